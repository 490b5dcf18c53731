"""The fused path of a patched Megatron-Core, with the stand-in in Transformer Engine's place.

``test_fused.py`` runs this file in a process per release. Names begin with the id of the report
that a test answers, where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
import warnings
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from counting import count_working_ops
from oracles import segments, transformer_engine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.packed_rope import fused
from megatron.packed_rope.check import rope as check_rope
from megatron.packed_rope.check.fakes import accepted, fake_config, fake_cp
from megatron.packed_rope.check.gpt import set_cp_group
from megatron.packed_rope.check.model import (
    SegmentAttention,
    cpu_shims,
    one_process,
    packed_params,
    tiny_gpt,
    zigzag_rows,
)
from megatron.packed_rope.layout import PackedLayout

LAYOUTS = ["per_sequence", "packed", "packed_local"]
LENGTHS = [8, 24, 0, 16, 8]
HEADS, DIM, ROTARY = 3, 16, 12


@pytest.fixture(scope="session")
def rope() -> ModuleType:
    """Upstream's rope_utils, patched on disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    from megatron.packed_rope import require_active

    require_active()
    return module


@pytest.fixture(autouse=True)
def te(rope: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in in the release's module; call it to say which version is installed."""
    version = tuple(map(int, importlib.import_module("megatron.core").__version__.split(".")[:2]))
    wrappers = transformer_engine.wrappers(thd_takes_interleaved=version >= (0, 17))
    for name, function in wrappers.items():
        monkeypatch.setattr(rope, name, function)
    transformer_engine.forget()
    fused._warn_unfused.cache_clear()
    monkeypatch.delenv(fused.BACKEND_VARIABLE, raising=False)

    def installed(version: str) -> None:
        def is_te_min_version(minimum: str, check_equality: bool = True) -> bool:
            found, wanted = (tuple(map(int, v.split(".")[:2])) for v in (version, minimum))
            return found >= wanted if check_equality else found > wanted

        for module in ("megatron.core.utils", rope.__name__):
            monkeypatch.setattr(
                importlib.import_module(module), "is_te_min_version", is_te_min_version, False
            )

    installed("2.20.2")
    return installed


def pack(lengths, layout, *, cp=1, tail=0, dtype=torch.float32, interleaved=False, dim=DIM):
    """t and a gradient of one rank, freqs in the layout."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths) // cp
    num_rows = {"per_sequence": max(lengths), "packed": sum(lengths), "packed_local": tokens}
    t = torch.randn(tokens + tail, HEADS, dim, generator=generator).to(dtype)
    grad = torch.randn(tokens + tail, HEADS, dim, generator=generator).to(dtype)
    angles = 30 * torch.rand(num_rows[layout], 1, 1, ROTARY // 2, generator=generator)
    if interleaved:
        freqs = angles.repeat_interleave(2, dim=-1)
    else:
        freqs = torch.cat((angles, angles), dim=-1)
    cu = torch.tensor(segments.boundaries(lengths), dtype=torch.int32)
    return t.requires_grad_(), grad, freqs, cu


def config(**changes: Any) -> Any:
    return fake_config(apply_rope_fusion=True, **changes)


def call(function, t, freqs, cu, values, *, cp=1, rank=0, **keywords):
    """The installed (or original) ``apply_rotary_pos_emb`` of one rank."""
    with fake_cp(cp, rank) as group:
        arguments = accepted(function, cp_group=group)
        return function(t, freqs, values, cu_seqlens=cu, **arguments, **keywords)


def largest(difference):
    return difference.abs().max().item()


def errors(t, grad, freqs, out, rows, *, interleaved=False, mscale=1.0):
    """Largest error of output and gradient over the real tokens; everything must be finite."""
    (found,) = torch.autograd.grad(out, t, grad, retain_graph=True)
    assert out.shape == t.shape
    assert out.dtype == t.dtype
    assert out.isfinite().all()
    assert found.isfinite().all()
    real, selected = len(rows), freqs[rows]
    expected = segments.rotate(t.detach()[:real], selected, interleaved, mscale)
    expected_grad = segments.rotate(grad[:real], selected, interleaved, mscale, inverse=True)
    return max(largest(out[:real] - expected), largest(found[:real] - expected_grad))


def bound(t, grad, mscale=1.0):
    return segments.tolerance(torch.float32) * mscale * max(largest(t.detach()), largest(grad))


def ranks():
    return [(cp, rank) for cp in (1, 2, 4) for rank in range(cp)]


@pytest.mark.parametrize("tail", [0, 3], ids="tail {}".format)
@pytest.mark.parametrize(("cp", "rank"), ranks())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradient_equal_the_oracle(rope, layout, cp, rank, tail):
    t, grad, freqs, cu = pack(LENGTHS, layout, cp=cp, tail=tail)
    values = config(packed_rope_freqs_layout=layout)
    before = t.detach().clone(), freqs.clone(), cu.clone()
    out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=rank)
    rows = segments.rows(LENGTHS, layout, cp, rank)
    assert errors(t, grad, freqs, out, rows) <= bound(t, grad)
    assert transformer_engine.calls == {"sbhd": 1}
    assert all(torch.equal(*pair) for pair in zip(before, (t, freqs, cu), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_computed_in_float32_and_rounded_once(rope, layout):
    t, _, freqs, cu = pack(LENGTHS, layout, dtype=torch.bfloat16)
    values = config(packed_rope_freqs_layout=layout)
    out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values).detach()
    expected = segments.rotate(t.detach(), freqs[segments.rows(LENGTHS, layout)])
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    slack = segments.tolerance(torch.float32) * largest(t.detach())
    assert ((out - expected).abs() <= half_ulp * expected.abs() + slack).all()


def test_r01_every_segment_of_packed_freqs_reads_its_own_rows(rope):
    lengths = [4, 6]
    t, grad, freqs, cu = pack(lengths, "packed")
    out = call(rope.apply_rotary_pos_emb, t, freqs, cu, config())  # nobody declared the layout
    assert errors(t, grad, freqs, out, list(range(10))) <= bound(t, grad)


@pytest.mark.parametrize(("cp", "rank"), ranks())
def test_r01_r10_unpatched_packed_freqs_restart_at_row_0(rope, cp, rank):
    lengths = [8, 24, 16, 8]
    t, grad, freqs, cu = pack(lengths, "packed", cp=cp)
    original = rope.apply_rotary_pos_emb.__packed_rope_original__
    out = call(original, t, freqs, cu, config(), cp=cp, rank=rank)
    assert errors(t, grad, freqs, out, segments.rows(lengths, "packed", cp, rank)) > 1
    # What it computes is the rotation by the rows of a table.
    restarted = segments.rows(lengths, "per_sequence", cp, rank)
    assert errors(t, grad, freqs, out, restarted) <= bound(t, grad)
    assert transformer_engine.calls == {"thd": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_r10_fused_is_as_unfused_at_cp_2(rope, rank):
    t, grad, freqs, cu = pack([4, 12], "packed", cp=2)
    outs = []
    for fusion in (True, False):
        values = fake_config(apply_rope_fusion=fusion)
        outs.append(call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=2, rank=rank))
    assert transformer_engine.calls == {"sbhd": 1}
    grads = [torch.autograd.grad(out, t, grad)[0] for out in outs]
    assert largest(outs[0] - outs[1]) <= 2 * bound(t, grad)
    assert largest(grads[0] - grads[1]) <= 2 * bound(t, grad)


@pytest.mark.parametrize("num_rows", [10, 12], ids="{} rows".format)
def test_r09_the_padded_tail_is_finite_and_real_rows_are_untouched(rope, num_rows):
    t, grad, freqs, cu = pack([4, 8], "packed")
    cu[-1], freqs = 10, freqs[:num_rows]
    out = call(rope.apply_rotary_pos_emb, t, freqs, cu, config(packed_rope_freqs_layout="packed"))
    assert errors(t, grad, freqs, out, list(range(10))) <= bound(t, grad)
    original = rope.apply_rotary_pos_emb.__packed_rope_original__
    assert call(original, t, freqs, cu, config())[10:].isnan().all()


def test_r14_one_row_and_one_block_per_token_of_thousands_of_segments(rope):
    lengths = [20] * 2400 + [17536]
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(sum(lengths), 1, 4, generator=generator).requires_grad_()
    grad = torch.randn(t.shape, generator=generator)
    freqs = 30 * torch.rand(max(lengths), 1, 1, 2, generator=generator).repeat(1, 1, 1, 2)
    cu = torch.tensor(segments.boundaries(lengths), dtype=torch.int32)
    values = config(packed_rope_freqs_layout="per_sequence")
    out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values)
    assert errors(t, grad, freqs, out, segments.rows(lengths, "per_sequence")) <= bound(t, grad)
    # SBHD launches (sequence, batch) blocks; THD (rows of the table, segments): 42 million here.
    assert transformer_engine.shapes == [((65536, 1, 1, 4), (65536, 1, 1, 4))]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("layout", [*LAYOUTS, None])
def test_r15_nothing_is_read_to_the_host(rope, layout, cp):
    """Fake tensors have no values: whatever reads one fails, forward and backward."""
    with FakeTensorMode():
        t, grad, freqs, cu = pack(LENGTHS, layout or "packed", cp=cp, tail=2)
        values = config(packed_rope_freqs_layout=layout)
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=cp - 1)
        (found,) = torch.autograd.grad(out, t, grad)
    assert out.shape == found.shape == t.shape
    assert transformer_engine.calls == {"sbhd": 1}


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r15_boundaries_rewritten_in_place_are_read_anew(rope, layout, cp):
    """As a CUDA graph replays them: no row may be kept from an earlier call."""
    t, grad, freqs, cu = pack(LENGTHS, layout, cp=cp)
    values = config(packed_rope_freqs_layout=layout)
    for lengths in (LENGTHS, [16, 4, 16, 12, 8], LENGTHS):
        cu.copy_(torch.tensor(segments.boundaries(lengths)))
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=cp - 1)
        rows = segments.rows(lengths, layout, cp, cp - 1)
        assert errors(t, grad, freqs, out, rows) <= bound(t, grad)


@pytest.mark.filterwarnings("ignore:megatron-packed-rope.*rotating unfused")
def test_the_cases_that_check_runs_on_a_gpu_are_right_and_wrong_unpatched(rope, monkeypatch):
    outcomes = list(check_rope.run(rope, fusion=True))
    assert [case for case in outcomes if case[1] != "right"] == []
    assert len(outcomes) == len(check_rope.CASES)
    for name in ("apply_rotary_pos_emb", "_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope, name, getattr(rope, name).__packed_rope_original__)
    unpatched = {name: outcome for name, outcome, _ in check_rope.run(rope, fusion=True)}
    assert unpatched["packed freqs, mixed resolution"] == "wrong"
    assert unpatched["tail padding in t and freqs"] == "wrong"
    assert unpatched["mscale 1.2"] == "wrong"
    assert unpatched["table, C=4"] == "right"


# What upstream's wrapper of Transformer Engine cannot express, or drops.


def mla(values, function):
    """How this release is told of MLA's interleaving."""
    values.multi_latent_attention = True
    return accepted(function, mla_rotary_interleaved=True)


def mla_order(x, inverse=False):
    """Even dims, then odd ones, as MLA's rotation reads them."""
    order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
    back = sorted(range(len(order)), key=order.__getitem__)
    return x[..., back if inverse else order]


@pytest.fixture
def warned() -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r31_mscale_is_applied_with_one_warning_in_total(rope, warned, layout):
    for cp, rank in ranks():
        t, grad, freqs, cu = pack(LENGTHS, layout, cp=cp)
        values = config(packed_rope_freqs_layout=layout)
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=rank, mscale=1.2)
        rows = segments.rows(LENGTHS, layout, cp, rank)
        assert errors(t, grad, freqs, out, rows, mscale=1.2) <= bound(t, grad, 1.2)
    assert not transformer_engine.calls
    assert ["mscale" in str(w.message) for w in warned] == [True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r31_mla_interleaving_is_applied_with_one_warning_in_total(rope, warned, layout):
    for cp, rank in ranks():
        t, grad, freqs, cu = pack(LENGTHS, layout, cp=cp, dim=ROTARY)
        values = config(packed_rope_freqs_layout=layout)
        flags = mla(values, rope.apply_rotary_pos_emb)
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=rank, **flags)
        selected = freqs[segments.rows(LENGTHS, layout, cp, rank)]
        expected = segments.rotate(mla_order(t.detach()), selected)
        assert largest(out - expected) <= bound(t, grad)
        (found,) = torch.autograd.grad(out, t, grad)
        expected = mla_order(segments.rotate(grad, selected, inverse=True), inverse=True)
        assert largest(found - expected) <= bound(t, grad)
    assert not transformer_engine.calls
    assert ["MLA" in str(w.message) for w in warned] == [True]


