"""Transformer Engine's fused RoPE as documented, for machines that cannot run it.

``test_transformer_engine.py`` holds it against Transformer Engine's own Python. What the tests of
the patch rest on:

    thd    token j of segment i reads the row of its position in its segment (zigzag under CP),
           plus start_positions[i]; the output is allocated, not filled, so rows past the last
           segment hold whatever was there (here NaN), in the gradient as well
    sbhd   token s reads row s, whatever the batch index; every row is written

Both compute in float32 and round once, whatever the dtype of t. ``calls`` counts calls by name,
``shapes`` keeps those of t and freqs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []


def thd(
    t: Tensor,
    freqs: Tensor,
    cu_seqlens: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """``t: [T, h, d]``, ``freqs: [n, 1, 1, r]``, ``cu_seqlens`` before CP sharding."""
    _called("thd", t, freqs)
    starts = None if start_positions is None else start_positions.tolist()
    rows: list[int] = []
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        length = (end - begin) // cp_size
        half = length // 2
        for token in range(length):
            position = token
            if cp_size > 1 and token < half:
                position = token + cp_rank * half
            elif cp_size > 1:
                position = cp_size * length - (cp_rank + 1) * half + token - half
            rows.append(position + (starts[i] if starts else 0))
    return _Rotation.apply(t, freqs.float()[rows, 0], interleaved)


def sbhd(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """``t: [s, b, h, d]``, ``freqs: [n, 1, 1, r]`` with n >= s and r <= d."""
    _called("sbhd", t, freqs)
    length = t.shape[0]
    # The checks of the compiled function.
    assert t.dim() == 4, t.shape
    assert freqs.shape[0] >= length, f"{freqs.shape[0]} rows for a sequence of {length}"
    assert freqs.shape[1:3] == (1, 1), freqs.shape
    assert freqs.shape[3] <= t.shape[3], freqs.shape
    return _Rotation.apply(t, freqs.float()[:length], interleaved)


def wrappers(*, thd_takes_interleaved: bool) -> dict[str, Any]:
    """Stand-ins for the two functions by the names and signatures of Megatron-Core's wrappers.

    ``thd_takes_interleaved``: as from 0.17; before, the wrapper cannot pass it on.
    """

    def fused_apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        transpose_output_memory: bool = False,
        interleaved: bool = False,
    ) -> Tensor:
        return sbhd(t, freqs, interleaved)

    def without_interleaved(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
    ) -> Tensor:
        return thd(t, freqs, cu_seqlens, cp_size, cp_rank)

    def with_interleaved(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        interleaved: bool = False,
    ) -> Tensor:
        return thd(t, freqs, cu_seqlens, cp_size, cp_rank, interleaved=interleaved)

    return {
        "fused_apply_rotary_pos_emb": fused_apply_rotary_pos_emb,
        "fused_apply_rotary_pos_emb_thd": (
            with_interleaved if thd_takes_interleaved else without_interleaved
        ),
    }


def forget() -> None:
    """Start counting anew."""
    calls.clear()
    shapes.clear()


def _called(name: str, t: Tensor, freqs: Tensor) -> None:
    calls[name] += 1
    shapes.append((tuple(t.shape), tuple(freqs.shape)))


class _Rotation(torch.autograd.Function):
    """One row of angles per token; tokens without a row are poisoned."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.interleaved = interleaved
        return _rotated(t, angles, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        return _rotated(grad, angles, ctx.interleaved, -1), None, None


def _rotated(x: Tensor, angles: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Turn dims (x1, x2) of every pair by ``sign`` times its angle, in float32."""
    tokens, rotary = angles.shape[0], angles.shape[-1]
    if interleaved:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    else:
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    out = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    real = x[:tokens].float()
    cos, sin = angles.cos(), angles.sin() * sign
    x1, x2 = real[..., first], real[..., second]
    turned = real.clone()
    if sign > 0:
        turned[..., first] = x1 * cos[..., first] - x2 * sin[..., first]
        turned[..., second] = x2 * cos[..., second] + x1 * sin[..., second]
    else:  # the transpose: each output's own angle
        turned[..., first] = x1 * cos[..., first] - x2 * sin[..., second]
        turned[..., second] = x2 * cos[..., second] + x1 * sin[..., first]
    out[:tokens] = turned.to(x.dtype)
    return out
