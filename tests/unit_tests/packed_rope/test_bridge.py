"""Megatron-Bridge: position ids of packed rows by its real code, as released and bound.

The expected numbers are Bridge's own (transformers' for the models that borrow its method), run on
each segment alone by the same release. CI runs one Bridge per distinct definition;
PACKED_ROPE_RELEASES=all runs every pinned one.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.positions_packs import IMAGE, VIDEO, VIDEO_END, VIDEO_START
from trees import HERE, digests, packed_rope, run, unpacked, wheels

from megatron.packed_rope.replacements import bridge_transformers

pytest.importorskip("transformers", reason="Bridge and the oracle need it")

CORE = "0.16.1"
DISTINCT = ["0.3.1", "0.4.1", "0.5.1", "0.6.2"]
BRIDGE = Path("megatron/bridge/models")
BORROWING = ("qwen2_5_vl", "glm4v")


def releases() -> list[str]:
    if os.environ.get("PACKED_ROPE_RELEASES") != "all":
        return DISTINCT
    return [pin.version for pin in wheels().pins("megatron-bridge")]


def process(tree: Path, *arguments: str) -> dict[str, Any]:
    done = run(["-W", "ignore", str(HERE / "bridge_process.py"), *arguments], tree)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class Release:
    """One Bridge on one Megatron-Core: what it did as released, patched, and reverted."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = tuple(map(int, version.split(".")))[:2]
        self.tree = folder / version
        self.tree.mkdir()
        for source in (unpacked(CORE), unpacked(version, "megatron-bridge")):
            subprocess.run(["cp", "-al", f"{source}/.", str(self.tree)], check=True)
        pristine = digests(self.tree)
        self.before = process(self.tree)
        applied = packed_rope("apply", "--tree", str(self.tree))
        assert applied.returncode == 0, applied.stderr
        self.patched = {
            Path(line.removeprefix("patched ")).relative_to(self.tree)
            for line in applied.stdout.splitlines()
        }
        self.after = process(self.tree)
        assert packed_rope("revert", "--tree", str(self.tree)).returncode == 0
        self.reverted = digests(self.tree) == pristine


@pytest.fixture(scope="module", params=releases())
def release(request, tmp_path_factory) -> Release:
    return Release(request.param, tmp_path_factory.mktemp("bridge"))


def joined(segments: list[list[list[int]]]) -> list[list[list[int]]]:
    """``[3, 1, T]`` of ``[n][3][L]``."""
    return [[[p for segment in segments for p in segment[axis]]] for axis in range(3)]


def padded(segments: list[list[list[int]]], boundaries: list[int]) -> list[list[list[int]]]:
    """As ``joined``, each segment filled up with ones to its boundary."""
    lengths = [end - begin for begin, end in itertools.pairwise(boundaries)]
    filled = [
        [axis + [1] * (length - len(axis)) for axis in segment]
        for segment, length in zip(segments, lengths, strict=True)
    ]
    return joined(filled)


def test_apply_patches_bridge_beside_core_and_revert_restores_it(release):
    assert {path for path in release.patched if path.is_relative_to(BRIDGE)} == {
        BRIDGE / "glm_vl/modeling_glm_45v.py",
        BRIDGE / "qwen_vl/modeling_qwen25_vl.py",
        BRIDGE / "qwen_vl/modelling_qwen3_vl/model.py",
        BRIDGE / "qwen_vl/modelling_qwen3_vl/rope.py",
        BRIDGE / "qwen_vl/modelling_qwen3_vl/utils.py",
    }
    assert len(release.patched) > 5, "Megatron-Core too"
    assert release.reverted


def test_every_name_is_bound(release):
    assert release.before["not bound"]
    assert not release.after["not bound"]


def test_get_rope_index_told_of_the_segments(release):
    before, after = (report["qwen3_vl"] for report in (release.before, release.after))
    if release.version < (0, 6):  # takes segments for rows of a batch
        assert before["told"].startswith("IndexError: index 1 is out of bounds")
    else:
        assert before["told"][0] == joined(before["alone"])
    assert after["told"][0] == joined(before["alone"])


def test_get_rope_index_told_of_padded_segments(release):
    before, after = (report["qwen3_vl"]["padded"] for report in (release.before, release.after))
    expected = padded(release.before["qwen3_vl"]["alone"], before["boundaries"])
    if release.version < (0, 6):
        assert before["found"].startswith("IndexError: index 1 is out of bounds")
    else:
        assert before["found"][0] == expected
        assert after["found"][1] == before["found"][1], "deltas, as the release counts them"
    assert after["found"][0] == expected


def test_what_is_no_flat_packed_row_is_as_before(release):
    before, after = (report["qwen3_vl"] for report in (release.before, release.after))
    assert after["unchanged"] == before["unchanged"]
    assert not any(isinstance(case, str) for case in before["unchanged"]), "none raises"


def test_qwen3_vl_forward_numbers_each_segment(release):
    before, after = (report["qwen3_vl"]["forward"] for report in (release.before, release.after))
    expected = joined(before["alone"])
    assert before["whole"] != expected
    assert before["packed"] == (before["whole"] if release.version < (0, 6) else expected)
    assert after["packed"] == expected


def test_the_batch_reaches_no_other_thread_model_or_call(release):
    forward = release.after["qwen3_vl"]["forward"]
    during = forward["during"]
    assert during["after nested"] == joined(forward["alone"]), "the outer batch is back"
    for case in ("thread", "nested dense", "after an error", "dense forward"):
        assert during[case] == forward["whole"], case


