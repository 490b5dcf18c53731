"""Find the upstream files that the catalogue names: of the installed packages, or of a checkout."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ..errors import PatchError, PatchRefused
from .catalogue import Patch, patches

CORE = "megatron.core"


@dataclass(frozen=True)
class Target:
    """One upstream file and what the catalogue binds in it."""

    patch: Patch
    path: Path


@dataclass(frozen=True)
class Tree:
    """The folders of megatron.core and, where present, of other packages in the catalogue."""

    packages: dict[str, Path]

    @property
    def core(self) -> Path:
        return self.packages[CORE]

    @property
    def root(self) -> Path:
        """The folder to put on sys.path: site-packages, or a checkout."""
        return self.core.parents[1]

    @property
    def version(self) -> str:
        return release_of(self.core)

    def targets(self) -> list[Target]:
        """Files to patch; only other packages than megatron.core may lack one.

        Raises:
            PatchRefused: a file is missing, or lies outside its package (a link).
        """
        found = []
        for patch in patches():
            package = self.packages.get(patch.top)
            if package is None:
                continue
            path = package / patch.relative_path
            if not path.is_file():
                if patch.top != CORE:
                    continue
                raise PatchRefused(
                    f"{path} is missing, so {package} is no Megatron-Core the patch knows "
                    "(0.10.0 and later). Nothing was changed."
                )
            if not path.resolve().is_relative_to(package):
                raise PatchRefused(
                    f"{path} is a link to {path.resolve()}, outside {package}; the patch only "
                    "writes inside the package. Nothing was changed."
                )
            found.append(Target(patch, path))
        return found


def find_tree(directory: Path | None = None) -> Tree:
    """The tree that Python would import, or the one below ``directory`` (a checkout).

    Raises:
        PatchError: there is no megatron.core.
        PatchRefused: ``megatron`` is an ordinary package there, which hides namespace packages.
    """
    tops = sorted({patch.top for patch in patches()})
    packages = {}
    for top in tops:
        folder = _installed(top) if directory is None else _below(directory, top)
        if folder is not None:
            packages[top] = folder.resolve()
    if CORE not in packages:
        where = "this Python environment" if directory is None else str(directory)
        raise PatchError(
            f"no megatron.core in {where}; expected an installed megatron-core, or --tree with a "
            "folder that holds megatron/core."
        )
    tree = Tree(packages)
    init = tree.core.parent / "__init__.py"
    if init.exists():
        raise PatchRefused(
            f"{init} exists: it makes `megatron` an ordinary package, which hides "
            "megatron.packed_rope and every other namespace sub-package. Remove it (no release has "
            "one), then apply again. Nothing was changed."
        )
    return tree


def _installed(top: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(top)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _below(directory: Path, top: str) -> Path | None:
    for base in (directory, directory / "src"):
        folder = base.joinpath(*top.split("."))
        if folder.is_dir():
            return folder
    return None


def release_of(core: Path) -> str:
    """Megatron-Core's release as its package_info.py states it, without importing it."""
    try:
        body = ast.parse((core / "package_info.py").read_bytes()).body
    except (OSError, SyntaxError):
        return "unknown"
    values = {
        node.targets[0].id: node.value.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    numbers = [values.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        return "unknown"
    return ".".join(map(str, numbers)) + str(values.get("PRE_RELEASE") or "")
