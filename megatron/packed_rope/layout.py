"""Which row of freqs each token of a packed row reads: what the rows stand for, and the checks.

The arithmetic is in ``spans``; suffixes name shapes as there: T local tokens, n segments.
"""

from __future__ import annotations

from numbers import Integral
from typing import Final

import torch
from torch import Tensor

from .errors import FreqsError, PackedInputError, require
from .layout_errors import check_integers, explain_lengths, explain_rows_of_tokens
from .spans import Cut, Segments, rows_of_tokens

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
        for name, value in (("cp_size", cp_size), ("cp_rank", cp_rank), ("num_tokens", num_tokens)):
            if not isinstance(value, (Integral, torch.SymInt)):
                raise PackedInputError(f"{name} is {value!r}; expected an integer.")
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
        self._cut = Cut.of(cp_size, cp_rank, cp_layout)

    @property
    def segments(self) -> Tensor:
        """``[T]`` int64, index of the segment of each local token; n for tail padding."""
        pack = Segments.of(self.cu_seqlens, self._cut)
        self._require(pack)
        tokens_T = torch.arange(self.num_tokens, device=pack.cu.device)
        return torch.searchsorted(pack.local[1:], tokens_T, right=True)

    @property
    def positions(self) -> Tensor:
        """``[T]`` int64, position of each local token in its own segment; 0 for tail padding."""
        pack = Segments.of(self.cu_seqlens, self._cut)
        self._require(pack)
        positions_T = rows_of_tokens(pack, self._cut, self.num_tokens)
        tokens_T = torch.arange(self.num_tokens, device=pack.cu.device)
        return torch.where(tokens_T < pack.local[-1], positions_T, 0)

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

        if freqs_layout == AUTO:
            rows_T = self._rows_undeclared(num_rows)
        elif freqs_layout == PACKED:
            pack = Segments.of(self.cu_seqlens, self._cut)
            self._require(pack, packed_rows=num_rows)
            rows_T = rows_of_tokens(pack, self._cut, self.num_tokens, pack.cu[:-1])
        else:
            starts_n = self.start_positions
            longest = num_rows if starts_n is None else None  # else start + length is checked
            pack = Segments.of(self.cu_seqlens, self._cut, longest)
            self._require(pack, table_rows=num_rows)
            rows_T = rows_of_tokens(pack, self._cut, self.num_tokens, starts_n)
        # Tail padding goes on past the last segment: back to a row that exists.
        return rows_T if num_rows is None else rows_T.clamp(max=num_rows - 1)

    def _rows_undeclared(self, num_rows: int) -> Tensor:
        """The rule of ``rows`` as predicates on the device."""
        one_row_per_token = num_rows == self.num_tokens  # and C > 1: ``rows`` took the other case
        pack = Segments.of(self.cu_seqlens, self._cut, None if one_row_per_token else num_rows)
        whole = pack.cu[-1] <= self.num_tokens if self.cp_size > 1 else None
        self._require(pack, table_rows=num_rows, whole=whole)
        if one_row_per_token:
            # Packed freqs of tokens that all ranks hold, or packed_local: the row is the token.
            token_is_row = whole | (pack.lengths_n.max() > num_rows)
            return rows_of_tokens(pack, self._cut, self.num_tokens, token_is_row=token_is_row)
        if whole is not None:
            pack = pack.where_whole(whole)
        packed = pack.cu[-1] <= num_rows
        return rows_of_tokens(pack, self._cut, self.num_tokens, pack.cu[:-1] * packed)

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
        pack: Segments,
        *,
        table_rows: int | None = None,
        packed_rows: int | None = None,
        whole: Tensor | None = None,
    ) -> None:
        """Lengths fit their bounds and the cut, tokens fit t, and the rows they read exist.

        ``table_rows``, ``packed_rows``: rows of freqs, where they stand for positions or for
        global tokens. ``whole``: 0-dim bool; where true, every rank holds all tokens.
        """
        fitting_n = pack.within_n
        if self.cp_size > 1:
            fitting_n = pack.chunk_n * self._cut.chunks
            if whole is not None:
                fitting_n = torch.where(whole, pack.within_n, fitting_n)
        most = self.num_tokens * self.cp_size
        if packed_rows is not None:
            most = min(most, packed_rows)
        ok = (fitting_n == pack.lengths_n) & (pack.cu[0] == 0) & (pack.cu[-1] <= most)
        if self.start_positions is not None:
            ok = ok & (self.start_positions >= 0)
            if table_rows is not None:
                ok = ok & (self.start_positions + pack.lengths_n <= table_rows)
        require(
            ok,
            "packed_rope: cu_seqlens does not start at 0, or a segment does not fit the CP layout "
            "(zigzag: divisible by 2 * cp_size, contiguous: by cp_size), the tokens of t, or the "
            "rows of freqs",
            lambda: explain_lengths(
                self,
                pack.lengths_n.tolist(),
                1 if whole is not None and whole else self._cut.chunks,
                table_rows=table_rows,
                packed_rows=packed_rows,
            ),
        )