@pytest.mark.parametrize("version", ["2.2.0", "2.20.2"], ids="TE {}".format)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r31_rotary_interleaved_is_applied_fused_where_te_can(rope, te, warned, layout, version):
    te(version)
    for cp, rank in ranks():
        t, grad, freqs, cu = pack(LENGTHS, layout, cp=cp, interleaved=True, tail=2)
        values = config(packed_rope_freqs_layout=layout, rotary_interleaved=True)
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values, cp=cp, rank=rank)
        rows = segments.rows(LENGTHS, layout, cp, rank)
        assert errors(t, grad, freqs, out, rows, interleaved=True) <= bound(t, grad)
    if version == "2.2.0":
        assert not transformer_engine.calls
        assert ["rotary_interleaved" in str(w.message) for w in warned] == [True]
    else:
        assert transformer_engine.calls == {"sbhd": len(ranks())}
        assert not warned


def test_r31_a_wrapper_without_interleaved_goes_unfused(rope, warned, monkeypatch):
    """Apex's function, which 0.12 prefers, and Megatron-Core's own through 0.11."""
    plain = rope.fused_apply_rotary_pos_emb

    def without(t, freqs, transpose_output_memory=False):
        return plain(t, freqs)

    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb", without)
    for _ in range(3):
        t, grad, freqs, cu = pack(LENGTHS, "packed", interleaved=True)
        values = config(packed_rope_freqs_layout="packed", rotary_interleaved=True)
        out = call(rope.apply_rotary_pos_emb, t, freqs, cu, values)
        rows = segments.rows(LENGTHS, "packed")
        assert errors(t, grad, freqs, out, rows, interleaved=True) <= bound(t, grad)
    assert not transformer_engine.calls
    assert len(warned) == 1


