"""The Triton kernel compiled for real GPUs, without one: registers, spills, widths, recompilation.

The compiler is told which GPU there is and asked for a warm-up, which compiles through Triton's own
JIT cache and launches nothing; ptxas reports registers and spills, the PTX shows how wide each
access to memory is.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron.packed_rope.rotary_triton import _launch_arguments, _rotate_kernel

ARCHITECTURES = [80, 90]
MOST_REGISTERS = 136
"""Of 65,536 per multiprocessor: 7 programs of 64 threads, with 7 * 64 * 128 bytes in flight."""


class PretendGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> str:
        return f"sm_{self.architecture}"  # the key of the kernel's cache

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class Compiled(NamedTuple):
    registers: int
    spilled: int
    stack: int
    accesses: Counter[tuple[str, int]]
    """How often each kind of access to global memory occurs: ("ld", 16) is a load of 16 bytes."""
    conversions: set[str]
    """How numbers are converted: "rn.bf16.f32" rounds float32 to the nearest bfloat16."""


@pytest.fixture
def compile_for(monkeypatch, tmp_path, capfd):
    """Compiles the kernel for an architecture, as a launch with these tensors would."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def compile_for(architecture, t, freqs, rows=None, interleaved=False, **flags):
        monkeypatch.setattr(driver, "_active", PretendGPU(architecture))
        mscale, transpose = flags.pop("mscale", 1.0), flags.pop("transpose", False)
        out = torch.empty(t.shape, dtype=t.dtype)
        arguments = _launch_arguments(out, t, freqs, rows, interleaved, mscale, transpose)
        _rotate_kernel.device_caches.pop(f"sm_{architecture}", None)
        capfd.readouterr()
        kernel = _rotate_kernel.warmup(**arguments, **flags, grid=(1,))
        return read(kernel.asm["ptx"], capfd.readouterr().out)

    yield compile_for
    for architecture in ARCHITECTURES:
        _rotate_kernel.device_caches.pop(f"sm_{architecture}", None)


def read(ptx: str, log: str) -> Compiled:
    """Figures of one kernel from its PTX and from what ptxas printed."""

    def total(pattern):
        found = re.findall(pattern, log)
        assert found, f"no {pattern!r} in what ptxas printed:\n{log}"
        return sum(map(int, found))

    accesses = Counter()
    for kind, count, bits in re.findall(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx):
        accesses[kind, int(count or 1) * int(bits) // 8] += 1
    return Compiled(
        registers=total(r"Used (\d+) registers"),
        spilled=total(r"(\d+) bytes spill (?:stores|loads)"),
        stack=total(r"(\d+) bytes stack frame"),
        accesses=accesses,
        conversions=set(re.findall(r"\bcvt\.([\w.]+)", ptx)),
    )


def tensors(heads, dim, rotary, dtype=torch.bfloat16, tokens=8, rows=False):
    t = torch.empty(tokens, heads, dim, dtype=dtype)
    freqs = torch.empty(tokens, 1, 1, rotary)
    return t, freqs, torch.zeros(tokens, dtype=torch.int64) if rows else None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "dtype", "rows", "flags"),
    [
        (32, 128, 128, torch.bfloat16, False, {}),
        (32, 128, 128, torch.bfloat16, False, {"transpose": True}),
        (32, 128, 128, torch.bfloat16, False, {"interleaved": True}),
        (32, 128, 128, torch.bfloat16, False, {"interleaved": True, "transpose": True}),
        (32, 128, 128, torch.bfloat16, True, {"mscale": 1.2}),
        (4, 128, 128, torch.bfloat16, False, {}),
        (16, 80, 80, torch.bfloat16, False, {}),
        (16, 80, 80, torch.bfloat16, True, {"interleaved": True}),
        (32, 128, 64, torch.bfloat16, False, {}),
        (32, 128, 64, torch.bfloat16, True, {"interleaved": True}),
        (32, 128, 128, torch.float16, False, {}),
        (32, 128, 128, torch.float32, True, {}),
        (32, 128, 128, torch.float32, False, {"interleaved": True}),
    ],
)
def test_nothing_spills_and_every_access_to_t_is_16_bytes_wide(
    architecture, heads, dim, rotary, dtype, rows, flags, compile_for
):
    compiled = compile_for(architecture, *tensors(heads, dim, rotary, dtype, rows=rows), **flags)
    assert (compiled.spilled, compiled.stack) == (0, 0)
    assert compiled.registers <= MOST_REGISTERS
    narrow = {access for access in compiled.accesses if access[1] < 16}
    assert narrow <= ({("ld", 8)} if rows else set()), "only row indices are read one by one"
    assert compiled.accesses["ld", 16] > compiled.accesses["st", 16] >= 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_results_are_rounded_once_from_float32_to_nearest(architecture, dtype, name, compile_for):
    compiled = compile_for(architecture, *tensors(4, 64, 64, dtype))
    assert {c for c in compiled.conversions if name in c.split(".")} == {
        f"f32.{name}",
        f"rn.{name}.f32",
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float64_does_not_spill(architecture, compile_for):
    compiled = compile_for(architecture, *tensors(8, 128, 128, torch.float64))
    assert compiled.spilled == 0
    assert compiled.accesses["st", 16] >= 2


def test_a_strided_last_dim_is_read_narrowly_and_written_in_full(compile_for):
    t, freqs, _ = tensors(32, 256, 128)
    compiled = compile_for(90, t[..., ::2], freqs)
    assert compiled.accesses["ld", 2] > 0
    assert {access for access in compiled.accesses if access[0] == "st"} == {("st", 16)}


def test_a_kernel_with_too_few_registers_is_seen_to_spill(compile_for):
    """That the figures above can be bad: the same reading, of a kernel squeezed into 32."""
    compiled = compile_for(90, *tensors(32, 128, 128), maxnreg=32)
    assert compiled.registers <= 32
    assert compiled.spilled > 0


@pytest.mark.parametrize("with_rows", [False, True])
def test_nothing_is_compiled_again_when_tokens_rows_or_segments_change(with_rows, compile_for):
    compile_for(90, *tensors(8, 64, 64, rows=with_rows))
    cache = _rotate_kernel.device_caches["sm_90"][0]
    assert len(cache) == 1
    for tokens in (1, 2, 15, 16, 17, 513, 4096):
        for num_rows in (1, 16, 31, 8192):
            t, _, rows = tensors(8, 64, 64, tokens=tokens, rows=with_rows)
            freqs, out = torch.empty(num_rows, 1, 1, 64), torch.empty_like(t)
            arguments = _launch_arguments(out, t, freqs, rows, False, 1.0, False)
            _rotate_kernel.warmup(**arguments, grid=(1,))
    assert len(cache) == 1
    t, freqs, rows = tensors(4, 64, 64, rows=with_rows)
    arguments = _launch_arguments(torch.empty_like(t), t, freqs, rows, False, 1.0, False)
    _rotate_kernel.warmup(**arguments, grid=(1,))
    assert len(cache) == 2, "another number of heads is another kernel"
