"""PackedLayout: which row each local token reads."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import segments
from shared_cases import load_cases

from megatron.packed_rope import (
    FreqsError,
    PackedInputError,
    PackedLayout,
    PackedRopeError,
    SegmentLengthError,
)

ROWS = load_cases("rows.json")


def layout_of(case: dict) -> PackedLayout:
    starts = case.get("start_positions")
    return PackedLayout(
        torch.tensor(case["cu_seqlens"], dtype=torch.int32),
        num_tokens=case["tokens"],
        cp_size=case["cp"],
        cp_rank=case["rank"],
        cp_layout=case.get("cp_layout", "zigzag"),
        start_positions=None if starts is None else torch.tensor(starts),
    )


def case_id(case: dict) -> str:
    return f"{case['layout']}-{case['cu_seqlens']}-cp{case['cp']}-rank{case['rank']}"


@pytest.mark.parametrize("case", [c for c in ROWS if "rows" in c], ids=case_id)
def test_rows_of_the_shared_cases(case):
    rows = layout_of(case).rows(case["layout"], num_rows=case.get("freqs_rows"))
    found = list(range(case["tokens"])) if rows is None else rows.tolist()
    assert len(found) == case["tokens"]
    for row, expected in zip(found, case["rows"], strict=True):
        if expected is not None:
            assert row == expected
    if rows is not None and "freqs_rows" in case:
        assert min(found) >= 0
        assert max(found) < case["freqs_rows"]


@pytest.mark.parametrize("case", [c for c in ROWS if "error" in c], ids=case_id)
def test_bad_packs_are_named(case):
    with pytest.raises(PackedRopeError) as error:
        layout_of(case).rows(case["layout"], num_rows=case.get("freqs_rows"))
    for word in case["error"].replace(",", " ").split():
        if word.isdigit():
            assert word in str(error.value)


@pytest.mark.parametrize("layout", ["packed", "packed_local", "auto"])
def test_no_index_where_the_row_is_the_token(layout):
    cu = torch.tensor([0, 4, 10])
    assert PackedLayout(cu, num_tokens=10).rows(layout, num_rows=10) is None


def test_segments_and_positions():
    cu = torch.tensor([0, 8, 8, 12])
    layout = PackedLayout(cu, num_tokens=8, cp_size=2, cp_rank=1)
    assert layout.segments.tolist() == [0, 0, 0, 0, 2, 2, 3, 3]
    assert layout.positions.tolist() == [2, 3, 4, 5, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cu_seqlens": torch.zeros(3)}, "torch.float32"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, "(2, 2)"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, "1 entries"),
        ({"cu_seqlens": [0, 4]}, "list"),
        ({"cp_size": 2, "cp_rank": 2}, "cp_rank 2 of cp_size 2"),
        ({"cp_size": 0}, "cp_size 0"),
        ({"cp_layout": "striped"}, "'striped'"),
        ({"start_positions": torch.tensor([1, 2, 3])}, "3 entries"),
    ],
)
def test_wrong_arguments_are_typed(arguments, words):
    good = {"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32), "num_tokens": 4}
    with pytest.raises(PackedInputError, match="expected") as error:
        PackedLayout(**(good | arguments))
    assert words in str(error.value)


def test_wrong_values_are_typed():
    def rows(cu, layout, num_rows=None, **kwargs):
        return PackedLayout(torch.tensor(cu), **kwargs).rows(layout, num_rows=num_rows)

    with pytest.raises(SegmentLengthError, match="decreases at segment 1"):
        rows([0, 4, 2], "per_sequence", num_tokens=4)
    with pytest.raises(SegmentLengthError, match="t has 8"):
        rows([0, 4, 10], "per_sequence", num_tokens=8)
    with pytest.raises(SegmentLengthError, match="t has 8"):
        rows([0, 4, 10], "packed", 10, num_tokens=8)
    with pytest.raises(
        SegmentLengthError, match=r"segment 1 of 3 tokens is not divisible by cp = 2"
    ):
        rows([0, 4, 7], "packed", num_tokens=4, cp_size=2, cp_layout="contiguous")
    with pytest.raises(FreqsError, match="6 rows for 10 packed tokens"):
        rows([0, 4, 10], "packed", 6, num_tokens=10)
    with pytest.raises(FreqsError, match="freqs has 6 rows, the pack 8 tokens"):
        rows([0, 4, 8], "packed", 6, num_tokens=4, cp_size=2)
    with pytest.raises(FreqsError, match="freqs has 6 rows, the pack 8 tokens"):
        rows([0, 8], "packed", 6, num_tokens=4, cp_size=2)
    with pytest.raises(FreqsError, match="segment 1 of 2 tokens from position 7"):
        rows([0, 2, 4], "per_sequence", 8, num_tokens=4, start_positions=torch.tensor([0, 7]))
    with pytest.raises(FreqsError, match="no rows"):
        rows([0, 4], "auto", 0, num_tokens=4)
    with pytest.raises(PackedInputError, match="only a 'per_sequence' table"):
        rows([0, 4], "packed", 4, num_tokens=4, start_positions=torch.tensor([1]))
    with pytest.raises(PackedInputError, match="'rowwise'"):
        rows([0, 4], "rowwise", 4, num_tokens=4)


@st.composite
def packs(draw):
    """A random pack: 1 to 3,000 segments, empty ones too, on any rank, in any layout."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    cp = draw(st.sampled_from([1, 2, 4]))
    cp_layout = draw(st.sampled_from(["zigzag", "contiguous"]))
    count = rng.choice([1, 2, 3, 7, 50, rng.randint(100, 3000)])
    unit = 1 if cp == 1 else (2 * cp if cp_layout == "zigzag" else cp)
    longest = rng.choice([1, 2, 5, 40 if count < 100 else 3])
    lengths = [unit * rng.randint(0, longest) for _ in range(count)]
    layout = draw(st.sampled_from(["packed", "per_sequence", "packed_local"]))
    starts = None
    if layout == "per_sequence" and rng.random() < 0.3:
        starts = [rng.randint(0, 9) for _ in lengths]
    return lengths, layout, cp, rng.randrange(cp), cp_layout, starts, rng.choice([0, 0, 1, 5])


