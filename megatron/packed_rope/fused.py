"""One kernel launch for the rotation: which kernel, and when the eager arithmetic must do it.

Transformer Engine's THD kernel restarts every segment at row 0 and leaves tail padding
uninitialised. Its SBHD kernel reads row s for sequence index s, so a packed tensor seen as one
sequence ``[T, 1, h, d]``, with one selected row per token, is right on every TE release; it writes
every row and launches one block per token. Both compute in float32 and round once.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .errors import BackendNotAvailable, PackedInputError
from .rotary import rotate

BACKENDS = ("eager", "te", "triton")
BACKEND_VARIABLE = "PACKED_ROPE_BACKEND"
"""Environment variable, for people who measure: use this backend wherever fusion is asked for."""


def rotate_fused_upstream(
    module: ModuleType,
    t: Tensor,
    freqs_T: Tensor,
    *,
    interleaved: bool,
    mscale: float,
    flags: dict[str, Any],
) -> Tensor | None:
    """The fused rotation under ``config.apply_rope_fusion``; None where eager must do it.

    Args:
        module: upstream's rope_utils, whose TE wrapper is looked up at every call.
        t, freqs_T: ``[T, h, d]`` and ``[T, 1, 1, r]`` (fewer rows before tail padding).
        flags: what only upstream's eager arithmetic knows (MLA interleaving, ...).
    """
    te = getattr(module, "fused_apply_rotary_pos_emb", None)
    wanted = _wanted()
    if not flags and _kernels_take(freqs_T):
        if wanted in (None, "te") and _te_is_exact(te, interleaved, mscale):
            return _rotate_te(te, t, freqs_T, interleaved)
        if wanted == "triton" or (wanted is None and t.is_cuda and _has_triton()):
            return _rotate_triton(t, freqs_T, interleaved, mscale)
    if wanted in ("te", "triton"):
        raise BackendNotAvailable(
            f"{BACKEND_VARIABLE}={wanted}, but it cannot do this rotation here (TE wrapper "
            f"{'found' if te else 'missing'}; rotary_interleaved={interleaved}, mscale={mscale}, "
            f"{flags or 'no further flags'}). Unset the variable to let the package choose."
        )
    if wanted is None and not torch.compiler.is_compiling():  # a warning would break the graph
        _warn_unfused()
    return None


def rotate_fused(t: Tensor, freqs_T: Tensor, *, interleaved: bool, mscale: float) -> Tensor:
    """The fused rotation that a caller of ``apply_packed_rotary`` asked for by ``fused=True``.

    Raises:
        BackendNotAvailable: neither Transformer Engine nor, on CUDA, Triton can do it.
    """
    wanted = _wanted()
    if wanted == "eager":
        return rotate(t, freqs_T, interleaved=interleaved, mscale=mscale)
    takes = _kernels_take(freqs_T)
    if takes and wanted in (None, "te"):
        te = getattr(sys.modules.get(_UPSTREAM), "fused_apply_rotary_pos_emb", None)
        if te is not None and _te_is_exact(te, interleaved, mscale):
            return _rotate_te(te, t, freqs_T, interleaved)
    if takes and (wanted == "triton" or (wanted is None and t.is_cuda and _has_triton())):
        return _rotate_triton(t, freqs_T, interleaved, mscale)
    raise BackendNotAvailable(
        f"fused=True for a tensor on {t.device} (interleaved={interleaved}, mscale={mscale}, freqs "
        f"{tuple(freqs_T.shape)}, requires_grad={freqs_T.requires_grad}), and no fused kernel can "
        "do it: expected Transformer Engine through an imported megatron.core, or a CUDA tensor "
        "and Triton, and freqs [n, 1, 1, r] that need no gradient. Pass fused=False for the eager "
        "rotation."
    )


_UPSTREAM = "megatron.core.models.common.embeddings.rope_utils"


def _wanted() -> str | None:
    wanted = os.environ.get(BACKEND_VARIABLE) or None
    if wanted is not None and wanted not in BACKENDS:
        raise PackedInputError(f"{BACKEND_VARIABLE}={wanted!r}; expected one of {BACKENDS}.")
    return wanted


def _kernels_take(freqs_T: Tensor) -> bool:
    """One row per token for all heads, and no gradient into freqs: what fused kernels compute."""
    return freqs_T.shape[2] == 1 and not freqs_T.requires_grad


def _te_is_exact(te: Callable[..., Tensor] | None, interleaved: bool, mscale: float) -> bool:
    """Whether upstream's TE wrapper computes exactly this (0.10-0.19 drop what it cannot do)."""
    if te is None or mscale != 1.0:
        return False
    if not interleaved:
        return True
    if "interleaved" not in inspect.signature(te).parameters:
        return False
    return sys.modules["megatron.core.utils"].is_te_min_version("2.3.0")


def _rotate_te(te: Callable[..., Tensor], t: Tensor, freqs_T: Tensor, interleaved: bool) -> Tensor:
    missing = t.shape[0] - freqs_T.shape[0]
    if missing:  # tail padding without rows: an angle of 0 leaves it as it is
        freqs_T = torch.nn.functional.pad(freqs_T, (0, 0) * 3 + (0, missing))
    kwargs = {"interleaved": True} if interleaved else {}
    return te(t.unsqueeze(1), freqs_T.float(), **kwargs).squeeze(1)


def _rotate_triton(t: Tensor, freqs_T: Tensor, interleaved: bool, mscale: float) -> Tensor:
    if not _has_triton():
        raise BackendNotAvailable("the Triton backend was asked for, and triton is not installed.")
    from .rotary_triton import rotate_triton

    return rotate_triton(t, freqs_T, None, interleaved=interleaved, mscale=mscale)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _warn_unfused() -> None:
    """Once per process: the same model asks for it in every layer of every step."""
    warnings.warn(
        "megatron-packed-rope: apply_rope_fusion is set, but no fused kernel here can do this "
        "packed rotation exactly (mscale, MLA interleaving and, on older releases or Transformer "
        "Engine, rotary_interleaved would be dropped silently); rotating unfused.",
        stacklevel=5,
    )
