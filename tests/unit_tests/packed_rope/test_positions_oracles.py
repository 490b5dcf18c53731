"""packed_position_ids against transformers and against the rules written out, on random packs.

``PACKED_ROPE_PACKS`` sets the number of packs per family (100 if unset; ``make fuzz``: 1,000).
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from oracles import positions_packs as packs
from oracles import positions_rules as rules
from oracles.positions_calls import positions
from shared_cases import CASES

from megatron.packed_rope import packed_position_ids

PACKS = int(os.environ.get("PACKED_ROPE_PACKS", "100"))
FRACTIONS = (0.04, 0.08, 0.35, 0.5, 1.0, 1.7, 2.02)
RECORDED = json.loads((CASES / "positions_tf5.json").read_text())


@pytest.fixture(scope="module")
def transformers4():
    transformers = pytest.importorskip(
        "transformers", reason="the oracle is transformers' own get_rope_index, 4.57"
    )
    if not transformers.__version__.startswith("4.57."):
        pytest.skip(f"the oracle is transformers 4.57, found {transformers.__version__}")
    from oracles import positions_transformers

    return positions_transformers


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "qwen2_5_omni"],
)
def test_random_packs_equal_transformers_on_each_segment(transformers4, family):
    fractions = FRACTIONS if family in packs.OMNI else (1.0, 2.0, 3.0)  # 4.57 truncates others
    for seed in range(PACKS):
        pack = packs.random_pack(family, seed, fractions)
        assert torch.equal(positions(pack), transformers4.positions(pack)), f"seed {seed}"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_an_image_of_several_frames_equals_transformers(transformers4, family):
    """No processor makes one, but the rule has a number for each of its tokens."""
    pack = packs.Pack(family, [packs.Segment(), packs.Segment()])
    for segment, frames in zip(pack.segments, (3, 2), strict=True):
        segment.text(*packs.WORDS[:4])
        packs.add_image(segment, 2, 3, frames)
        segment.text(*packs.WORDS[:4])
    assert torch.equal(positions(pack), transformers4.positions(pack))


def test_random_packs_equal_transformers_with_float_time(transformers4):
    """Whole quarters of a position: float32 holds every sum exactly, so both are exact."""
    for seed in range(PACKS):
        pack = packs.random_pack("qwen3_omni_moe", seed, (0.25, 0.5, 1.0, 2.75))
        found = positions(pack)
        assert found.dtype == torch.float32
        assert torch.equal(found, transformers4.positions(pack)), f"seed {seed}"


def test_random_packs_are_within_rounding_of_transformers_with_any_float_time(transformers4):
    """transformers rounds the counter to float32 after each block, this package once at the end."""
    for seed in range(PACKS):
        pack = packs.random_pack("qwen3_omni_moe", seed, FRACTIONS)
        found, expected = positions(pack), transformers4.positions(pack)
        roundings = 2 * (len(pack.videos) + len(pack.images)) + 2
        half_step = torch.finfo(torch.float32).eps / 2 * expected.max()
        assert (found - expected).abs().max() <= roundings * half_step, f"seed {seed}"


@pytest.mark.parametrize("advance", ["max", "hw"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_random_packs_equal_the_rules_written_out(family, advance):
    for seed in range(PACKS):
        pack = packs.random_pack(family, seed, FRACTIONS)
        found = positions(pack, advance=advance).tolist()
        assert found == rules.positions(pack, advance), f"seed {seed}"


def test_random_packs_of_ernie_equal_the_rules_written_out():
    """With "max" there is no transformers to compare with: Baidu's own processor counts so."""
    for seed in range(PACKS):
        pack = packs.random_pack("ernie4_5_vl_moe", seed)
        assert positions(pack).tolist() == rules.positions(pack), f"seed {seed}"


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda c: f"{c['family']}-{c['seed']}")
def test_numbers_recorded_from_transformers_5(case):
    """record_positions_tf5.py made them, with transformers 5.24.0."""
    found = packed_position_ids(
        torch.tensor(case["ids"]),
        torch.tensor(case["cu_seqlens"]),
        family=case["family"],
        advance=case["advance"],
        image_token_id=packs.IMAGE,
        video_token_id=packs.VIDEO,
        image_grid_thw=torch.tensor(case["images"], dtype=torch.int64).reshape(-1, 3),
        video_grid_thw=torch.tensor(case["videos"], dtype=torch.int64).reshape(-1, 3),
        second_per_grid_ts=case["seconds"],
        tokens_per_second=case["tokens_per_second"],
        mm_token_type_ids=torch.tensor(case["types"]),
    )
    assert found[:, 0].tolist() == case["positions"]