@settings(max_examples=int(os.environ.get("PACKED_ROPE_FUZZ", "150")), deadline=None)
@given(packs())
def test_random_packs_read_the_rows_of_each_segment_alone(pack):
    lengths, layout_name, cp, rank, cp_layout, starts, tail = pack
    expected = segments.rows(lengths, layout_name, cp, rank, cp_layout, starts)
    num_rows = max(
        [sum(lengths) if layout_name == "packed" else 0, len(expected) + tail]
        if layout_name != "per_sequence"
        else [s + n for s, n in zip(starts or [0] * len(lengths), lengths, strict=True)]
    )
    layout = PackedLayout(
        torch.tensor(segments.boundaries(lengths), dtype=torch.int32),
        num_tokens=len(expected) + tail,
        cp_size=cp,
        cp_rank=rank,
        cp_layout=cp_layout,
        start_positions=None if starts is None else torch.tensor(starts),
    )
    if num_rows == 0:
        return
    rows = layout.rows(layout_name, num_rows=num_rows)
    found = list(range(len(expected) + tail)) if rows is None else rows.tolist()
    assert found[: len(expected)] == expected
    assert all(0 <= row < max(num_rows, len(expected) + tail) for row in found)
    positions = [p for n in lengths for p in segments.local_positions(n, cp, rank, cp_layout)]
    assert layout.positions.tolist() == positions + [0] * tail


@pytest.mark.parametrize("cu", [[3, 8], [-4, 4], [5, 10], [0, 5, 3, 8], [0, 4, 80]])
@pytest.mark.parametrize("read", ["segments", "positions", "rows"])
def test_boundaries_that_are_none_are_refused_whatever_is_read(cu, read):
    layout = PackedLayout(torch.tensor(cu), num_tokens=8)
    with pytest.raises(SegmentLengthError, match=r"cu_seqlens (starts at|decreases|ends at)"):
        layout.rows("per_sequence", num_rows=64) if read == "rows" else getattr(layout, read)


def test_a_negative_start_position_is_refused():
    layout = PackedLayout(
        torch.tensor([0, 4, 8]), num_tokens=8, start_positions=torch.tensor([-2, 0])
    )
    with pytest.raises(PackedInputError, match=r"start_positions\[0\] is -2"):
        layout.rows("per_sequence", num_rows=64)