def test_r31_all_kinds_together_warn_once(rope, te, warned):
    te("2.2.0")
    t, _, freqs, cu = pack(LENGTHS, "packed", dim=ROTARY)
    values = config(packed_rope_freqs_layout="packed")
    for mscale in (1.2, 1.3):
        call(rope.apply_rotary_pos_emb, t, freqs, cu, values, mscale=mscale)
    flags = mla(values, rope.apply_rotary_pos_emb)
    call(rope.apply_rotary_pos_emb, t, freqs, cu, values, **flags)
    interleaved = config(packed_rope_freqs_layout="packed", rotary_interleaved=True)
    call(rope.apply_rotary_pos_emb, t, freqs, cu, interleaved)
    assert len(warned) == 1


@pytest.mark.parametrize("what", ["mscale", "MLA", "rotary_interleaved"])
def test_r31_unpatched_drops_it_silently(rope, warned, what):
    lengths = [8, 24, 16, 8]
    t, _, freqs, cu = pack(lengths, "per_sequence", dim=ROTARY)
    original = rope.apply_rotary_pos_emb.__packed_rope_original__
    values, keywords = config(), {}
    if what == "mscale":
        keywords["mscale"] = 1.2
    elif what == "MLA":
        keywords = mla(values, original)
    else:
        values.rotary_interleaved = True
    out = call(original, t, freqs, cu, values, **keywords).detach()
    dropped = segments.rotate(t.detach(), freqs[segments.rows(lengths, "per_sequence")])
    takes_it = inspect.signature(rope.fused_apply_rotary_pos_emb_thd).parameters
    if what == "rotary_interleaved" and "interleaved" in takes_it:
        assert largest(out - dropped) > 1
    else:
        assert largest(out - dropped) <= bound(t, t.detach())
    assert not warned


