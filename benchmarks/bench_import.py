"""What the patch adds to the import of megatron.core, and what require_active() costs.

python benchmarks/bench_import.py [--out FILE] [RELEASE]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import wheels  # noqa: E402

from megatron.packed_rope.binding import disk  # noqa: E402

REPEATS = 10
IMPORT = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch
start = time.perf_counter()
import megatron.core.models.gpt.gpt_model
print(time.perf_counter() - start)
"""
ACTIVE = """
import time, warnings
warnings.simplefilter("ignore")
from megatron.packed_rope import require_active
require_active()
times = []
for _ in range(100):
    start = time.perf_counter()
    require_active()
    times.append(time.perf_counter() - start)
print(sorted(times)[50])
"""


def seconds(code: str, tree: Path) -> float:
    path = os.pathsep.join([str(tree), str(ROOT)])
    command = [sys.executable, "-c", code]
    return float(subprocess.check_output(command, env=os.environ | {"PYTHONPATH": path}, text=True))


def measure(release: str) -> str:
    pristine = wheels.tree(release)
    with tempfile.TemporaryDirectory(dir=pristine.parent) as folder:
        patched = Path(folder) / release
        subprocess.run(["cp", "-al", str(pristine), str(patched)], check=True)
        disk.apply(patched)
        for tree in (pristine, patched):  # bytecode
            seconds(IMPORT, tree)
        pairs = [(seconds(IMPORT, pristine), seconds(IMPORT, patched)) for _ in range(REPEATS)]
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        active = seconds(ACTIVE, patched)
    cells = [f"{before * 1e3:.0f} ms", f"{after * 1e3:.0f} ms", f"{(after - before) * 1e3:+.0f} ms"]
    return f"| {release} | {' | '.join(cells)} | {active * 1e3:.2f} ms |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="?", default="0.16.1")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = "\n".join(
        [
            "# Import of megatron.core.models.gpt.gpt_model, torch imported before",
            "",
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
            f"medians of {REPEATS}, in turns.",
            "",
            "| release | as released | patched | difference | require_active() |",
            "|---|---|---|---|---|",
            measure(arguments.release),
            "",
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
