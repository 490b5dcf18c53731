"""Bind upstream names in this process, and say whether they are bound.

``rebind`` runs at the end of a patched upstream file (or from the import hook), when the module's
names are defined and nobody has taken a copy of them yet.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..errors import PatchNotActive
from .catalogue import Binding, patch_of, patches

ORIGINAL = "__packed_rope_original__"
"""Attribute of a bound function: the upstream definition it took the place of."""


def rebind(module_name: str) -> list[Callable[..., Any]]:
    """Bind the catalogue's names of one upstream module; names that are bound already stay.

    Returns:
        The functions that were bound by this call.

    Raises:
        PatchNotActive: the module lacks a name that no release is known to lack.
    """
    module = sys.modules[module_name]
    new = []
    for binding in patch_of(module_name).bindings:
        place = _find(module, binding)
        if place is None:
            if binding.absent is None:
                raise PatchNotActive(
                    f"{module_name} has no {' or '.join(binding.names)}: this Megatron is none the "
                    "patch was made for. Run `python -m megatron.packed_rope status`."
                )
            continue
        owner, attribute, current = place
        if not hasattr(current, ORIGINAL):
            bound = binding.load_factory()(module, current)
            setattr(bound, ORIGINAL, current)
            setattr(owner, attribute, bound)
            new.append(bound)
    return new


def _find(module: ModuleType, binding: Binding) -> tuple[Any, str, Callable[..., Any]] | None:
    """Owner (module or class), attribute and current value of the first name that exists."""
    for name in binding.names:
        *classes, attribute = name.split(".")
        owner: Any = module
        for part in classes:
            owner = getattr(owner, part, None)
        if owner is not None and attribute in vars(owner):
            return owner, attribute, vars(owner)[attribute]
    return None


def unbound() -> Iterator[str]:
    """One line for each catalogued name of a loaded module that is not bound to this package."""
    functions: dict[str, tuple[str, Callable[..., Any]]] = {}
    for patch in patches():
        module = sys.modules.get(patch.module)
        if module is None:
            continue
        for binding in patch.bindings:
            place = _find(module, binding)
            if place is None:
                if binding.absent is None:
                    yield f"{patch.module}.{binding.name} is missing"
                continue
            owner, attribute, current = place
            if not hasattr(current, ORIGINAL):
                yield f"{patch.module}.{binding.name} is {_origin(current)}"
            elif owner is module:
                functions[attribute] = (patch.module, current)
    for holder_name in _of_megatron(tuple(sys.modules)):
        holder = sys.modules.get(holder_name)
        if holder is not None:
            yield from _stale_copies(holder_name, holder.__dict__, functions)


@functools.lru_cache(maxsize=1)
def _of_megatron(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Those of megatron; kept, since looking through thousands takes longer than all the rest."""
    return tuple(name for name in modules if name.startswith("megatron."))


def _stale_copies(
    holder: str,
    held_by_name: dict[str, Any],
    functions: dict[str, tuple[str, Callable[..., Any]]],
) -> Iterator[str]:
    """What a module that imported a name (``from rope_utils import ...``) holds in its stead."""
    for name, (module, bound) in functions.items():
        held = held_by_name.get(name, bound)
        home = getattr(held, "__module__", None) or ""
        # Other upstream modules, and Transformer Engine, have functions of the same name.
        another = home != module and home.startswith(("megatron.", "transformer_engine"))
        if held is not bound and not another:
            yield f"{holder}.{name} is {_origin(held)}"


def _origin(function: Any) -> str:
    where = getattr(getattr(function, "__code__", None), "co_filename", None)
    return f"upstream's or another package's own ({where or type(function).__name__})"


def require_active() -> None:
    """Raise unless every catalogued upstream name is bound to this package in this process.

    For launch scripts: file marks say nothing about a process that imported Megatron before the
    patch, nor about a framework that bound its own function afterwards. Imports megatron.core's
    patched modules if they are not loaded yet (costs less than a millisecond once they are);
    of other packages, such as Megatron-Bridge, it looks at what is loaded.

    Raises:
        PatchNotActive: names what is not bound, and the command that binds it.
    """
    import importlib

    for patch in patches():
        if patch.top != "megatron.core" or patch.module in sys.modules:
            continue
        try:
            importlib.import_module(patch.module)
        except ModuleNotFoundError as error:
            raise PatchNotActive(
                f"{patch.module} cannot be imported ({error}), so it is not patched. Install "
                "megatron-core in this environment."
            ) from error
    wrong = list(unbound())
    if wrong:
        raise PatchNotActive(
            "packed RoPE is not patched in this process:\n  "
            + "\n  ".join(wrong)
            + "\nRun `python -m megatron.packed_rope apply` (on disk, for every process), or "
            "`import megatron.packed_rope.auto` before anything imports Megatron. If that was "
            "done, another package bound its own function over ours: keep one of the two patches."
        )
