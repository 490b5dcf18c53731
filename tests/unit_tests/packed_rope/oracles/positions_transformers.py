"""transformers' own get_rope_index on each segment alone, without building a model.

The methods read a few attributes of ``self.config``; a namespace stands in for the model.
"""

from __future__ import annotations

import importlib
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracles import positions_packs as packs
from oracles.positions_packs import Pack, Segment

# family: (module below transformers.models, class with get_rope_index)
MODELS = {
    "qwen2_vl": ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLModel"),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLModel"),
    "qwen3_vl": ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeModel"),
    "qwen3_5": ("qwen3_5.modeling_qwen3_5", "Qwen3_5Model"),
    "glm4v": ("glm4v.modeling_glm4v", "Glm4vModel"),
    "glm4v_moe": ("glm4v_moe.modeling_glm4v_moe", "Glm4vMoeModel"),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe.modeling_ernie4_5_vl_moe", "Ernie4_5_VLMoeModel"),
    "qwen2_5_omni": (
        "qwen2_5_omni.modeling_qwen2_5_omni",
        "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    ),
    "qwen3_omni_moe": (
        "qwen3_omni_moe.modeling_qwen3_omni_moe",
        "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
    ),
}


def stand_in(family: str, tokens_per_second: int | None = None) -> Any:
    """What get_rope_index of ``family`` needs of its model, with the method bound to it."""
    module, name = MODELS[family]
    model = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    vision = SimpleNamespace(
        spatial_merge_size=packs.MERGE, temporal_merge_size=2, tokens_per_second=tokens_per_second
    )
    config = SimpleNamespace(
        vision_config=vision,
        image_token_id=packs.IMAGE,
        video_token_id=packs.VIDEO,
        audio_token_id=packs.AUDIO,
        vision_start_token_id=packs.VISION_START,
        video_start_token_id=packs.VIDEO_START,
        video_end_token_id=packs.VIDEO_END,
        audio_start_token_id=packs.AUDIO_START,
        position_id_per_seconds=tokens_per_second,
        seconds_per_chunk=2,
        audio_config=SimpleNamespace(n_window=50),
    )
    held = SimpleNamespace(config=config, spatial_merge_size=packs.MERGE)
    for method in ("get_rope_index", "get_vision_position_ids", "get_llm_pos_ids_for_vision"):
        if hasattr(model, method):
            setattr(held, method, MethodType(getattr(model, method), held))
    return held


def arguments(pack: Pack, segment: Segment, with_types: bool) -> dict[str, Any]:
    """What get_rope_index is called with; ``with_types`` as transformers 5.x wants it."""
    omni = pack.family in packs.OMNI
    ids = torch.tensor([segment.ids])
    found: dict[str, Any] = {
        "input_ids": ids,
        "image_grid_thw": torch.tensor(segment.images) if segment.images else None,
        "video_grid_thw": torch.tensor(segment.videos) if segment.videos else None,
    }
    if omni:
        found["attention_mask"] = torch.ones_like(ids)
        found["audio_seqlens"] = torch.tensor(segment.audio_lengths)
        found["second_per_grids"] = torch.tensor(segment.seconds)
    elif pack.family == "qwen2_5_vl":
        found["second_per_grid_ts"] = torch.tensor(segment.seconds)
    if with_types and not omni:
        found["mm_token_type_ids"] = torch.tensor([segment.types])
    return found


def positions(pack: Pack, with_types: bool = False) -> Tensor:
    """``[3, T]`` of the whole row, each segment on its own."""
    model = stand_in(pack.family, pack.tokens_per_second)
    found = [
        model.get_rope_index(**arguments(pack, segment, with_types))[0][:, 0]
        for segment in pack.segments
        if segment.ids
    ]
    return torch.cat(found, dim=1)
