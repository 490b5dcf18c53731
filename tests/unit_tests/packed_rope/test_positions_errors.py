"""packed_position_ids refuses what does not fit, and says what was found and where."""

from __future__ import annotations

import pytest
import torch
from oracles.positions_packs import IMAGE, VIDEO

from megatron.packed_rope import packed_position_ids
from megatron.packed_rope.errors import PackedInputError, PositionIdsError, SegmentLengthError

TENSORS = ("image_grid_thw", "video_grid_thw", "cu_seqlens_padded", "mm_token_type_ids")


def call(ids, cu, family="qwen2_vl", **more):
    given = {"input_ids": ids, "cu_seqlens": cu, "image_token_id": IMAGE, "video_token_id": VIDEO}
    given |= more
    for name in ("input_ids", "cu_seqlens", *TENSORS):
        if isinstance(given.get(name), list):
            given[name] = torch.tensor(given[name])
    return packed_position_ids(family=family, **given)


I4, I6, V8 = [IMAGE] * 4, [IMAGE] * 6, [VIDEO] * 8
FOUR, SIX, TWO_FRAMES = [1, 4, 4], [1, 4, 6], [2, 4, 4]

# Media and grids that contradict each other: call, and what the message must say.
MEDIA = {
    "a token without a grid": (
        ([1, *I4, 1, IMAGE], [0, 3, 7], {"image_grid_thw": [FOUR]}),
        "segment 0: a block of image_grid_thw[0] has 4 tokens, but 2 of them come before the "
        "segment ends and segment 1 begins",
    ),
    "more tokens than the grids make": (
        ([*I4, 1, 1, IMAGE], [0, 5, 7], {"image_grid_thw": [FOUR]}),
        "segment 1: token 6 is an image token, and no grid is left. The row has 5 image tokens "
        "where image_grid_thw makes 4",
    ),
    "no grids at all": (
        ([1, IMAGE], [0, 2], {}),
        "segment 0: token 1 is an image token, and no grid is left. The row has 1 image tokens "
        "where image_grid_thw makes 0",
    ),
    "a grid without tokens": (
        ([*I4, 1], [0, 5], {"image_grid_thw": [FOUR, SIX]}),
        "image_grid_thw[1] has no tokens in the row. The row has 4 image tokens where "
        "image_grid_thw makes 10",
    ),
    "a row that ends inside a block": (
        ([1, 1, *I4], [0, 2, 6], {"image_grid_thw": [SIX]}),
        "segment 1: a block of image_grid_thw[0] has 6 tokens, but 4 of them come before the row "
        "ends",
    ),
    "grids in another order than the row": (
        ([*I4, 1, *I6], [0, 5, 11], {"image_grid_thw": [SIX, FOUR]}),
        "segment 0: a block of image_grid_thw[0] has 6 tokens, but 4 of them come before",
    ),
    "text inside a block": (
        ([IMAGE, IMAGE, 7, IMAGE, IMAGE], [0, 5], {"image_grid_thw": [FOUR]}),
        "has 4 tokens, but 2 of them come before another token, 2, interrupts it",
    ),
    "a video inside an image": (
        (
            [IMAGE, IMAGE, *V8, IMAGE, IMAGE],
            [0, 12],
            {"image_grid_thw": [FOUR], "video_grid_thw": [TWO_FRAMES]},
        ),
        "has 4 tokens, but 2 of them come before another token, 2, interrupts it",
    ),
    "images and videos exchanged": (
        ([*I4, 1], [0, 5], {"video_grid_thw": [[1, 4, 4]]}),
        "token 0 is an image token, and no grid is left. The row has 4 image tokens where "
        "image_grid_thw makes 0 and 0 video tokens where video_grid_thw makes 4",
    ),
}


@pytest.mark.parametrize("name", MEDIA)
def test_media_that_contradict_the_grids(name):
    (ids, cu, more), message = MEDIA[name]
    with pytest.raises(PositionIdsError) as raised:
        call(ids, cu, **more)
    assert message in str(raised.value)
    assert "whole and in the order of the row" in str(raised.value), "the next step"


def test_a_frame_that_crosses_a_boundary_where_a_whole_video_may():
    """qwen3_vl: each frame is a block, so a boundary may fall between frames but not into one."""
    grids = {"video_grid_thw": [TWO_FRAMES], "family": "qwen3_vl"}
    assert call([*V8, 1], [0, 4, 9], **grids)[0, 0].tolist() == [0] * 4 + [0] * 4 + [2]
    with pytest.raises(PositionIdsError, match=r"segment 0: a block of video_grid_thw\[0\] has 4"):
        call([*V8, 1], [0, 6, 9], **grids)
    with pytest.raises(PositionIdsError, match=r"has 8 tokens, but 4 of them come before"):
        call([*V8, 1], [0, 4, 9], video_grid_thw=[TWO_FRAMES])


def test_an_unknown_family_is_told_the_known_ones():
    with pytest.raises(PositionIdsError, match=r"'qwen9' is not known; .*qwen2_vl.*3\.6"):
        call([1], [0, 1], family="qwen9")


def test_an_unknown_advance():
    with pytest.raises(PackedInputError, match=r"advance 'sum'; expected .*'max'.*'hw'"):
        call([1], [0, 1], advance="sum")


def test_an_advance_that_a_family_is_never_used_with():
    with pytest.raises(PositionIdsError, match="'qwen3_omni_moe' with advance 'hw'"):
        call([1], [0, 1], family="qwen3_omni_moe", advance="hw")


