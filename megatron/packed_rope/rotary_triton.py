"""Rotate a packed tensor in one Triton kernel: t is read once, the result written once.

Suffixes name shapes: T local tokens, h heads, d head dim, r rotary dim (r <= d), n rows of freqs,
k pairs of rotary dims (k = r / 2). Inside the kernel a block is ``[h, T, k]``: the heads come
first so that they lie in the registers of one thread, and every cos and sin is computed by the one
thread that uses it, for all heads of its token.

The formula is that of ``rotary.py``, in float32 (float64 where t is float64), rounded once:

    out1 = x1 * cos1 - x2 * sin1        out2 = x2 * cos2 + x1 * sin2

The two halves of a freqs row may differ; the gradient is the transpose of the same two lines, so
backward is the same kernel with the sines exchanged and negated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .errors import BackendNotAvailable, FreqsError, PackedInputError

_WARPS = 2
_HEADS_AT_ONCE = 4
"""Heads that a thread loads before it needs the first: 8 accesses of 16 bytes are in flight."""


def rotate_triton(
    t: Tensor,
    freqs: Tensor,
    rows: Tensor | None = None,
    *,
    interleaved: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotate every token of ``t`` by its row of ``freqs``.

    Args:
        t: ``[T, h, d]`` float16, bfloat16, float32 or float64, any strides; nothing is copied
            beforehand (accesses are 16 bytes wide where the last stride is 1 and t is aligned).
        freqs: ``[n, 1, 1, r]`` angles in radians, any float dtype and strides, r even and at most
            d; dims past r are copied. cos and sin are computed in float32, in float64 where freqs
            or t is.
        rows: ``[T]`` int32 or int64, the row of each token (``PackedLayout.rows``), or None
            where the row is the token; then tokens from n on (tail padding) are copied. A row
            outside freqs gives NaN, never a read out of bounds.
        interleaved: pairs are neighbouring dims instead of the two halves.
        mscale: factor on cos and sin (YaRN).

    Returns:
        ``[T, h, d]`` contiguous, in the dtype of t. Differentiable in t, any number of times.

    Raises:
        PackedInputError, FreqsError: an argument has the wrong shape, dtype or device, or freqs
            need a gradient, which only the eager rotation computes.
        BackendNotAvailable: t is on a CPU, outside Triton's interpreter.
    """
    _check(t, freqs, rows)
    return _rotate(t, freqs, rows, interleaved, mscale, False)


def _check(t: Tensor, freqs: Tensor, rows: Tensor | None) -> None:
    if t.dim() != 3 or not t.is_floating_point():
        raise PackedInputError(
            f"t is {t.dtype} of shape {tuple(t.shape)}; expected a float tensor [T, h, d]."
        )
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1:
        raise FreqsError(
            f"freqs has shape {tuple(freqs.shape)}; expected [n, 1, 1, r], the same angles for "
            "all heads. Angles of each head's own need the eager rotation (fused=False)."
        )
    if freqs.shape[3] % 2 or freqs.shape[3] > t.shape[2] or not freqs.is_floating_point():
        raise FreqsError(
            f"freqs is {freqs.dtype} with rotary dim {freqs.shape[3]}, t has head dim "
            f"{t.shape[2]}; expected floating-point angles and an even rotary dim of at most that."
        )
    if rows is not None:
        if rows.shape != t.shape[:1] or rows.dtype not in (torch.int32, torch.int64):
            raise PackedInputError(
                f"rows is {rows.dtype} of shape {tuple(rows.shape)}; expected int32 or int64, one "
                f"for each of the {t.shape[0]} tokens."
            )
        if rows.device != t.device:
            raise PackedInputError(f"rows on {rows.device}, t on {t.device}; expected one device.")
    if freqs.device != t.device:
        raise PackedInputError(f"freqs on {freqs.device}, t on {t.device}; expected one device.")
    if freqs.requires_grad and torch.is_grad_enabled():
        raise FreqsError(
            "freqs need a gradient; the Triton kernel has none for them. Expected freqs without: "
            "detach them, or use the eager rotation (fused=False)."
        )
    if t.device.type == "cpu" and not _INTERPRETED:
        raise BackendNotAvailable(
            "t is on a CPU; the Triton kernel expects a GPU (or TRITON_INTERPRET=1 set before "
            "triton is imported). Use the eager rotation (fused=False)."
        )


@torch.library.custom_op("packed_rope::rotate", mutates_args=())
def _rotate(
    t: Tensor, freqs: Tensor, rows: Tensor | None, interleaved: bool, mscale: float, transpose: bool
) -> Tensor:
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    if out.numel():
        arguments = _launch_arguments(out, t, freqs, rows, interleaved, mscale, transpose)
        grid = (triton.cdiv(t.shape[0], arguments["BLOCK_T"]),)
        with torch.cuda.device_of(t):  # Triton launches on the current device
            _rotate_kernel[grid](**arguments)
    return out


@_rotate.register_fake
def _(
    t: Tensor, freqs: Tensor, rows: Tensor | None, interleaved: bool, mscale: float, transpose: bool
) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, freqs, rows, *ctx.flags = inputs
    ctx.save_for_backward(freqs, rows)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    interleaved, mscale, transpose = ctx.flags
    freqs, rows = ctx.saved_tensors
    grad_t = _rotate(grad, freqs, rows, interleaved, mscale, not transpose)
    return grad_t, None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_keep_for_backward)


