"""Position ids of a packed row against the loops of transformers and Megatron-Bridge, on a CPU.

    python benchmarks/bench_positions.py [--repeats 15] [--out FILE]

32,768 tokens, 64 segments, 128 images, the same row for all. Every figure is a ratio of medians
measured alternately in one process, so that the machine's noise hits all sides; operations are
counted, which noise cannot touch. Prints Markdown, and writes it where --out says.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/unit_tests/packed_rope"), str(ROOT / "tools"), str(ROOT)]

import bridge_process  # noqa: E402
import wheels  # noqa: E402
from counting import count_operations  # noqa: E402
from oracles import positions_transformers  # noqa: E402
from oracles.positions_packs import IMAGE, VIDEO, WORDS, Pack, Segment, add_image  # noqa: E402

from megatron.packed_rope import packed_position_ids  # noqa: E402

TOKENS, SEGMENTS, IMAGES = 32_768, 64, 128
BRIDGE, CORE = "0.6.2", "0.16.1"
OURS, TRANSFORMERS = "packed_position_ids", "transformers, segment by segment"
LOOP = f"Megatron-Bridge {BRIDGE}, told of the segments"


def image_pack(tokens: int, segments: int, images: int) -> Pack:
    """Segments of equal length with as many images each, text in between and behind."""
    rng = random.Random(0)
    pack = Pack("qwen3_vl", [])
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
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    return lambda: packed_position_ids(
        ids, cu_seqlens, family=pack.family, image_grid_thw=grids, **tokens
    )[:, 0]


def transformers_call(pack: Pack) -> Callable[[], torch.Tensor]:
    """The loop that users write: cut the row, call the model's own method on each segment."""
    model = positions_transformers.stand_in(pack.family)
    inputs: list[dict[str, Any]] = [
        positions_transformers.arguments(pack, segment, with_types=False)
        for segment in pack.segments
    ]
    return lambda: torch.cat([model.get_rope_index(**each)[0][:, 0] for each in inputs], dim=1)


def bridge_call(pack: Pack) -> Callable[[], torch.Tensor]:
    """Bridge's own get_rope_index, which loops over the segments of a flat row from 0.6 on."""
    trees = (wheels.tree(BRIDGE, "megatron-bridge"), wheels.tree(CORE))
    sys.path[:0] = [str(tree) for tree in trees]
    bridge_process.bypass_packages()
    index = bridge_process.Qwen3VL().index
    ids, grids = bridge_process.row(pack), bridge_process.grids(pack)
    params = bridge_process.packed_seq_params(pack.cu_seqlens)
    return lambda: index(ids, packed_seq_params=params, **grids)[0][:, 0]


def medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def report(repeats: int) -> str:
    torch.set_num_threads(1)  # tensors are small, and collators run one thread a process
    pack = image_pack(TOKENS, SEGMENTS, IMAGES)
    calls = {
        TRANSFORMERS: transformers_call(pack),
        LOOP: bridge_call(pack),
        OURS: packed_call(pack),
    }
    if not all(torch.equal(call(), calls[OURS]()) for call in calls.values()):
        raise SystemExit("the positions do not agree: no figure is worth printing")
    times = medians(calls, repeats)
    rows = {n: count_operations(packed_call(image_pack(TOKENS, n, n))) for n in (8, 800)}
    lines = [
        f"# Position ids of a packed row, {datetime.date.today()}",
        "",
        f"{processor()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}. "
        f"`python benchmarks/bench_positions.py`. {TOKENS:,} tokens, {SEGMENTS} segments, {IMAGES} "
        f"images, family `{pack.family}`; medians of {repeats} calls that take turns. Same numbers "
        "from all three.",
        "",
        "| | times the time of `packed_position_ids` |",
        "|---|---|",
        *(f"| {name} | {times[name] / times[OURS]:.1f} |" for name in (TRANSFORMERS, LOOP)),
        "",
        "| `packed_position_ids` on | working operations | of them host reads |",
        "|---|---|---|",
        *(
            f"| {n} segments, {n} images | {operations} | {reads} |"
            for n, (operations, reads) in rows.items()
        ),
        "",
        "Host reads are those of the value checks on a CPU, which name what is wrong; on a CUDA "
        "device the checks are device-side asserts and there are none.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    arguments = parser.parse_args()
    text = report(arguments.repeats)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
