"""The patched rope_utils of the installed Megatron-Core."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from oracles import segments
from shared_cases import load_cases

from megatron.packed_rope import (
    AmbiguousFreqsLayout,
    PackedInputError,
    PackedRopeError,
    UnknownArgument,
    rotary,
)
from megatron.packed_rope.check.fakes import fake_config as settings

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tensors(tokens, num_rows, *, heads=2, dim=16, rotary_dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    freqs = 50 * torch.randn(num_rows, 1, 1, rotary_dim, generator=generator)
    return t.requires_grad_(), freqs, grad


def both(call, t, grad):
    out = call()
    return out, torch.autograd.grad(out, t, grad)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_eager_is_bit_identical_to_upstreams_arithmetic(rope, dtype, contiguous):
    for interleaved, rotary_dim, mscale in itertools.product((False, True), (16, 10), (1.0, 1.2)):
        t, freqs, grad = tensors(333, 333, heads=3, rotary_dim=rotary_dim, dtype=dtype)
        if not contiguous:
            t = t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        ours = rotary.rotate(t, freqs, interleaved=interleaved, mscale=mscale)
        theirs = rope._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), freqs, rotary_interleaved=interleaved, mscale=mscale
        ).squeeze(1)
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(out, t, grad)[0] for out in (ours, theirs)))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_text_tables_do_not_change_by_a_bit(rope, upstream, cp, cp_size, dtype):
    cu = torch.tensor([0, 8, 32, 40], dtype=torch.int32)  # upstream fails on empty segments
    for rank, interleaved, num_rows in itertools.product(range(cp_size), (False, True), (24, 30)):
        t, freqs, grad = tensors(40 // cp_size, num_rows, dtype=dtype)
        group = cp(rope.apply_rotary_pos_emb, cp_size, rank)
        values = settings(rotary_interleaved=interleaved)

        def theirs(module, t=t, freqs=freqs, values=values, group=group):
            return module.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, **group)

        before = both(lambda theirs=theirs: upstream(theirs), t, grad)
        values.packed_rope_freqs_layout = "per_sequence"
        after = both(lambda theirs=theirs: theirs(rope), t, grad)
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("case", load_cases("rows.json"), ids=str)
def test_shared_cases_through_the_installed_function(rope, cp, case):
    if case.get("cp_layout") == "contiguous" or "start_positions" in case:
        pytest.skip("upstream's function has no argument for it")
    tokens, cu = case["tokens"], torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    num_rows = case.get("freqs_rows", tokens if case["layout"] == "packed_local" else int(cu[-1]))
    t, freqs, grad = tensors(tokens, num_rows)
    values = settings()
    if case["layout"] != "auto":
        values.packed_rope_freqs_layout = case["layout"]
    group = cp(rope.apply_rotary_pos_emb, case["cp"], case["rank"])

    def call():
        return rope.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, **group)

    if "error" in case:
        with pytest.raises(PackedRopeError):
            call()
        return
    out, found = both(call, t, grad)
    real = [i for i, row in enumerate(case["rows"]) if row is not None]
    rows = [case["rows"][i] for i in real]
    bound = segments.tolerance(torch.float32, 10)
    expected = segments.rotate(t.detach()[real], freqs[rows])
    assert (out.detach()[real] - expected).abs().max() < bound
    expected = segments.rotate(grad[real], freqs[rows], inverse=True)
    assert (found[real] - expected).abs().max() < bound
    assert out.isfinite().all()


def test_dense_calls_run_the_original(rope, upstream):
    t = torch.randn(6, 2, 3, 16)
    freqs = torch.randn(6, 1, 1, 16)
    values = settings()

    def call(module):
        group = {}
        if "cp_group" in inspect.signature(module.apply_rotary_pos_emb).parameters:
            group = {"cp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0)}
        return module.apply_rotary_pos_emb(t, freqs, values, **group)

    assert torch.equal(call(rope), upstream(call))


def test_direct_thd_calls_positional_and_by_keyword(rope, cp):
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    t, freqs, _ = tensors(10, 10)
    group = cp(rope._apply_rotary_pos_emb_thd, 1, 0)
    flag = next(
        name
        for name in ("mla_rotary_interleaved", "multi_latent_attention")
        if name in inspect.signature(rope._apply_rotary_pos_emb_thd).parameters
    )
    by_position = rope._apply_rotary_pos_emb_thd(t, cu, freqs, True, False, 1.2, **group)
    by_keyword = rope._apply_rotary_pos_emb_thd(
        t=t,
        cu_seqlens=cu,
        freqs=freqs,
        rotary_interleaved=True,
        mscale=1.2,
        **{flag: False},
        **group,
    )
    expected = rope._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs, rotary_interleaved=True, mscale=1.2
    ).squeeze(1)
    assert torch.equal(by_position, by_keyword)
    assert torch.equal(by_position, expected)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_mla_is_a_table_and_keeps_its_interleaving(rope, upstream, cp, cp_size):
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    t, freqs, grad = tensors(12 // cp_size, 8)
    values = settings(multi_latent_attention=True)
    group = cp(rope.apply_rotary_pos_emb, cp_size, 0)
    if "mla_rotary_interleaved" in inspect.signature(rope.apply_rotary_pos_emb).parameters:
        group["mla_rotary_interleaved"] = None  # the config decides

    def call(module):
        return module.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, mscale=1.3, **group)

    ours, theirs = both(lambda: call(rope), t, grad), both(lambda: upstream(call), t, grad)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    plain = both(lambda: rotary.rotate(t, freqs[:6], mscale=1.3), t, grad) if cp_size == 2 else None
    assert plain is None or not torch.equal(ours[0], plain[0])


def test_mla_interleaving_of_a_padded_row_without_rows_for_the_tail(rope, cp):
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    t, freqs, _ = tensors(12, 10)
    values = settings(multi_latent_attention=True, packed_rope_freqs_layout="packed")
    group = cp(rope.apply_rotary_pos_emb, 1, 0)
    if "mla_rotary_interleaved" in inspect.signature(rope.apply_rotary_pos_emb).parameters:
        group["mla_rotary_interleaved"] = True
    out = rope.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, **group)
    assert out.shape == t.shape
    assert torch.equal(out[10:], t[10:])


def test_r23_a_new_keyword_of_upstreams_caller_is_accepted(rope, cp):
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    t, freqs, _ = tensors(10, 10)
    group = cp(rope.apply_rotary_pos_emb, 1, 0)
    plain = rope.apply_rotary_pos_emb(t, freqs, settings(), cu_seqlens=cu, **group)
    hinted = rope.apply_rotary_pos_emb(t, freqs, settings(), cu_seqlens=cu, max_seqlen=16, **group)
    assert torch.equal(plain, hinted)
    with pytest.raises(UnknownArgument, match="sideways"):
        rope.apply_rotary_pos_emb(t, freqs, settings(), cu_seqlens=cu, sideways=True, **group)


def test_undeclared_mrope_is_read_or_refused_never_guessed(rope, cp):
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    values = settings(mrope_section=[2, 3, 3])
    group = cp(rope.apply_rotary_pos_emb, 2, 0)
    t, freqs, _ = tensors(8, 16)
    out = rope.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, **group)
    rows = segments.rows([8, 8], "packed", 2, 0)
    assert torch.equal(out, rotary.rotate(t, freqs[rows]))
    with pytest.raises(AmbiguousFreqsLayout, match="packed_rope_freqs_layout"):
        rope.apply_rotary_pos_emb(t, freqs[:8], values, cu_seqlens=cu, **group)
    values.packed_rope_freqs_layout = "packed_local"
    out = rope.apply_rotary_pos_emb(t, freqs[:8], values, cu_seqlens=cu, **group)
    assert torch.equal(out, rotary.rotate(t, freqs[:8]))
    values.packed_rope_freqs_layout = "row by row"
    with pytest.raises(PackedInputError, match="row by row"):
        rope.apply_rotary_pos_emb(t, freqs[:8], values, cu_seqlens=cu, **group)


def test_the_config_of_a_text_model_declares_its_table(rope, embedding):
    values = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
    params = SimpleNamespace(max_seqlen_q=7, max_seqlen_kv=9, qkv_format="thd")
    make = embedding.RotaryEmbedding.get_rotary_seq_len
    block = SimpleNamespace(input_tensor=None)
    assert make(None, None, block, torch.zeros(4, 1, 8), values, None) == 4
    assert not hasattr(values, "packed_rope_freqs_layout")
    assert make(None, None, None, None, values, params) == 9
    assert values.packed_rope_freqs_layout == "per_sequence"
    values.packed_rope_freqs_layout = "packed"
    make(None, None, None, None, values, packed_seq_params=params)
    assert values.packed_rope_freqs_layout == "packed", "what the user declared stays"


def test_bound_functions_carry_upstreams_name_and_pickle(rope):
    for name in ("apply_rotary_pos_emb", "_apply_rotary_pos_emb_thd"):
        function = getattr(rope, name)
        assert function.__module__ == rope.__name__
        assert pickle.loads(pickle.dumps(function)) is function
        assert inspect.signature(function) == inspect.signature(function.__packed_rope_original__)


def test_every_holder_has_the_bound_function(rope):
    for name in ("megatron.core.transformer.attention", rope.__name__.rpartition(".")[0]):
        module = importlib.import_module(name)
        assert module.apply_rotary_pos_emb is rope.apply_rotary_pos_emb


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_caller_runs_the_patch(rope, cp, backend):
    torch.compiler.reset()
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    t, freqs, grad = tensors(12, 12)
    values = settings()
    group = cp(rope.apply_rotary_pos_emb, 1, 0)
    if not group:
        pytest.skip("this release reads parallel_state, which cannot be traced")

    def layer(t, freqs, cu):
        return rope.apply_rotary_pos_emb(t, freqs, values, cu_seqlens=cu, **group)

    eager = both(lambda: layer(t, freqs, cu), t, grad)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = both(lambda: compiled(t, freqs, cu), t, grad)
    tolerance = {} if backend == "inductor" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[0], eager[0], **tolerance)
    torch.testing.assert_close(found[1], eager[1], **tolerance)