SECONDS = {
    "missing": ({"tokens_per_second": 2}, "second_per_grid_ts is missing for the 1 videos"),
    "too many": (
        {"tokens_per_second": 2, "second_per_grid_ts": [1.0, 2.0]},
        r"shape \(2,\); expected \(1,\)",
    ),
    "too few": (
        {"tokens_per_second": 2, "second_per_grid_ts": []},
        r"shape \(0,\); expected \(1,\)",
    ),
    "no rate": ({"second_per_grid_ts": [1.0]}, "tokens_per_second is missing; family 'qwen2_5_vl'"),
    "negative": (
        {"tokens_per_second": 2, "second_per_grid_ts": [-1.0]},
        "video 0 lasts for -4.0 positions",
    ),
    "no number": (
        {"tokens_per_second": 2, "second_per_grid_ts": [float("nan")]},
        "video 0 lasts for nan positions",
    ),
    "more than float32 counts": (
        {"tokens_per_second": 2, "second_per_grid_ts": [1e8]},
        "expected 0 to 16777216",
    ),
}


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_videos(name):
    more, message = SECONDS[name]
    with pytest.raises(PositionIdsError, match=message):
        call([*V8, 1], [0, 9], family="qwen2_5_vl", video_grid_thw=[TWO_FRAMES], **more)


BOUNDARIES = {
    "not from 0": ([1, 4], {}, PackedInputError, "cu_seqlens begins at 1; expected 0"),
    "decreasing": ([0, 3, 2, 4], {}, SegmentLengthError, "decrease at segment 1"),
    "past the row": ([0, 6], {}, SegmentLengthError, "end at 6; the row has 4 tokens"),
    "longer than padded": (
        [0, 3, 4],
        {"cu_seqlens_padded": [0, 2, 4]},
        SegmentLengthError,
        "segment 0 has 3 tokens in cu_seqlens and room for 2",
    ),
    "other segments padded": (
        [0, 2, 4],
        {"cu_seqlens_padded": [0, 4]},
        PackedInputError,
        "cu_seqlens_padded has 2 entries, cu_seqlens 3",
    ),
    "one boundary": ([0], {}, PackedInputError, r"shape \(1,\); expected a tensor \[n \+ 1\]"),
    "floats": ([0.0, 4.0], {}, PackedInputError, "cu_seqlens is torch.float32"),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries(name):
    cu, more, kind, message = BOUNDARIES[name]
    with pytest.raises(kind, match=message):
        call([1, 1, 1, 1], cu, **more)


GRIDS = {
    "not divisible by the merge": ([1, 4, 5], r"image_grid_thw\[0\] is \(1, 4, 5\)"),
    "zero": ([1, 0, 4], r"image_grid_thw\[0\] is \(1, 0, 4\); expected positive"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(name):
    grid, message = GRIDS[name]
    with pytest.raises(PositionIdsError, match=message):
        call([*I4], [0, 4], image_grid_thw=[grid])


def test_frames_that_are_merged_must_divide():
    with pytest.raises(PositionIdsError, match=r"video_grid_thw\[0\] is \(3, 4, 4\).*\(2, 2, 2\)"):
        call([*V8], [0, 8], family="ernie4_5_vl_moe", video_grid_thw=[[3, 4, 4]])


SHAPES = {
    "two rows": ({"input_ids": [[1, 2], [3, 4]]}, r"input_ids has shape \(2, 2\)"),
    "float ids": ({"input_ids": [1.0, 2.0]}, "input_ids is torch.float32"),
    "a list": ({"input_ids": (1, 2)}, "input_ids: tuple; expected a tensor"),
    "grid of two": ({"image_grid_thw": [[4, 4]]}, r"image_grid_thw: shape \(1, 2\)"),
    "float grid": ({"image_grid_thw": [[1.0, 4.0, 4.0]]}, "image_grid_thw is torch.float32"),
    "types of another row": ({"mm_token_type_ids": [0, 0, 0]}, "has 3 entries for 2 tokens"),
    "one id for both": ({"video_token_id": IMAGE}, "image_token_id and video_token_id are both 10"),
    "boolean seconds": (
        {
            "family": "qwen2_5_vl",
            "tokens_per_second": 1,
            "second_per_grid_ts": torch.zeros(0, dtype=torch.bool),
        },
        "second_per_grid_ts is torch.bool",
    ),
    "two devices": (
        {"image_grid_thw": torch.empty(0, 3, dtype=torch.int64, device="meta")},
        "image_grid_thw is on meta, input_ids on cpu",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_dtypes_and_devices(name):
    more, message = SHAPES[name]
    with pytest.raises(PackedInputError, match=message):
        call(**({"ids": [1, 2], "cu": [0, 2]} | more))


@pytest.mark.parametrize("missing", ["image_token_id", "video_token_id"])
def test_a_token_id_that_is_no_integer_is_named(missing):
    with pytest.raises(PackedInputError, match=f"{missing} is None; expected an integer"):
        call([1, 2], [0, 2], **{missing: None})


def test_grids_of_more_tokens_than_int32_counts_are_refused():
    """65,536 x 65,536 tokens and none would be the same number."""
    with pytest.raises(PositionIdsError, match="the grids make 4294967296 tokens; expected at"):
        call([1, 1], [0, 2], image_grid_thw=[[1, 2**17, 2**17]])


def test_ids_that_cannot_hold_the_token_id_are_refused():
    """A comparison would wrap: 300 is 44 in uint8."""
    ids = torch.tensor([1, 44, 44, 2], dtype=torch.uint8)
    with pytest.raises(PackedInputError, match=r"image_token_id is 300, which .* cannot hold"):
        call(ids, [0, 4], image_token_id=300)
