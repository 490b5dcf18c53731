"""The Triton kernel's own tests, in a process of their own, and what importing it does."""

from __future__ import annotations

import json
import re

import pytest
import torch
from trees import HERE, ROOT, run, run_python, unpacked

BENCHMARK = ROOT / "benchmarks" / "bench_gpu.py"


def test_the_kernel_is_right_on_a_gpu_or_interpreted():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_rotation.py")],
        env=interpreted,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Nothing was left out on the way: no test skipped, deselected or expected to fail.
    assert re.fullmatch(r"\d{3,} passed in [\d.]+s.*", done.stdout.splitlines()[-1]), done.stdout


def test_importing_the_kernel_needs_no_gpu_and_starts_none():
    done = run_python(
        "import torch, megatron.packed_rope.rotary_triton\n"
        "from triton.runtime import driver\n"
        "assert driver._active is None\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torch.ops.packed_rope.rotate\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not BENCHMARK.exists(), reason="the benchmarks are in the project's checkout")
def test_the_gpu_benchmark_runs_through_without_a_gpu(tmp_path):
    report = tmp_path / "report.md"
    done = run(
        [str(BENCHMARK), "--dry-run", "--out", str(report)],
        env={"PACKED_ROPE_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    text = report.read_text()
    assert text in done.stdout
    for layout in ("packed", "per_sequence"):
        for what in ("copy of t", "eager", "Triton, whole call", "Triton, kernel"):
            assert f"| 64 x 4 x 16 | 4 | {layout} | {what} |" in text
    assert f"torch {torch.__version__}, triton " in text
    assert "upstream 0.16.1: not under .cache/trees (make wheels), skipped" in text


def test_the_gpu_benchmark_measures_an_unpatched_release_beside_ours():
    done = run([str(BENCHMARK), "--measure", "--dry-run"], tree=unpacked("0.16.1"))
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    assert set(times) == {f"64 x 4 x 16 | 4 | {layout}" for layout in ("packed", "per_sequence")}
    assert all(len(both) == 2 and min(both) > 0 for both in times.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_without_a_gpu_says_what_to_do():
    done = run([str(BENCHMARK)])
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
