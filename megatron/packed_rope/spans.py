"""How context parallelism cuts the segments of a pack, and the row each local token then reads.

Suffixes name shapes: T local tokens of this rank, n segments, s spans (a span is a run of local
tokens whose rows follow each other), k spans of one segment.

Local token j of segment i (start c_i, length L_i, CP size C, rank r) has the position

    C = 1        p = j                               j counted from the segment's first local token
    zigzag       p = j + r * h                       j <  h = L_i / 2C
                 p = j + (2C - r - 2) * h            j >= h
    contiguous   p = j + r * L_i / C

and reads row p + start_i of a per-sequence table, or row c_i + p of packed freqs. So within a span
the row is the local index plus a constant: one binary search over the spans finds the constant,
whatever the number of segments, and nothing is read back to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How every segment is cut, and which of its chunks this rank holds."""

    cp_size: int
    chunks: int
    """Equal chunks of a segment."""
    offsets_k: range
    """Chunks between a token's index in its share of the segment and its position, by span."""

    @classmethod
    def of(cls, cp_size: int, cp_rank: int, cp_layout: str) -> Cut:
        """Chunk r of C (contiguous), or chunks r and 2C-1-r of 2C (zigzag)."""
        if cp_size == 1 or cp_layout == "contiguous":
            return cls(cp_size, cp_size, range(cp_rank, cp_rank + 1))
        first, second = cp_rank, 2 * cp_size - cp_rank - 2
        # The two chunks of the last rank are neighbours: one span.
        return cls(cp_size, 2 * cp_size, range(first, second + 1, max(1, second - first)))


class Segments(NamedTuple):
    """The segments of a pack before they are cut, and what one rank holds of them. All int64."""

    cu: Tensor
    """``[n + 1]`` boundaries before sharding."""
    local: Tensor
    """``[n + 1]`` boundaries of this rank's tokens."""
    lengths_n: Tensor
    """Tokens of each segment before sharding,"""
    within_n: Tensor
    """the same brought between 0 and the longest allowed,"""
    chunk_n: Tensor
    """and tokens of one of its chunks; 0 where every rank holds the whole segment."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, cut: Cut, longest: int | None = None) -> Segments:
        """Segments of ``cu_seqlens: [n + 1]``, not checked (see ``uncut``)."""
        cu = cu_seqlens.long()
        lengths_n = cu[1:] - cu[:-1]
        within_n = lengths_n.clamp(0, longest)
        if cut.cp_size == 1:
            return cls(cu, cu, lengths_n, within_n, within_n)
        return cls(cu, cu // cut.cp_size, lengths_n, within_n, within_n // cut.chunks)

    def where_whole(self, whole: Tensor) -> Segments:
        """These where ``whole`` (0-dim, bool) is false; else every rank holds all tokens."""
        return self._replace(
            local=torch.where(whole, self.cu, self.local),
            chunk_n=self.chunk_n.masked_fill(whole, 0),
        )


def rows_of_tokens(
    pack: Segments,
    cut: Cut,
    num_tokens: int,
    base_n: Tensor | None = None,
    token_is_row: Tensor | None = None,
) -> Tensor:
    """``[T]`` int64: the token's local index plus the constant of its span.

    Tail padding (tokens after the last segment) goes on counting in the last span.

    Args:
        pack, cut: the segments, with lengths that fit the cut.
        num_tokens: T.
        base_n: row of position 0 of each segment; zeros if not given.
        token_is_row: 0-dim bool; where true, the row is the local index.
    """
    starts_n, ends_n = pack.local[:-1], pack.local[1:]
    shifts_s = -starts_n if base_n is None else base_n - starts_n
    inner_ends_s = ends_n[:-1]
    if cut.cp_size > 1:
        k = cut.offsets_k
        offsets_k = torch.arange(k.start, k.stop, k.step, device=pack.cu.device)
        # shifts + chunk * offset, for every span of every segment
        shifts_s = torch.addcmul(shifts_s[:, None], pack.chunk_n[:, None], offsets_k).flatten()
        if len(k) == 2:
            inner_ends_s = torch.stack((starts_n + pack.chunk_n, ends_n), dim=1).flatten()[:-1]
    if token_is_row is not None:
        shifts_s = shifts_s.masked_fill(token_is_row, 0)
    tokens_T = torch.arange(num_tokens, device=pack.cu.device)
    # Only inner boundaries, so that the span found for tail padding exists: the last one.
    return tokens_T + shifts_s[torch.searchsorted(inner_ends_s, tokens_T, right=True)]
