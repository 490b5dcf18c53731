"""Position ids of a packed row: this package against transformers' get_rope_index per segment.

One run, both sides on the same row, so that only ratios matter: 32,768 tokens, 64 segments, 128
images of 4 to 400 tokens each, on a CPU. Prints Markdown.

    python benchmarks/bench_positions.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.packed_rope import packed_position_ids

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit_tests" / "packed_rope"))

from counting import count_working_ops
from oracles import positions_transformers
from oracles.positions_packs import IMAGE, VIDEO, WORDS, Pack, Segment, add_image

TOKENS, SEGMENTS, IMAGES = 32_768, 64, 128


def image_pack(tokens: int, segments: int, images: int) -> Pack:
    """Segments of equal length with as many images each, text in between and behind."""
    rng = random.Random(0)
    pack = Pack("qwen2_vl", [])
    for _ in range(segments):
        segment = Segment()
        pack.segments.append(segment)
        for _ in range(images // segments):
            segment.text(*rng.choices(WORDS, k=8))
            largest = int((tokens / segments / (images / segments) - 16) ** 0.5)
            add_image(segment, rng.randint(1, largest), rng.randint(1, largest))
        segment.text(*rng.choices(WORDS, k=tokens // segments - len(segment.ids)))
    return pack


def packed_call(pack: Pack) -> Callable[[], torch.Tensor]:
    ids = torch.tensor(pack.ids)
    cu_seqlens = torch.tensor(pack.cu_seqlens, dtype=torch.int32)
    grids = torch.tensor(pack.images)

    def call() -> torch.Tensor:
        return packed_position_ids(
            ids,
            cu_seqlens,
            family=pack.family,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            image_grid_thw=grids,
        )[:, 0]

    return call


def transformers_call(pack: Pack) -> Callable[[], torch.Tensor]:
    """The loop that users write: cut the row, call the model's own method on each segment."""
    model = positions_transformers.stand_in(pack.family)
    inputs: list[dict[str, Any]] = [
        positions_transformers.arguments(pack, segment, with_types=False)
        for segment in pack.segments
    ]
    return lambda: torch.cat([model.get_rope_index(**each)[0][:, 0] for each in inputs], dim=1)


def seconds(calls: list[Callable[[], torch.Tensor]], repeats: int) -> list[float]:
    """Median time of each call; calls take turns, so that noise falls on all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, spent in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
    return [statistics.median(spent) for spent in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats

    pack = image_pack(TOKENS, SEGMENTS, IMAGES)
    ours, theirs = packed_call(pack), transformers_call(pack)
    if not torch.equal(ours(), theirs()):
        raise SystemExit("the two do not agree: no figure is worth printing")
    fast, slow = seconds([ours, theirs], repeats)
    few, many = (
        sum(count_working_ops(packed_call(image_pack(TOKENS, n, n))).values()) for n in (8, 800)
    )
    print(
        f"{TOKENS:,} tokens, {SEGMENTS} segments, {IMAGES} images; {platform.machine()}, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}\n"
    )
    print("| | one call | ratio |")
    print("|---|---|---|")
    print(f"| transformers, segment by segment | {slow * 1e3:.1f} ms | 1.0 |")
    print(f"| packed_position_ids | {fast * 1e3:.1f} ms | {slow / fast:.1f} |")
    print("\n| aten operations | 8 segments, 8 images | 800 segments, 800 images |")
    print("|---|---|---|")
    print(f"| packed_position_ids | {few} | {many} |")


if __name__ == "__main__":
    main()
