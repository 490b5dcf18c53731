"""Which row of freqs each token of a packed row reads.

Suffixes name shapes: T local tokens of this rank, n segments, s spans (a span is a run of local
tokens whose rows follow each other: a segment, or half of one under zigzag).

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

from typing import Final, NamedTuple

import torch
from torch import Tensor

from .errors import FreqsError, PackedInputError, require
from .layout_errors import check_integers, explain_lengths, explain_rows_of_tokens

PER_SEQUENCE: Final = "per_sequence"
"""Row p of freqs is position p; all segments share the table."""
PACKED: Final = "packed"
"""Row g of freqs is global token g of the packed row."""
PACKED_LOCAL: Final = "packed_local"
"""Row j of freqs is local token j of this context-parallel rank."""
AUTO: Final = "auto"
"""Nobody declared the layout: decided from the numbers of rows and tokens (see ``rows``)."""

FREQS_LAYOUTS: Final = (PER_SEQUENCE, PACKED, PACKED_LOCAL, AUTO)
CP_LAYOUTS: Final = ("zigzag", "contiguous")


class _Cut(NamedTuple):
    """How segments are cut: ints, or 0-dim tensors where that is decided on the device."""

    cp_size: int | Tensor
    """Ranks that share a segment."""
    chunks: int | Tensor
    """Equal chunks that a segment is cut into."""
    first: int | Tensor
    second: int | Tensor
    """Chunks between a local token's index in its segment and its position, in either span."""

    def where(self, sharded: Tensor) -> _Cut:
        """This cut where ``sharded``; else every rank holds whole segments: one chunk, no shift."""
        shares = sharded.long()
        return _Cut(
            (self.cp_size - 1) * shares + 1,
            (self.chunks - 1) * shares + 1,
            self.first * shares,
            self.second * shares,
        )


