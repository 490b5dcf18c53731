"""Unpacked upstream releases for the tests, and processes that import one of them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WHEELS = ROOT / "tools" / "wheels.py"

if not WHEELS.exists():
    pytest.skip("needs the project's own checkout (tools/wheels.py)", allow_module_level=True)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    pytest.skip("starts processes of its own, so not under torchrun", allow_module_level=True)


def wheels() -> ModuleType:
    """tools/wheels.py, which fetches wheels by pinned hash."""
    spec = importlib.util.spec_from_file_location("wheels", WHEELS)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("wheels", module)
    spec.loader.exec_module(module)
    return module


def unpacked(version: str, project: str = "megatron-core") -> Path:
    """The shared, unpacked release; copy it before changing anything."""
    return wheels().tree(version, project)


def copy_tree(version: str, folder: Path) -> Path:
    """A copy of a release made of hard links: the patch never writes into a file in place."""
    tree = folder / version
    subprocess.run(["cp", "-al", str(unpacked(version)), str(tree)], check=True)
    return tree


def environment(tree: Path | None = None) -> dict[str, str]:
    """Environment of a process that imports this checkout and, in front of it, a release."""
    path = [str(tree)] if tree else []
    path += [str(ROOT)] if (ROOT / "megatron" / "packed_rope").is_dir() else []
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}


def run(arguments: list[str], tree: Path | None = None, **kwargs) -> subprocess.CompletedProcess:
    """A Python process, its output captured as text."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(tree) | kwargs.pop("env", {}),
        capture_output=True,
        text=True,
        **kwargs,
    )


def run_python(code: str, tree: Path | None = None, **kwargs) -> subprocess.CompletedProcess:
    return run(["-c", code], tree, **kwargs)


def packed_rope(*arguments: str, tree: Path | None = None, **kwargs) -> subprocess.CompletedProcess:
    """``python -m megatron.packed_rope`` with a release on the path."""
    return run(["-W", "ignore", "-m", "megatron.packed_rope", *arguments], tree, **kwargs)


def target_files(version: str, folder: Path) -> Path:
    """A tree of real copies of no more than what the patch reads and writes."""
    from megatron.packed_rope.binding.catalogue import patches

    source, tree = unpacked(version), folder / f"files-{version}"
    core = [Path("package_info.py")]
    core += [patch.relative_path for patch in patches() if patch.top == "megatron.core"]
    for path in core:
        copied = tree / "megatron" / "core" / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes((source / "megatron" / "core" / path).read_bytes())
    return tree


def digests(tree: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, hidden ones too, bytecode left out."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and ".git" not in path.parts
    }
