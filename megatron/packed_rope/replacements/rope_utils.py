"""megatron.core.models.common.embeddings.rope_utils: the rotation of packed tensors.

``apply_rotary_pos_emb`` is bound because only it sees the config (the declared layout, fusion) and
mscale; ``_apply_rotary_pos_emb_thd`` because others call it directly. Upstream gained arguments
over the releases, so arguments are matched with the names of the installed definition.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UnknownArgument
from ..fused import rotate_fused_upstream
from ..layout import AUTO, PackedLayout
from ..rotary import check_tensors, rotate, select
from .declarations import CP_GROUP_ATTRIBUTE, argument_reader, cp_of, freqs_layout

# What this package implements itself; max_seqlen is a bound that main guesses the layout from.
_OWN = frozenset(
    {"t", "freqs", "config", "cu_seqlens", "cp_group", "mscale", "rotary_interleaved", "max_seqlen"}
)
# The names under which releases know MLA's interleaving; through 0.18 the config carries it.
_MLA = ("mla_rotary_interleaved", "multi_latent_attention")


def apply_rotary_pos_emb(module: ModuleType, original: Callable[..., Tensor]) -> Callable:
    """Packed calls rotate by the declared rows; every other call runs the original."""
    arguments = _Arguments(module, original)

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Tensor:
        given = arguments.match(args, kwargs)
        if given.get("cu_seqlens") is None:
            return original(*args, **kwargs)
        config = given["config"]
        mla = given.get(_MLA[0], False if _MLA[0] in arguments.names else None)
        if mla is None:
            mla = config.multi_latent_attention
        return _rotate_packed(
            module,
            given,
            flags=arguments.flags(given, mla),
            cp=cp_of(getattr(config, CP_GROUP_ATTRIBUTE, None), given.get("cp_group")),
            interleaved=config.rotary_interleaved,
            config=config,
        )

    return apply_rotary_pos_emb


def apply_rotary_pos_emb_thd(module: ModuleType, original: Callable[..., Tensor]) -> Callable:
    """Direct calls carry no config: the layout is read from the numbers of rows and tokens."""
    arguments = _Arguments(module, original)

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> Tensor:
        given = arguments.match(args, kwargs)
        return _rotate_packed(
            module,
            given,
            flags=arguments.flags(given, any(given.get(name) for name in _MLA)),
            cp=cp_of(given.get("cp_group")),
            interleaved=given.get("rotary_interleaved", False),
            config=None,
        )

    return _apply_rotary_pos_emb_thd


class _Arguments:
    """The parameters of an installed definition, and what its ``bshd`` counterpart accepts."""

    def __init__(self, module: ModuleType, original: Callable[..., Tensor]) -> None:
        parameters = inspect.signature(original).parameters
        self.function = original.__name__
        self.match = argument_reader(original)
        self.names = frozenset(parameters)
        self.defaults = {name: p.default for name, p in parameters.items()}
        self.bshd = frozenset(inspect.signature(module._apply_rotary_pos_emb_bshd).parameters)

    def flags(self, given: dict[str, Any], mla: bool) -> dict[str, Any]:
        """Arguments that only upstream's own arithmetic knows, where they ask for something.

        Raises:
            UnknownArgument: one that it does not know either, at a value other than its default.
        """
        flags = {}
        if mla:
            flags[next(name for name in _MLA if name in self.bshd)] = True
        for name, value in given.items():
            default = self.defaults.get(name)
            if name in _OWN or name in _MLA or value is default or value == default:
                continue
            if name not in self.bshd:
                raise UnknownArgument(
                    f"{self.function}(..., {name}={value!r}): neither megatron-packed-rope nor the "
                    f"installed _apply_rotary_pos_emb_bshd knows {name!r}; only its default "
                    f"{default!r} can be ignored. Update megatron-packed-rope, or take the patch "
                    "out with `python -m megatron.packed_rope revert`."
                )
            flags[name] = value
        return flags


def _rotate_packed(
    module: ModuleType,
    given: dict[str, Any],
    *,
    flags: dict[str, Any],
    cp: tuple[int, int],
    interleaved: bool,
    config: Any | None,
) -> Tensor:
    t, freqs, cu_seqlens = given["t"], given["freqs"], given["cu_seqlens"]
    mscale = given.get("mscale", 1.0)
    check_tensors(t, freqs, cu_seqlens)
    (num_tokens, num_rows), (cp_size, cp_rank) = (t.shape[0], freqs.shape[0]), cp
    freqs_are = AUTO
    if config is not None:
        freqs_are = freqs_layout(config, num_rows=num_rows, num_tokens=num_tokens, cp_size=cp_size)
    layout = PackedLayout(cu_seqlens, num_tokens=num_tokens, cp_size=cp_size, cp_rank=cp_rank)
    freqs_T = select(freqs, layout.rows(freqs_are, num_rows=num_rows), num_tokens)
    if config is not None and config.apply_rope_fusion:
        out = rotate_fused_upstream(
            module, t, freqs_T, interleaved=interleaved, mscale=mscale, flags=flags
        )
        if out is not None:
            return out
    if not flags:
        return rotate(t, freqs_T, interleaved=interleaved, mscale=mscale)
    rotated = module._apply_rotary_pos_emb_bshd(
        t[: freqs_T.shape[0]].unsqueeze(1),
        freqs_T,
        rotary_interleaved=interleaved,
        mscale=mscale,
        **flags,
    ).squeeze(1)
    tail = t[freqs_T.shape[0] :]
    return torch.cat((rotated, tail)) if tail.shape[0] else rotated
