"""What is right, written out in float64, one token at a time; shares no code with the package."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def rows(cu: list[int], layout: str, cp: int, rank: int) -> list[int]:
    """Row of freqs of every local token: each segment cut in 2 * cp chunks, written out."""
    rows: list[int] = []
    for begin, end in itertools.pairwise(cu):
        positions = list(range(end - begin))
        if cp > 1:
            chunk = len(positions) // (2 * cp)
            chunks = [positions[i * chunk : (i + 1) * chunk] for i in range(2 * cp)]
            positions = chunks[rank] + chunks[2 * cp - 1 - rank]
        rows += [p + (begin if layout == "packed" else 0) for p in positions]
    return list(range(len(rows))) if layout == "packed_local" else rows


def rotate(
    x: Tensor, freqs: Tensor, rows: list[int], interleaved: bool, mscale: float, sign: int = 1
) -> Tensor:
    """Each pair of dims as a complex number times mscale * exp(i * angle), in float64."""
    rotary = freqs.shape[-1]
    out = x[: len(rows)].double().clone()
    for token, row in enumerate(rows):
        angles = freqs[row, 0, 0].double()
        if interleaved:
            first, second, angle = slice(0, rotary, 2), slice(1, rotary, 2), angles[0::2]
        else:
            first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
            angle = angles[: rotary // 2]
        pairs = torch.complex(out[token, :, first], out[token, :, second])
        turned = pairs * torch.polar(torch.full_like(angle, mscale), sign * angle)
        out[token, :, first], out[token, :, second] = turned.real, turned.imag
    return out


def largest(difference: Tensor) -> float:
    """Largest absolute value; infinite where one is not a number (which would hide)."""
    if not difference.isfinite().all():
        return math.inf
    return difference.abs().max().item()
