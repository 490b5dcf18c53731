"""What only a CUDA device can show: the kernels that run there, and CUDA graphs.

``make gpu-check`` runs these; without a device they are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from oracles import segments
from trees import run_python

from megatron.packed_rope import apply_packed_rotary

pytestmark = pytest.mark.gpu

LAYOUTS = ["per_sequence", "packed", "packed_local"]
LENGTHS = [8, 24, 0, 16, 8]
DEVICE = "cuda"


def pack(lengths, layout, *, cp=1, tail=0, dtype=torch.float32, interleaved=False):
    """t, a gradient, freqs and cu_seqlens of one rank, on the device."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths) // cp
    num_rows = {"per_sequence": max(lengths), "packed": sum(lengths), "packed_local": tokens}
    t = torch.randn(tokens + tail, 3, 16, generator=generator).to(DEVICE, dtype)
    grad = torch.randn(tokens + tail, 3, 16, generator=generator).to(DEVICE, dtype)
    angles = 30 * torch.rand(num_rows[layout], 1, 1, 6, generator=generator)
    if interleaved:
        freqs = angles.repeat_interleave(2, dim=-1)
    else:
        freqs = torch.cat((angles, angles), dim=-1)
    cu = torch.tensor(segments.boundaries(lengths), dtype=torch.int32)
    return t.requires_grad_(), grad, freqs.to(DEVICE), cu.to(DEVICE)


def check(t, grad, freqs, rows, out, found, *, interleaved=False, mscale=1.0):
    """Output and gradient of the real tokens against float64; the tail is finite."""
    t, grad, freqs = t.detach().cpu(), grad.cpu(), freqs.cpu()
    real, selected = len(rows), freqs[rows]
    bound = segments.tolerance(t.dtype) * mscale * max(x.abs().max().item() for x in (t, grad))
    for x, result, inverse in ((t, out.detach(), False), (grad, found, True)):
        assert result.isfinite().all()
        expected = segments.rotate(x[:real], selected, interleaved, mscale, inverse)
        assert (result.cpu()[:real] - expected).abs().max() <= bound


def cases() -> Iterator[tuple[str, int, int, bool, float]]:
    for layout, cp, interleaved in itertools.product(LAYOUTS, (1, 2, 4), (False, True)):
        for rank in range(cp):
            yield layout, cp, rank, interleaved, (1.2 if rank % 2 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_every_layout_and_rank_equals_the_oracle(fused, dtype):
    if fused and importlib.util.find_spec("triton") is None:
        pytest.skip("fused=True without megatron.core needs triton, which is not installed")
    for layout, cp, rank, interleaved, mscale in cases():
        t, grad, freqs, cu = pack(
            LENGTHS, layout, cp=cp, tail=2, dtype=dtype, interleaved=interleaved
        )
        keywords = {"cp_size": cp, "cp_rank": rank, "interleaved": interleaved, "mscale": mscale}
        out = apply_packed_rotary(t, freqs, cu, freqs_layout=layout, fused=fused, **keywords)
        (found,) = torch.autograd.grad(out, t, grad)
        rows = segments.rows(LENGTHS, layout, cp, rank)
        check(t, grad, freqs, rows, out, found, interleaved=interleaved, mscale=mscale)


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, whatever waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def both(layout, cp, t, grad, freqs, cu):
    out = apply_packed_rotary(t, freqs, cu, freqs_layout=layout, cp_size=cp, cp_rank=cp - 1)
    return out, torch.autograd.grad(out, t, grad)[0]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r15_a_cuda_graph_replays_with_other_boundaries(layout, cp):
    """Captured without a host read, and nothing of the captured boundaries is kept."""
    inputs = pack(LENGTHS, layout, cp=cp)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_host_sync():
        both(layout, cp, *inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, found = both(layout, cp, *inputs)
    t, grad, freqs, cu = inputs
    for lengths in (LENGTHS, [16, 4, 16, 12, 8], [24, 8, 8, 8, 8]):
        cu.copy_(torch.tensor(segments.boundaries(lengths), dtype=torch.int32))
        with torch.no_grad():
            t.mul_(-1)
        graph.replay()
        torch.cuda.synchronize()
        rows = segments.rows(lengths, layout, cp, cp - 1)
        check(t, grad, freqs, rows, out, found)


FUSED_CHECK = """
import importlib, json, warnings
warnings.simplefilter("ignore")
import megatron.packed_rope.auto
from megatron.packed_rope import require_active
from megatron.packed_rope.check import fused, rope
module = importlib.import_module(rope.ROPE_UTILS)
require_active()
print(json.dumps(list(fused.run(module))))
"""


def test_the_fused_cases_of_check_are_right_on_the_installed_megatron():
    """In a process of its own: the patch is bound there, on disk or not."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("megatron.core is not installed")
    done = run_python(FUSED_CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    if [outcome for _, outcome, _ in outcomes] == ["not run"]:
        pytest.skip(outcomes[0][2])
    assert [case for case in outcomes if case[1] != "right"] == []
