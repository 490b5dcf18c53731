"""Apply to a fork with unknown definitions, and keep the patch only if it does no harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import PatchError, PatchRefused
from .disk import apply, revert
from .tree import find_tree


def apply_forced(directory: Path | None = None) -> tuple[list[Path], str]:
    """Apply whatever the definitions are; undo it if a case of ``check`` that was right is not.

    Returns:
        The files that changed, and what the checks before and after said.

    Raises:
        PatchRefused: naming the cases that turned wrong; every file is as it was before.
    """
    report_before = check_tree(directory)
    before = _outcomes(report_before)
    changed = apply(directory, force=True)
    try:
        report_after = check_tree(directory)
        after = _outcomes(report_after)
        harmed = [n for n, outcome in before.items() if outcome == "right" != after.get(n)]
        if harmed:
            raise PatchRefused(
                f"{len(harmed)} cases were right before the patch and are not after it: "
                f"{'; '.join(harmed)}. The patch was taken out again."
            )
    except BaseException:
        revert(directory)
        raise
    return changed, f"check before: {_counts(report_before)}; after: {_counts(report_after)}"


def check_tree(directory: Path | None = None) -> dict[str, Any]:
    """The report of ``check --json``, from a process of its own that imports that tree."""
    tree = find_tree(directory)
    ours = Path(__file__).resolve().parents[3]
    path = [str(tree.root), str(ours), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.packed_rope", "check", "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        cwd=tree.root,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PatchError(f"check could not run in {tree.root}: {last}")
    return json.loads(done.stdout)


def _counts(report: dict[str, Any]) -> str:
    counts = report["counts"]
    return ", ".join(f"{counts[name]} {name}" for name in ("right", "wrong", "raises"))


def _outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {case["name"]: case["outcome"] for case in report["cases"]}
