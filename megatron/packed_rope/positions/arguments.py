"""Arguments of packed_position_ids: shapes, dtypes and devices; no value in a tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import PackedInputError, PositionIdsError
from .families import Family

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def one_row(name: str, ids: Tensor, like: Tensor | None = None) -> Tensor:
    """``[T]`` from ``[T]`` or ``[1, T]`` integers; as many as, and where, ``like`` is."""
    if not isinstance(ids, Tensor):
        raise PackedInputError(f"{name}: {type(ids).__name__}; expected a tensor.")
    if ids.dim() not in (1, 2) or (ids.dim() == 2 and ids.shape[0] != 1):
        raise PackedInputError(
            f"{name} has shape {tuple(ids.shape)}; expected [T] or [1, T], one packed row. Rows of "
            "a dense batch go to the model's own get_rope_index."
        )
    _check_dtype(name, ids, _INTEGERS)
    if like is not None:
        if ids.numel() != like.numel():
            raise PackedInputError(
                f"{name} has {ids.numel()} entries for {like.numel()} tokens of input_ids; "
                "expected one for each."
            )
        _check_device(name, ids, like)
    return ids.reshape(-1)


def check_token_ids(ids_T: Tensor, image_token_id: int, video_token_id: int) -> None:
    """Two different integers that the dtype of the ids can hold (a comparison would wrap)."""
    for name, value in (("image_token_id", image_token_id), ("video_token_id", video_token_id)):
        if not isinstance(value, Integral):  # NumPy's too
            raise PackedInputError(
                f"{name} is {value!r}; expected an integer (-1 for a kind that the model lacks)."
            )
        if value > torch.iinfo(ids_T.dtype).max:
            raise PackedInputError(
                f"{name} is {value}, which input_ids of {ids_T.dtype} cannot hold; expected int64."
            )
    if image_token_id == video_token_id:
        raise PackedInputError(
            f"image_token_id and video_token_id are both {image_token_id}; pass mm_token_type_ids "
            "where ids do not tell images from videos."
        )


def grids_or_none(name: str, grid_thw: Tensor | None, like: Tensor) -> Tensor:
    """``[n, 3]`` int64 on the device of ``like``; no rows where there are no such media."""
    if grid_thw is None:
        return torch.empty((0, 3), dtype=torch.int64, device=like.device)
    if not isinstance(grid_thw, Tensor) or grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        raise PackedInputError(
            f"{name}: {_found(grid_thw)}; expected a tensor [n, 3], for each medium in the order "
            "of the packed row its frames, height and width in patches before merging."
        )
    _check_dtype(name, grid_thw, _INTEGERS)
    _check_device(name, grid_thw, like)
    return grid_thw.long()


def segment_boundaries(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Real and physical boundaries, ``[n + 1]`` int64 each, n >= 1."""
    found = []
    for name, ends in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if ends is None and found:
            return found[0], found[0]
        if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.shape[0] < 2:
            raise PackedInputError(
                f"{name}: {_found(ends)}; expected a tensor [n + 1], the boundaries of n >= 1 "
                "segments from 0 (an empty pack is [0, 0])."
            )
        _check_dtype(name, ends, (torch.int32, torch.int64))
        _check_device(name, ends, like)
        found.append(ends.long())
    if found[0].shape != found[1].shape:
        raise PackedInputError(
            f"cu_seqlens_padded has {found[1].shape[0]} entries, cu_seqlens {found[0].shape[0]}; "
            "expected the same segments in both."
        )
    return found[0], found[1]


def check_process_group(cp_group: Any) -> None:
    if not isinstance(cp_group, torch.distributed.ProcessGroup):
        raise PackedInputError(
            f"cp_group of size {cp_group.size()} is a {type(cp_group).__name__}; expected a "
            "torch.distributed.ProcessGroup, to gather the row from its ranks."
        )


def time_of_media(
    rules: Family,
    family: str,
    seconds: Tensor | Sequence[float] | None,
    rate: float | None,
    images: Tensor,
    videos: Tensor,
) -> tuple[Tensor, float]:
    """``[images + videos]`` float32 seconds from frame to frame, and positions per second.

    Ones where the family does not count in seconds.
    """
    num_images, num_videos, device = images.shape[0], videos.shape[0], images.device
    if not rules.in_seconds:
        return torch.ones(num_images + num_videos, dtype=torch.float32, device=device), 1.0
    of_images = torch.full((num_images,), rules.image_seconds, dtype=torch.float32, device=device)
    if seconds is None:
        if num_videos:
            raise PositionIdsError(
                f"second_per_grid_ts is missing for the {num_videos} videos of video_grid_thw; "
                f"family {family!r} needs the seconds from one frame of a grid to the next for "
                "each, as its processor returns them."
            )
        seconds = ()
    if rate is None:
        if num_videos or (num_images and rules.image_seconds):
            raise PositionIdsError(
                f"tokens_per_second is missing; family {family!r} needs it to turn seconds into "
                "positions: its config's tokens_per_second or position_id_per_seconds."
            )
        rate = 1.0
    if not isinstance(seconds, Tensor):
        seconds = torch.tensor(seconds, dtype=torch.float32, device=images.device)
    if seconds.dim() != 1 or seconds.shape[0] != num_videos:
        raise PositionIdsError(
            f"second_per_grid_ts: {_found(seconds)}; expected ({num_videos},), one entry for each "
            "video of video_grid_thw."
        )
    if seconds.dtype == torch.bool or seconds.is_complex():
        raise PackedInputError(f"second_per_grid_ts is {seconds.dtype}; expected real numbers.")
    _check_device("second_per_grid_ts", seconds, images)
    return torch.cat((of_images, seconds.float())), rate


def _found(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_dtype(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if value.dtype not in dtypes:
        wanted = "integers" if dtypes is _INTEGERS else "torch.int32 or torch.int64"
        raise PackedInputError(f"{name} is {value.dtype}; expected {wanted}.")


def _check_device(name: str, value: Tensor, like: Tensor) -> None:
    if value.device != like.device:
        raise PackedInputError(
            f"{name} is on {value.device}, input_ids on {like.device}; expected one device."
        )
