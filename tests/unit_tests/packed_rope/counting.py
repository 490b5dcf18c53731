"""Count aten operations that do work: what noise on a machine cannot touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Empty allocations, and the step between an autograd leaf and its data, move no bytes.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.host_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _FREE:
            self.ops[name] += 1
        if name in ("_local_scalar_dense", "item", "nonzero", "equal"):
            self.host_reads += 1
        return func(*args, **(kwargs or {}))


def count_working_ops(call: Callable[[], Any]) -> Counter[str]:
    """Working aten operations of one call, by name; views and allocations are not counted."""
    with torch.no_grad(), _Counter() as counter:
        call()
    return counter.ops


def count_operations(call: Callable[[], Any]) -> tuple[int, int]:
    """Working aten operations of one call, and how many of them read a value to the host."""
    with torch.no_grad(), _Counter() as counter:
        call()
    return sum(counter.ops.values()), counter.host_reads
