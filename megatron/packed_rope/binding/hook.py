"""Door 2: bind upstream names in this process only, by a hook that runs after an import.

The catalogue is the one of door 1, and so is ``rebind``; where both doors are open, the second one
finds every name bound already.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from ..errors import PatchNotActive
from .catalogue import module_names
from .live import ORIGINAL, rebind


def install() -> None:
    """Bind the catalogued modules that are loaded, and the others as soon as they are.

    Raises:
        PatchNotActive: something holds an upstream function from before, where it cannot be
            replaced (an instance, a default argument, ...); names every holder.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    loaded = [name for name in module_names() if name in sys.modules]
    bound = [function for name in loaded for function in _rebind_loaded(name)]
    stale: set[str] = set()
    for function in bound:
        stale.update(_stale_holders(function))
    if stale:
        raise PatchNotActive(
            "megatron.core was imported before megatron.packed_rope.auto, and upstream functions "
            "are still held by:\n  "
            + "\n  ".join(sorted(stale))
            + "\nImport megatron.packed_rope.auto "
            "first, or patch on disk: `python -m megatron.packed_rope apply`."
        )


class _Finder:
    """Lets the other finders find a catalogued module, and binds its names once it has run."""

    def __init__(self) -> None:
        self._inside: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._inside or name not in module_names():
            return None
        self._inside.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._inside.discard(name)
        # The loader keeps its type (inspect, pickle and debuggers ask it for the source).
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_exec_and_bind, spec.loader.exec_module)
        return spec


def _exec_and_bind(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    exec_module(module)
    rebind(module.__name__)


def _rebind_loaded(name: str) -> list[Callable[..., Any]]:
    """Bind the names of a loaded module, here and in every module that imported them."""
    if getattr(sys.modules[name].__spec__, "_initializing", False):
        raise PatchNotActive(
            f"megatron.packed_rope.auto was imported while {name} was being imported; import it "
            "before anything of Megatron, at the top of the script."
        )
    bound = rebind(name)
    by_original = {id(getattr(function, ORIGINAL)): function for function in bound}
    for holder in list(sys.modules.values()):
        for key, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in by_original:
                setattr(holder, key, by_original[id(value)])
    return bound


def _stale_holders(bound: Callable[..., Any]) -> Iterator[str]:
    """What still refers to the upstream function that ``bound`` took the place of."""
    original = getattr(bound, ORIGINAL)
    ours = [vars(bound), *(bound.__closure__ or ())]
    for holder in gc.get_referrers(original):
        if isinstance(holder, _PASSING) or any(holder is own for own in ours):
            continue
        yield f"{_describe(holder)} holds {original.__module__}.{original.__qualname__}"


_PASSING = (FrameType, GeneratorType, type(iter([])))  # this very search, among others
_ANONYMOUS = (dict, tuple, list, set, CellType, staticmethod, classmethod, functools.partial)
_UNNAMED = "an unnamed"


def _describe(holder: Any, steps: int = 4) -> str:
    """A name that a person can look for: of the holder, or of what holds it."""
    if isinstance(holder, type | FunctionType):
        return f"{holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, ModuleType):
        return holder.__name__
    if isinstance(holder, _ANONYMOUS) and steps:
        for owner in gc.get_referrers(holder):
            if isinstance(owner, _PASSING):
                continue
            if holder is getattr(owner, "__globals__", None):
                return f"a global of {holder['__name__']}"
            name = _describe(owner, steps - 1)
            if not name.startswith(_UNNAMED):
                return name if isinstance(holder, dict | tuple) else f"{name} ({_kind(holder)})"
    if isinstance(holder, _ANONYMOUS):
        return f"{_UNNAMED} {_kind(holder)}"
    return f"an instance of {type(holder).__module__}.{type(holder).__qualname__}"


def _kind(holder: Any) -> str:
    return "closure" if isinstance(holder, CellType) else type(holder).__name__
