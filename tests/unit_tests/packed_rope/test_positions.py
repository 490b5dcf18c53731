"""packed_position_ids: worked numbers, reports of users, odd packs, and what it promises to do."""

from __future__ import annotations

import pytest
import torch
from counting import count_working_ops
from oracles import positions_packs as packs
from oracles import positions_rules as rules
from oracles.positions_calls import arguments, positions
from oracles.positions_packs import IMAGE, VIDEO, VISION_END, VISION_START, Pack, Segment
from shared_cases import load_cases
from torch._subclasses.fake_tensor import FakeTensorMode
from trees import run_python

from megatron.packed_rope import packed_position_ids

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe", "qwen3_omni_moe"]
IMAGE_4 = [VISION_START, *[IMAGE] * 4, VISION_END]
VIDEO_20 = [VISION_START, *[VIDEO] * 20, VISION_END]


def call(ids, cu, family="qwen2_vl", **more):
    """Lists in, three lists out."""
    tensors = {
        name: torch.tensor(value)
        for name, value in more.items()
        if name in ("image_grid_thw", "video_grid_thw", "cu_seqlens_padded", "mm_token_type_ids")
    }
    found = packed_position_ids(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(cu, dtype=torch.int32),
        family=family,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **(more | tensors),
    )
    assert found.shape == (3, 1, len(ids))
    assert found.dtype == torch.int64
    return found[:, 0].tolist()


@pytest.mark.parametrize("case", load_cases("positions.json"))
def test_worked_numbers(case):
    case = dict(case)
    expected, ids, cu = case.pop("positions"), case.pop("ids"), case.pop("cu_seqlens")
    case.pop("note", None)
    assert call(ids, cu, **case) == expected


def test_r26_a_segment_that_ends_in_vision_start_before_one_that_begins_with_an_image():
    ids = [1, VISION_START, IMAGE, IMAGE, IMAGE, IMAGE, 5]
    time, height, width = call(ids, [0, 2, 7], image_grid_thw=[[1, 4, 4]])
    assert time == [0, 1, 0, 0, 0, 0, 2]
    assert height == [0, 1, 0, 0, 1, 1, 2]
    assert width == [0, 1, 0, 1, 0, 1, 2]


def test_r27_a_row_that_ends_in_vision_start():
    assert call([1, 2, VISION_START], [0, 3]) == [[0, 1, 2]] * 3


def test_r28_thousands_of_segments_of_one_token():
    n = 4000
    assert call([7] * n, list(range(n + 1))) == [[0] * n] * 3


def test_r16_padded_boundaries_place_tokens_real_ones_end_them():
    ids = [1, 2, 3, IMAGE, 4, 5, 6, 7, IMAGE, IMAGE, IMAGE, IMAGE]  # padding looks like an image
    found = call(ids, [0, 3, 7], cu_seqlens_padded=[0, 4, 12])
    assert found == [[0, 1, 2, 1, 0, 1, 2, 3, 1, 1, 1, 1]] * 3


@pytest.mark.parametrize(("advance", "after"), [("max", 7), ("hw", 4)])
def test_r33_text_behind_a_video_of_more_frames_than_rows(advance, after):
    time, *_ = call([1, *VIDEO_20, 7], [0, 24], video_grid_thw=[[5, 4, 4]], advance=advance)
    assert time[-2:] == [after, after + 1]


def test_r32_fractions_of_seconds_are_products_of_float32():
    ids = [VISION_START, *[VIDEO] * 13, VISION_END]
    time, *_ = call(
        ids,
        [0, 15],
        family="qwen2_5_vl",
        video_grid_thw=[[13, 2, 2]],
        second_per_grid_ts=[0.35],
        tokens_per_second=25,
    )
    assert [t - 1 for t in time[1:14]] == [0, 8, 17, 26, 35, 43, 52, 61, 70, 78, 87, 96, 104]
    assert time[14] == 1 + 104 + 1


def test_two_images_with_nothing_between_them():
    time, height, width = call([IMAGE] * 8 + [5], [0, 9], image_grid_thw=[[1, 4, 4]] * 2)
    assert time == [0, 0, 0, 0, 2, 2, 2, 2, 4]
    assert height == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert width == [0, 1, 0, 1, 2, 3, 2, 3, 4]


