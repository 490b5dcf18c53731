"""Rotate a packed tensor in one Triton kernel: t is read once, the result written once.

Suffixes name shapes: T local tokens, h heads, d head dim, r rotary dim (r <= d), n rows of freqs,
k pairs of rotary dims (k = r / 2). Inside the kernel a block is ``[h, T, k]``: the heads come
first so that they lie in the registers of one thread, which uses every cos and sin for all of them.

The formula is that of ``rotary.py``, in float32 (float64 where t is float64), rounded once:

    out1 = x1 * cos1 - x2 * sin1        out2 = x2 * cos2 + x1 * sin2

The two halves of a freqs row may differ; the gradient is the transpose of the same two lines, so
backward is the same kernel with the sines exchanged and negated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .errors import BackendNotAvailable, FreqsError, PackedInputError
from .rotary import check_tensors

_WARPS = 2
_HEADS_AT_ONCE = 4
"""Heads that a thread loads before it needs the first: 8 accesses of 16 bytes are in flight."""
_INTEGERS = (torch.int32, torch.int64)
_PI = tl.constexpr(math.pi)


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
            d; dims past r are copied. cos and sin are float32 (right to its rounding for angles
            up to 1e8), float64 where freqs or t is.
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
    check_tensors(t, freqs, t)
    if freqs.shape[2] != 1 or (freqs.requires_grad and torch.is_grad_enabled()):
        raise FreqsError(
            f"freqs has shape {tuple(freqs.shape)} and requires_grad={freqs.requires_grad}; the "
            "Triton kernel expected [n, 1, 1, r] without a gradient. Angles of each head's own and "
            "trained ones need the eager rotation (fused=False)."
        )
    if rows is not None and not (
        rows.shape == t.shape[:1] and rows.dtype in _INTEGERS and rows.device == t.device
    ):
        raise PackedInputError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)} on {rows.device}; expected int32 "
            f"or int64, one for each of the {t.shape[0]} tokens, on {t.device}."
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
def _(t: Tensor, *_: Any) -> Tensor:
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


def _launch_arguments(out: Tensor, *inputs: Any) -> dict[str, Any]:
    """All that the kernel is launched with; what is compiled in depends on the model alone."""
    t, freqs, rows, interleaved, mscale, transpose = inputs
    (tokens, heads, dim), (num_rows, _, _, rotary) = t.shape, freqs.shape
    pairs = triton.next_power_of_2(max(1, rotary // 2))
    # As many tokens as give each thread one 16-byte access for x1 of a head.
    accessed = 32 * _WARPS * 16 // t.element_size()
    tensors = {"out": out, "t": t, "freqs": freqs, "rows": rows}
    names = ("stride_tT", "stride_th", "stride_td", "stride_fn", "stride_fr", "stride_rT")
    step = 1 if rows is None else rows.stride(0)
    strides = dict(zip(names, (*t.stride(), *freqs.stride()[::3], step), strict=True))
    sizes = {"num_tokens": tokens, "num_rows": num_rows}
    model = {"HEADS": heads, "DIM": dim, "ROTARY": rotary}
    model |= {"INTERLEAVED": interleaved, "TRANSPOSE": transpose, "MSCALE": mscale}
    blocks = {
        "BLOCK_T": max(1, triton.next_power_of_2(accessed // pairs)),
        "BLOCK_h": min(_HEADS_AT_ONCE, triton.next_power_of_2(heads)),
        "BLOCK_k": pairs,
        "BLOCK_rest": triton.next_power_of_2(max(1, dim - rotary)),
    }
    return tensors | strides | sizes | model | blocks | {"num_warps": _WARPS}


@triton.jit
def _load_pairs(start, stride, inside, other, R: tl.constexpr, K: tl.constexpr, NEXT: tl.constexpr):
    """Both members of every pair, ``[h, T, k]`` each, of rows that start at ``start: [h, T, 1]``.

    R rotary dims are loaded into blocks of K pairs; NEXT: the members are neighbours.
    """
    if NEXT:
        r = tl.arange(0, 2 * K).to(tl.int64)[None, None, :]
        both = tl.load(start + r * stride, mask=inside & (r < R), other=other)
        first, second = tl.split(both.reshape(both.shape[0], both.shape[1], K, 2))
    else:
        k = tl.arange(0, K).to(tl.int64)[None, None, :]
        mask = inside & (k < R // 2)
        first = tl.load(start + k * stride, mask=mask, other=other)
        second = tl.load(start + (k + R // 2) * stride, mask=mask, other=other)
    return first, second


@triton.jit
def _cos_sin(angle, MSCALE: tl.constexpr, wide: tl.constexpr):
    """cos and sin times MSCALE; CUDA's own in float32 spill, in their path for large angles.

    The nearest multiple n of pi is taken off in float64, (-1)^n put back at the end; in between,
    on [-pi/2, pi/2], minimax polynomials are right to 5e-9.
    """
    exact = angle.to(tl.float64)
    if wide == tl.float64 or angle.dtype == tl.float64:
        cos, sin = tl.cos(exact) * MSCALE, tl.sin(exact) * MSCALE
    else:
        n = tl.floor(exact * (1 / _PI) + 0.5)
        scale = MSCALE * (1 - 2 * (n - 2 * tl.floor(n * 0.5))).to(tl.float32)
        x = (exact - n * _PI).to(tl.float32)
        z = x * x
        cos = 0.0416666558 + z * (-0.00138885691 + z * (2.47692979e-5 - z * 2.61936821e-7))
        sin = -0.166666571 + z * (0.00833301720 + z * (-0.000198066084 + z * 2.60003962e-6))
        cos, sin = scale * (1 + z * (-0.5 + z * cos)), scale * (x + x * z * sin)
    return cos.to(wide), sin.to(wide)


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
    row = token if rows is None else tl.load(rows + token * stride_rT, mask=real, other=0)
    readable = real & (row >= 0) & (row < num_rows)
    start = freqs + row.to(tl.int64) * stride_fn
    unknown = float("nan")
    angle1, angle2 = _load_pairs(start, stride_fr, readable, unknown, ROTARY, BLOCK_k, INTERLEAVED)
    wide: tl.constexpr = tl.float64 if t.dtype.element_ty == tl.float64 else tl.float32
    cos1, sin1 = _cos_sin(angle1, MSCALE, wide)
    cos2, sin2 = _cos_sin(angle2, MSCALE, wide)
    if TRANSPOSE:
        sin1, sin2 = -sin2, -sin1

    k, r = tl.arange(0, BLOCK_k)[None, None, :], tl.arange(0, 2 * BLOCK_k)[None, None, :]
    for first_head in range(0, HEADS, BLOCK_h):
        head = (first_head + tl.arange(0, BLOCK_h)).to(tl.int64)[:, None, None]
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
        if INTERLEAVED:
            both = tl.join(out1, out2).reshape(BLOCK_h, BLOCK_T, 2 * BLOCK_k)
            tl.store(target + r, both, mask=inside & (r < ROTARY))
        else:
            tl.store(target + k, out1, mask=inside & (k < ROTARY // 2))
            tl.store(target + k + ROTARY // 2, out2, mask=inside & (k < ROTARY // 2))
        if ROTARY < DIM:
            rest = ROTARY + tl.arange(0, BLOCK_rest).to(tl.int64)[None, None, :]
            mask = inside & (rest < DIM)
            tl.store(target + rest, tl.load(source + rest * stride_td, mask=mask), mask=mask)


_INTERPRETED = not isinstance(_rotate_kernel, triton.JITFunction)
