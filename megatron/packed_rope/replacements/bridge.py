"""megatron.bridge: what its vision-language models share about a packed batch.

These models compute position ids inside ``forward``, from the ids of the whole row, and most do not
hand packed_seq_params to the function that does it. So ``forward`` is wrapped and leaves the batch
where that function looks for it.

That place is a context variable: each thread has its own, and a model inside a model, or a dense
call inside a packed one, sees its own batch and puts the outer one back. Dynamo cannot trace one
under fullgraph, which costs nothing here: upstream's ``forward`` reads values to the host and
pushes NVTX ranges, so it has never been one graph. (GPTModel's wrapper must be traceable and uses
an attribute instead.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import PackedLayout
from ..positions import packed_position_ids
from .declarations import argument_reader, is_thd

_BATCH: ContextVar[Any | None] = ContextVar("packed_rope_batch", default=None)


def forward_with_batch(
    original: Callable[..., Any], prepare: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    """A model's ``forward`` during which ``packed_batch`` finds the call's packed_seq_params.

    ``prepare`` is called with the model before a packed batch runs.
    """
    given_by = argument_reader(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = given_by((self, *args), kwargs).get("packed_seq_params")
        packed = params if is_thd(params) else None
        if packed is not None and prepare is not None:
            prepare(self)
        token = _BATCH.set(packed)
        try:
            return original(self, *args, **kwargs)
        finally:
            _BATCH.reset(token)

    return forward


def packed_batch(input_ids: Tensor | None, packed_seq_params: Any = None) -> Any | None:
    """The batch's PackedSeqParams if ``input_ids`` are one flat packed row of it, else None.

    ``packed_seq_params`` are those the caller was given; without, those of the running ``forward``.

    Bridge also describes batches ``[b, s]`` by PackedSeqParams and packs them after the positions
    are made: rows of such a batch number as ever. One segment in one row may be either, and there
    the original is right, padding on the left included; only from two segments on is a single row
    certainly packed (shapes say so, no value is read; Bridge 0.6 draws the same line).
    """
    params = _BATCH.get() if packed_seq_params is None else packed_seq_params
    if not is_thd(params) or input_ids is None or input_ids.dim() != 2 or input_ids.shape[0] != 1:
        return None
    cu_seqlens = params.cu_seqlens_q
    return params if cu_seqlens is not None and cu_seqlens.shape[0] > 2 else None


def packed_rope_index(input_ids: Tensor, params: Any, **rules: Any) -> tuple[Tensor, Tensor]:
    """What get_rope_index returns, for a packed row.

    Args:
        input_ids: ``[1, T]``.
        params: the batch's PackedSeqParams.
        rules: keyword arguments of ``packed_position_ids``; tensors may be on any device.

    Returns:
        Position ids ``[3, 1, T]`` int64, padding 1; and ``[n, 1]``, for each segment by how much
        its next position exceeds its (padded) number of tokens, as Bridge 0.6 counts.

    Raises:
        PackedInputError and its kinds: as ``packed_position_ids``.
    """
    device = input_ids.device
    rules = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in rules.items()}
    cu_seqlens = params.cu_seqlens_q.to(device)
    padded = getattr(params, "cu_seqlens_q_padded", None)
    padded = cu_seqlens if padded is None else padded.to(device)
    position_ids = packed_position_ids(input_ids, cu_seqlens, cu_seqlens_padded=padded, **rules)
    return position_ids, _deltas(position_ids, cu_seqlens, padded)


def _deltas(position_ids: Tensor, cu_seqlens: Tensor, padded: Tensor) -> Tensor:
    num_tokens = position_ids.shape[-1]
    segment_T = PackedLayout(padded, num_tokens=num_tokens).segments
    real_ends_n = padded[:-1] + cu_seqlens.diff()
    tokens_T = torch.arange(num_tokens, device=padded.device)
    real_T = tokens_T < pad(real_ends_n, (0, 1))[segment_T]
    next_T = torch.where(real_T, position_ids.amax(0)[0] + 1, 0)
    next_n = torch.zeros_like(padded, dtype=next_T.dtype)
    next_n = next_n.scatter_reduce(0, segment_T, next_T, "amax")[:-1]
    return (next_n - padded.diff())[:, None]
