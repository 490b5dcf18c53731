"""Packed against unpacked on the installed Megatron-Core: one step's parity, then a short training.

    python run.py                              context-parallel size 1
    torchrun --nproc-per-node 2 run.py         context-parallel size 2 (gloo)

Unpacked is each sample alone, dense, at C = 1, its positions counted by transformers. Both run in
float64, so that a difference is a fault and not rounding. Exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import IGNORED, Sample, make_samples, pack
from model import FAMILIES, VisionLanguageModel
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packed_rope.check.model import cpu_shims, one_process

STEPS, LEARNING_RATE = 30, 3e-3
EQUAL = 1e-6
"""Largest difference that counts as none: some float32 rounding (1.2e-7), which is left because
transformers' towers rotate in float32 whatever the dtype. A wrong row makes 1e-2 and more."""
DIFFERENCES = ("loss", "logits", "gradients", "curve")


class Unpacked:
    """Each sample alone."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.model = model

    def logits(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        """``[tokens, vocabulary]`` and the labels ``[tokens]`` of all samples, one by one."""
        logits = torch.cat([self.model.unpacked(sample) for sample in samples])
        return logits, torch.cat([sample.labels for sample in samples])

    def whole(self, logits: Tensor, samples: list[Sample]) -> Tensor:
        return logits

    def summed(self, part: Tensor) -> Tensor:
        return part


class Packed:
    """All samples in one row, over the ranks of a context-parallel group."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.model = model

    def logits(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        """The same, of the tokens of this rank, padding included."""
        packed = pack(samples, 2 * self.model.cp_size)
        mine = self.model.tokens_of_rank(packed)
        return self.model(packed), packed.row.labels[mine]

    def whole(self, logits: Tensor, samples: list[Sample]) -> Tensor:
        """Logits of all ranks in the order of the samples, without padding."""
        packed = pack(samples, 2 * self.model.cp_size)
        row = torch.zeros(len(packed.row.input_ids), logits.shape[1], dtype=logits.dtype)
        row[self.model.tokens_of_rank(packed)] = logits
        return self.summed(row)[packed.real_tokens()]

    def summed(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        if self.model.cp_size > 1:
            torch.distributed.all_reduce(part)
        return part


@dataclass
class Step:
    loss: Tensor  # mean over the answers
    logits: Tensor  # [tokens, vocabulary]
    gradients: dict[str, Tensor]


def step(way: Unpacked | Packed, samples: list[Sample]) -> Step:
    """Loss, logits and gradients; the gradients are also left in the model."""
    answers = sum(int((sample.labels != IGNORED).sum()) for sample in samples)
    logits, labels = way.logits(samples)
    loss = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / answers
    way.model.zero_grad()
    loss.backward()
    for parameter in way.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        way.summed(parameter.grad)
    gradients = {n: p.grad.clone() for n, p in way.model.named_parameters()}
    whole = way.whole(logits.detach(), samples)
    return Step(way.summed(loss.detach()), whole, gradients)


def train(way: Unpacked | Packed, samples: list[Sample], steps: int) -> list[float]:
    """Losses of AdamW steps on the same samples in another order every time, as loaders serve them.

    The order changes what lies in front of a sample in its row. Alone, and in a rightly packed row,
    a sample does not notice.
    """
    optimizer = torch.optim.AdamW(way.model.parameters(), lr=LEARNING_RATE)
    curve = []
    for number in range(steps):
        order = random.Random(number).sample(samples, len(samples))
        curve.append(float(step(way, order).loss))
        optimizer.step()
    return curve


def measure(way_of: type, family: str, cp_size: int, steps: int) -> tuple[Step, list[float]]:
    """First step and loss curve of a fresh model, packed or not."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with one_process(cp_size):
        way = way_of(VisionLanguageModel(family, cp_size, rank % cp_size).double())
        samples = make_samples(family)
        return step(way, samples), train(way, samples, steps)


def largest(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def compare(family: str, cp_size: int, steps: int) -> dict[str, Any]:
    """Largest differences between packed and unpacked, and both curves."""
    alone, curve_alone = measure(Unpacked, family, 1, steps)
    packed, curve = measure(Packed, family, cp_size, steps)
    return {
        "loss": largest(packed.loss, alone.loss),
        "logits": largest(packed.logits, alone.logits),
        "gradients": max(largest(packed.gradients[n], alone.gradients[n]) for n in alone.gradients),
        "curve": max(abs(a - b) for a, b in zip(curve, curve_alone, strict=True)),
        "packed": curve,
        "unpacked": curve_alone,
    }


def is_equal(result: dict[str, Any]) -> bool:
    return all(result[name] <= EQUAL for name in DIFFERENCES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--out", type=Path, help="write results and curves here, as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cp_size = int(os.environ.get("WORLD_SIZE", "1"))
    if cp_size > 1:
        torch.distributed.init_process_group("gloo")
    with cpu_shims():
        results = {f: compare(f, cp_size, arguments.steps) for f in arguments.families}
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"largest difference, packed at C = {cp_size} against unpacked")
        print(table(results))
        if arguments.out:
            arguments.out.write_text(json.dumps({"cp_size": cp_size, "families": results}))
    if cp_size > 1:
        torch.distributed.destroy_process_group()
    return 0 if all(map(is_equal, results.values())) else 1


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per model family."""
    lines = ["  {:12}{:>10}{:>10}{:>12}{:>10}".format("", *DIFFERENCES)]
    for family, result in results.items():
        numbers = [f"{result[name]:.1e}" for name in DIFFERENCES]
        outcome = "equal" if is_equal(result) else "DIFFERENT"
        lines.append("  {:12}{:>10}{:>10}{:>12}{:>10}  {}".format(family, *numbers, outcome))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
