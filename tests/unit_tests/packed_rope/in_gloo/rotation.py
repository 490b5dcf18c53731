"""q and k of a packed mRoPE batch on real CP groups of 1, 2 and 4 processes, against float64.

Run by torchrun with 4 processes; the release on the path is run as it is, then bound in process.
Rank 0 prints one JSON object: state -> CP size -> largest difference (output, gradient), or the
error.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

warnings.simplefilter("ignore")

from megatron.packed_rope.check import gpt, oracle  # noqa: E402
from megatron.packed_rope.check.fakes import accepted  # noqa: E402
from megatron.packed_rope.check.model import (  # noqa: E402
    cpu_shims,
    freqs_of_model,
    one_process,
    packed_params,
    tiny_gpt,
    zigzag_rows,
)

PACKS = ([0, 16, 32], [0, 8, 8, 32, 40])


class Pack:
    """What every rank of the group knows of a packed row: positions, q, k and their gradients."""

    def __init__(self, boundaries: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(boundaries))
        tokens = boundaries[-1]
        self.boundaries = boundaries
        self.positions = torch.randint(0, 50, (3, 1, tokens), generator=generator)
        self.qk = [torch.randn(tokens, h, gpt.HEAD_DIM, generator=generator) for h in (4, 2)]
        self.grads = [torch.randn(x.shape, generator=generator) for x in self.qk]


def rotated_here(cp_size: int, pack: Pack) -> list[Tensor]:
    """This rank's share of q, its gradient, k, its gradient, by the installed Megatron."""
    state = importlib.import_module("megatron.core.parallel_state")
    attention = importlib.import_module("megatron.core.transformer.attention")
    boundaries = pack.boundaries
    ids = torch.zeros(1, boundaries[-1], dtype=torch.long)
    rank = state.get_context_parallel_rank()
    mine = zigzag_rows(boundaries, cp_size, rank)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    model = tiny_gpt("mrope", layers=1, config={"context_parallel_size": cp_size})
    params = packed_params(cu_seqlens)
    batch = {"input_ids": ids[:, mine], "position_ids": pack.positions, "packed_seq_params": params}
    freqs = freqs_of_model(model, **batch)
    rotate = attention.apply_rotary_pos_emb
    group = accepted(rotate, cp_group=cp_group())
    local = []
    for x, grad in zip(pack.qk, pack.grads, strict=True):
        leaf = x[mine].requires_grad_()
        out = rotate(leaf, freqs, model.config, cu_seqlens=cu_seqlens, **group)
        out.backward(grad[mine])
        local += [out.detach(), leaf.grad]
    return local


def largest_difference(pack: Pack, shares: list[list[Tensor]]) -> list[float]:
    """Of gathered, un-zigzagged q and k from each segment alone: outputs, gradients."""
    cp_size, boundaries, positions = len(shares), pack.boundaries, pack.positions
    order = torch.tensor(
        [row for r in range(cp_size) for row in zigzag_rows(boundaries, cp_size, r)]
    )
    whole = [torch.cat(parts)[order.argsort()] for parts in zip(*shares, strict=True)]
    worst = [0.0, 0.0]
    for begin, end in itertools.pairwise(boundaries):
        if begin == end:
            continue
        alone = gpt.oracle_angles(positions[:, 0, begin:end], False)
        angles = torch.cat((alone, alone), dim=-1)[:, None, None, :]
        rows = list(range(end - begin))
        for i, (x, grad) in enumerate(zip(pack.qk, pack.grads, strict=True)):
            expected = (
                oracle.rotate(x[begin:end], angles, rows, False, 1.0),
                oracle.rotate(grad[begin:end], -angles, rows, False, 1.0),
            )
            for j in (0, 1):
                found = oracle.largest(whole[2 * i + j][begin:end] - expected[j])
                worst[j] = max(worst[j], found)
    return worst


def cp_group() -> Any:
    return importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()


def run() -> dict[str, Any]:
    report = {}
    for cp_size in (1, 2, 4):
        with one_process(cp_size):
            for boundaries in PACKS:
                pack = Pack(boundaries)
                try:
                    here: Any = rotated_here(cp_size, pack)
                except Exception as error:  # upstream as it is; not on every rank
                    here = f"{type(error).__name__}: {error}"
                shares: list[Any] = [None] * cp_size
                dist.all_gather_object(shares, here, group=cp_group())
                errors = [share for share in shares if isinstance(share, str)]
                found: Any = errors[0] if errors else largest_difference(pack, shares)
                report[f"C={cp_size} {boundaries}"] = found
            dist.barrier()
    return report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with cpu_shims():
        reports = {"unpatched": run()}
        importlib.import_module("megatron.packed_rope.auto")
        reports["patched"] = run()
    if dist.get_rank() == 0:
        print(json.dumps(reports))
    sys.stdout.flush()
    dist.destroy_process_group()
