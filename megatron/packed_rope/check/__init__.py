"""The installed Megatron-Core, whatever state it is in, against an oracle, case by case.

The cases call upstream's own names, so an unpatched install shows exactly what it gets wrong:
``rope`` the rotation itself, ``gpt`` where a model makes its freqs, ``fused`` the fused kernels.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from ..binding.tree import find_tree
from . import fused, gpt, rope

OUTCOMES = ("right", "wrong", "raises", "not run")


@dataclass(frozen=True)
class Result:
    """Outcome of a case; the fields are those of ``check --json``."""

    name: str
    outcome: str
    """``right``, ``wrong``, ``raises`` or ``not run``."""
    detail: str


def run() -> dict[str, Any]:
    """Run every case; the returned dict is what ``check --json`` prints."""
    tree = find_tree()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope_utils = importlib.import_module(rope.ROPE_UTILS)
        cases = (*rope.run(rope_utils), *gpt.run(), *fused.run(rope_utils))
    results = [Result(*case) for case in cases]
    return {
        "megatron_core": tree.version,
        "path": str(tree.core),
        "counts": {o: sum(result.outcome == o for result in results) for o in OUTCOMES},
        "cases": [asdict(result) for result in results],
    }


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
