"""Cases of ``check`` that go through the installed GPTModel: where freqs are made and declared.

A tiny GPTModel is built on the CPU. For each rank of a (fake) CP group, the freqs that reach its
layers rotate a random q through the installed ``apply_rotary_pos_emb``; the oracle computes every
angle from the token's position ids, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from . import oracle
from .fakes import FakeGroup, fake_cp
from .model import (
    SegmentAttention,
    cpu_shims,
    one_process,
    packed_params,
    tiny_gpt,
    zigzag_rows,
)

SECTION = [2, 3, 3]
HEAD_DIM = 16


@dataclass(frozen=True)
class ModelCase:
    """One packed row (or a dense one) through GPTModel on every rank."""

    name: str
    cu_seqlens: list[int]
    kind: str = "mrope"
    cp: int = 1
    static_cp: int | None = None
    """Size of the model's own CP group where the batch brings another (dynamic CP)."""
    real_cu_seqlens: list[int] | None = None
    """Boundaries without padding, where ``cu_seqlens`` are the padded ones."""
    ids_of_rank: bool = False
    """Position ids are this rank's share already."""
    dense: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = (
    ModelCase("GPTModel text, C=1", [0, 4, 12], "rope"),
    ModelCase("GPTModel text, C=2", [0, 4, 12], "rope", cp=2),
    ModelCase("GPTModel text, table as long as the row, C=2", [0, 16], "rope", cp=2),
    ModelCase("GPTModel mRoPE, C=1", [0, 4, 12]),
    ModelCase("GPTModel mRoPE, C=2", [0, 4, 12], cp=2),
    ModelCase("GPTModel mRoPE, C=4", [0, 8, 8, 32], cp=4),
    ModelCase(
        "GPTModel mRoPE, padded boundaries, C=2", [0, 4, 12], cp=2, real_cu_seqlens=[0, 3, 9]
    ),
    ModelCase("GPTModel mRoPE, ids of the rank, C=2", [0, 4, 12], cp=2, ids_of_rank=True),
    ModelCase("GPTModel mRoPE, one dense row", [0, 8], dense=True),
    ModelCase("GPTModel mRoPE, one dense row, C=2", [0, 8], cp=2, dense=True),
    ModelCase(
        "GPTModel mRoPE, rotary_interleaved", [0, 4, 11], config={"rotary_interleaved": True}
    ),
    ModelCase("GPTModel mRoPE, Qwen3 order", [0, 4, 12], config={"interleaved_mrope": True}),
    ModelCase("dynamic CP mRoPE, model 1, batch 2", [0, 4, 12], cp=2, static_cp=1),
    ModelCase("dynamic CP mRoPE, model 2, batch 1", [0, 4, 12], cp=1, static_cp=2),
    ModelCase("dynamic CP text, model 1, batch 2", [0, 4, 12], "rope", cp=2, static_cp=1),
    ModelCase("dynamic CP text, model 4, batch 2", [0, 4, 12], "rope", cp=2, static_cp=4),
)


def run() -> Iterator[tuple[str, str, str]]:
    """Name, outcome and detail of every case."""
    embeddings = importlib.import_module("megatron.core.models.common.embeddings")
    has_mrope = hasattr(embeddings, "MultimodalRotaryEmbedding")
    params = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
    has_dynamic_cp = "cp_group" in getattr(params, "__dataclass_fields__", {})
    with warnings.catch_warnings(), cpu_shims(), one_process():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        for case in CASES:
            if case.kind == "mrope" and not has_mrope:
                yield case.name, "not run", "this release has no mRoPE"
            elif case.static_cp is not None and not has_dynamic_cp:
                yield case.name, "not run", "this release has no dynamic context parallelism"
            else:
                yield _run_case(case)


def _run_case(case: ModelCase) -> tuple[str, str, str]:
    worst = 0.0
    for rank in range(case.cp):
        try:
            worst = max(worst, _error_on_rank(case, rank))
        except Exception as raised:  # any error of upstream's is a result here
            first_line = next(iter(str(raised).splitlines()), "")
            return case.name, "raises", f"{type(raised).__name__}: {first_line}"[:150]
    ranks = f" over {case.cp} ranks" if case.cp > 1 else ""
    return case.name, "right" if worst < 1e-5 else "wrong", f"max error {worst:.1e}{ranks}"


