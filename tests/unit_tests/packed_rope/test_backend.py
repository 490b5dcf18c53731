"""Which kernel rotates: the automatic choice, PACKED_ROPE_BACKEND, and what absent ones raise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.packed_rope import BackendNotAvailable, PackedInputError, apply_packed_rotary
from megatron.packed_rope import fused as fused_module
from megatron.packed_rope.fused import BACKEND_VARIABLE, rotate_fused_upstream
from megatron.packed_rope.rotary import rotate

WITHOUT_TE = SimpleNamespace(fused_apply_rotary_pos_emb=None)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(6, 2, 8, generator=generator)
    return t, torch.randn(6, 1, 1, 8, generator=generator), torch.tensor([0, 2, 6])


def upstream(t, freqs, module=WITHOUT_TE, flags=None):
    return rotate_fused_upstream(
        module, t, freqs, interleaved=False, mscale=1.0, flags={} if flags is None else flags
    )


@pytest.mark.parametrize("name", ["te", "triton"])
def test_an_absent_backend_asked_for_by_name_raises(name, problem, monkeypatch):
    t, freqs, cu = problem
    monkeypatch.setenv(BACKEND_VARIABLE, name)
    with pytest.raises(BackendNotAvailable, match=r"expect|cannot do this rotation"):
        apply_packed_rotary(t, freqs, cu, fused=True)
    with pytest.raises(BackendNotAvailable, match=r"expect|cannot do this rotation"):
        upstream(t, freqs)


def test_triton_that_is_not_installed_raises(problem, monkeypatch):
    t, freqs, cu = problem
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.setattr(fused_module, "_has_triton", lambda: False)
    with pytest.raises(BackendNotAvailable, match="not installed"):
        apply_packed_rotary(t, freqs, cu, fused=True)
    with pytest.raises(BackendNotAvailable, match="not installed"):
        upstream(t, freqs)


@pytest.mark.parametrize("name", ["te", "triton"])
def test_a_named_backend_never_drops_a_flag_it_does_not_know(name, problem, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, name)
    with pytest.raises(BackendNotAvailable, match="mla_rotary_interleaved"):
        upstream(*problem[:2], flags={"mla_rotary_interleaved": True})


def test_an_unknown_backend_raises_and_lists_those_there_are(problem, monkeypatch):
    t, freqs, cu = problem
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    for call in (lambda: apply_packed_rotary(t, freqs, cu, fused=True), lambda: upstream(t, freqs)):
        with pytest.raises(PackedInputError, match=r"'cuda'.*'eager', 'te', 'triton'"):
            call()


def test_eager_asked_for_is_the_eager_arithmetic(problem, monkeypatch):
    t, freqs, cu = problem
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    assert torch.equal(apply_packed_rotary(t, freqs, cu, fused=True), rotate(t, freqs))
    assert upstream(t, freqs) is None


@pytest.mark.parametrize("value", [None, ""])
def test_unset_fused_without_a_kernel_raises_and_upstreams_flag_goes_unfused(
    value, problem, monkeypatch
):
    t, freqs, cu = problem
    if value is None:
        monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(BACKEND_VARIABLE, value)
    with pytest.raises(BackendNotAvailable, match="Pass fused=False"):
        apply_packed_rotary(t, freqs, cu, fused=True)
    fused_module._warn_unfused.cache_clear()
    with pytest.warns(UserWarning, match="rotating unfused"):
        assert upstream(t, freqs) is None
    assert upstream(t, freqs) is None  # warned once: a second warning would be an error here


def test_the_variable_does_not_touch_what_did_not_ask_for_fusion(problem, monkeypatch):
    t, freqs, cu = problem
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    assert torch.equal(apply_packed_rotary(t, freqs, cu), rotate(t, freqs))
