"""megatron.bridge.models.qwen_vl.modelling_qwen3_vl (and the models built on it, as Qwen3.5-VL).

Given a flat packed row, ``get_rope_index`` of 0.3 takes its segments for rows of a batch and fails;
``forward`` of 0.4 and 0.5 does not tell it of segments, so positions run on through the whole row;
0.6 is right, with a loop and several host reads for each segment and medium.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from .bridge import forward_with_batch, packed_batch, packed_rope_index
from .declarations import argument_reader


def get_rope_index(
    module: ModuleType, original: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Packed rows in one pass; every other call runs the original."""
    given_by = argument_reader(original)

    @functools.wraps(original)
    def get_rope_index(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = given_by(args, kwargs)
        params = packed_batch(given.get("input_ids"), given.get("packed_seq_params"))
        if params is None:
            return original(*args, **kwargs)
        return packed_rope_index(
            given["input_ids"],
            params,
            family="qwen3_vl",
            image_token_id=given["image_token_id"],
            video_token_id=given["video_token_id"],
            image_grid_thw=given.get("image_grid_thw"),
            video_grid_thw=given.get("video_grid_thw"),
            spatial_merge_size=given["spatial_merge_size"],
        )

    return get_rope_index


def forward(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """``Qwen3VLModel.forward`` with its batch in reach of ``get_rope_index``."""
    return forward_with_batch(original)
