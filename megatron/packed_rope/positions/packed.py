"""mRoPE position ids of a packed row, in one vectorised pass.

Suffixes name shapes: T tokens of the row, n segments.

The pass rests on one quantity: by how much each token moves the running counter. A text token
moves it by 1, a media token by nothing, the last token of a media block by what its family says.
The sum of the moves before a token, less the sum before its segment, is the counter it sees.
So text is a medium like any other: blocks of one token that move the counter by 1.
Which medium a media token belongs to, and where in it, follows from its number among the tokens
of its kind: nothing looks for markers such as vision start, or across a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import PackedLayout
from .arguments import (
    check_process_group,
    check_token_ids,
    grids_or_none,
    one_row,
    segment_boundaries,
    time_of_media,
)
from .checks import IMAGE, VIDEO, check_boundaries, check_media
from .families import Family, family_rules
from .media import Media, ends_passed, media_of_row

__all__ = ["packed_position_ids"]


def packed_position_ids(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    family: str,
    image_token_id: int,
    video_token_id: int,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    spatial_merge_size: int = 2,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    tokens_per_second: float | None = None,
    cu_seqlens_padded: Tensor | None = None,
    advance: str = "max",
    mm_token_type_ids: Tensor | None = None,
    cp_group: Any = None,
    cp_layout: str = "zigzag",
) -> Tensor:
    """Position ids of a packed row: number for number those of each segment alone.

    Args:
        input_ids: ``[T]`` or ``[1, T]`` integers, the packed row, or this rank's share of it.
        cu_seqlens: ``[n + 1]`` int32 or int64, the segments' real boundaries in tokens, before
            CP sharding, from 0.
        family: whose rules to count by: the ``model_type`` of the checkpoint's config, such as
            ``"qwen2_vl"``, ``"qwen2_5_vl"``, ``"qwen3_vl"``, ``"qwen3_5"`` (also Qwen3.6),
            ``"glm4v"``; all of them in ``positions.families.FAMILIES``.
        image_token_id, video_token_id: the ids that stand for one merged patch of an image or
            a video. Not read where ``mm_token_type_ids`` is given.
        image_grid_thw, video_grid_thw: ``[n, 3]`` integers, frames, height and width of each
            medium in patches before merging, in the order of the row.
        spatial_merge_size: patches that are merged into one token, along height and width each.
        second_per_grid_ts: ``[videos]`` seconds from one frame of a grid to the next; needed by
            families whose time is in seconds (qwen2_5_vl, the omni ones), not read by others.
            A list is copied to the device; pass a tensor to stay capturable.
        tokens_per_second: positions per second; needed by the same families (their config's
            ``tokens_per_second`` or ``position_id_per_seconds``).
        cu_seqlens_padded: ``[n + 1]``, where segments lie if they are padded: token j of segment
            i is at ``cu_seqlens_padded[i] + j``. The same as ``cu_seqlens`` if not given.
        advance: how far a media block moves the counter. ``"max"``: past its largest position
            on any axis (what the models were trained with: transformers 4.x, vLLM,
            Megatron-Bridge); ``"hw"``: by the larger of its height and width (transformers 5.x).
        mm_token_type_ids: shape of ``input_ids``; 1 for image, 2 for video tokens, else text
            (transformers 5.x). GLM-4.1V and 4.5V rows of transformers 4.57 need them, with 2 for
            image tokens between begin and end of a video.
        cp_group: the CP group, if ``input_ids`` is this rank's share of the row: kinds of tokens
            are gathered from all its ranks, and this rank's share of the positions is returned.
        cp_layout: how segments were cut over ``cp_group``: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        ``[3, 1, T]`` int64 (float32 for families whose time is not rounded: qwen3_omni), axes
        time, height, width. Padding, and tokens past the last boundary, get 1 on all axes.

    Raises:
        PositionIdsError: media tokens do not match the grids; a media block crosses a boundary
            or is interrupted; unknown family; seconds are missing or too many or few.
        SegmentLengthError: boundaries do not fit the row or the CP layout.
        PackedInputError: an argument has the wrong shape, dtype, device or value.

    Errors that depend on values in tensors are typed on CPU, a device-side assert elsewhere.

    The rules are those of ``get_rope_index`` in transformers, family by family (see
    ``positions.families``). Where time is in seconds, f(k) is ``k * second_per_grid_t`` in
    float32, then ``* tokens_per_second``, rounded down: 0.35 s at 25 per second gives 104 for
    k = 12, where transformers 4.57 casts the seconds to integers first. Float positions are
    summed in float64 and rounded once.
    """
    rules = family_rules(family, advance)
    ids_T = one_row("input_ids", input_ids)
    is_image_T, is_video_T = _is_media(ids_T, image_token_id, video_token_id, mm_token_type_ids)
    cu, padded = segment_boundaries(cu_seqlens, cu_seqlens_padded, ids_T)
    images = grids_or_none("image_grid_thw", image_grid_thw, ids_T)
    videos = grids_or_none("video_grid_thw", video_grid_thw, ids_T)
    seconds_m, rate = time_of_media(
        rules, family, second_per_grid_ts, tokens_per_second, images, videos
    )
    media = media_of_row(images, videos, seconds_m, rate, spatial_merge_size, rules, advance)

    cp_size = 1 if cp_group is None else cp_group.size()
    row = _row(cu, padded, ids_T.shape[0] * cp_size, cp_size)
    if cp_size == 1:
        return _positions(is_image_T, is_video_T, row, media, rules)[:, None]
    share = PackedLayout(
        padded,
        num_tokens=ids_T.shape[0],
        cp_size=cp_size,
        cp_rank=cp_group.rank(),
        cp_layout=cp_layout,
    )
    rows_T = share.rows("packed", num_rows=ids_T.shape[0] * cp_size)
    kinds_T = is_image_T.to(torch.uint8) * IMAGE + is_video_T.to(torch.uint8) * VIDEO
    kinds_T = _gather_row(kinds_T, row, cp_group, cp_layout)
    positions_T = _positions(kinds_T == IMAGE, kinds_T == VIDEO, row, media, rules)[:, rows_T]
    is_tail_T = share.segments == cu.shape[0] - 1  # rows of the tail are any that exist
    return torch.where(is_tail_T, 1, positions_T)[:, None]


def _is_media(
    ids_T: Tensor, image_token_id: int, video_token_id: int, mm_token_type_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``[T]`` bool each: image tokens, and video tokens."""
    if mm_token_type_ids is None:
        check_token_ids(ids_T, image_token_id, video_token_id)
        return ids_T == image_token_id, ids_T == video_token_id
    types_T = one_row("mm_token_type_ids", mm_token_type_ids, like=ids_T)
    return types_T == IMAGE, types_T == VIDEO