class PackedLayout:
    """Positions and freqs rows of the tokens that one context-parallel rank holds.

    Args:
        cu_seqlens: ``[n + 1]`` int32 or int64, boundaries of the segments before CP sharding,
            in tokens, from 0; the padded boundaries where a batch has both.
        num_tokens: local tokens T of this rank, tail padding included.
        cp_size, cp_rank: size of the CP group and this rank in it.
        cp_layout: ``"zigzag"`` (chunks r and 2C-1-r of every segment) or ``"contiguous"``.
        start_positions: ``[n]`` integers, position of the first token of each segment (only
            for a per-sequence table); zeros if not given.

    Raises:
        PackedInputError: an argument has the wrong shape, dtype, device or value.

    Errors that depend on the values in ``cu_seqlens`` are raised by ``rows``, ``positions`` and
    ``segments``: typed on CPU, as a device-side assert elsewhere.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        *,
        num_tokens: int,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: str = "zigzag",
        start_positions: Tensor | None = None,
    ) -> None:
        check_integers("cu_seqlens", cu_seqlens)
        if cu_seqlens.shape[0] < 2:
            raise PackedInputError(
                f"cu_seqlens has {cu_seqlens.shape[0]} entries; expected n + 1 boundaries for "
                "n >= 1 segments, from 0 (an empty pack is [0, 0])."
            )
        if not (cp_size >= 1 and 0 <= cp_rank < cp_size):
            raise PackedInputError(
                f"cp_rank {cp_rank} of cp_size {cp_size}; expected 0 <= cp_rank < cp_size."
            )
        if cp_layout not in CP_LAYOUTS:
            raise PackedInputError(f"cp_layout {cp_layout!r}; expected one of {CP_LAYOUTS}.")
        if start_positions is not None:
            check_integers("start_positions", start_positions)
            if start_positions.shape[0] != cu_seqlens.shape[0] - 1:
                raise PackedInputError(
                    f"start_positions has {start_positions.shape[0]} entries; expected one for "
                    f"each of the {cu_seqlens.shape[0] - 1} segments of cu_seqlens."
                )
        self.cu_seqlens = cu_seqlens
        self.num_tokens = num_tokens
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        self.cp_layout = cp_layout
        self.start_positions = start_positions

    @property
    def segments(self) -> Tensor:
        """``[T]`` int64, index of the segment of each local token; n for tail padding."""
        cu = self.cu_seqlens.long()
        self._require(cu, cu[1:] - cu[:-1], self._declared_cut())
        local_ends_n = cu[1:] // self.cp_size
        tokens_T = torch.arange(self.num_tokens, device=local_ends_n.device)
        return torch.searchsorted(local_ends_n, tokens_T, right=True)

    @property
    def positions(self) -> Tensor:
        """``[T]`` int64, position of each local token in its own segment; 0 for tail padding."""
        cu = self.cu_seqlens.long()
        lengths_n, cut = cu[1:] - cu[:-1], self._declared_cut()
        self._require(cu, lengths_n, cut)
        positions_T = self._rows(cu, lengths_n, None, cut)
        tokens_T = torch.arange(self.num_tokens, device=cu.device)
        return torch.where(tokens_T < cu[-1] // self.cp_size, positions_T, 0)

    def rows(self, freqs_layout: str, *, num_rows: int | None = None) -> Tensor | None:
        """Row of freqs that each local token reads.

        Args:
            freqs_layout: what the rows of freqs stand for: ``"per_sequence"``, ``"packed"``,
                ``"packed_local"``, or ``"auto"`` where nobody declared it.
            num_rows: rows of freqs at hand; needed for ``"auto"``, and checked where given.

        Returns:
            ``[T]`` int64, or None where the row is the token (no index is needed). Tail padding
            reads some row that exists.

        ``"auto"``: at C = 1 with one row per token, packed. Else, decided on the device:
        tokens that all ranks hold (cu_seqlens[-1] <= T inside a CP group) are treated as C = 1;
        rows for every global token mean packed; one row per local token, with a segment longer
        than that, means packed_local; anything else is a table.

        Raises:
            PackedInputError: unknown layout, or start_positions with freqs that are no table.
            SegmentLengthError: a segment's length does not fit the tokens or the CP layout.
            FreqsError: fewer rows than the tokens read.
        """
        if freqs_layout not in FREQS_LAYOUTS:
            raise PackedInputError(
                f"freqs_layout {freqs_layout!r}; expected one of {FREQS_LAYOUTS}."
            )
        if self.start_positions is not None:
            if freqs_layout not in (PER_SEQUENCE, AUTO):
                raise PackedInputError(
                    f"start_positions given with freqs_layout {freqs_layout!r}; only a "
                    "'per_sequence' table is read from a start position."
                )
            freqs_layout = PER_SEQUENCE
        if num_rows == 0 and self.num_tokens > 0:
            raise FreqsError(f"freqs has no rows for {self.num_tokens} tokens.")
        if freqs_layout == AUTO:
            if num_rows is None:
                raise PackedInputError("freqs_layout 'auto' needs num_rows, the rows of freqs.")
            if self.cp_size == 1 and num_rows == self.num_tokens:
                freqs_layout = PACKED
        if freqs_layout == PACKED_LOCAL or (freqs_layout == PACKED and self.cp_size == 1):
            self._require_rows_of_tokens(num_rows)
            return None

        cu = self.cu_seqlens.long()
        lengths_n = cu[1:] - cu[:-1]
        if freqs_layout == AUTO:
            return self._rows_undeclared(cu, lengths_n, num_rows)
        if freqs_layout == PACKED:
            base_n, rows_read = cu[:-1], cu[-1]
        elif self.start_positions is None:
            base_n, rows_read = None, lengths_n
        else:
            base_n = self.start_positions.long()
            rows_read = base_n + lengths_n
        cut = self._declared_cut()
        self._require(cu, lengths_n, cut, rows_read, num_rows)
        return self._rows(cu, lengths_n, base_n, cut, num_rows)

    def _declared_cut(self) -> _Cut:
        size, rank = self.cp_size, self.cp_rank
        if size == 1:
            return _Cut(1, 1, 0, 0)
        if self.cp_layout == "contiguous":
            return _Cut(size, size, rank, rank)
        return _Cut(size, 2 * size, rank, 2 * size - rank - 2)

    def _rows_undeclared(self, cu: Tensor, lengths_n: Tensor, num_rows: int) -> Tensor:
        """Rows where nobody declared the layout: the rule of ``rows`` as predicates on device."""
        cut = self._declared_cut()
        packed = cu[-1] <= num_rows
        rows_read, local = lengths_n, None  # of packed freqs, no segment is longer than all rows
        if self.cp_size > 1:
            sharded = cu[-1] > self.num_tokens
            if num_rows == self.num_tokens:
                local = sharded & ~packed & (lengths_n.max() > num_rows)
                rows_read = lengths_n * ~local
            cut = cut.where(sharded)
        self._require(cu, lengths_n, cut, rows_read, num_rows)
        rows_T = self._rows(cu, lengths_n, cu[:-1] * packed, cut, num_rows)
        if local is not None:
            rows_T = torch.where(local, torch.arange(self.num_tokens, device=cu.device), rows_T)
        return rows_T

    def _rows(
        self,
        cu: Tensor,
        lengths_n: Tensor,
        base_n: Tensor | None,
        cut: _Cut,
        num_rows: int | None = None,
    ) -> Tensor:
        """Local index plus the constant of the token's span; ``base_n``: row of position 0."""
        local = cu if self.cp_size == 1 else cu // cut.cp_size
        shifts_s = -local[:-1] if base_n is None else base_n - local[:-1]
        inner_ends_s = local[1:-1]
        if self.cp_size > 1:
            chunk_n = lengths_n // cut.chunks
            first_n, second_n = shifts_s + cut.first * chunk_n, shifts_s + cut.second * chunk_n
            shifts_s = first_n
            if self.cp_layout == "zigzag":
                middles_n = local[:-1] + chunk_n
                inner_ends_s = torch.stack((middles_n, local[1:]), dim=1).flatten()[:-1]
                shifts_s = torch.stack((first_n, second_n), dim=1).flatten()
        tokens_T = torch.arange(self.num_tokens, device=cu.device)
        # Only inner boundaries: tail padding falls into the last span, with rows past its end ...
        rows_T = tokens_T + shifts_s[torch.searchsorted(inner_ends_s, tokens_T, right=True)]
        # ... which this brings back to a row that exists; rows of real tokens were checked.
        return rows_T if num_rows is None else rows_T.clamp(max=num_rows - 1)

    def _require_rows_of_tokens(self, num_rows: int | None) -> None:
        """Where the row is the token: the real tokens must fit into t and into freqs."""
        fit = self.num_tokens if num_rows is None else min(self.num_tokens, num_rows)

        require(
            self.cu_seqlens[-1] <= fit * self.cp_size,
            "packed_rope: cu_seqlens[-1] exceeds the tokens or the rows of freqs at hand",
            lambda: explain_rows_of_tokens(self, num_rows),
        )

    def _require(
        self,
        cu: Tensor,
        lengths_n: Tensor,
        cut: _Cut,
        rows_read: Tensor | None = None,
        num_rows: int | None = None,
    ) -> None:
        """Lengths fit the CP layout, tokens fit t, and rows read (per segment or in all) exist."""
        # Tokens that all ranks hold fit by definition: they are what cu[-1] <= T recognises.
        ok = (lengths_n >= 0) & (cu[0] == 0) & (cu[-1] <= self.num_tokens * self.cp_size)
        if self.cp_size > 1:
            ok = ok & (lengths_n % cut.chunks == 0)
        if self.start_positions is not None:
            ok = ok & (self.start_positions >= 0)
        if rows_read is not None and num_rows is not None:
            ok = ok & (rows_read <= num_rows)
        require(
            ok,
            "packed_rope: cu_seqlens does not start at 0, or a segment does not fit the CP layout "
            "(zigzag: divisible by 2 * cp_size, contiguous: by cp_size), the tokens of t, or the "
            "rows of freqs",
            lambda: explain_lengths(self, lengths_n.tolist(), int(cut.chunks), num_rows),
        )
