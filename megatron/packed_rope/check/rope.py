"""Cases of ``check`` on the rotation of packed tensors itself, forward and gradient, every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from . import oracle
from .fakes import accepted, fake_config, fake_cp

ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
HEADS, DIM = 2, 16


@dataclass(frozen=True)
class Case:
    """One packed batch, run on every rank, forward and gradient."""

    name: str
    cu_seqlens: list[int]
    layout: str
    """What freqs are: ``per_sequence``, ``packed`` or ``packed_local`` (the oracle's reading)."""
    freqs_rows: int | None = None
    """Rows of freqs; as many as the layout reads if None."""
    cp: int = 1
    tail: int = 0
    """Padding tokens past the end of the pack, per rank."""
    declared: str | None = None
    """What the model's config declares (text models do so by themselves once patched)."""
    replicated: bool = False
    """All ranks of the CP group hold all tokens."""
    second_cu_seqlens: list[int] | None = None
    """The same freqs are then used with these boundaries (window and full attention)."""
    refused: bool = False
    """The input is wrong: right is a typed error, not a result."""
    config: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("packed freqs, one length", [0, 6], "packed"),
    Case("packed freqs, mixed resolution", [0, 4, 10, 15], "packed"),
    Case("packed freqs, two images of 640 and 960 tokens", [0, 640, 1600], "packed"),
    Case("packed freqs, C=2", [0, 4, 8], "packed", cp=2),
    Case("packed freqs, C=4, mixed", [0, 8, 32, 40], "packed", cp=4),
    Case("packed freqs, empty segment", [0, 4, 4, 10], "packed"),
    Case("one freqs tensor, two cu_seqlens", [0, 3, 8, 12], "packed", second_cu_seqlens=[0, 12]),
    Case("tail padding in t and freqs", [0, 4, 10], "packed", freqs_rows=12, tail=2),
    Case("tail padding in t only", [0, 4, 10], "packed", freqs_rows=10, tail=2),
    Case("tail padding, C=2", [0, 4, 8], "packed", freqs_rows=8, cp=2, tail=2),
    Case("freqs with more rows than tokens", [0, 4, 8], "packed", freqs_rows=10),
    Case("tokens replicated in a CP group of 2", [0, 4, 8], "packed", cp=2, replicated=True),
    Case("table", [0, 4, 10], "per_sequence", freqs_rows=6, declared="per_sequence"),
    Case("table, C=2", [0, 4, 12], "per_sequence", freqs_rows=8, cp=2, declared="per_sequence"),
    Case("table, C=4", [0, 8, 32], "per_sequence", freqs_rows=24, cp=4, declared="per_sequence"),
    Case("table, two equal segments, C=2", [0, 8, 16], "per_sequence", freqs_rows=8, cp=2),
    Case(
        "table as long as the bin",
        [0, 4, 10],
        "per_sequence",
        freqs_rows=10,
        declared="per_sequence",
    ),
    Case(
        "table longer than the bin",
        [0, 4, 10],
        "per_sequence",
        freqs_rows=16,
        declared="per_sequence",
    ),
    Case("table, tail padding", [0, 4, 10], "per_sequence", 6, tail=2, declared="per_sequence"),
    Case("rank's own rows, C=2", [0, 4, 12], "packed_local", cp=2, declared="packed_local"),
    Case("rank's own rows, C=4", [0, 8, 32], "packed_local", cp=4, declared="packed_local"),
    Case("rank's own rows, C=2, undeclared", [0, 16], "packed_local", cp=2),
    Case("partial rotary", [0, 4, 10], "packed", config={"rotary_dim": 8}),
    Case("interleaved pairs", [0, 4, 10], "packed", config={"rotary_interleaved": True}),
    Case("mscale 1.2", [0, 4, 10], "packed", config={"mscale": 1.2}),
    Case("segment not divisible by 2 * cp", [0, 6, 12], "packed", cp=2, refused=True),
    Case(
        "table shorter than a segment",
        [0, 6],
        "per_sequence",
        4,
        declared="per_sequence",
        refused=True,
    ),
)


Outcome = tuple[str, str, str]
"""Name, outcome and detail of a case."""


def run(rope_utils: ModuleType, *, fusion: bool = False) -> Iterator[Outcome]:
    """Every case against the installed ``apply_rotary_pos_emb``."""
    for case in CASES:
        yield _run_case(rope_utils, case, fusion)


def _run_case(rope: ModuleType, case: Case, fusion: bool) -> Outcome:
    worst = 0.0
    for rank in range(case.cp):
        for cu in filter(None, (case.cu_seqlens, case.second_cu_seqlens)):
            try:
                error = _error_on_rank(rope, case, cu, rank, fusion)
            except Exception as raised:  # any error of upstream's is a result here
                name = type(raised).__name__
                first_line = next(iter(str(raised).splitlines()), "")
                return (
                    case.name,
                    "right" if case.refused else "raises",
                    f"{name}: {first_line}"[:150],
                )
            worst = max(worst, error)
    if case.refused:
        return (case.name, "wrong", "accepted; expected an error")
    ranks = f" over {case.cp} ranks" if case.cp > 1 else ""
    return (case.name, "right" if worst < 1e-5 else "wrong", f"max error {worst:.1e}{ranks}")


def _error_on_rank(rope: ModuleType, case: Case, cu: list[int], rank: int, fusion: bool) -> float:
    """Largest difference from the oracle over output and gradient of the real tokens."""
    sharded = 1 if case.replicated else case.cp
    rows = oracle.rows(cu, case.layout, sharded, 0 if case.replicated else rank)
    tokens = len(rows) + case.tail
    num_rows = case.freqs_rows or (max(rows, default=0) + 1 if case.refused else _rows(case, cu))
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(tokens, HEADS, DIM, generator=generator)
    gradient = torch.randn(tokens, HEADS, DIM, generator=generator)
    settings = {"rotary_dim": DIM, "rotary_interleaved": False, "mscale": 1.0} | case.config
    angles = 6 * torch.rand(num_rows, settings["rotary_dim"] // 2, generator=generator)
    if settings["rotary_interleaved"]:
        freqs = angles.repeat_interleave(2, dim=1)[:, None, None, :]
    else:
        freqs = torch.cat((angles, angles), dim=1)[:, None, None, :]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaf = t.to(device).requires_grad_()
    config = fake_config(
        rotary_interleaved=settings["rotary_interleaved"], apply_rope_fusion=fusion
    )
    if case.declared:
        config.packed_rope_freqs_layout = case.declared
    with fake_cp(case.cp, rank) as group:
        out = rope.apply_rotary_pos_emb(
            leaf,
            freqs.to(device),
            config,
            cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=device),
            mscale=settings["mscale"],
            **accepted(rope.apply_rotary_pos_emb, cp_group=group),
        )
    if not (out.shape == t.shape and out.isfinite().all()):
        return math.inf
    (grad,) = torch.autograd.grad(out, leaf, gradient.to(device))
    arguments = freqs, rows, settings["rotary_interleaved"], settings["mscale"]
    real = len(rows)
    expected = oracle.rotate(t, *arguments)
    expected_grad = oracle.rotate(gradient, *arguments, sign=-1)
    return max(
        oracle.largest(out.detach().cpu()[:real] - expected),
        oracle.largest(grad.cpu()[:real] - expected_grad),
    )


def _rows(case: Case, cu: list[int]) -> int:
    return cu[-1] // case.cp if case.layout == "packed_local" else cu[-1]
