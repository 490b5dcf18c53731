"""Stand-ins for what upstream's functions ask of a running job: a config and a CP group."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


def fake_config(**changes: Any) -> SimpleNamespace:
    """The attributes of TransformerConfig that rope_utils reads."""
    values = {
        "apply_rope_fusion": False,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "mrope_section": None,
    }
    return SimpleNamespace(**(values | changes))


class FakeGroup:
    """A context-parallel group that only knows its size and this rank in it."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@contextlib.contextmanager
def fake_cp(size: int, rank: int) -> Iterator[Any]:
    """A fake group, also as the one in parallel_state (which 0.10 to 0.12 ask)."""
    group = FakeGroup(size, rank)
    state = importlib.import_module("megatron.core.parallel_state")
    with (
        mock.patch.object(state, "get_context_parallel_group", return_value=group),
        mock.patch.object(state, "get_context_parallel_world_size", return_value=size),
        mock.patch.object(state, "get_context_parallel_rank", return_value=rank),
    ):
        yield group


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release's function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
