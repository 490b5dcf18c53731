"""The stand-in for Transformer Engine does what Transformer Engine's own Python does.

The pure wheel carries the real ``pytorch/attention/rope.py``; its unfused paths run on a CPU with
stand-ins for the compiled module and for three parent packages. It runs in a process of its own,
where those stand-ins stay.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles import segments, transformer_engine
from trees import run, unpacked

VERSION = "2.20.2"
HEADS, DIM, ROTARY = 3, 16, 12
# Its unfused interleaved path fails on an empty segment.
LENGTHS = {False: [8, 24, 0, 16, 8], True: [8, 24, 16, 8]}

RUN_THE_REAL_ONE = """
import importlib.util, sys, types
import torch

rope, cases, results = sys.argv[1:]
package = "transformer_engine.pytorch.cpp_extensions"
for name in ("transformer_engine", "transformer_engine.pytorch", package):
    sys.modules[name] = types.ModuleType(name)
sys.modules["transformer_engine_torch"] = types.ModuleType("transformer_engine_torch")
fused_attn = types.ModuleType(package + ".fused_attn")
fused_attn.QKVFormat = {name: name for name in ("sbhd", "bshd", "thd")}
sys.modules[fused_attn.__name__] = fused_attn
spec = importlib.util.spec_from_file_location("real_rope", rope)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

found = {}
for name, (t, grad, freqs, keywords) in torch.load(cases).items():
    leaf = t.requires_grad_()
    out = module.apply_rotary_pos_emb(leaf, freqs, fused=False, **keywords)
    found[name] = out.detach(), torch.autograd.grad(out, leaf, grad)[0]
torch.save(found, results)
"""


def problem(shape, num_rows):
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(shape, generator=generator)
    grad = torch.randn(shape, generator=generator)
    angles = 30 * torch.rand(num_rows, 1, 1, ROTARY // 2, generator=generator)
    return t, grad, angles


def freqs_of(angles, interleaved):
    if interleaved:
        return angles.repeat_interleave(2, dim=-1)
    return torch.cat((angles, angles), dim=-1)


def thd_cases():
    """Name: t, gradient, freqs and the keywords that TE takes."""
    for cp, interleaved in itertools.product((1, 2, 4), (False, True)):
        for rank, kind in itertools.product(range(cp), ("table", "packed", "packed, starts")):
            lengths = LENGTHS[interleaved]
            cu = torch.tensor(segments.boundaries(lengths), dtype=torch.int32)
            tokens = sum(lengths) // cp
            num_rows = max(lengths) if kind == "table" else sum(lengths)
            t, grad, angles = problem((tokens, HEADS, DIM), num_rows)
            keywords = {
                "tensor_format": "thd",
                "cu_seqlens": cu,
                "cp_size": cp,
                "cp_rank": rank,
                "interleaved": interleaved,
            }
            if kind == "packed, starts":
                keywords["start_positions"] = cu[:-1]
            name = f"{kind}, cp {cp}, rank {rank}, interleaved {interleaved}"
            yield name, (t, grad, freqs_of(angles, interleaved), keywords)


def sbhd_cases():
    for batch, interleaved in itertools.product((1, 2), (False, True)):
        t, grad, angles = problem((10, batch, HEADS, DIM), 12)
        keywords = {"tensor_format": "sbhd", "interleaved": interleaved}
        name = f"sbhd, batch {batch}, interleaved {interleaved}"
        yield name, (t, grad, freqs_of(angles, interleaved), keywords)


THD, SBHD = dict(thd_cases()), dict(sbhd_cases())


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Output and gradient of every case, from Transformer Engine."""
    folder = tmp_path_factory.mktemp("transformer_engine")
    torch.save(THD | SBHD, folder / "cases")
    tree = unpacked(VERSION, "transformer-engine")
    rope = tree / "transformer_engine" / "pytorch" / "attention" / "rope.py"
    paths = [str(path) for path in (rope, folder / "cases", folder / "results")]
    done = run(["-c", RUN_THE_REAL_ONE, *paths])
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / "results")


def stand_in(t, freqs, keywords):
    keywords = dict(keywords)
    function = getattr(transformer_engine, keywords.pop("tensor_format"))
    return function(t, freqs, **keywords)


def bound(t, grad):
    return segments.tolerance(torch.float32) * max(t.abs().max().item(), grad.abs().max().item())


@pytest.mark.parametrize("name", [*THD, *SBHD])
def test_the_stand_in_is_faithful(name, real):
    t, grad, freqs, keywords = (THD | SBHD)[name]
    leaf = t.clone().requires_grad_()
    out = stand_in(leaf, freqs, keywords)
    expected, expected_grad = real[name]
    assert (out - expected).abs().max() <= bound(t, grad)
    found = torch.autograd.grad(out, leaf, grad)[0]
    assert (found - expected_grad).abs().max() <= bound(t, grad)


@pytest.mark.parametrize("name", [name for name in THD if name.startswith("packed")])
def test_only_start_positions_make_packed_freqs_right_in_the_real_one(name, real):
    t, grad, freqs, keywords = THD[name]
    interleaved = keywords["interleaved"]
    lengths = LENGTHS[interleaved]
    rows = segments.rows(lengths, "packed", keywords["cp_size"], keywords["cp_rank"])
    expected = segments.rotate(t, freqs[rows], interleaved)
    error = (real[name][0] - expected).abs().max()
    assert error <= bound(t, grad) if "start_positions" in keywords else error > 1


def test_the_stand_in_leaves_rows_past_the_last_segment_unwritten():
    t = torch.randn(6, 2, 8, requires_grad=True)
    out = transformer_engine.thd(t, torch.randn(4, 1, 1, 8), torch.tensor([0, 4]))
    (grad,) = torch.autograd.grad(out, t, torch.ones_like(out))
    for written in (out, grad):
        assert written[:4].isfinite().all()
        assert written[4:].isnan().all()


def test_the_stand_in_rounds_once():
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(64, 1, 2, 8, generator=generator).bfloat16()
    freqs = torch.randn(64, 1, 1, 8, generator=generator)
    exact = transformer_engine.sbhd(t.float(), freqs)
    assert torch.equal(transformer_engine.sbhd(t, freqs), exact.bfloat16())


def test_the_stand_in_counts_its_calls():
    transformer_engine.forget()
    t, freqs = torch.randn(4, 2, 8), torch.randn(4, 1, 1, 8)
    transformer_engine.thd(t, freqs, torch.tensor([0, 4]))
    for _ in range(2):
        transformer_engine.sbhd(t[:, None], freqs)
    assert transformer_engine.calls == {"thd": 1, "sbhd": 2}
    assert transformer_engine.shapes[-1] == ((4, 1, 2, 8), (4, 1, 1, 8))