# Through GPTModel.

upstream_may_warn = pytest.mark.filterwarnings(
    "ignore:::megatron.core", "error:megatron-packed-rope"
)
LAYERS = 4
BATCHES = (([4, 12], 1), ([8, 8, 16], 2))
"""Lengths of the segments and seed of two micro-batches."""


def token_by_token(self, query, key, value, *_, **__):
    """An attention that mixes no tokens: a rank's result is its tokens' part of the whole."""
    repeat = query.shape[-2] // key.shape[-2]
    key, value = (x.repeat_interleave(repeat, dim=-2) for x in (key, value))
    return (query * key + value).flatten(-2)


@pytest.fixture(scope="module")
def megatron(rope) -> Iterator[None]:
    """A world of one process, in which models are built and run on the CPU."""
    with (
        warnings.catch_warnings(),
        cpu_shims(),
        one_process(),
        mock.patch.object(SegmentAttention, "forward", token_by_token),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


def micro_batch(lengths, seed):
    """Tokens, mRoPE positions and a gradient of the logits of a whole packed row."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, 64, (1, total), generator=generator)
    positions = torch.randint(0, 40, (3, 1, total), generator=generator)
    return ids, positions, torch.randn(1, total, 64, generator=generator)


class Dense:
    """The whole row as one dense sequence through upstream's own unfused path."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = tiny_gpt("mrope", layers=LAYERS).to(dtype)
        self.outs = []
        for batch in BATCHES:
            ids, positions, gradient = micro_batch(*batch)
            out = self.model(ids, positions, None)
            out.backward(gradient.to(dtype))
            self.outs.append(out.detach())
        self.grads = grads_of(self.model)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def dense(megatron) -> tuple[Dense, float, float]:
    """The reference in float64, and how far float32 is from it in outputs and gradients."""
    exact, single = Dense(torch.float64), Dense(torch.float32)
    out = max(relative(a, b) for a, b in zip(single.outs, exact.outs, strict=True))
    return exact, out, max(relative(single.grads[n], g) for n, g in exact.grads.items())


def relative(found, expected):
    return largest(found - expected) / largest(expected)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, list]]:
    """Row selections that do work, and the freqs that reach the layers."""
    seen: dict[str, list] = {"selections": [], "freqs": []}
    rows = PackedLayout.rows
    embeddings = importlib.import_module("megatron.core.models.common.embeddings")
    forward = embeddings.MultimodalRotaryEmbedding.__call__

    def counted(self, freqs_layout, **keywords):
        selected = rows(self, freqs_layout, **keywords)
        if selected is not None:
            seen["selections"].append(freqs_layout)
        return selected

    def kept(self, *args, **kwargs):
        freqs = forward(self, *args, **kwargs)
        # Of the storage: recomputation works on detached tensors that share it.
        seen["freqs"].append(StorageWeakRef(freqs.untyped_storage()))
        return freqs

    with (
        mock.patch.object(PackedLayout, "rows", counted),
        mock.patch.object(embeddings.MultimodalRotaryEmbedding, "__call__", kept),
    ):
        yield seen


