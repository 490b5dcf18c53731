"""A GPTModel on packed rows against each sample run alone, on CP groups of 1 and 2 processes.

Run by torchrun with 2 processes; the release on the path is run as it is, then bound in process.
Rank 0 prints one JSON object: state -> case -> figure (a difference, true or false, or an error).
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.simplefilter("ignore")

from megatron.packed_rope.check.gpt import set_cp_group  # noqa: E402
from megatron.packed_rope.check.model import (  # noqa: E402
    cpu_shims,
    one_process,
    packed_params,
    tiny_gpt,
    zigzag_rows,
)

BOUNDARIES = [0, 8, 24, 40]
VOCABULARY = 64


class Samples:
    """A packed row of tokens, with mRoPE positions that start anew in every sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (1, BOUNDARIES[-1]), generator=generator)
        lengths = [end - begin for begin, end in itertools.pairwise(BOUNDARIES)]
        starts = torch.randint(0, 9, (3, 1, BOUNDARIES[-1]), generator=generator)
        own = torch.cat([torch.arange(length) for length in lengths])
        self.mrope = own + starts
        self.rope = own[None]
        self.weight = torch.randn(1, BOUNDARIES[-1], VOCABULARY, generator=generator)

    def positions(self, kind: str) -> Tensor:
        return self.mrope if kind == "mrope" else self.rope


SAMPLES = Samples()


def packed(model: nn.Module, kind: str, cp_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Logits of this rank's tokens, and their numbers in the row; gradients are in the model."""
    mine = torch.tensor(zigzag_rows(BOUNDARIES, cp_size, rank))
    positions = SAMPLES.positions(kind)
    logits = model(
        input_ids=SAMPLES.ids[:, mine],
        position_ids=positions if kind == "mrope" else positions[:, mine],
        attention_mask=None,
        packed_seq_params=packed_params(torch.tensor(BOUNDARIES, dtype=torch.int32)),
    )
    (logits * SAMPLES.weight[:, mine]).sum().backward()
    return logits.detach(), mine


def alone(model: nn.Module, kind: str) -> Tensor:
    """Logits of the whole row, each sample run on its own as one dense sequence."""
    parts = []
    for begin, end in itertools.pairwise(BOUNDARIES):
        logits = model(
            input_ids=SAMPLES.ids[:, begin:end],
            position_ids=SAMPLES.positions(kind)[..., begin:end],
            attention_mask=None,
        )
        (logits * SAMPLES.weight[:, begin:end]).sum().backward()
        parts.append(logits.detach())
    return torch.cat(parts, dim=1)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def reference(kind: str) -> tuple[Tensor, Tensor]:
    """Logits and gradients of the samples alone, on a model without context parallelism."""
    with one_process(1):
        model = tiny_gpt(kind)
        return alone(model, kind), gradients(model)


def compare(cp_size: int, kind: str, **config: Any) -> list[float]:
    """Largest difference of logits and of gradients between packed and alone."""
    logits_alone, grads_alone = reference(kind)
    with one_process(cp_size):
        model = tiny_gpt(kind, config={"context_parallel_size": cp_size, **config}).train()
        rank = dist.get_rank() if cp_size > 1 else 0
        logits, mine = packed(model, kind, cp_size, rank)
        grads = gradients(model)
        difference = (logits - logits_alone[:, mine]).abs().max()
        if cp_size > 1:
            dist.all_reduce(grads)
            dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    scale = grads_alone.abs().max()
    return [difference.item(), ((grads - grads_alone).abs().max() / scale).item()]


def recomputed(cp_size: int) -> bool:
    """Whether full activation recomputation changes nothing, to the last bit."""
    settings = {"recompute_granularity": "full", "recompute_method": "uniform"}
    results = []
    for config in ({}, settings | {"recompute_num_layers": 1}):
        with one_process(cp_size):
            config = {"context_parallel_size": cp_size, **config}
            model = tiny_gpt("mrope", config=config).train()
            logits, _ = packed(model, "mrope", cp_size, dist.get_rank() if cp_size > 1 else 0)
            results.append((logits, gradients(model)))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def two_models() -> bool:
    """Whether models of CP size 1 and 2, used in turn, give what each gives alone."""
    alone_groups = [dist.new_group([rank]) for rank in (0, 1)]
    rank = dist.get_rank()
    with one_process(2):
        big = tiny_gpt("mrope", config={"context_parallel_size": 2}, seed=1)
        small = tiny_gpt("mrope", seed=2)
        set_cp_group(small, alone_groups[rank])
        first = [packed(big, "mrope", 2, rank)[0], packed(small, "mrope", 1, 0)[0]]
        again = [packed(small, "mrope", 1, 0)[0], packed(big, "mrope", 2, rank)[0]][::-1]
    with one_process(1):
        expected = packed(tiny_gpt("mrope", seed=2), "mrope", 1, 0)[0]
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return same and torch.equal(first[1], expected)


def text_logits() -> Tensor:
    with one_process(2):
        model = tiny_gpt("rope", config={"context_parallel_size": 2})
        return packed(model, "rope", 2, dist.get_rank())[0]


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """The figure, or the error where upstream raises (on all ranks alike)."""
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(patched: bool) -> dict[str, Any]:
    report = {
        f"{kind}, C={cp_size}": attempt(compare, cp_size, kind)
        for kind in ("rope", "mrope")
        for cp_size in (1, 2)
    }
    if patched:
        report |= {f"recomputation, C={c}": recomputed(c) for c in (1, 2)}
        report["two models"] = attempt(two_models)
    return report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with cpu_shims():
        reports = {"unpatched": run(patched=False)}
        text = text_logits()
        importlib.import_module("megatron.packed_rope.auto")
        reports["patched"] = run(patched=True)
        reports["patched"]["text unchanged bit for bit"] = torch.equal(text, text_logits())
    if dist.get_rank() == 0:
        print(json.dumps(reports))
    sys.stdout.flush()
    dist.destroy_process_group()