def _launch_arguments(
    out: Tensor,
    t: Tensor,
    freqs: Tensor,
    rows: Tensor | None,
    interleaved: bool,
    mscale: float,
    transpose: bool,
) -> dict[str, Any]:
    """Everything the kernel is launched with; what is compiled in depends on the model alone."""
    heads, dim = t.shape[1:]
    rotary = freqs.shape[3]
    pairs = triton.next_power_of_2(max(1, rotary // 2))
    threads, vector = 32 * _WARPS, 16 // t.element_size()
    return {
        "out": out,
        "t": t,
        "freqs": freqs,
        "rows": rows,
        "num_tokens": t.shape[0],
        "num_rows": freqs.shape[0],
        "stride_tT": t.stride(0),
        "stride_th": t.stride(1),
        "stride_td": t.stride(2),
        "stride_fn": freqs.stride(0),
        "stride_fr": freqs.stride(3),
        "stride_rT": 1 if rows is None else rows.stride(0),
        "HEADS": heads,
        "DIM": dim,
        "ROTARY": rotary,
        "INTERLEAVED": interleaved,
        "TRANSPOSE": transpose,
        "MSCALE": mscale,
        # As many tokens as give each thread one 16-byte access for x1 of a head.
        "BLOCK_T": max(1, triton.next_power_of_2(threads * vector // pairs)),
        "BLOCK_h": min(_HEADS_AT_ONCE, triton.next_power_of_2(heads)),
        "BLOCK_k": pairs,
        "BLOCK_rest": triton.next_power_of_2(max(1, dim - rotary)),
        "num_warps": _WARPS,
    }


@triton.jit
def _load_pairs(
    pointers, stride, inside, other, ROTARY: tl.constexpr, K: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """Both members of every pair, ``[h, T, k]`` each, of rows that start at ``pointers [h, T, 1]``."""
    if NEIGHBOURS:
        r = tl.arange(0, 2 * K)[None, None, :]
        both = tl.load(pointers + r * stride, mask=inside & (r < ROTARY), other=other)
        return tl.split(both.reshape(both.shape[0], both.shape[1], K, 2))
    k = tl.arange(0, K)[None, None, :]
    mask = inside & (k < ROTARY // 2)
    first = tl.load(pointers + k * stride, mask=mask, other=other)
    second = tl.load(pointers + (k + ROTARY // 2) * stride, mask=mask, other=other)
    return first, second


@triton.jit
def _store_pairs(
    pointers, first, second, inside, ROTARY: tl.constexpr, K: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    if NEIGHBOURS:
        r = tl.arange(0, 2 * K)[None, None, :]
        both = tl.join(first, second).reshape(first.shape[0], first.shape[1], 2 * K)
        tl.store(pointers + r, both, mask=inside & (r < ROTARY))
    else:
        k = tl.arange(0, K)[None, None, :]
        mask = inside & (k < ROTARY // 2)
        tl.store(pointers + k, first, mask=mask)
        tl.store(pointers + k + ROTARY // 2, second, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _rotate_kernel(
    out,
    t,
    freqs,
    rows,
    num_tokens,
    num_rows,
    stride_tT,
    stride_th,
    stride_td,
    stride_fn,
    stride_fr,
    stride_rT,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    MSCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_h: tl.constexpr,
    BLOCK_k: tl.constexpr,
    BLOCK_rest: tl.constexpr,
):
    # All heads of BLOCK_T tokens. 64-bit offsets: T * h * d may exceed 2^31.
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :, None]
    real = token < num_tokens
    if rows is None:
        row = token
    else:
        row = tl.load(rows + token * stride_rT, mask=real, other=0).to(tl.int64)
    readable = real & (row >= 0) & (row < num_rows)
    angle1, angle2 = _load_pairs(
        freqs + row * stride_fn,
        stride_fr,
        readable,
        float("nan"),
        ROTARY,
        BLOCK_k,
        INTERLEAVED,
    )
    wide: tl.constexpr = tl.float64 if t.dtype.element_ty == tl.float64 else tl.float32
    if freqs.dtype.element_ty != tl.float64:
        angle1, angle2 = angle1.to(wide), angle2.to(wide)
    cos1, cos2 = tl.cos(angle1).to(wide), tl.cos(angle2).to(wide)
    sin1, sin2 = tl.sin(angle1).to(wide), tl.sin(angle2).to(wide)
    if MSCALE != 1.0:
        cos1, cos2, sin1, sin2 = cos1 * MSCALE, cos2 * MSCALE, sin1 * MSCALE, sin2 * MSCALE
    if TRANSPOSE:
        sin1, sin2 = -sin2, -sin1

    for first_head in range(0, HEADS, BLOCK_h):
        head = (first_head + tl.arange(0, BLOCK_h)).to(tl.int64)[:, None, None]
        inside = real
        if HEADS % BLOCK_h:
            inside = real & (head < HEADS)
        source = t + token * stride_tT + head * stride_th
        target = out + token * (HEADS * DIM) + head * DIM
        x1, x2 = _load_pairs(source, stride_td, inside, 0.0, ROTARY, BLOCK_k, INTERLEAVED)
        wide1, wide2 = x1.to(wide), x2.to(wide)
        out1 = (wide1 * cos1 - wide2 * sin1).to(x1.dtype)
        out2 = (wide2 * cos2 + wide1 * sin2).to(x2.dtype)
        if rows is None:
            out1 = tl.where(token < num_rows, out1, x1)
            out2 = tl.where(token < num_rows, out2, x2)
        _store_pairs(target, out1, out2, inside, ROTARY, BLOCK_k, INTERLEAVED)
        if ROTARY < DIM:
            rest = ROTARY + tl.arange(0, BLOCK_rest)[None, None, :]
            mask = inside & (rest < DIM)
            tl.store(target + rest, tl.load(source + rest * stride_td, mask=mask), mask=mask)


_INTERPRETED = not isinstance(_rotate_kernel, triton.JITFunction)
