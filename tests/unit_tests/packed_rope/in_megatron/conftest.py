"""Tests of the installed Megatron-Core with the patch in it.

They run where megatron.core can be imported: in a user's install or checkout, and for each pinned
release in a process of its own (``test_releases.py``). Where the patch is not on disk, the hook
binds it for this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


collect_ignore_glob = [] if _installed() else ["test_*.py"]

EMBEDDINGS = "megatron.core.models.common.embeddings"


@pytest.fixture(scope="session")
def rope() -> ModuleType:
    """Upstream's rope_utils, patched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.packed_rope.auto  # noqa: F401
        from megatron.packed_rope import require_active

        require_active()
        return importlib.import_module(f"{EMBEDDINGS}.rope_utils")


@pytest.fixture(scope="session")
def embedding(rope: ModuleType) -> ModuleType:
    return importlib.import_module(f"{EMBEDDINGS}.rotary_pos_embedding")


@pytest.fixture
def upstream(rope: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a call with upstream's own definitions in rope_utils, as if it were not patched."""

    def run(call: Any) -> Any:
        with monkeypatch.context() as context:
            for name in ("apply_rotary_pos_emb", "_apply_rotary_pos_emb_thd"):
                original = getattr(rope, name).__packed_rope_original__
                context.setattr(rope, name, original)
            return call(rope)

    return run


@pytest.fixture
def cp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keyword arguments for a fake CP group; where a release asks parallel_state, it is there."""
    state = importlib.import_module("megatron.core.parallel_state")

    def arguments(function: Any, size: int, rank: int) -> dict[str, Any]:
        import inspect

        group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        monkeypatch.setattr(state, "get_context_parallel_group", lambda **_: group)
        monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: size)
        monkeypatch.setattr(state, "get_context_parallel_rank", lambda: rank)
        takes = "cp_group" in inspect.signature(function).parameters
        return {"cp_group": group} if takes else {}

    return arguments
