"""Eager rotation on a CPU against the upstream original and against copying the tensor.

    python benchmarks/bench_cpu.py [--quick] [--out FILE]

Every figure is a ratio of medians measured alternately in one process, so that the machine's noise
hits both sides; operations, host reads and bytes are counted, which noise cannot touch. Each
release runs in a process of its own. Prints Markdown, and writes it where --out says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.14.0", "0.16.1", "0.19.2")
SHAPES = ((16384, 16, 80), (16384, 32, 128))
SEGMENTS = (16, 1024)
SECONDS_PER_CALL = 4
GROWTH_SEGMENTS = (4, 64, 512, 4096)


def medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; the calls take turns. A slow call is measured less often."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            if sum(times[name]) > SECONDS_PER_CALL:
                continue
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
            if not repeat and times[name][0] < SECONDS_PER_CALL:
                times[name].clear()  # the first round warms up
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes allocated at once during the call, its result included."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = call()  # noqa: F841 (kept alive: it belongs to the peak)
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def measure(release: str, quick: bool) -> dict[str, Any]:
    """In a process that imports this release, unpatched: ours against its own function."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "tests" / "unit_tests" / "packed_rope"))
    import torch
    from counting import count_operations
    from megatron.core.models.common.embeddings import rope_utils

    from megatron.packed_rope import apply_packed_rotary

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    repeats = 3 if quick else 9

    def problem(tokens: int, heads: int, dim: int, segments: int, dtype: torch.dtype) -> Any:
        t = torch.randn(tokens, heads, dim, dtype=dtype, requires_grad=True)
        grad = torch.randn_like(t)
        cu = torch.arange(0, tokens + 1, tokens // segments, dtype=torch.int32)
        packed, table = torch.randn(tokens, 1, 1, dim), torch.randn(tokens // segments, 1, 1, dim)
        ours = {
            "packed": lambda: apply_packed_rotary(t, packed, cu, freqs_layout="packed"),
            "table": lambda: apply_packed_rotary(t, table, cu, freqs_layout="per_sequence"),
        }
        upstream = rope_utils._apply_rotary_pos_emb_thd
        theirs = {
            "packed": lambda: upstream(t, cu, packed, cp_group=group),
            "table": lambda: upstream(t, cu, table, cp_group=group),
        }
        return t, grad, ours, theirs

    rows = []
    for (tokens, heads, dim), dtype in [(s, d) for s in SHAPES for d in ("float32", "bfloat16")]:
        for segments in SEGMENTS:
            t, grad, ours, theirs = problem(tokens, heads, dim, segments, getattr(torch, dtype))
            for layout in ("packed", "table"):

                def both(call: Callable[[], Any], t: Any = t, grad: Any = grad) -> Any:
                    return torch.autograd.grad(call(), t, grad)

                seconds = medians(
                    {
                        "ours": lambda both=both, call=ours[layout]: both(call),
                        "upstream": lambda both=both, call=theirs[layout]: both(call),
                        "two copies": lambda t=t, grad=grad: (t.detach().clone(), grad.clone()),
                    },
                    repeats,
                )
                size = t.numel() * t.element_size()
                row = {"shape": f"{tokens} x {heads} x {dim}", "dtype": dtype, "layout": layout}
                row |= {"segments": segments, "seconds": seconds}
                row["peak_ours"] = peak_bytes(ours[layout]) / size
                row["peak_upstream"] = peak_bytes(theirs[layout]) / size
                rows.append(row)

    counts = []
    for segments in GROWTH_SEGMENTS:
        t, _, ours, theirs = problem(4096, 1, 8, segments, torch.float32)
        for layout in ("packed", "table"):
            mine, its = count_operations(ours[layout]), count_operations(theirs[layout])
            counts.append({"segments": segments, "layout": layout, "ours": mine, "upstream": its})

    growth = []
    for segments in GROWTH_SEGMENTS:
        t, grad, ours, _ = problem(16384, 16, 80, segments, torch.float32)
        growth.append((t, grad, ours))
    flat = {}
    for layout in ("packed", "table"):
        seconds = medians(
            {
                str(n): lambda t=t, g=grad, call=ours[layout]: torch.autograd.grad(call(), t, g)
                for n, (t, grad, ours) in zip(GROWTH_SEGMENTS, growth, strict=True)
            },
            repeats,
        )
        flat[layout] = {n: value / seconds["4"] for n, value in seconds.items()}
    return {"rows": rows, "counts": counts, "flat": flat, "torch": torch.__version__}


def report(results: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown, ratios only."""
    some = next(iter(results.values()))
    lines = [f"# Eager rotation on CPU, {datetime.date.today().isoformat()}", ""]
    lines += [
        f"{_processor()}, {os.cpu_count()} cores, {platform.python_implementation()} "
        f"{platform.python_version()}, torch {some['torch']}, "
        f"{os.environ.get('OMP_NUM_THREADS', 'all')} threads. `make bench`. Forward and backward, "
        "ratios of medians taken in turns; peak: bytes allocated at once in a forward pass, over "
        "those of t.",
        "",
        "| against | t | dtype | freqs | segments | times as fast | over two copies of t "
        "| peak | upstream's peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for release, result in results.items():
        for row in result["rows"]:
            seconds = row["seconds"]
            lines.append(
                f"| {release} | {row['shape']} | {row['dtype']} | {row['layout']} "
                f"| {row['segments']} | {seconds['upstream'] / seconds['ours']:.2f} "
                f"| {seconds['ours'] / seconds['two copies']:.2f} | {row['peak_ours']:.2f} "
                f"| {row['peak_upstream']:.2f} |"
            )
    lines += [
        "",
        "Working aten operations of one forward call (views and empty allocations not counted), "
        "host reads in brackets (on CPU ours reads once, for typed errors; on CUDA never):",
        "",
        "| segments | freqs | ours | " + " | ".join(results) + " |",
        "|---|---|---|" + "---|" * len(results),
    ]
    for i, count in enumerate(some["counts"]):
        theirs = [result["counts"][i]["upstream"] for result in results.values()]
        lines.append(
            f"| {count['segments']} | {count['layout']} | {_count(count['ours'])} | "
            + " | ".join(map(_count, theirs))
            + " |"
        )
    lines += ["", "Time at 16384 x 16 x 80 float32 over that at 4 segments:", ""]
    for layout, ratios in some["flat"].items():
        figures = ", ".join(f"{n} segments {ratio:.2f}" for n, ratio in ratios.items())
        lines.append(f"- {layout}: {figures}")
    return "\n".join(lines) + "\n"


def _count(pair: list[int]) -> str:
    return f"{pair[0]} ({pair[1]})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    parser.add_argument("--measure", metavar="RELEASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        json.dump(measure(arguments.measure, arguments.quick), sys.stdout)
        return
    sys.path.insert(0, str(ROOT / "tools"))
    import wheels

    results = {}
    for release in RELEASES:
        print(f"measuring against {release} ...", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--measure", release]
        command += ["--quick"] if arguments.quick else []
        path = os.pathsep.join((str(wheels.tree(release)), str(ROOT)))
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        results[release] = json.loads(done.stdout.splitlines()[-1])
    text = report(results)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
