"""megatron.core.models.gpt.gpt_model: tells the rotary embedding about the packed batch.

The model knows the batch (packed_seq_params) and its config, the embedding that makes the freqs
knows neither. For the duration of the call that makes them, the wrapper hands both over, and
declares what the rows will be. It wraps ``_preprocess`` (EP overlap calls it without ``forward``),
or ``forward`` itself in releases that have no ``_preprocess``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..layout import PACKED_LOCAL, PER_SEQUENCE
from .declarations import argument_reader, batch_cp_group, cp_of, declare, is_thd
from .rotary_pos_embedding import CALL_ATTRIBUTE, MropeCall


def preprocess(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """``GPTModel._preprocess`` (or ``forward``) with the batch at hand for the embedding."""
    given_by = argument_reader(original)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(self, "position_embedding_type", None)
        embedding = getattr(self, "rotary_pos_emb", None)
        given = given_by((self, *args), kwargs)
        params = given.get("packed_seq_params")
        thd = is_thd(params)
        if kind != "mrope" or embedding is None:
            if thd and kind in ("rope", "yarn"):
                declare(self.config, PER_SEQUENCE)
            return original(self, *args, **kwargs)
        mrope = getattr(module, "MultimodalRotaryEmbedding", None)
        if mrope is None or type(embedding).forward is not mrope.forward:
            compiling = torch.compiler.is_compiling()  # a warning would break the graph
            if (
                thd
                and not compiling
                and cp_of(batch_cp_group(params), getattr(embedding, "cp_group", None))[0] > 1
            ):
                _warn_foreign_forward(type(embedding))
            return original(self, *args, **kwargs)
        if thd:
            declare(self.config, PACKED_LOCAL)
        before = getattr(embedding, CALL_ATTRIBUTE, None)
        call = MropeCall(
            packed_seq_params=params if thd else None,
            num_tokens=_local_tokens(self, given) if thd else None,
            interleaved_sections=bool(getattr(self.config, "interleaved_mrope", False)),
        )
        setattr(embedding, CALL_ATTRIBUTE, call)
        try:
            return original(self, *args, **kwargs)
        finally:
            if before is None:
                delattr(embedding, CALL_ATTRIBUTE)
            else:
                setattr(embedding, CALL_ATTRIBUTE, before)

    return wrapper


def _local_tokens(model: Any, given: dict[str, Any]) -> int | None:
    """Tokens of this CP rank: from the hidden states where they come from outside, else the ids."""
    hidden = given.get("decoder_input")
    if hidden is None and not model.pre_process:
        hidden = getattr(model.decoder, "input_tensor", None)
    if hidden is None:
        input_ids = given.get("input_ids")
        return None if input_ids is None else input_ids.shape[-1]
    if model.config.sequence_parallel:
        return hidden.shape[0] * model.config.tensor_model_parallel_size
    return hidden.shape[0]


@functools.cache
def _warn_foreign_forward(embedding: type) -> None:
    warnings.warn(
        f"megatron-packed-rope: {embedding.__module__}.{embedding.__qualname__} has a forward of "
        "its own, which this package does not replace. A packed (THD) batch at context-parallel "
        "size > 1 gets whatever rows it selects: if it cuts the whole row instead of each segment, "
        "positions are wrong. Return the rows of this rank (or of the whole row), and set "
        "config.packed_rope_freqs_layout to 'packed_local' (or 'packed').",
        stacklevel=3,
    )
