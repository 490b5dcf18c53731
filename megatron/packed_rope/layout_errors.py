"""What is wrong with a pack, in words: the typed errors of ``PackedLayout``.

These read values to the host in order to name them, which is why ``errors.require`` calls them on
CPU alone, and only once a check has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import FreqsError, PackedInputError, PackedRopeError, SegmentLengthError

if TYPE_CHECKING:
    from .layout import PackedLayout


def check_integers(name: str, value: Tensor) -> None:
    """Boundaries and start positions: one dimension, int32 or int64."""
    if not isinstance(value, Tensor) or value.dim() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise PackedInputError(f"{name}: {found}; expected a tensor with one dimension.")
    if value.dtype not in (torch.int32, torch.int64):
        raise PackedInputError(f"{name} is {value.dtype}; expected torch.int32 or torch.int64.")


def explain_rows_of_tokens(layout: PackedLayout, num_rows: int | None) -> PackedRopeError:
    """Where the row is the token: too few tokens in t, or too few rows in freqs."""
    needed = -(-int(layout.cu_seqlens[-1]) // layout.cp_size)
    if needed > layout.num_tokens:
        return _too_few_tokens(layout, needed)
    return FreqsError(
        f"freqs has {num_rows} rows for {needed} packed tokens of this rank; expected a row for "
        "each. If freqs is a table of positions, declare 'per_sequence'."
    )


def explain_lengths(
    layout: PackedLayout,
    lengths: list[int],
    divisor: int,
    *,
    table_rows: int | None,
    packed_rows: int | None,
) -> PackedRopeError:
    """The first segment that does not fit the CP layout, the tokens or the rows of freqs."""
    starts = [0] * len(lengths)
    if layout.start_positions is not None:
        starts = layout.start_positions.tolist()
    first = int(layout.cu_seqlens[0])
    if first != 0:
        return SegmentLengthError(
            f"cu_seqlens starts at {first}; expected 0: pass the boundaries of the whole row."
        )
    for i, length in enumerate(lengths):
        if length < 0:
            return SegmentLengthError(f"cu_seqlens decreases at segment {i}; expected it not to.")
        if length % divisor:
            factor = "2 * cp" if layout.cp_layout == "zigzag" else "cp"
            return SegmentLengthError(
                f"segment {i} of {length} tokens is not divisible by {factor} = {divisor}; pad "
                f"each segment of the pack to a multiple of it (cp_size {layout.cp_size}, "
                f"{layout.cp_layout})."
            )
    if sum(lengths) > layout.num_tokens * layout.cp_size:
        return _too_few_tokens(layout, sum(lengths) // layout.cp_size)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start < 0:
            return PackedInputError(f"start_positions[{i}] is {start}; expected 0 or more.")
        if table_rows is not None and start + length > table_rows:
            at = f" from position {start}" if start else ""
            return FreqsError(
                f"table of {table_rows} rows, segment {i} of {length} tokens{at}; expected a row "
                "for every position. Make freqs for the longest segment, or declare 'packed' "
                "if its rows are the tokens of the pack."
            )
    return FreqsError(
        f"freqs has {packed_rows} rows, the pack {sum(lengths)} tokens before CP sharding; "
        "expected a row for every token (freqs_layout 'packed')."
    )


def _too_few_tokens(layout: PackedLayout, needed: int) -> SegmentLengthError:
    return SegmentLengthError(
        f"cu_seqlens ends at {int(layout.cu_seqlens[-1])}, so this rank of {layout.cp_size} holds "
        f"{needed} tokens; t has {layout.num_tokens}. Pass the boundaries before CP sharding, "
        "and the padded ones where the batch has both."
    )