class _Row(NamedTuple):
    """How the whole row is cut."""

    start: Tensor  # [n + 1] int32 where each segment lies; the last is what is past all of them
    length: Tensor  # [n + 1] int32, padding included; the last is 0
    segment: Tensor  # [T] int32 of each token
    real: Tensor  # [T] bool: neither padding nor past the last boundary


def _row(cu: Tensor, padded: Tensor, num_tokens: int, cp_size: int) -> _Row:
    real_n, length_n = (torch.diff(ends, append=ends[-1:]) for ends in (cu, padded))
    check_boundaries(cu, padded, real_n, length_n, num_tokens, cp_size)
    segment_T = ends_passed(padded[1:], num_tokens)[:-1]
    if padded is cu:  # what is past the last boundary is all that is not real
        real_T = segment_T < cu.shape[0] - 1
    else:
        tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=cu.device)
        real_T = tokens_T < (padded + real_n).int().index_select(0, segment_T)
    return _Row(padded.int(), length_n.int(), segment_T, real_T)


def _gather_row(kinds_T: Tensor, row: _Row, cp_group: Any, cp_layout: str) -> Tensor:
    """Kinds of the whole row from all ranks' shares: the inverse of ``PackedLayout.rows``."""
    check_process_group(cp_group)
    size, share = cp_group.size(), kinds_T.shape[0]
    gathered = torch.empty(size * share, dtype=kinds_T.dtype, device=kinds_T.device)
    # The same collective; newer releases of torch warn about the older of its names.
    gather = getattr(torch.distributed, "all_gather_single", None)
    gather = gather or torch.distributed.all_gather_into_tensor
    gather(gathered, kinds_T.contiguous(), group=cp_group)
    start_T, length_T = (sizes.index_select(0, row.segment) for sizes in (row.start, row.length))
    offset_T = torch.arange(size * share, device=kinds_T.device) - start_T
    chunk_T = length_T // (2 * size if cp_layout == "zigzag" else size)
    chunk_T = chunk_T.clamp(min=1)  # what is past all segments has none
    index_T = offset_T // chunk_T
    # Rank r holds chunk r of each segment and, under zigzag, chunk 2C-1-r right after it.
    rank_T = torch.minimum(index_T, 2 * size - 1 - index_T)
    inside_T = offset_T - (index_T - (index_T >= size).long()) * chunk_T
    source_T = rank_T * share + start_T // size + inside_T
    return gathered[source_T.clamp(0, size * share - 1)]  # the tail may read any token


