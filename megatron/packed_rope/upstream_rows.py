"""A model of which freqs row each token of a pack reads in upstream's releases, for ``show``.

A few lines per release family; the tests hold them against the releases themselves. What a token
should read comes from ``PackedLayout``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import PackedInputError, SegmentLengthError

if TYPE_CHECKING:
    from .layout import PackedLayout

PACKED, PER_SEQUENCE, PACKED_LOCAL = "packed", "per_sequence", "packed_local"
MROPE = "mrope"
"""Whole-row freqs that MultimodalRotaryEmbedding makes, and cuts for its context-parallel rank."""
FREQS = {
    PACKED: "packed freqs: row g is global token g of the pack",
    PER_SEQUENCE: "a table: row p is position p of every segment",
    PACKED_LOCAL: "freqs of the rank: row j is its local token j",
    MROPE: "mRoPE in GPTModel: row g is global token g of the pack",
}
MAIN = "main"


class Refused(Exception):
    """Upstream raises for this pack; says why."""


@dataclass(frozen=True)
class Pack:
    """A packed row and what its freqs are.

    Raises:
        PackedInputError: boundaries, sizes or the kind of freqs are not valid.
    """

    cu_seqlens: list[int]
    freqs: str = PACKED
    cp_size: int = 1
    tokens: int | None = None
    """Local tokens of each rank, tail padding included; ``cu_seqlens[-1] / cp_size`` if None."""
    max_seqlen: int | None = None
    """What the batch says is its longest segment (also the rows of a table); if None, it is."""

    def __post_init__(self) -> None:
        cu = self.cu_seqlens
        if len(cu) < 2 or cu[0] != 0:
            raise PackedInputError(f"cu_seqlens {cu}; expected n + 1 boundaries that start at 0.")
        for i, length in enumerate(self.lengths):
            if length < 0:
                raise SegmentLengthError(
                    f"cu_seqlens decreases at segment {i}; expected it not to."
                )
        if self.cp_size < 1:
            raise PackedInputError(f"cp_size {self.cp_size}; expected 1 or more.")
        if self.freqs not in FREQS:
            raise PackedInputError(f"freqs {self.freqs!r}; expected one of {', '.join(FREQS)}.")
        longest = max(self.lengths)
        if self.max_seqlen is not None and self.max_seqlen < longest:
            raise PackedInputError(
                f"max_seqlen {self.max_seqlen}; expected {longest} (the longest segment) or more."
            )
        self.layout(0).positions  # noqa: B018 (typed errors: divisibility, tokens)

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in itertools.pairwise(self.cu_seqlens)]

    @property
    def local_tokens(self) -> int:
        return self.cu_seqlens[-1] // self.cp_size if self.tokens is None else self.tokens

    @property
    def real_tokens(self) -> int:
        """Local tokens before the tail padding."""
        return self.cu_seqlens[-1] // self.cp_size

    def layout(self, rank: int) -> PackedLayout:
        # Not at the top: the command line reads its options from here without loading torch.
        import torch

        from .layout import PackedLayout

        cu = torch.tensor(self.cu_seqlens)
        size = self.cp_size
        return PackedLayout(cu, num_tokens=self.local_tokens, cp_size=size, cp_rank=rank)

    def segments(self, rank: int) -> list[int]:
        """Segment of each local token; n of n segments for tail padding."""
        return self.layout(rank).segments.tolist()

    def rows_made(self) -> list[int]:
        """The rows that freqs hold, numbered, before any cut."""
        count = {
            PACKED: self.cu_seqlens[-1],
            PER_SEQUENCE: self.bound,
            PACKED_LOCAL: self.local_tokens,
            MROPE: self.local_tokens * self.cp_size,
        }
        return list(range(count[self.freqs]))

    @property
    def bound(self) -> int:
        return max(self.lengths) if self.max_seqlen is None else self.max_seqlen


def right_rows(pack: Pack, rank: int) -> list[int]:
    """Row of each local token as it should be; of tail padding, any."""
    declared = PACKED if pack.freqs == MROPE else pack.freqs
    rows = pack.layout(rank).rows(declared, num_rows=len(pack.rows_made()))
    return list(range(pack.local_tokens)) if rows is None else rows.tolist()


def upstream_rows(release: str, pack: Pack, rank: int) -> list[int]:
    """Row of each local token as a release reads it, unfused; ``Refused`` where it raises.

    Args:
        release: ``"0.10.0"`` to ``"0.19.x"``, or ``"main"`` (of 2026-08).
    """
    minor = _minor(release)
    freqs = pack.rows_made()
    if pack.freqs == MROPE:
        freqs = _cut_whole_row(freqs, pack, rank, minor)
    if minor is None:
        return _rows_of_main(freqs, pack, rank)
    return _rows_by_segment(freqs, pack, rank, minor)


def _minor(release: str) -> int | None:
    """14 for 0.14.0, None for main."""
    if release == MAIN:
        return None
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0]
    if major == "0" and minor.isdecimal() and 10 <= int(minor) <= 19:
        return int(minor)
    raise PackedInputError(f"release {release!r}; expected 0.10.0 to 0.19.x, or {MAIN!r}.")


def _cut_whole_row(freqs: list[int], pack: Pack, rank: int, minor: int | None) -> list[int]:
    """MultimodalRotaryEmbedding: the row cut zigzag as if it were one segment."""
    if minor is not None and minor < 12:
        raise Refused("this release has no mRoPE")
    if pack.cp_size == 1:
        return freqs
    if minor == 12:
        raise Refused("cuts the batch axis instead of the tokens")
    chunk, rest = divmod(len(freqs), 2 * pack.cp_size)
    if rest:
        raise Refused(f"{len(freqs)} rows are not divisible by {2 * pack.cp_size}")
    second = 2 * pack.cp_size - 1 - rank
    return [row for at in (rank, second) for row in freqs[at * chunk : (at + 1) * chunk]]


def _rows_by_segment(freqs: list[int], pack: Pack, rank: int, minor: int) -> list[int]:
    """0.10 to 0.19: slices, segment by segment.

    Until 0.14 every segment starts at row 0; from 0.15 at its own offset, if there are as many rows
    as tokens before CP sharding. A slice of one row serves a whole segment (or in 0.15 to 0.18,
    which join the slices first, the whole pack): tensors broadcast. Any other that is too short
    does not fit.
    """
    if pack.local_tokens != pack.real_tokens:
        raise Refused(f"t has {pack.local_tokens} tokens, the segments {pack.real_tokens}")
    whole = minor >= 15 and len(freqs) == pack.cu_seqlens[-1]
    read: list[int] = []
    for begin, length in zip(pack.cu_seqlens, pack.lengths, strict=False):
        local, offset = length // pack.cp_size, begin if whole else 0
        if pack.cp_size == 1:
            rows = freqs[offset : offset + length]
        else:
            half, end = local // 2, offset + length
            rows = freqs[offset + rank * half : offset + (rank + 1) * half]
            rows += freqs[end - (rank + 1) * half : end - rank * half]
        read += rows if 15 <= minor <= 18 else _broadcast(rows, local, len(freqs))
    return _broadcast(read, pack.local_tokens, len(freqs))


def _broadcast(rows: list[int], tokens: int, num_rows: int) -> list[int]:
    if len(rows) not in (1, tokens):
        raise Refused(f"{num_rows} rows are too few: {len(rows)} read for {tokens} tokens")
    return rows if len(rows) == tokens else rows * tokens


def _rows_of_main(freqs: list[int], pack: Pack, rank: int) -> list[int]:
    """One gather; rows beyond the last are clamped to it. More rows than max_seqlen: packed."""
    rows = pack.layout(rank).positions.tolist()
    if len(freqs) > pack.bound:
        for token, segment in enumerate(pack.segments(rank)):
            rows[token] += pack.cu_seqlens[segment] if segment < len(pack.lengths) else 0
    return [freqs[min(row, len(freqs) - 1)] for row in rows]
