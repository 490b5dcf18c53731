"""megatron.core.models.common.embeddings.rotary_pos_embedding: where freqs are made.

Every release cuts the rows of a packed mRoPE batch as if they were one sequence. Here the rows of
this context-parallel rank are selected segment by segment, once per micro-batch, so that every
layer then rotates local token j by local row j.

Suffixes name shapes: 3 axes (T, H, W), b batch, S tokens of the row, f frequencies (half of the
rotary dim r).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FreqsError, PackedInputError, SegmentLengthError
from ..layout import PACKED, PER_SEQUENCE, PackedLayout
from .declarations import argument_reader, batch_cp_group, cp_of, declare

CALL_ATTRIBUTE = "_packed_rope_call"


class MropeCall(NamedTuple):
    """What ``GPTModel`` knows about the batch and its embedding does not."""

    packed_seq_params: Any | None
    """The batch's PackedSeqParams where it is packed (THD)."""
    num_tokens: int | None
    """Local tokens of this rank, tail padding included."""
    interleaved_sections: bool
    """Qwen3's order of the mRoPE sections (config.interleaved_mrope)."""


DENSE = MropeCall(None, None, False)


def get_rotary_seq_len(module: ModuleType, original: Callable[..., int]) -> Callable[..., int]:
    """Text models ask for the length of their table here: what they get is a table."""

    given = argument_reader(original)

    @functools.wraps(original)
    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        called_with = given(args, kwargs)
        if called_with.get("packed_seq_params") is not None:
            declare(called_with["transformer_config"], PER_SEQUENCE)
        return original(*args, **kwargs)

    return get_rotary_seq_len


def mrope_forward(module: ModuleType, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``MultimodalRotaryEmbedding.forward`` that cuts segments instead of the whole row."""

    @functools.wraps(original)
    def forward(
        self: Any,
        position_ids: Tensor,
        mrope_section: Sequence[int],
        cp_group: Any = None,
        packed_seq: bool = False,
    ) -> Tensor:
        """Freqs of this rank's tokens.

        Args:
            position_ids: ``[3, b, S]``: the whole row, or for a packed batch this rank's share.
            mrope_section: frequencies of the T, H and W axes; they add up to half the rotary dim.
            cp_group: context-parallel group; the embedding's own one if None.
            packed_seq: return the rows of the whole row uncut, for callers that cut themselves.

        Returns:
            ``[tokens of this rank, b, 1, r]`` float32 angles in radians.
        """
        call = getattr(self, CALL_ATTRIBUTE, DENSE)
        own_group = getattr(self, "cp_group", None)  # held by the embedding from 0.14
        freqs = mrope_freqs(
            position_ids,
            self.inv_freq,
            mrope_section,
            interpolation=self.seq_len_interpolation_factor,
            interleaved_pairs=self.rotary_interleaved,
            interleaved_sections=call.interleaved_sections,
        )
        if call.packed_seq_params is not None:
            batch_group = batch_cp_group(call.packed_seq_params)
            return _rows_of_rank(freqs, call, *cp_of(batch_group, cp_group, own_group))
        if packed_seq:
            return freqs
        return _cut_dense(freqs, *cp_of(cp_group, own_group))

    return forward


def mrope_freqs(
    position_ids: Tensor,
    inv_freq: Tensor,
    mrope_section: Sequence[int],
    *,
    interpolation: float | None,
    interleaved_pairs: bool,
    interleaved_sections: bool,
) -> Tensor:
    """``[S, b, 1, r]`` angles: position times frequency, each frequency on the axis it belongs to.

    ``mrope_section`` gives the number of frequencies per axis: in order T, H, W (Qwen2-VL), or
    with ``interleaved_sections`` in the stride-3 order of Qwen3-VL (H at 1, 4, 7, ..., W at 2, 5,
    8, ..., T elsewhere). ``interleaved_pairs`` places the two copies of a frequency side by side.
    """
    if position_ids.dim() != 3 or position_ids.shape[0] != 3:
        raise PackedInputError(
            f"position_ids has shape {tuple(position_ids.shape)}; expected [3, batch, tokens] (T, "
            "H, W)."
        )
    if len(mrope_section) != 3 or sum(mrope_section) != inv_freq.shape[0]:
        raise FreqsError(
            f"mrope_section {list(mrope_section)} for {inv_freq.shape[0]} frequencies; expected "
            "three numbers that add up to it."
        )
    # Float32 whatever the dtype of the model: bfloat16 loses integers above 256.
    seq_3bS = position_ids.to(device=inv_freq.device, dtype=torch.float32)
    if interpolation is not None:
        seq_3bS = seq_3bS * (1 / interpolation)
    angles_3bSf = seq_3bS[..., None] * inv_freq.float()
    if interleaved_sections:
        angles_bSf = angles_3bSf[0].clone()
        for axis in (1, 2):
            strided = slice(axis, 3 * mrope_section[axis], 3)
            angles_bSf[..., strided] = angles_3bSf[axis, ..., strided]
    else:
        sections = angles_3bSf.split(list(mrope_section), dim=-1)
        angles_bSf = torch.cat([section[axis] for axis, section in enumerate(sections)], dim=-1)
    if interleaved_pairs:
        freqs_bSr = torch.stack((angles_bSf, angles_bSf), dim=-1).flatten(-2)
    else:
        freqs_bSr = torch.cat((angles_bSf, angles_bSf), dim=-1)
    return freqs_bSr[..., None, :].transpose(0, 1).contiguous()


def _rows_of_rank(freqs: Tensor, call: MropeCall, cp_size: int, cp_rank: int) -> Tensor:
    """``[T, 1, 1, r]`` rows of this rank's tokens, from those of the whole row or of its share."""
    num_rows, batch = freqs.shape[:2]
    if batch != 1:
        raise PackedInputError(
            f"position_ids of a packed (THD) batch has {batch} rows; expected one, [3, 1, tokens]."
        )
    if cp_size == 1 or num_rows == call.num_tokens:
        return freqs
    if call.num_tokens is not None and num_rows != call.num_tokens * cp_size:
        raise PackedInputError(
            f"position_ids of {num_rows} tokens for {call.num_tokens} local tokens at cp_size "
            f"{cp_size}; expected the whole row ({call.num_tokens * cp_size}) or this rank's share "
            f"({call.num_tokens})."
        )
    params = call.packed_seq_params
    padded = params.cu_seqlens_q_padded
    layout = PackedLayout(
        params.cu_seqlens_q if padded is None else padded,
        num_tokens=num_rows // cp_size,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    return freqs.index_select(0, layout.rows(PACKED, num_rows=num_rows))


def _cut_dense(freqs: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Chunks r and 2C-1-r of one dense sequence, as every release cuts it (0.12: wrong axis)."""
    if cp_size == 1:
        return freqs
    if freqs.shape[0] % (2 * cp_size):
        raise SegmentLengthError(
            f"sequence of {freqs.shape[0]} tokens is not divisible by 2 * cp = {2 * cp_size}; pad "
            "it to a multiple."
        )
    chunks = freqs.chunk(2 * cp_size)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))
