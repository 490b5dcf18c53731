"""Context parallelism on the processes that torchrun started: NCCL on GPUs, gloo on CPUs.

    torchrun --nproc-per-node 2 -m pytest .../in_megatron

Without torchrun the group has one process.
"""

from __future__ import annotations

import importlib
import itertools
import os

import pytest
import torch
import torch.distributed as dist

from megatron.packed_rope.check import oracle
from megatron.packed_rope.check.fakes import accepted, fake_config
from megatron.packed_rope.check.model import zigzag_rows


@pytest.fixture(scope="module")
def world():
    """The whole world as one CP group, and this process's device."""
    started = not dist.is_initialized()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        backend = "nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD, torch.device("cuda" if cuda else "cpu")
    if started:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["packed", "per_sequence", "packed_local"])
def test_gathered_shares_are_each_segment_alone(rope, world, monkeypatch, layout):
    group, device = world
    size, rank = group.size(), group.rank()
    boundaries = [2 * size * n for n in (0, 2, 3, 3, 8)]
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(boundaries[-1], 4, 16, generator=generator)
    half = 50 * torch.randn(boundaries[-1], 1, 1, 8, generator=generator)
    packed = torch.cat((half, half), dim=-1)
    mine = zigzag_rows(boundaries, size, rank)
    own = [p for begin, end in itertools.pairwise(boundaries) for p in range(end - begin)]
    freqs = {"packed": packed, "per_sequence": packed[: max(own) + 1], "packed_local": packed[mine]}
    state = importlib.import_module("megatron.core.parallel_state")
    monkeypatch.setattr(state, "get_context_parallel_group", lambda **_: group)
    out = rope.apply_rotary_pos_emb(
        t[mine].to(device),
        freqs[layout].to(device),
        fake_config(packed_rope_freqs_layout=layout),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32, device=device),
        **accepted(rope.apply_rotary_pos_emb, cp_group=group),
    )
    shares = [torch.empty_like(out) for _ in range(size)]
    dist.all_gather(shares, out)
    order = torch.tensor([row for r in range(size) for row in zigzag_rows(boundaries, size, r)])
    whole = torch.cat(shares).cpu()[order.argsort()]
    rows = own if layout == "per_sequence" else list(range(boundaries[-1]))
    expected = oracle.rotate(t, packed, rows, False, 1.0)
    assert oracle.largest(whole - expected) < 2e-5