def fused_model(group, cp, **changes):
    settings = {"apply_rope_fusion": True, "context_parallel_size": cp}
    model = tiny_gpt("mrope", layers=LAYERS, config=settings | changes)
    set_cp_group(model, group)
    return model


def forward_of_rank(model, lengths, seed, cp, rank):
    """Logits of a rank's tokens, their gradient, and the PackedSeqParams that were passed."""
    ids, positions, gradient = micro_batch(lengths, seed)
    boundaries = segments.boundaries(lengths)
    mine = zigzag_rows(boundaries, cp, rank)
    params = packed_params(torch.tensor(boundaries, dtype=torch.int32))
    out = model(ids[:, mine], positions, None, packed_seq_params=params)
    return out, gradient[:, mine], params, mine


RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@upstream_may_warn
@pytest.mark.parametrize("changes", [{}, RECOMPUTATION], ids=["stored", "recomputed"])
@pytest.mark.parametrize("cp", [1, 2])
def test_r10_two_micro_batches_in_flight_are_right_and_leave_nothing(dense, changes, cp):
    exact, out_error, grad_error = dense
    total: dict[str, torch.Tensor] = {}
    for rank in range(cp):
        with fake_cp(cp, rank) as group, recorded() as seen:
            model = fused_model(group, cp, **changes)
            transformer_engine.forget()
            flights = [forward_of_rank(model, *batch, cp, rank) for batch in BATCHES]
            # One call for q and one for k of every layer and micro-batch, none of them THD.
            assert transformer_engine.calls == {"sbhd": 2 * LAYERS * len(BATCHES)}
            for (out, _, _, mine), expected in zip(flights, exact.outs, strict=True):
                assert relative(out.detach(), expected[:, mine]) <= 8 * out_error
            params = [weakref.ref(flight[2]) for flight in flights]
            assert [freqs.expired() for freqs in seen["freqs"]] == [False] * len(BATCHES)
            for out, gradient, _, _ in flights:
                out.backward(gradient)
        again = 2 if changes else 1
        assert transformer_engine.calls == {"sbhd": 2 * LAYERS * len(BATCHES) * again}
        # Selected where freqs are made, once per micro-batch, not again by any layer.
        assert seen["selections"] == (["packed"] * len(BATCHES) if cp > 1 else [])
        del flights, out, gradient
        gc.collect()
        assert [ref() for ref in params] == [None] * len(BATCHES)
        assert [freqs.expired() for freqs in seen["freqs"]] == [True] * len(BATCHES)
        for name, grad in grads_of(model).items():
            total[name] = total.get(name, 0) + grad
    assert total.keys() == exact.grads.keys()
    for name, grad in total.items():
        assert relative(grad, exact.grads[name]) <= 8 * grad_error, name