def _positions(
    is_image_T: Tensor, is_video_T: Tensor, row: _Row, media: Media, rules: Family
) -> Tensor:
    """``[3, T]`` of the whole row.

    int32 until the end, as it takes half the time of int64 on a CPU: sums over the row may wrap
    around, but only their differences within a segment are read.
    """
    # Whatever ids padding has, it is text.
    is_image_T, is_video_T = is_image_T & row.real, is_video_T & row.real
    medium_T, offset_T = _find_media(is_image_T, is_video_T, media)
    block_T = media.block.index_select(0, medium_T)
    inside_T = offset_T
    if rules.splits_videos and media.num_videos:
        inside_T = offset_T - _quotient(offset_T, block_T) * block_T
    check_media(is_image_T, is_video_T, row.segment, medium_T, inside_T, media, rules.splits_videos)
    is_last_T = inside_T == block_T - 1
    counter_T = _counter(torch.where(is_last_T, media.moves.index_select(0, medium_T), 0), row)
    dtype = torch.float32 if rules.float_time else torch.int64
    positions = torch.empty((3, is_image_T.shape[0]), dtype=dtype, device=is_image_T.device)
    for i, axis_T in enumerate(_axes(medium_T, inside_T, media, rules)):
        positions[i] = counter_T + axis_T
    return positions


def _find_media(is_image_T: Tensor, is_video_T: Tensor, media: Media) -> tuple[Tensor, Tensor]:
    """Medium of each token, and the token's index in it; 0 in the last medium for text.

    The media of one kind follow each other in the row as in the grids, so a token's number among
    the tokens of its kind finds both.
    """
    num_tokens = is_image_T.shape[0]
    image_T, video_T = (mask.cumsum(0, dtype=torch.int32) - 1 for mask in (is_image_T, is_video_T))
    number_T = torch.where(is_video_T, video_T + media.start[media.num_images], media.start[-1])
    number_T = torch.where(is_image_T, image_T, number_T).clamp(max=num_tokens)
    medium_T = ends_passed(media.start[1:], num_tokens).index_select(0, number_T)
    return medium_T, number_T - media.start.index_select(0, medium_T)


def _counter(moves_T: Tensor, row: _Row) -> Tensor:
    """The counter that each token sees: moves by the tokens before it in its segment."""
    moved_T = pad(moves_T.cumsum(0, dtype=moves_T.dtype), (1, 0))
    counter_T = moved_T[:-1] - moved_T[row.start].index_select(0, row.segment)
    return torch.where(row.real, counter_T, 1)


def _axes(medium_T: Tensor, inside_T: Tensor, media: Media, rules: Family) -> list[Tensor]:
    """What each token adds to the counter: f(k), y and x; all 0 for text."""
    # index_select takes a quarter of the time of sizes[medium_T] on a CPU
    width_T = media.width.index_select(0, medium_T)
    height_T = media.height.index_select(0, medium_T)
    line_T = _quotient(inside_T, width_T)
    time_T = k_T = _quotient(line_T, height_T)
    y_T, x_T = line_T - k_T * height_T, inside_T - line_T * width_T
    if rules.in_seconds:
        time_T = rules.time(k_T, media.seconds.index_select(0, medium_T), media.rate)
    return [time_T, y_T, x_T]


def _quotient(a_T: Tensor, b_T: Tensor) -> Tensor:
    """``a // b`` of int32, a >= 0, b >= 1, in a quarter of the time that takes on a CPU.

    Exact: a / b is off an integer by at least 1 / b, far more than a float64 is rounded by.
    """
    return (a_T.double() / b_T).int()
