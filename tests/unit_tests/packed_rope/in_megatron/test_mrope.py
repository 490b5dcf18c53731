"""mRoPE through the installed, patched GPTModel and its embedding."""

from __future__ import annotations

import functools
import importlib
import itertools
import warnings

import pytest
import torch

from megatron.packed_rope.check import gpt
from megatron.packed_rope.check.fakes import accepted, fake_config, fake_cp
from megatron.packed_rope.check.model import (
    cpu_shims,
    freqs_of_model,
    one_process,
    packed_params,
    tiny_gpt,
    zigzag_rows,
)
from megatron.packed_rope.errors import AmbiguousFreqsLayout, PackedInputError

BOUNDARIES = [0, 4, 12]


@pytest.fixture(autouse=True)
def on_cpu(rope, embedding):
    if not hasattr(embedding, "MultimodalRotaryEmbedding"):
        pytest.skip("this release has no mRoPE")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cpu_shims(), one_process():
            yield


@functools.cache
def has_dynamic_cp() -> bool:
    params = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
    return "cp_group" in params.__dataclass_fields__


@pytest.mark.parametrize("kind", ["mrope", "rope"])
@pytest.mark.parametrize(("static", "batch"), list(itertools.product((1, 2, 4), repeat=2)))
def test_dynamic_cp_reads_the_rows_of_the_batchs_own_group(kind, static, batch):
    if not has_dynamic_cp():
        pytest.skip("this release has no dynamic context parallelism")
    case = gpt.ModelCase("", [0, 8, 24], kind, cp=batch, static_cp=static)
    _, outcome, detail = gpt._run_case(case)
    assert outcome == "right", detail


def embed(embedding, **changes):
    made = embedding.MultimodalRotaryEmbedding(
        kv_channels=16, rotary_percent=1.0, rotary_base=10000, **changes
    )
    return made, torch.randint(0, 50, (3, 1, 12))


def test_a_direct_caller_gets_all_rows_uncut_for_packed_seq(embedding):
    made, positions = embed(embedding)
    whole = made(positions, gpt.SECTION)
    with fake_cp(2, 1) as group:
        uncut = made(positions, gpt.SECTION, cp_group=group, packed_seq=True)
        cut = made(positions, gpt.SECTION, cp_group=group)
    assert torch.equal(uncut, whole)
    assert torch.equal(cut, whole[[3, 4, 5, 6, 7, 8]])


def test_dense_rows_are_upstreams_bit_for_bit(embedding):
    made, positions = embed(embedding)
    original = type(made).forward.__packed_rope_original__
    assert torch.equal(made(positions, gpt.SECTION), original(made, positions, gpt.SECTION))


def test_any_legal_section_in_either_order(embedding):
    made = embedding.MultimodalRotaryEmbedding(
        kv_channels=128, rotary_percent=1.0, rotary_base=10000
    )
    positions = torch.randint(0, 50, (3, 1, 12))
    assert made(positions, [24, 20, 20]).shape == (12, 1, 1, 128)
    with pytest.raises(PackedInputError, match=r"mrope_section \[24, 20\]"):
        made(positions, [24, 20])


def test_positions_above_256_survive_a_bfloat16_model(embedding):
    made, _ = embed(embedding)
    positions = torch.tensor([257, 1001, 30001]).expand(3, 1, 3)
    expected = made(positions, gpt.SECTION)
    assert torch.equal(made.to(torch.bfloat16)(positions, gpt.SECTION)[..., 0], expected[..., 0])


def batch(positions, mine, **changes):
    params = packed_params(torch.tensor(BOUNDARIES, dtype=torch.int32), **changes)
    ids = torch.zeros(1, len(mine), dtype=torch.long)
    return {"input_ids": ids, "position_ids": positions, "packed_seq_params": params}


def test_the_first_micro_batch_does_not_show_in_the_second():
    """Interleaved micro-batches, as a pipeline schedule runs them."""
    model = tiny_gpt("mrope")
    positions = [torch.randint(0, 50, (3, 1, 12)) for _ in range(2)]
    one, two = (freqs_of_model(model, **batch(p, range(12))) for p in positions)
    assert torch.equal(freqs_of_model(model, **batch(positions[0], range(12))), one)
    assert not torch.equal(one, two)
    assert not hasattr(model.rotary_pos_emb, "_packed_rope_call")


def test_packed_seq_params_with_sbhd_tensors_are_left_alone():
    model = tiny_gpt("mrope")
    positions = torch.randint(0, 50, (3, 1, 12))
    sbhd = freqs_of_model(model, **batch(positions, range(12), qkv_format="sbhd"))
    dense = batch(positions, range(12)) | {"packed_seq_params": None}
    assert torch.equal(sbhd, freqs_of_model(model, **dense))
    assert getattr(model.config, "packed_rope_freqs_layout", None) is None


def test_ids_that_fit_neither_the_row_nor_the_share_are_refused():
    with fake_cp(2, 0) as group:
        model = tiny_gpt("mrope", config={"context_parallel_size": 2})
        gpt.set_cp_group(model, group)
        mine = zigzag_rows(BOUNDARIES, 2, 0)
        with pytest.raises(PackedInputError, match=r"expected the whole row \(12\)"):
            freqs_of_model(model, **batch(torch.zeros(3, 1, 9), mine))


def test_an_embedding_with_a_forward_of_its_own_is_said_once_at_cp_size_2(embedding):
    class Own(embedding.MultimodalRotaryEmbedding):
        def forward(self, position_ids, mrope_section, cp_group=None, **_):
            return torch.zeros(position_ids.shape[-1] // 2, 1, 1, 16)

    with fake_cp(2, 0) as group:
        model = tiny_gpt("mrope", config={"context_parallel_size": 2})
        gpt.set_cp_group(model, group)
        model.rotary_pos_emb.__class__ = Own
        mine = zigzag_rows(BOUNDARIES, 2, 0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                freqs_of_model(model, **batch(torch.zeros(3, 1, 12), mine))
    ours = [str(w.message) for w in said if "packed-rope" in str(w.message)]
    assert len(ours) == 1
    assert "Own has a forward of its own" in ours[0]
    assert "packed_rope_freqs_layout" in ours[0]


def test_undeclared_mrope_freqs_that_can_be_read_in_two_ways_raise(rope):
    config = fake_config(mrope_section=gpt.SECTION)
    cu = torch.tensor([0, 4, 8])
    t, freqs = torch.randn(4, 2, 16), torch.randn(4, 1, 1, 16)
    with fake_cp(2, 0) as group:
        takes = accepted(rope.apply_rotary_pos_emb, cp_group=group)
        with pytest.raises(AmbiguousFreqsLayout, match="packed_rope_freqs_layout"):
            rope.apply_rotary_pos_emb(t, freqs, config, cu_seqlens=cu, **takes)
        config.packed_rope_freqs_layout = "packed_local"
        rope.apply_rotary_pos_emb(t, freqs, config, cu_seqlens=cu, **takes)
