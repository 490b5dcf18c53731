"""The installed Megatron-Core, whatever state it is in, against an oracle, case by case.

The oracle is written out in float64, one token at a time, and shares no code with the package; the
cases call upstream's own names, so an unpatched install shows exactly what it gets wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_ROPE = "megatron.core.models.common.embeddings.rope_utils"
_EMBEDDING = "megatron.core.models.common.embeddings.rotary_pos_embedding"
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


@dataclass(frozen=True)
class Result:
    """Outcome of a case; the fields are those of ``check --json``."""

    name: str
    outcome: str
    """``right``, ``wrong``, ``raises`` or ``not run``."""
    detail: str


def run(names: list[str] | None = None) -> dict[str, Any]:
    """Run every case; the returned dict is what ``check --json`` prints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope = importlib.import_module(_ROPE)
    results = [_run_case(rope, case) for case in CASES if not names or case.name in names]
    from . import check_fused, check_mrope  # after Megatron: both look at what is installed

    for extra in (check_mrope.run(), check_fused.run(rope)):
        results += [Result(*row) for row in extra if not names or row[0] in names]
    from .binding.tree import find_tree

    counts = {
        outcome: sum(result.outcome == outcome for result in results)
        for outcome in ("right", "wrong", "raises", "not run")
    }
    tree = find_tree()
    return {
        "megatron_core": tree.version,
        "path": str(tree.core),
        "counts": counts,
        "cases": [asdict(result) for result in results],
    }


def _run_case(rope: ModuleType, case: Case) -> Result:
    worst = 0.0
    for rank in range(case.cp):
        for cu in filter(None, (case.cu_seqlens, case.second_cu_seqlens)):
            try:
                error = _error_on_rank(rope, case, cu, rank)
            except Exception as raised:  # any error of upstream's is a result here
                name = type(raised).__name__
                first_line = next(iter(str(raised).splitlines()), "")
                return Result(
                    case.name, "right" if case.refused else "raises", f"{name}: {first_line}"[:150]
                )
            worst = max(worst, error)
    if case.refused:
        return Result(case.name, "wrong", "accepted; expected an error")
    ranks = f" over {case.cp} ranks" if case.cp > 1 else ""
    return Result(case.name, "right" if worst < 1e-5 else "wrong", f"max error {worst:.1e}{ranks}")


def _error_on_rank(rope: ModuleType, case: Case, cu: list[int], rank: int) -> float:
    """Largest difference from the oracle over output and gradient of the real tokens."""
    sharded = 1 if case.replicated else case.cp
    rows = oracle_rows(cu, case.layout, sharded, 0 if case.replicated else rank)
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
    config = fake_config(rotary_interleaved=settings["rotary_interleaved"])
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
    expected = oracle_rotate(t, *arguments)
    expected_grad = oracle_rotate(gradient, *arguments, sign=-1)
    return max(
        (out.detach().cpu()[:real] - expected).abs().max().item(),
        (grad.cpu()[:real] - expected_grad).abs().max().item(),
    )


def _rows(case: Case, cu: list[int]) -> int:
    return cu[-1] // case.cp if case.layout == "packed_local" else cu[-1]


def oracle_rows(cu: list[int], layout: str, cp: int, rank: int) -> list[int]:
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


def oracle_rotate(
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


def fake_config(**changes: Any) -> SimpleNamespace:
    """The attributes of TransformerConfig that rope_utils reads."""
    values = {
        "apply_rope_fusion": False,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "mrope_section": None,
    }
    return SimpleNamespace(**(values | changes))


@contextlib.contextmanager
def fake_cp(size: int, rank: int) -> Iterator[Any]:
    """A CP group with only size() and rank(), also as the one in parallel_state (0.10 to 0.12)."""
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    state = importlib.import_module("megatron.core.parallel_state")
    with (
        mock.patch.object(state, "get_context_parallel_group", return_value=group),
        mock.patch.object(state, "get_context_parallel_world_size", return_value=size),
        mock.patch.object(state, "get_context_parallel_rank", return_value=rank),
    ):
        yield group


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release's function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def table(report: dict[str, Any]) -> str:
    """The report as people read it."""
    width = max(len(case["name"]) for case in report["cases"])
    lines = [f"Megatron-Core {report['megatron_core']} ({report['path']})", ""]
    for case in report["cases"]:
        outcome = case["outcome"]
        shout = outcome.upper() if outcome in ("wrong", "raises") else outcome
        lines.append(f"  {shout:8}{case['name']:{width}}  {case['detail']}")
    counts = report["counts"]
    lines += ["", "  " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items())]
    return "\n".join(lines)
