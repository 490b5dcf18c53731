"""The picture of the example, from the results of ``run.py`` before and after the patch.

    python curves.py unpatched.json patched.json patched_cp2.json --title "..." -o packed_vlm.png

Exit code 1 if the unpatched curve is not visibly apart from the unpacked one, or the patched is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from run import is_equal

APART = 2.0
"""Visibly apart: the mean loss of the last third of the steps is higher by this factor."""


def last_third(curve: list[float]) -> float:
    tail = curve[-(len(curve) // 3) :]
    return sum(tail) / len(tail)


def is_apart(result: dict[str, Any]) -> bool:
    return last_third(result["packed"]) > APART * last_third(result["unpacked"])


def draw(runs: list[dict[str, Any]], title: str, out: Path) -> None:
    """Loss curves, one panel per model family."""
    unpatched, patched, patched_cp2 = (run["families"] for run in runs)
    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(patched), sharey=True, squeeze=False)[0]
    for axes, family in zip(panels, patched, strict=True):
        lines = (
            (patched[family]["unpacked"], "each sample alone", {"color": "#bbbbbb", "lw": 6}),
            (unpatched[family]["packed"], "packed, as released", {"color": "#c62828", "lw": 1.8}),
            (patched[family]["packed"], "packed, patched", {"color": "#1565c0", "lw": 1.8}),
            (
                patched_cp2[family]["packed"],
                "packed, patched, C = 2",
                {"color": "#111111", "lw": 0, "marker": "o", "ms": 2.5, "markevery": 3},
            ),
        )
        for curve, label, style in lines:
            axes.semilogy(range(1, len(curve) + 1), curve, label=label, **style)
        axes.set(title=family, xlabel="AdamW step")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("loss per answer")
    panels[0].legend(loc="upper right", fontsize=8)
    figure.suptitle(title)
    figure.savefig(out, metadata={"Software": None} if out.suffix == ".png" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs=3, type=Path, help="unpatched, patched, patched at C = 2")
    parser.add_argument("--title", default="")
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in arguments.results]
    draw(runs, arguments.title, arguments.out)
    unpatched, *patched = (run["families"] for run in runs)
    good = all(is_equal(result) for run in patched for result in run.values())
    for family, result in unpatched.items():
        packed, alone = last_third(result["packed"]), last_third(result["unpacked"])
        print(f"{family:12} mean loss of the last third: {alone:.1e} alone,", end=" ")
        print(f"{packed:.1e} packed as released", end="")
        print("" if is_apart(result) else "  NOT APART")
        good = good and is_apart(result)
    print(f"wrote {arguments.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
