"""megatron.bridge models that borrow get_rope_index from transformers: Qwen2.5-VL and GLM-4.5V.

``__init__`` binds transformers' method to the model, ``forward`` calls it over the whole packed row
(0.3 to 0.5), so positions run on through all segments. Here ``forward`` exchanges that method for
one that knows packed rows, once per model. Bridge 0.6 cuts the row first and calls the method with
one row per segment, which is right and stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..layout import PackedLayout
from ..positions.checks import IMAGE, VIDEO
from .bridge import forward_with_batch, packed_batch, packed_rope_index
from .declarations import argument_reader

_Rules = Callable[[Any, dict[str, Any], Any], dict[str, Any]]


def qwen25_vl_forward(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """``Qwen25VLModel.forward``, its borrowed get_rope_index right for packed rows."""
    return forward_with_batch(original, functools.partial(_exchange, _qwen25_vl_rules))


def glm_45v_forward(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """``GLM45VModel.forward``, its borrowed get_rope_index right for packed rows."""
    return forward_with_batch(original, functools.partial(_exchange, _glm_45v_rules))


def _exchange(rules: _Rules, model: Any) -> None:
    """Put a get_rope_index that knows packed rows in place of transformers' own, if it is."""
    function = getattr(model.get_rope_index, "__func__", None)
    if function is None or hasattr(function, "_packed_rope_rules"):
        return
    if function.__module__.startswith("transformers."):
        model.get_rope_index = MethodType(_knowing_packed_rows(function, rules), model)


@functools.cache
def _knowing_packed_rows(original: Callable[..., Any], rules: _Rules) -> Callable[..., Any]:
    given_by = argument_reader(original)
    # From 5.3, which asks for mm_token_type_ids, transformers moves the counter by height and
    # width alone; a packed row counts as the dense rows of the same run do.
    by_size = "mm_token_type_ids" in inspect.signature(original).parameters

    @functools.wraps(original)
    def get_rope_index(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = given_by((self, *args), kwargs)
        params = packed_batch(given.get("input_ids"))
        if params is None:
            return original(self, *args, **kwargs)
        return packed_rope_index(
            given["input_ids"],
            params,
            image_token_id=self.config.image_token_id,
            video_token_id=self.config.video_token_id,
            image_grid_thw=given.get("image_grid_thw"),
            video_grid_thw=given.get("video_grid_thw"),
            spatial_merge_size=self.config.vision_config.spatial_merge_size,
            advance="hw" if by_size else "max",
            **rules(self.config, given, params),
        )

    get_rope_index._packed_rope_rules = rules
    return get_rope_index


def _qwen25_vl_rules(config: Any, given: dict[str, Any], params: Any) -> dict[str, Any]:
    seconds, videos = given.get("second_per_grid_ts"), given.get("video_grid_thw")
    if seconds is None and videos is not None:
        # As transformers takes them where they are missing.
        seconds = torch.ones(videos.shape[0], dtype=torch.float32, device=videos.device)
    return {
        "family": "qwen2_5_vl",
        "second_per_grid_ts": seconds,
        "tokens_per_second": config.vision_config.tokens_per_second,
    }


def _glm_45v_rules(config: Any, given: dict[str, Any], params: Any) -> dict[str, Any]:
    ids, types = given["input_ids"], given.get("mm_token_type_ids")
    if types is None or types.shape != ids.shape:  # Bridge 0.4 and 0.5 do not pack them
        types = _glm_types(ids, config, params)
    return {"family": "glm4v", "mm_token_type_ids": types}


def _glm_types(ids: Tensor, config: Any, params: Any) -> Tensor:
    """mm_token_type_ids ``[1, T]``, by GLM's markers: frames of a video carry the image token.

    An image token belongs to a video if the last marker before it, in its own segment, begins one.
    """
    ids_T = ids[0]
    num_tokens = ids_T.shape[0]
    padded = getattr(params, "cu_seqlens_q_padded", None)
    padded = (params.cu_seqlens_q if padded is None else padded).to(ids.device)
    segment_T = PackedLayout(padded, num_tokens=num_tokens).segments
    tokens_T = torch.arange(num_tokens, device=ids.device)

    def last_T(marker: int) -> Tensor:
        return torch.where(ids_T == marker, tokens_T, -1).cummax(0).values

    begin_T = last_T(config.video_start_token_id)
    in_video_T = (begin_T > last_T(config.video_end_token_id)) & (begin_T >= padded[segment_T])
    is_image_T, is_video_T = ids_T == config.image_token_id, ids_T == config.video_token_id
    types_T = is_image_T * IMAGE
    return torch.where(is_video_T | (is_image_T & in_video_T), VIDEO, types_T)[None]
