"""The catalogue: which upstream names are bound, by what, and which definitions are known.

One TOML per upstream module, named after it (``patches/<module>.toml``), written by hand; and
``patches/known.toml``, the fingerprints of known definitions, written by ``make fingerprints``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parents[1]
# Installed, the catalogue lies inside the package; in a checkout of this project, beside it.
FOLDER = next(
    (f for f in (_PACKAGE / "patches", _PACKAGE.parents[1] / "patches") if f.is_dir()),
    _PACKAGE / "patches",
)


@dataclass(frozen=True)
class Binding:
    """One upstream name and what it is bound to."""

    name: str
    """Qualified name in the upstream module: ``function`` or ``Class.method``."""
    factory: str
    """``module:function`` that makes the replacement from the upstream module and definition."""
    replaced: bool
    """Whether the definition is replaced (its text must be known) or only wrapped."""
    needs: tuple[str, ...]
    """Parameters that the definition must have."""
    instead: str | None
    """Name to take in releases that lack ``name``."""
    absent: str | None
    """Why some releases have neither, if that is right."""
    why: str
    affects: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.instead is None else (self.name, self.instead)

    def load_factory(self) -> Callable[..., Callable[..., Any]]:
        module, _, function = self.factory.partition(":")
        return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class Patch:
    """What is bound in one upstream module."""

    module: str
    bindings: tuple[Binding, ...]

    @property
    def top(self) -> str:
        """The installed package that the module belongs to: ``megatron.core`` or another."""
        return ".".join(self.module.split(".")[:2])

    @property
    def relative_path(self) -> Path:
        """Path of the module's file inside that package."""
        return Path(*self.module.split(".")[2:]).with_suffix(".py")


@functools.cache
def module_names() -> tuple[str, ...]:
    """Upstream modules in the catalogue, in a fixed order."""
    return tuple(sorted(p.stem for p in FOLDER.glob("megatron.*.toml")))


@functools.cache
def patch_of(module: str) -> Patch:
    """What is bound in one upstream module."""
    content = tomllib.loads((FOLDER / f"{module}.toml").read_text(encoding="utf-8"))
    bindings = [
        Binding(
            name=entry["name"],
            factory=entry["by"],
            replaced=kind == "replace",
            needs=tuple(entry["needs"]),
            instead=entry.get("instead"),
            absent=entry.get("absent"),
            why=" ".join(entry["why"].split()),
            affects=" ".join(entry["affects"].split()),
        )
        for kind in ("replace", "wrap")
        for entry in content.get(kind, ())
    ]
    return Patch(module=content["module"], bindings=tuple(bindings))


def patches() -> tuple[Patch, ...]:
    return tuple(patch_of(name) for name in module_names())


@functools.cache
def known_definitions() -> Mapping[str, Mapping[str, list[str]]]:
    """``module:name`` -> SHA-256 of a known definition's text -> releases that have it."""
    return tomllib.loads((FOLDER / "known.toml").read_text(encoding="utf-8"))
