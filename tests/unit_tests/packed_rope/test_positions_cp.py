"""packed_position_ids on rows that are already sharded over a context-parallel group."""

from __future__ import annotations

import json

import pytest
import torch
from trees import HERE, run

from megatron.packed_rope import packed_position_ids
from megatron.packed_rope.errors import PackedInputError, SegmentLengthError

TORCHRUN = ["-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def outcomes():
    done = run([*TORCHRUN, "4", str(HERE / "in_gloo" / "positions.py")], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_each_rank_gets_its_share_of_the_whole_row(outcomes, cp_size, layout):
    cases = {name: ranks for name, ranks in outcomes.items() if f"C={cp_size}, {layout}" in name}
    assert len(cases) == 15
    assert not any(cases.values()), {name: ranks for name, ranks in cases.items() if ranks}


class Group:
    """No process group: enough to ask for its size."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def sharded(cu: list[int], num_tokens: int, **more) -> torch.Tensor:
    return packed_position_ids(
        torch.ones(num_tokens, dtype=torch.int64),
        torch.tensor(cu),
        family="qwen2_vl",
        image_token_id=10,
        video_token_id=20,
        cp_group=Group(),
        **more,
    )


def test_a_group_that_cannot_gather_is_refused():
    with pytest.raises(PackedInputError, match=r"size 2 is a Group; expected a torch.distributed"):
        sharded([0, 4, 8], 4)


@pytest.mark.parametrize(("layout", "divisor"), [("zigzag", 4), ("contiguous", 2)])
def test_a_segment_that_cannot_be_cut_is_named(layout, divisor):
    with pytest.raises(SegmentLengthError, match=rf"segment 1\b.*\b7\b.*\b{divisor}\b"):
        sharded([0, 4, 11], 6, cp_layout=layout)


def test_boundaries_of_more_than_all_ranks_hold():
    message = r"end at 12; the row has 8 tokens, 4 on each of 2 ranks"
    with pytest.raises(SegmentLengthError, match=message):
        sharded([0, 4, 12], 4)


def test_an_unknown_layout():
    with pytest.raises(PackedInputError, match="cp_layout 'striped'"):
        sharded([0, 4, 8], 4, cp_layout="striped")