@upstream_may_warn
def test_r14_rows_are_gathered_once_per_micro_batch(megatron):
    with fake_cp(2, 0) as group:
        model = fused_model(group, 2)
        lengths, seed = BATCHES[0]
        transformer_engine.forget()
        ops = count_working_ops(lambda: forward_of_rank(model, lengths, seed, 2, 0))
    assert ops["index_select"] == 1
    assert transformer_engine.calls == {"sbhd": 2 * LAYERS}


@upstream_may_warn
def test_wrong_rows_would_show_in_the_model(dense):
    """The bounds above have teeth: one token's position off by one is far outside them."""
    exact, out_error, _ = dense
    with fake_cp(1, 0) as group:
        model = fused_model(group, 1)
        ids, positions, _ = micro_batch(*BATCHES[0])
        params = packed_params(torch.tensor(segments.boundaries(BATCHES[0][0])))
        positions[0, 0, 7] += 1
        out = model(ids, positions, None, packed_seq_params=params).detach()
    assert relative(out, exact.outs[0]) > 100 * out_error


@upstream_may_warn
def test_unpatched_models_rotate_by_the_wrong_rows(rope, dense):
    exact = dense[0]
    attention = importlib.import_module("megatron.core.transformer.attention")
    original = rope.apply_rotary_pos_emb.__packed_rope_original__
    transformer_engine.forget()
    with (
        fake_cp(1, 0) as group,
        mock.patch.object(attention, "apply_rotary_pos_emb", original),
    ):
        model = fused_model(group, 1)
        out, *_ = forward_of_rank(model, *BATCHES[0], 1, 0)
    assert transformer_engine.calls == {"thd": 2 * LAYERS}
    assert relative(out.detach(), exact.outs[0]) > 0.1


def test_every_report_of_the_fused_path_has_a_test():
    names = " ".join(name for name in globals() if name.startswith("test_r"))
    for report in ("r01", "r09", "r10", "r14", "r15", "r31"):
        assert f"_{report}_" in names