def test_the_rotary_classes_of_qwen3_vl_take_packed_seq_params(release):
    """Newer callers pass the keyword; no pinned Bridge has a class that lacks it."""
    classes = release.before["qwen3_vl"]["rotary classes"]
    assert classes
    assert all("packed_seq_params" in parameters for parameters in classes.values())


@pytest.mark.parametrize("family", BORROWING)
def test_models_that_borrow_from_transformers_number_each_segment(release, family):
    before, after = release.before[family], release.after[family]
    expected = [[axis] for axis in before["alone"]]
    assert after["dense"] == after["dense afterwards"] == before["dense"]
    if family == "glm4v" and release.version >= (0, 4):  # asks for transformers 5
        assert "mm_token_type_ids" in before["packed"]
        if release.version >= (0, 6):  # cuts the row itself, before the method is called
            assert after["packed"] == before["packed"]
            return
    elif release.version >= (0, 6):
        assert before["packed"] == expected
    else:
        assert before["dense"] != expected
        assert before["packed"] == before["dense"], "runs on through the whole row"
    assert after["packed"] == expected


def test_qwen2_5_vl_takes_missing_seconds_for_one(release):
    report = release.after["qwen2_5_vl"]
    assert report["without seconds"] == [[axis] for axis in report["alone, 1 s"]]


def test_in_process_binds_the_same(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for source in (unpacked(CORE), unpacked("0.5.1", "megatron-bridge")):
        subprocess.run(["cp", "-al", f"{source}/.", str(tree)], check=True)
    report = process(tree, "in-process")
    assert not report["not bound"]
    forward = report["qwen3_vl"]["forward"]
    assert forward["packed"] == joined(forward["alone"])
    assert report["qwen3_vl"]["told"][0] == joined(report["qwen3_vl"]["alone"])
    for family in BORROWING:
        assert report[family]["packed"] == [[axis] for axis in report[family]["alone"]]


# The models that borrow a method, on a transformers that this environment does not have.


def get_rope_index_4(self, input_ids, image_grid_thw=None, video_grid_thw=None):
    return "dense", None


def get_rope_index_5(self, input_ids, mm_token_type_ids, image_grid_thw=None, video_grid_thw=None):
    return "dense", None


def borrowing_model(method: Any, module: str = "transformers.models.any") -> Any:
    method.__module__ = module
    model = SimpleNamespace(
        config=SimpleNamespace(
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            video_start_token_id=VIDEO_START,
            video_end_token_id=VIDEO_END,
            vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=1),
        )
    )
    model.get_rope_index = MethodType(method, model)
    return model


def run_forward(wrapper: Any, model: Any, ids: list[int], cu: list[int], **more: Any) -> Any:
    """What the model's get_rope_index gives inside a wrapped forward."""

    def forward(self, input_ids, packed_seq_params=None):
        return self.get_rope_index(input_ids, **more)[0]

    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(cu))
    return wrapper(None, forward)(model, torch.tensor([ids]), packed_seq_params=params)


@pytest.mark.parametrize(("method", "after"), [(get_rope_index_4, 5), (get_rope_index_5, 2)])
def test_a_packed_row_counts_as_the_installed_transformers_counts(method, after):
    """Five frames of 2 x 2: transformers 5 moves the counter by 2, as its dense rows do."""
    more = {"video_grid_thw": torch.tensor([[5, 4, 4]])}
    if method is get_rope_index_5:
        more["mm_token_type_ids"] = None
    model = borrowing_model(method)
    wrapper = bridge_transformers.qwen25_vl_forward
    found = run_forward(wrapper, model, [7, *[VIDEO] * 20, 7], [0, 1, 22], **more)
    assert found[0, 0, -1] == after
    first = model.get_rope_index
    run_forward(wrapper, model, [7, *[VIDEO] * 20, 7], [0, 1, 22], **more)
    assert model.get_rope_index == first, "exchanged once"


def test_a_method_that_is_not_transformers_own_stays():
    model = borrowing_model(get_rope_index_4, "some.framework")
    wrapper = bridge_transformers.qwen25_vl_forward
    assert run_forward(wrapper, model, [7, 7, 7], [0, 1, 3]) == "dense"


def test_a_video_that_is_cut_off_does_not_reach_into_the_next_segment():
    """GLM frames carry the image token; begin-of-video without end, then an image."""
    ids = [VIDEO_START, *[IMAGE] * 4, 7, *[IMAGE] * 6, VIDEO_START, *[IMAGE] * 4, VIDEO_END]
    grids = {
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "video_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }
    model = borrowing_model(get_rope_index_4)
    found = run_forward(bridge_transformers.glm_45v_forward, model, ids, [0, 5, 18], **grids)
    assert found[0, 0].tolist() == [0, 1, 1, 1, 1, 0, *[1] * 6, 4, *[5] * 4, 7]


def test_types_of_the_row_are_taken_where_they_are_given():
    ids, types = [IMAGE] * 4 + [7, 7], [[2, 2, 2, 2, 0, 0]]
    model = borrowing_model(get_rope_index_5)
    more = {"mm_token_type_ids": torch.tensor(types), "video_grid_thw": torch.tensor([[1, 4, 4]])}
    found = run_forward(bridge_transformers.glm_45v_forward, model, ids, [0, 5, 6], **more)
    assert found[0, 0].tolist() == [0, 0, 0, 0, 2, 0]
