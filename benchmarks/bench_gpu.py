"""Rotation on a GPU: the Triton kernel against copying the tensor, eager, upstream and TE.

    python benchmarks/bench_gpu.py [--out FILE] [--dry-run]

Times are medians between device events, the L2 cache flushed before every run. A rotation has to
read t and to write as much, which is what copying t does; so the copy's time over a rotation's is
the share of the copy's bytes per second that it reaches. Upstream releases are those unpacked under
.cache/trees (``make wheels``), each in a process of its own. ``--dry-run`` goes through all of it
on a CPU at a tiny size, Triton interpreted; its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.14.0", "0.16.1", "0.19.2")
# Tokens, heads and head dim of t; segments.
SIZES = list(itertools.product(((65536, 32, 128), (16384, 16, 80)), (16, 512)))
DRY_SIZES = [((64, 4, 16), 4)]


def problems(dry: bool) -> Iterator[tuple[str, SimpleNamespace]]:
    """Every size and layout, by name: t and its gradient bf16 ``[T, h, d]``, freqs float32."""
    sizes, device = (DRY_SIZES, "cpu") if dry else (SIZES, "cuda")
    every = itertools.product(sizes, ("packed", "per_sequence"))
    for ((tokens, heads, dim), segments), layout in every:
        length = tokens // segments
        p = SimpleNamespace(layout=layout)
        p.t = torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device=device).requires_grad_()
        p.grad = torch.randn_like(p.t)
        rows = tokens if layout == "packed" else length
        p.freqs = 4 * torch.randn(rows, 1, 1, dim, device=device)
        p.cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        yield f"{tokens} x {heads} x {dim} | {segments} | {layout}", p


def rotations(p: SimpleNamespace) -> dict[str, Callable[[Any], Any]]:
    """Those of this package, and Transformer Engine's where it is installed, as functions of t."""
    from megatron.packed_rope import PackedLayout, apply_packed_rotary
    from megatron.packed_rope.rotary_triton import rotate_triton

    rows = PackedLayout(p.cu, num_tokens=len(p.t)).rows(p.layout, num_rows=len(p.freqs))
    common = {"freqs": p.freqs, "cu_seqlens": p.cu, "freqs_layout": p.layout}
    os.environ["PACKED_ROPE_BACKEND"] = "triton"  # which fused=True is then
    calls = {
        "eager": lambda t: apply_packed_rotary(t, **common),
        "Triton, whole call": lambda t: apply_packed_rotary(t, **common, fused=True),
        "Triton, kernel": lambda t: rotate_triton(t, p.freqs, rows),
    }
    if te := transformer_engine():
        selected = p.freqs if rows is None else p.freqs[rows]
        sbhd = {"tensor_format": "sbhd", "fused": True}
        calls["TE, SBHD on selected rows"] = lambda t: te(t[:, None], selected, **sbhd)[:, 0]
        if p.layout == "per_sequence":  # its THD kernel restarts every segment at row 0
            thd = {"tensor_format": "thd", "fused": True, "cu_seqlens": p.cu}
            calls["TE, THD"] = lambda t: te(t, p.freqs, **thd)
    return calls


def transformer_engine() -> Callable[..., Any] | None:
    try:
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
    except ImportError:
        return None
    return apply_rotary_pos_emb


def median_ms(call: Callable[[], Any], dry: bool) -> float:
    if dry:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    from triton.testing import do_bench

    return do_bench(call, warmup=25, rep=100, return_mode="median")


def both_ms(call: Callable[[Any], Any], p: SimpleNamespace, dry: bool) -> tuple[float, float]:
    """Milliseconds forward and backward."""
    out, gradient = call(p.t), torch.autograd.grad
    forward_ms = median_ms(lambda: call(p.t.detach()), dry)
    return forward_ms, median_ms(lambda: gradient(out, p.t, p.grad, retain_graph=True), dry)


def measure(dry: bool) -> dict[str, dict[str, tuple[float, float]]]:
    """Milliseconds by problem and rotation; each result is compared with eager's first."""
    times = {}
    for name, p in problems(dry):
        calls = rotations(p)
        times[name] = {"copy of t": (median_ms(p.grad.clone, dry),) * 2}
        for what, call in calls.items():
            expected = calls["eager"](p.t).detach()
            bound = 8 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(call(p.t).detach(), expected, rtol=0, atol=bound)
            times[name][what] = both_ms(call, p, dry)
            if not dry and not what.startswith("TE"):
                check_capture(call, p)
    return times


def check_capture(call: Callable[[Any], Any], p: SimpleNamespace) -> None:
    """Forward and backward captured in a CUDA graph, and replayed on other values of t."""

    def both() -> tuple[Any, Any]:
        t = p.t.detach().requires_grad_()  # a leaf of the capturing stream
        out = call(t)
        return out, torch.autograd.grad(out, t, p.grad)[0]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    p.t.data.normal_()
    p.grad.normal_()
    graph.replay()
    for found, expected in zip(captured, both(), strict=True):
        assert torch.equal(found, expected), "a replayed CUDA graph differs from a plain call"


def measure_upstream(dry: bool) -> dict[str, tuple[float, float]]:
    """In a process that imports a release, unpatched: its own THD function."""
    warnings.simplefilter("ignore")
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as thd

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return {
        name: both_ms(lambda t, p=p: thd(t, p.cu, p.freqs, cp_group=group), p, dry)
        for name, p in problems(dry)
    }


def report(times: dict[str, dict[str, tuple[float, float]]], notes: list[str]) -> str:
    lines = [f"# Rotation on a GPU, {datetime.date.today()}", "", *(f"- {n}" for n in notes), ""]
    lines += ["| t, bf16 | segments | freqs | what | forward, ms | of copy | backward | of copy |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, row in times.items():
        copy = row["copy of t"][0]
        for what, both in row.items():
            cells = " | ".join(f"{ms:.3f} | {copy / ms:.0%}" for ms in both)
            lines.append(f"| {name} | {what} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at a tiny size")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dry = arguments.dry_run
    if arguments.measure:
        json.dump(measure_upstream(dry), sys.stdout)
        return
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import triton

    if not (dry or torch.cuda.is_available()):
        parser.error("no CUDA device; --dry-run goes through the script without one")
    gpu = "dry run on a CPU" if dry else torch.cuda.get_device_name()
    graphs = "not checked" if dry else "replays of eager and Triton, both ways, are bit-equal"
    times = measure(dry)
    notes = [
        f"{gpu}; torch {torch.__version__}, triton {triton.__version__}",
        "results of this package and of TE were compared with eager's before they were timed",
        f"CUDA graphs: {graphs}",
        f"Transformer Engine: {'measured' if transformer_engine() else 'not installed, skipped'}",
    ]
    trees = Path(os.environ.get("PACKED_ROPE_CACHE", ROOT / ".cache")) / "trees" / "megatron-core"
    for release in RELEASES:
        if not (trees / release).is_dir():
            notes += [f"upstream {release}: not under .cache/trees (make wheels), skipped"]
            continue
        environment = os.environ | {"PYTHONPATH": f"{trees / release}{os.pathsep}{ROOT}"}
        command = [sys.executable, __file__, "--measure"] + ["--dry-run"] * dry
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for name, both in json.loads(done.stdout.splitlines()[-1]).items():
            times[name][f"upstream {release}"] = both
    text = report(times, notes)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
