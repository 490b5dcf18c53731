"""A tiny vision-language model: a vision tower of transformers feeding Megatron-Core's GPTModel.

What a training framework has to do for packed (THD) batches is in ``forward``: position ids of the
whole row by ``packed_position_ids``, ``PackedSeqParams``, and the embeddings of this context
parallel rank. The rotary embedding itself is Megatron-Core's own; patched, it is right.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from data import IMAGE, MERGE, VIDEO, VISION_START, VOCABULARY, PackedRow, Sample
from torch import Tensor, nn

from megatron.packed_rope import PackedLayout, packed_position_ids
from megatron.packed_rope.check.model import tiny_gpt

HIDDEN = 64
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SECONDS_PER_GRID, TOKENS_PER_SECOND = 1.0, 2  # time of Qwen2.5-VL videos


def vision_tower(family: str) -> nn.Module:
    """The family's tower, random and small: depth 2, patches of 2 x 2 x 2 pixels."""
    small: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 2}
    small |= {"spatial_merge_size": MERGE, "attn_implementation": "sdpa"}
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "qwen2_vl":
        config = configs.Qwen2VLVisionConfig(embed_dim=32, mlp_ratio=2, hidden_size=HIDDEN, **small)
        return models.Qwen2VisionTransformerPretrainedModel(config)
    small |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": HIDDEN}
    if family == "qwen2_5_vl":
        windows = {"window_size": 8, "fullatt_block_indexes": [1]}
        config = configs.Qwen2_5_VLVisionConfig(**windows, **small)
        return models.Qwen2_5_VisionTransformerPretrainedModel(config)
    # Without deepstack, which has nothing to do with positions.
    config = configs.Qwen3VLVisionConfig(
        num_position_embeddings=64, deepstack_visual_indexes=[], **small
    )
    return models.Qwen3VLVisionModel(config)


class VisionLanguageModel(nn.Module):
    """Tower, then GPTModel with mRoPE; the same weights for the same seed at any CP size."""

    def __init__(self, family: str, cp_size: int = 1, cp_rank: int = 0) -> None:
        super().__init__()
        self.family, self.cp_size, self.cp_rank = family, cp_size, cp_rank
        torch.manual_seed(0)
        self.vision = vision_tower(family)
        config = {"context_parallel_size": cp_size}
        if family == "qwen3_vl":
            config["interleaved_mrope"] = True
        self.language = tiny_gpt("mrope", vocabulary=VOCABULARY, sequence=1024, config=config)

    def forward(self, packed: PackedRow) -> Tensor:
        """Logits ``[T, vocabulary]`` of this rank's tokens."""
        row, padded = packed.row, packed.cu_seqlens_padded
        seconds = torch.full((len(row.video_grids),), SECONDS_PER_GRID)
        position_ids = packed_position_ids(
            row.input_ids,
            packed.cu_seqlens,
            cu_seqlens_padded=padded,
            family=self.family,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_grid_thw=row.image_grids,
            video_grid_thw=row.video_grids,
            spatial_merge_size=MERGE,
            second_per_grid_ts=seconds,
            tokens_per_second=TOKENS_PER_SECOND,
        )
        params = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=int(padded.diff().max()),
            max_seqlen_kv=int(padded.diff().max()),
        )
        mine = self.tokens_of_rank(packed)
        embeddings = self._embed(row)[mine]
        return self._decode(row.input_ids[mine], embeddings, position_ids, params)

    def tokens_of_rank(self, packed: PackedRow) -> Tensor:
        """``[T]`` index in the row of each token that this rank holds."""
        total = len(packed.row.input_ids)
        if self.cp_size == 1:
            return torch.arange(total)
        layout = PackedLayout(
            packed.cu_seqlens_padded,
            num_tokens=total // self.cp_size,
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
        )
        return layout.rows("packed")

    def unpacked(self, sample: Sample) -> Tensor:
        """``[L, vocabulary]`` of one sample alone, dense, its positions by transformers."""
        position_ids = reference_position_ids(self.family, sample)
        return self._decode(sample.input_ids, self._embed(sample), position_ids, None)

    def _embed(self, row: Sample) -> Tensor:
        """``[T, 1, hidden]``: the words' embeddings, those of media tokens from the tower."""
        embeddings = self.language.embedding(row.input_ids[None], position_ids=None)
        for token, patches, grids in (
            (IMAGE, row.image_patches, row.image_grids),
            (VIDEO, row.video_patches, row.video_grids),
        ):
            if len(grids):
                features = self.vision(patches.to(embeddings.dtype), grids)
                features = features[0] if isinstance(features, tuple) else features
                places = (row.input_ids == token).nonzero()[:, 0]
                embeddings = embeddings.index_copy(0, places, features[:, None])
        return embeddings

    def _decode(self, ids: Tensor, embeddings: Tensor, position_ids: Tensor, params: Any) -> Tensor:
        logits = self.language(
            input_ids=ids[None],
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=embeddings,
            packed_seq_params=params,
        )
        return logits[0]


def reference_position_ids(family: str, sample: Sample) -> Tensor:
    """``[3, 1, L]`` of one sample by the family's own ``get_rope_index``."""
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}
    count = getattr(models, names.get(family, "Qwen3VLModel")).get_rope_index
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND)
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens["vision_start_token_id"] = VISION_START
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision, **tokens))
    images, videos = (
        grids if len(grids) else None for grids in (sample.image_grids, sample.video_grids)
    )
    extra = {}
    if family == "qwen2_5_vl" and videos is not None:
        extra["second_per_grid_ts"] = torch.full((len(videos),), SECONDS_PER_GRID)
    return count(model, sample.input_ids[None], images, videos, **extra)[0]
