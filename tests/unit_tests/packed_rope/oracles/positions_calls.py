"""packed_position_ids called on a pack of ``positions_packs``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.packed_rope import packed_position_ids
from oracles import positions_packs as packs
from oracles.positions_packs import Pack


def arguments(pack: Pack, device: str = "cpu") -> dict[str, Any]:
    """All tensors, none of them None; GLM rows by mm_token_type_ids (see the docstring)."""
    with torch.device(device):
        found = {
            "input_ids": torch.tensor(pack.ids, dtype=torch.int64),
            "cu_seqlens": torch.tensor(pack.cu_seqlens, dtype=torch.int32),
            "family": pack.family,
            "image_token_id": packs.IMAGE,
            "video_token_id": packs.VIDEO,
            "image_grid_thw": torch.tensor(pack.images, dtype=torch.int64).reshape(-1, 3),
            "video_grid_thw": torch.tensor(pack.videos, dtype=torch.int64).reshape(-1, 3),
        }
        if pack.family in packs.SECONDS:
            found["second_per_grid_ts"] = torch.tensor(pack.seconds, dtype=torch.float32)
            found["tokens_per_second"] = pack.tokens_per_second
        if pack.family in packs.GLM:
            found["mm_token_type_ids"] = torch.tensor(pack.types, dtype=torch.int32)
    return found


def positions(pack: Pack, **changes: Any) -> Tensor:
    """``[3, T]``."""
    return packed_position_ids(**(arguments(pack) | changes))[:, 0]
