"""Cases of ``check`` on the fused kernels: run where a GPU and a kernel exist, else "not run"."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from . import rope


def run(rope_utils: ModuleType) -> Iterator[rope.Outcome]:
    """Every case of ``rope`` again with ``config.apply_rope_fusion``."""
    missing = None
    if not torch.cuda.is_available():
        missing = "no CUDA device"
    elif getattr(rope_utils, "fused_apply_rotary_pos_emb", None) is None:
        missing = "no Transformer Engine"
    if missing:
        yield f"fused: all {len(rope.CASES)} cases", "not run", missing
        return
    for name, outcome, detail in rope.run(rope_utils, fusion=True):
        yield f"fused: {name}", outcome, detail
