"""The rotation of one segment at a time, in float64, written out; shares no code with the product.

A pack is a list of segment lengths. ``rows`` gives the freqs row of every local token by cutting
lists; ``rotate`` turns each pair of dims by its angle.
"""

from __future__ import annotations

import torch
from torch import Tensor


def boundaries(lengths: list[int]) -> list[int]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def local_positions(length: int, cp: int, rank: int, cp_layout: str = "zigzag") -> list[int]:
    """Positions of one segment that a rank holds, in the order it holds them."""
    positions = list(range(length))
    if cp == 1:
        return positions
    if cp_layout == "contiguous":
        share = length // cp
        return positions[rank * share : (rank + 1) * share]
    chunk = length // (2 * cp)
    last = 2 * cp - 1 - rank
    front = positions[rank * chunk : (rank + 1) * chunk]
    return front + positions[last * chunk : (last + 1) * chunk]


def rows(
    lengths: list[int],
    layout: str,
    cp: int = 1,
    rank: int = 0,
    cp_layout: str = "zigzag",
    starts: list[int] | None = None,
) -> list[int]:
    """Row of freqs of every local token; no tail padding."""
    found: list[int] = []
    begin = 0
    for i, length in enumerate(lengths):
        base = {"packed": begin, "per_sequence": starts[i] if starts else 0, "packed_local": 0}
        found += [p + base[layout] for p in local_positions(length, cp, rank, cp_layout)]
        begin += length
    return list(range(len(found))) if layout == "packed_local" else found


def rotate(
    x: Tensor, freqs: Tensor, interleaved: bool = False, mscale: float = 1.0, inverse: bool = False
) -> Tensor:
    """``x: [T, h, d]`` by ``freqs: [T, 1, 1, r]``, in float64; ``inverse`` gives the gradient."""
    x, angles = x.double(), freqs[:, 0].double()
    cos, sin = angles.cos() * mscale, angles.sin() * mscale
    r = freqs.shape[-1]
    out = x.clone()
    for k in range(r // 2):
        i, j = (2 * k, 2 * k + 1) if interleaved else (k, k + r // 2)
        a, b = x[..., i], x[..., j]
        if inverse:
            out[..., i] = a * cos[..., i] + b * sin[..., j]
            out[..., j] = b * cos[..., j] - a * sin[..., i]
        else:
            out[..., i] = a * cos[..., i] - b * sin[..., i]
            out[..., j] = b * cos[..., j] + a * sin[..., j]
    return out


def tolerance(dtype: torch.dtype, scale: float = 1.0) -> float:
    """Rounding of the eager arithmetic: cos, sin, two products and a sum, each rounded once.

    For float32 and wider, cos and sin of angles up to ``scale`` add their own few ulps.
    """
    return 4 * torch.finfo(dtype).eps * scale
