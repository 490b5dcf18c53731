"""What the media of a packed row look like in tokens.

Suffix m: media, images first, then videos, and last, as one more, text: blocks of one token that
move the counter by 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import check_grids
from .families import Family


class Media(NamedTuple):
    """Sizes of each medium; int32 but for the grids as given, and the seconds."""

    grids: Tensor  # [m - 1, 3]
    num_images: int
    start: Tensor  # [m] tokens of all media before it
    height: Tensor  # [m] rows of tokens in a frame
    width: Tensor  # [m] tokens in a row
    block: Tensor  # [m] tokens in a block: all frames, or one where videos split
    moves: Tensor  # [m] how far a block moves the counter (float64 for float time)
    seconds: Tensor  # [m] float32, from frame to frame
    rate: float  # positions per second

    @property
    def num_videos(self) -> int:
        return self.grids.shape[0] - self.num_images


def media_of_row(
    images: Tensor,
    videos: Tensor,
    seconds_m: Tensor,
    rate: float,
    merge: int,
    rules: Family,
    advance: str,
) -> Media:
    grids, num_images = torch.cat((images, videos)), images.shape[0]
    frames_m = torch.cat((images[:, 0], videos[:, 0] // rules.temporal_merge))
    times_m = frames_m * seconds_m * rate
    check_grids(grids, num_images, frames_m, times_m, merge, rules.temporal_merge)
    # At least 1, so that no integer is divided by 0 where a device-side assert stops grids of 0.
    frames_m, heights_m, widths_m = (
        pad(sizes.clamp(min=1), (0, 1), value=1).int()
        for sizes in (frames_m, grids[:, 1] // merge, grids[:, 2] // merge)
    )
    seconds_m = pad(seconds_m, (0, 1))
    frame_m = heights_m * widths_m
    tokens_m = frames_m * frame_m
    if rules.splits_videos:  # frames of a block from here on
        frames_m = pad(frames_m[:num_images], (0, videos.shape[0] + 1), value=1)
    block_m = frames_m * frame_m
    moves_m = torch.maximum(heights_m, widths_m)
    if advance == "max":
        last_m = rules.time(frames_m - 1, seconds_m, rate)
        moves_m = torch.maximum(moves_m, last_m + 1)
    start_m = tokens_m.cumsum(0, dtype=torch.int32) - tokens_m
    return Media(grids, num_images, start_m, heights_m, widths_m, block_m, moves_m, seconds_m, rate)


def ends_passed(ends: Tensor, num_places: int) -> Tensor:
    """``[num_places + 1]`` int32: how many of the ascending ``ends`` are at or before each place.

    So, which of the runs that end there a place is in. A mark at each end and a cumulative sum
    take a fifth of the time of a binary search on a CPU.
    """
    marks = torch.zeros(num_places + 1, dtype=torch.int32, device=ends.device)
    marks.index_add_(0, ends.clamp(0, num_places), torch.ones_like(ends, dtype=torch.int32))
    return marks.cumsum(0, dtype=torch.int32)
