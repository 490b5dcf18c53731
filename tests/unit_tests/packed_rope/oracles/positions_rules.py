"""The rules of position ids written out, one token after the other; no code of the product.

Time is computed in float32, as the product promises it: k * seconds, then * tokens_per_second.
"""

from __future__ import annotations

import math

import numpy as np

from oracles.positions_packs import Pack, Run, Segment

WHOLE_FRAMES = {"qwen2_vl", "ernie4_5_vl_moe"}


def frame_time(pack: Pack, run: Run, frame: int) -> float:
    if pack.family in WHOLE_FRAMES:
        return frame
    if pack.tokens_per_second is None or run.kind == 1:
        return 0
    time = np.float32(frame) * np.float32(run.seconds) * np.float32(pack.tokens_per_second)
    return float(time) if pack.family == "qwen3_omni_moe" else math.floor(time)


def segment_positions(pack: Pack, segment: Segment, advance: str) -> list[list[float]]:
    """Three lists: time, height, width of each token of one segment."""
    axes: list[list[float]] = [[], [], []]
    counter = 0
    for run in segment.runs:
        if run.grid is None:
            for _ in run.ids:
                for axis in axes:
                    axis.append(counter)
                counter += 1
            continue
        frames, rows, columns = run.grid
        largest = 0
        for frame in range(frames):
            for row in range(rows):
                for column in range(columns):
                    at = (frame_time(pack, run, frame), row, column)
                    largest = max(largest, *at)
                    for axis, value in zip(axes, at, strict=True):
                        axis.append(counter + value)
        counter += largest + 1 if advance == "max" else max(rows, columns)
    return axes


def positions(pack: Pack, advance: str = "max") -> list[list[float]]:
    """Three lists over the whole row: every segment on its own, one after the other."""
    axes: list[list[float]] = [[], [], []]
    for segment in pack.segments:
        for axis, found in zip(axes, segment_positions(pack, segment, advance), strict=True):
            axis += found
    return axes