def _error_on_rank(case: ModelCase, rank: int) -> float:
    static = case.cp if case.static_cp is None else case.static_cp
    generator = torch.Generator().manual_seed(1)
    total = case.cu_seqlens[-1]
    positions = torch.randint(0, 40, (3, 1, total), generator=generator)
    ids = torch.randint(0, 64, (1, total), generator=generator)
    mine = zigzag_rows(case.cu_seqlens, case.cp, rank)
    model = tiny_gpt(case.kind, layers=1, config={"context_parallel_size": static} | case.config)
    static_rank = min(rank, static - 1)
    with fake_cp(static, static_rank) as group:
        set_cp_group(model, group)
        batch: dict[str, Any] = {"input_ids": ids[:, mine], "position_ids": positions}
        if case.kind == "rope" or case.ids_of_rank:
            batch["position_ids"] = positions[0] if case.kind == "rope" else positions[..., mine]
        if not case.dense:
            batch["packed_seq_params"] = _params(case, rank)
        t = torch.randn(len(mine), 4, HEAD_DIM, generator=generator)
        out = _rotated_by_model(model, t, batch)
    if case.kind == "rope":
        own = [p for b, e in itertools.pairwise(case.cu_seqlens) for p in range(e - b)]
        positions = torch.tensor(own).expand(3, 1, -1)
    stride3 = case.config.get("interleaved_mrope", False)
    angles = oracle_angles(positions[:, 0, mine], stride3)
    freqs = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    expected = oracle.rotate(t, freqs, list(range(len(mine))), False, 1.0)
    if case.config.get("rotary_interleaved"):
        freqs = angles.repeat_interleave(2, dim=-1)[:, None, None, :]
        expected = oracle.rotate(t, freqs, list(range(len(mine))), True, 1.0)
    return oracle.largest(out - expected)


def _params(case: ModelCase, rank: int) -> Any:
    padded = torch.tensor(case.cu_seqlens, dtype=torch.int32)
    changes: dict[str, Any] = {}
    if case.static_cp is not None:
        changes["local_cp_size"] = case.cp
        changes["cp_group"] = FakeGroup(case.cp, rank)
    if case.real_cu_seqlens is None:
        return packed_params(padded, **changes)
    real = torch.tensor(case.real_cu_seqlens, dtype=torch.int32)
    return packed_params(real, padded, **changes)


def _rotated_by_model(model: nn.Module, t: Tensor, batch: dict[str, Any]) -> Tensor:
    """What the model's attention makes of a query t: ``[T, h, d]`` in and out."""
    rotated = {}
    attention = importlib.import_module("megatron.core.transformer.attention")
    rotate = attention.apply_rotary_pos_emb

    def with_t(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = t.unsqueeze(1) if query.dim() == 4 else t
        if query.shape[-2] != t.shape[-2]:  # the key
            return query
        rotated["t"] = rotate(given, *args, **kwargs).reshape(t.shape)
        return query

    def stop(self: Any, *_: Any, **__: Any) -> None:
        raise _Rotated

    with (
        mock.patch.object(attention, "apply_rotary_pos_emb", with_t),
        mock.patch.object(SegmentAttention, "forward", stop),
        contextlib.suppress(_Rotated),
    ):
        model(attention_mask=None, **batch)
    return rotated["t"].detach()


class _Rotated(Exception):
    """Stops the model once its first layer has rotated the query."""


def set_cp_group(model: nn.Module, group: Any) -> None:
    """Make ``group`` the model's own CP group, wherever this release keeps it."""
    for module in model.modules():
        if hasattr(module, "cp_group"):
            module.cp_group = group
        for name in ("pg_collection", "model_comm_pgs"):
            collection = getattr(module, name, None)
            if getattr(collection, "cp", None) is not None:
                collection = copy.copy(collection)
                collection.cp = group
                setattr(module, name, collection)


def oracle_angles(positions: Tensor, stride3: bool, base: float = 10000.0) -> Tensor:
    """``[3, T]`` positions to ``[T, 8]`` angles, one frequency at a time, in float64."""
    half = HEAD_DIM // 2
    angles = torch.empty(positions.shape[1], half, dtype=torch.float64)
    in_order = [axis for axis, count in enumerate(SECTION) for _ in range(count)]
    for f in range(half):
        axis = in_order[f]
        if stride3:
            axis = f % 3 if f < 3 * SECTION[f % 3] else 0
        angles[:, f] = positions[axis].double() * base ** (-2 * f / HEAD_DIM)
    return angles
