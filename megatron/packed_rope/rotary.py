"""Rotate a packed tensor by the freqs row of each of its tokens.

Suffixes name shapes: T local tokens, h heads, d head dim, r rotary dim (r <= d), n rows of freqs.

The formula is upstream's (``_apply_rotary_pos_emb_bshd``): with x1, x2 the two halves of the
rotary dims (or, interleaved, the even and the odd ones), cos and sin of freqs times mscale and
rounded to the dtype of t, every product rounded to that dtype on its own,

    out1 = x1 * cos1 + x2 * -sin1       out2 = x2 * cos2 + x1 * sin2

Upstream writes the first line as ``x1 * cos1 + (-x2) * sin1``, which is the same number bit for
bit. The gradient is the transpose of the same two lines: -sin1 and sin2 change places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import FreqsError, PackedInputError
from .layout import AUTO, PackedLayout

# Bytes of t rotated at a time: on a CPU what stays in its cache, elsewhere what bounds the memory
# that the products with sin take.
_CPU_BLOCK_BYTES, _BLOCK_BYTES = 1 << 20, 1 << 28

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def apply_packed_rotary(
    t: Tensor,
    freqs: Tensor,
    cu_seqlens: Tensor,
    *,
    freqs_layout: str = AUTO,
    cp_group: Any = None,
    cp_size: int | None = None,
    cp_rank: int | None = None,
    cp_layout: str = "zigzag",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    mscale: float = 1.0,
    fused: bool = False,
) -> Tensor:
    """Rotary position embedding of a packed (THD) tensor.

    Args:
        t: ``[T, h, d]`` query or key, any float dtype, any strides; the local tokens of this
            rank, tail padding included.
        freqs: ``[n, 1, 1, r]`` angles in radians, r even and at most d; dims past r pass through.
        cu_seqlens: ``[segments + 1]`` int32 or int64, boundaries before CP sharding, in tokens
            (the padded ones where the batch has both).
        freqs_layout: what a row of freqs stands for: ``"per_sequence"`` (a position),
            ``"packed"`` (a global token), ``"packed_local"`` (a token of this rank) or
            ``"auto"`` (see ``PackedLayout.rows``).
        cp_group: context-parallel group (anything with ``size()`` and ``rank()``), or
        cp_size, cp_rank: its size and this rank in it; 1 and 0 if nothing is given.
        cp_layout: ``"zigzag"`` or ``"contiguous"`` sharding of each segment.
        start_positions: ``[segments]`` first position of each segment (per-sequence tables).
        interleaved: pairs are neighbouring dims instead of the two halves.
        mscale: factor on cos and sin (YaRN).
        fused: one kernel launch (Transformer Engine or Triton) in float32, rounded once, instead
            of the eager arithmetic.

    Returns:
        ``[T, h, d]`` contiguous, in the dtype of t; rows of tail padding are finite.

    Raises:
        PackedInputError, SegmentLengthError, FreqsError: typed input errors.
        BackendNotAvailable: ``fused`` where no fused kernel is installed.
    """
    check_tensors(t, freqs, cu_seqlens)
    cp_size, cp_rank = cp_size_and_rank(cp_group, cp_size, cp_rank)
    layout = PackedLayout(
        cu_seqlens,
        num_tokens=t.shape[0],
        cp_size=cp_size,
        cp_rank=cp_rank,
        cp_layout=cp_layout,
        start_positions=start_positions,
    )
    freqs_T = select(freqs, layout.rows(freqs_layout, num_rows=freqs.shape[0]), t.shape[0])
    if fused:
        from .fused import rotate_fused

        return rotate_fused(t, freqs_T, interleaved=interleaved, mscale=mscale)
    return rotate(t, freqs_T, interleaved=interleaved, mscale=mscale)


def cp_size_and_rank(
    cp_group: Any, cp_size: int | None = None, cp_rank: int | None = None
) -> tuple[int, int]:
    """Size and rank from a group or from the two numbers; never from both."""
    if cp_group is None:
        if cp_size not in (None, 1) and cp_rank is None:
            raise PackedInputError(
                f"cp_size {cp_size} without cp_rank; pass both, or cp_group, so that ranks do not "
                "all rotate as rank 0."
            )
        return (1 if cp_size is None else cp_size), (0 if cp_rank is None else cp_rank)
    if cp_size is not None or cp_rank is not None:
        raise PackedInputError(
            f"cp_group given together with cp_size={cp_size}, cp_rank={cp_rank}; pass one or the "
            "other."
        )
    if not (hasattr(cp_group, "size") and hasattr(cp_group, "rank")):
        raise PackedInputError(
            f"cp_group is {cp_group!r}; expected a process group, with size() and rank(). Pass "
            "numbers as cp_size and cp_rank."
        )
    return cp_group.size(), cp_group.rank()


def check_tensors(t: Tensor, freqs: Tensor, cu_seqlens: Tensor) -> None:
    """Shapes, dtypes and devices; the values in cu_seqlens are checked by ``PackedLayout``."""
    for name, value in (("t", t), ("freqs", freqs), ("cu_seqlens", cu_seqlens)):
        if not isinstance(value, Tensor):
            raise PackedInputError(f"{name} is a {type(value).__name__}; expected a tensor.")
    if t.dim() != 3 or t.dtype not in _DTYPES:
        raise PackedInputError(
            f"t is {t.dtype} of shape {tuple(t.shape)}; expected a float16, bfloat16, float32 or "
            "float64 tensor [T, h, d] (packed, THD)."
        )
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] not in (1, t.shape[1]):
        raise FreqsError(
            f"freqs has shape {tuple(freqs.shape)}; expected [n, 1, 1, r] with one row of angles "
            "per position or token."
        )
    if freqs.shape[3] % 2 or freqs.shape[3] > t.shape[2]:
        raise FreqsError(
            f"freqs has rotary dim {freqs.shape[3]}, t head dim {t.shape[2]}; expected an even "
            "rotary dim of at most the head dim."
        )
    if freqs.dtype not in _DTYPES:
        raise FreqsError(
            f"freqs is {freqs.dtype}; expected float16, bfloat16, float32 or float64 angles in "
            "radians."
        )
    if not t.device == freqs.device == cu_seqlens.device:
        raise PackedInputError(
            f"t is on {t.device}, freqs on {freqs.device}, cu_seqlens on {cu_seqlens.device}; "
            "expected one device."
        )


def select(freqs: Tensor, rows_T: Tensor | None, num_tokens: int) -> Tensor:
    """``[T, 1, 1, r]`` rows of freqs, one per token; fewer where freqs ends before tail padding."""
    return freqs[:num_tokens] if rows_T is None else freqs.index_select(0, rows_T)


def rotate(t: Tensor, freqs_T: Tensor, *, interleaved: bool = False, mscale: float = 1.0) -> Tensor:
    """Rotate ``t: [T, h, d]`` by ``freqs_T: [T, 1, 1, r]``; tokens without a row pass through."""
    cos, sin = torch.cos(freqs_T).squeeze(1), torch.sin(freqs_T).squeeze(1)
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    cos, sin = cos.to(t.dtype), sin.to(t.dtype)
    # Dynamo refuses out= into strided views, and freqs that are trained need autograd's own graph.
    if torch.compiler.is_compiling() or cos.requires_grad:
        return _rotate_functional(t, cos, sin, interleaved)
    return _Rotate.apply(t, cos, sin, interleaved, False)


class _Rotate(torch.autograd.Function):
    """The rotation, or with ``transpose`` its transpose, written into one output buffer."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transpose: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.flags = interleaved, transpose
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        tokens, rotary_dim = cos.shape[0], cos.shape[2]
        if tokens < t.shape[0]:
            out[tokens:] = t[tokens:]
        if rotary_dim < t.shape[2]:
            out[:tokens, :, rotary_dim:] = t[:tokens, :, rotary_dim:]
        rotated = slice(tokens), slice(None), slice(rotary_dim)
        _rotate_into(out[rotated], t[rotated], cos, sin, interleaved, transpose)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        interleaved, transpose = ctx.flags
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, sin, interleaved, not transpose), None, None, None, None


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two members of every rotated pair of the last dim."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _rotate_into(
    out: Tensor, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transpose: bool
) -> None:
    x1, x2 = _pair(t, interleaved)
    sin1, sin2 = _pair(sin, interleaved)
    sin1 = -sin1
    if transpose:
        sin1, sin2 = sin2, sin1
    bytes_of_token = max(1, t.shape[1] * t.shape[2] * t.element_size())
    bytes_of_block = _CPU_BLOCK_BYTES if t.device.type == "cpu" else _BLOCK_BYTES
    block = max(1, min(bytes_of_block // bytes_of_token, t.shape[0]))
    product = torch.empty((block, *t.shape[1:]), dtype=t.dtype, device=t.device)
    blocks = zip(*(x.split(block) for x in (out, t, x1, x2, cos, sin1, sin2)), strict=True)
    for out_b, t_b, x1_b, x2_b, cos_b, sin1_b, sin2_b in blocks:
        product_b = product[: t_b.shape[0]]
        product1_b, product2_b = _pair(product_b, interleaved)
        torch.mul(t_b, cos_b, out=out_b)
        torch.mul(x2_b, sin1_b, out=product1_b)
        torch.mul(x1_b, sin2_b, out=product2_b)
        out_b.add_(product_b)


def _rotate_functional(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same arithmetic without writing into views: for torch.compile and trained freqs."""
    tokens, rotary_dim = cos.shape[0], cos.shape[2]
    x1, x2 = _pair(t[:tokens, :, :rotary_dim], interleaved)
    cos1, cos2 = _pair(cos, interleaved)
    sin1, sin2 = _pair(sin, interleaved)
    out1, out2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    if interleaved:
        rotated = torch.stack((out1, out2), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((out1, out2), dim=-1)
    if rotary_dim < t.shape[2]:
        rotated = torch.cat((rotated, t[:tokens, :, rotary_dim:]), dim=-1)
    if tokens < t.shape[0]:
        rotated = torch.cat((rotated, t[tokens:]), dim=0)
    return rotated
