"""mRoPE angles against the text rotary of transformers, for both orders of the sections."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from megatron.packed_rope.replacements.rotary_pos_embedding import mrope_freqs

HEAD_DIM, TOKENS = 128, 96


def ours(positions, rotary, section, stride3):
    freqs = mrope_freqs(
        positions,
        rotary.inv_freq,
        section,
        interpolation=None,
        interleaved_pairs=False,
        interleaved_sections=stride3,
    )
    return freqs[:, 0, 0].cos(), freqs[:, 0, 0].sin()


def rotary_of(module, name, config_name, section):
    config = getattr(module, config_name)(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        rope_scaling={"rope_type": "default", "type": "mrope", "mrope_section": section},
    )
    return getattr(module, name)(config)


@pytest.mark.parametrize("section", [[16, 24, 24], [24, 20, 20]])
@pytest.mark.parametrize(
    ("module", "prefix"),
    [(modeling_qwen2_vl, "Qwen2VL"), (modeling_qwen2_5_vl, "Qwen2_5_VL")],
    ids=["qwen2_vl", "qwen2_5_vl"],
)
def test_sections_in_order(module, prefix, section):
    rotary = rotary_of(module, f"{prefix}RotaryEmbedding", f"{prefix}TextConfig", section)
    positions = torch.randint(0, 3000, (3, 1, TOKENS))
    cos, sin = rotary(torch.zeros(1), positions)
    picked = [
        torch.cat([part[i % 3] for i, part in enumerate(x.split(section * 2, dim=-1))], dim=-1)[0]
        for x in (cos, sin)
    ]
    for mine, theirs in zip(ours(positions, rotary, section, False), picked, strict=True):
        # One rounding of an angle of up to 3,000 radians in float32 is 1.2e-4.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2.5e-4)
        assert (mine - theirs).abs().median() < 1e-6


@pytest.mark.parametrize("section", [[24, 20, 20], [22, 21, 21]])
def test_sections_in_stride_3(section):
    rotary = rotary_of(
        modeling_qwen3_vl, "Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", section
    )
    positions = torch.randint(0, 3000, (3, 1, TOKENS))
    cos, sin = rotary(torch.zeros(1), positions)
    for mine, theirs in zip(ours(positions, rotary, section, True), (cos[0], sin[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2.5e-4)
        assert (mine - theirs).abs().median() < 1e-6
