"""Position ids of rows that are sharded over real CP groups of 2 and 4 processes.

Run by torchrun with 4 processes. Every rank compares its share with that of the whole row, found by
counting tokens one by one, and rank 0 prints one JSON object: case -> ranks that differ.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracles import positions_packs as packs
from oracles.positions_calls import arguments

from megatron.packed_rope import packed_position_ids

TAIL = 8  # tokens past the last boundary, on all ranks together


def share(boundaries: list[int], total: int, size: int, rank: int, layout: str) -> list[int]:
    """Tokens of the whole row that a rank holds; of the tail, the next ones of a share each."""
    held = []
    for begin, end in itertools.pairwise(boundaries):
        chunk = (end - begin) // (2 * size if layout == "zigzag" else size)
        chunks = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
        for c in chunks:
            held += range(begin + c * chunk, begin + (c + 1) * chunk)
    tail = (total - boundaries[-1]) // size
    held += range(boundaries[-1] + rank * tail, boundaries[-1] + (rank + 1) * tail)
    return held


def padded_row(pack: packs.Pack, multiple: int) -> dict[str, Any]:
    """The pack with every segment padded by image tokens, and a tail of them."""
    ids, types, padded = [], [], [0]
    for segment in pack.segments:
        missing = -len(segment.ids) % multiple
        ids += segment.ids + [packs.IMAGE] * missing
        types += segment.types + [1] * missing
        padded.append(len(ids))
    row = arguments(pack) | {"cu_seqlens_padded": torch.tensor(padded, dtype=torch.int32)}
    row["input_ids"] = torch.tensor([ids + [packs.IMAGE] * TAIL])
    if pack.family in packs.GLM:
        row["mm_token_type_ids"] = torch.tensor([types + [1] * TAIL])
    return row


def differs(family: str, seed: int, size: int, group: Any, layout: str) -> bool:
    row = padded_row(packs.mixed_pack(family, seed), 2 * size)
    whole = packed_position_ids(**row)
    total = row["input_ids"].shape[1]
    held = share(row["cu_seqlens_padded"].tolist(), total, size, group.rank(), layout)
    for name in ("input_ids", "mm_token_type_ids"):
        if name in row:
            row[name] = row[name][:, held]
    before = row["input_ids"].clone()
    found = packed_position_ids(**row, cp_group=group, cp_layout=layout)
    expected = whole[..., held]
    return not (
        found.dtype == expected.dtype
        and torch.equal(found, expected)
        and torch.equal(row["input_ids"], before)
    )


def main() -> None:
    dist.init_process_group("gloo")
    groups = {
        2: [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2],
        4: dist.group.WORLD,
    }
    report = {}
    for size, layout in itertools.product(groups, ("zigzag", "contiguous")):
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_omni_moe"):
            for seed in (3, 20, 40):
                outcome = torch.zeros(4, dtype=torch.int32)
                outcome[dist.get_rank()] = differs(family, seed, size, groups[size], layout)
                dist.all_reduce(outcome)
                report[f"{family}, pack {seed}, C={size}, {layout}"] = outcome.nonzero().tolist()
    if dist.get_rank() == 0:
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