def test_images_and_videos_are_taken_from_their_own_grids_in_row_order():
    ids = [*VIDEO_20, *IMAGE_4, *VIDEO_20, *IMAGE_4]
    time, *_ = call(
        ids,
        [0, 28, 56],
        image_grid_thw=[[1, 4, 4], [1, 2, 8]],
        video_grid_thw=[[5, 4, 4], [1, 10, 8]],
    )
    assert time[22:28] == [7, 8, 8, 8, 8, 10]  # 5 frames move by 5, the square image by 2
    assert time[28 + 22 :] == [7, 8, 8, 8, 8, 12]  # 5 rows move by 5, the line of 4 by 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_media_is_arange_by_segment(family):
    found = packed_position_ids(
        torch.tensor([1, 2, 3, 4, 5]),
        torch.tensor([0, 2, 5]),
        family=family,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    assert found[:, 0].tolist() == [[0, 1, 0, 1, 2]] * 3
    assert found.dtype == (torch.float32 if family == "qwen3_omni_moe" else torch.int64)


def test_empty_segments_and_a_tail():
    assert call([1, 2, 3, 4, 9, 9], [0, 0, 2, 2, 4, 4]) == [[0, 1, 0, 1, 1, 1]] * 3
    assert call([9, 9], [0, 0]) == [[1, 1]] * 3
    assert call([], [0, 0]) == [[]] * 3


def test_media_in_the_tail_are_padding():
    ids = [*IMAGE_4, IMAGE, VIDEO]
    assert call(ids, [0, 6], image_grid_thw=[[1, 4, 4]])[0] == [0, 1, 1, 1, 1, 3, 1, 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [20, 40])
def test_padding_changes_no_real_token(family, seed):
    pack = packs.mixed_pack(family, seed)
    padded, ids, kept = [0], [], []
    for i, segment in enumerate(pack.segments):
        kept += range(len(ids), len(ids) + len(segment.ids))
        ids += segment.ids + [(IMAGE, 0, VIDEO)[i % 3]] * (i % 4)
        padded.append(len(ids))
    ids += [IMAGE, 0]
    types = torch.full((len(ids),), 2, dtype=torch.int32)
    types[kept] = torch.tensor(pack.types, dtype=torch.int32)
    changes = {"input_ids": torch.tensor(ids), "cu_seqlens_padded": torch.tensor(padded)}
    if family in packs.GLM:
        changes["mm_token_type_ids"] = types
    found = positions(pack, **changes)
    assert torch.equal(found[:, kept], positions(pack))
    is_padding = torch.ones(len(ids), dtype=torch.bool)
    is_padding[kept] = False
    assert (found[:, is_padding] == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_segment_is_as_it_is_alone(family):
    pack = packs.mixed_pack(family)
    alone = [positions(Pack(family, [s], pack.tokens_per_second)) for s in pack.segments]
    assert torch.equal(positions(pack), torch.cat(alone, dim=1))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_types_take_the_place_of_ids(family):
    pack = packs.mixed_pack(family)
    types = torch.tensor([pack.types], dtype=torch.int32)
    ids = torch.zeros(1, len(pack.ids), dtype=torch.int32)
    found = positions(pack, input_ids=ids, mm_token_type_ids=types)
    assert torch.equal(found, positions(pack))


def test_types_other_than_image_and_video_are_text():
    assert call([1, 2, 3], [0, 3], mm_token_type_ids=[0, 3, 257]) == [[0, 1, 2]] * 3


def test_glm_frames_as_video_tokens():
    """transformers 5.x: no mm_token_type_ids needed where frames carry the video token."""
    pack = packs.mixed_pack("glm4v")
    types = torch.tensor(pack.types)
    ids = torch.where(types == 2, VIDEO, torch.tensor(pack.ids))
    assert torch.equal(positions(pack, input_ids=ids, mm_token_type_ids=None), positions(pack))


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_a_row_of_one_or_two_dims_and_any_integers(ids_dtype, cu_dtype):
    pack = packs.mixed_pack("qwen2_vl")
    given = arguments(pack)
    expected = packed_position_ids(**given)
    given["input_ids"] = given["input_ids"].to(ids_dtype)[None]
    given["cu_seqlens"] = given["cu_seqlens"].to(cu_dtype)
    given["image_grid_thw"] = given["image_grid_thw"].int()
    assert torch.equal(packed_position_ids(**given), expected)


def test_rows_and_grids_that_are_not_contiguous():
    pack = packs.mixed_pack("qwen2_vl")
    given = arguments(pack)
    expected = packed_position_ids(**given)
    given["input_ids"] = torch.stack([given["input_ids"]] * 2, dim=1)[:, 0]
    given["image_grid_thw"] = given["image_grid_thw"].t().contiguous().t()
    assert torch.equal(packed_position_ids(**given), expected)


def test_seconds_as_a_list_are_the_same_as_a_tensor():
    pack = packs.mixed_pack("qwen2_5_vl")
    assert torch.equal(positions(pack, second_per_grid_ts=pack.seconds), positions(pack))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_omni_moe"])
def test_torchs_default_dtype_changes_nothing(family, dtype):
    pack = packs.mixed_pack(family)
    expected = positions(pack)
    seconds = {"second_per_grid_ts": pack.seconds} if family in packs.SECONDS else {}
    torch.set_default_dtype(dtype)
    try:
        found = positions(pack, **seconds)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_rows_and_frames_of_every_size_are_told_apart():
    """The quotients that find them are exact: one image of each shape up to 48 x 48."""
    pack = Pack("qwen2_vl", [Segment()])
    for rows in range(1, 49):
        for columns in range(1, 49, 5):
            packs.add_image(pack.segments[0], rows, columns)
    assert positions(pack).tolist() == rules.positions(pack)


def test_another_merge():
    found = call(IMAGE_4, [0, 6], image_grid_thw=[[1, 6, 6]], spatial_merge_size=3)
    assert found[2] == [0, 1, 2, 1, 2, 3]


def test_names_of_one_family_count_alike():
    pack = packs.mixed_pack("qwen3_vl")
    for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"):
        assert torch.equal(positions(pack, family=name), positions(pack))


def test_float_positions_are_float32_and_keep_their_fractions():
    segment = Segment()
    packs.add_video(segment, "qwen3_omni_moe", 3, 1, 1, 0.3)
    pack = Pack("qwen3_omni_moe", [segment], 25)
    found = positions(pack)
    assert found.dtype == torch.float32
    assert found[0, 1:4].tolist() == [1.0, 8.5, 16.0]
    assert found[1, 4] == 17.0


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_not_touched_and_the_result_is_new(family):
    given = arguments(packs.mixed_pack(family))
    before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
    first = packed_position_ids(**given)
    for name, value in before.items():
        assert torch.equal(given[name], value)
    second = packed_position_ids(**given)
    second.zero_()
    assert not torch.equal(first, second)
    for name, value in before.items():
        assert torch.equal(given[name], value)


def images_one_per_segment(family: str, n: int) -> Pack:
    pack = Pack(family, [Segment() for _ in range(n)], 25)
    for segment in pack.segments:
        packs.add_image(segment, 2, 3)
    return pack


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_do_not_grow_with_segments_or_media(family):
    counts = []
    for n in (8, 800):
        given = arguments(images_one_per_segment(family, n))
        counts.append(count_working_ops(lambda given=given: packed_position_ids(**given)))
    assert counts[0] == counts[1]
    assert counts[0].total() <= 150


@pytest.mark.parametrize("family", FAMILIES)
def test_no_host_read_under_fake_tensors(family):
    # Fake tensors have no values: any host read would raise, whatever the device.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pack = packs.mixed_pack(family)
    with FakeTensorMode():
        given = arguments(pack, device)
        padded = torch.zeros_like(given["cu_seqlens"])
        found = packed_position_ids(**given, cu_seqlens_padded=padded)
    assert found.shape == (3, 1, len(pack.ids))
    assert found.device.type == device


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_without_a_break(family):
    torch.compiler.reset()
    compiled = torch.compile(packed_position_ids, fullgraph=True, backend="aot_eager")
    for seed in (20, 30, 40):  # other numbers of tokens, segments and media each time
        given = arguments(packs.mixed_pack(family, seed))
        given["tokens_per_second"] = 25
        assert torch.equal(compiled(**given), packed_position_ids(**given))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_omni_moe"])
def test_compiled_by_inductor(family):
    torch.compiler.reset()
    compiled = torch.compile(packed_position_ids, fullgraph=True)
    given = arguments(packs.mixed_pack(family))
    assert torch.equal(compiled(**given), packed_position_ids(**given))
    with pytest.raises(RuntimeError, match="media tokens do not match the grids"):
        compiled(**(given | {"input_ids": torch.zeros_like(given["input_ids"])}))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_without_a_synchronisation(family):
    pack = packs.mixed_pack(family)
    given = arguments(pack, "cuda")
    packed_position_ids(**given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = packed_position_ids(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), packed_position_ids(**arguments(pack)))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    given = arguments(packs.mixed_pack("qwen2_5_vl"), "cuda")
    other = arguments(packs.mixed_pack("qwen2_5_vl"), "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        packed_position_ids(**given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = packed_position_ids(**given)
    given["second_per_grid_ts"].mul_(2)
    other["second_per_grid_ts"].mul_(2)
    graph.replay()
    assert torch.equal(found, packed_position_ids(**other))


def test_it_needs_torch_and_no_megatron():
    done = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from megatron.packed_rope import packed_position_ids\n"
        "from megatron.packed_rope.positions import packed_position_ids as the_same\n"
        "assert packed_position_ids is the_same\n"
        "packed_position_ids(torch.tensor([1, 2]), torch.tensor([0, 2]), family='qwen2_vl',\n"
        "                    image_token_id=10, video_token_id=20)\n"
        "new = set(sys.modules) - before - set(sys.stdlib_module_names)\n"
        "print(*sorted(n for n in new if not n.startswith(('torch.', 'megatron.packed_rope'))))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["megatron"]
