"""Repack a Megatron-Core wheel with the patch in it: a drop-in install for private indexes.

Unpacking, hashes and RECORD are the ``wheel`` library's work. The version gains a local label
(``0.16.1+packedrope.0.1.0``), which satisfies ``megatron-core==0.16.1``, and this package becomes
a requirement.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .. import __version__
from ..errors import PatchError, PatchRefused
from .disk import apply

LABEL = f"packedrope.{__version__}"


def repack(wheel: Path, out: Path) -> Path:
    """Write the patched wheel into the folder ``out`` and return its path.

    Raises:
        PatchRefused: no megatron_core wheel, one that carries a local version already, or one
            with definitions that the catalogue does not know.
        PatchError: the ``wheel`` library is missing or failed. Nothing is left in ``out``.
    """
    if importlib.util.find_spec("wheel") is None:
        raise PatchError("repacking needs the wheel library: pip install wheel.")
    name = re.fullmatch(r"megatron_core-(?P<version>[^-]+)(?P<rest>-.+)\.whl", wheel.name)
    if not wheel.is_file() or name is None:
        raise PatchRefused(
            f"{wheel} is no Megatron-Core wheel; expected a file megatron_core-<version>-....whl, "
            "as `pip download --no-deps megatron-core` fetches it."
        )
    version = name["version"]
    if "+" in version:
        raise PatchRefused(
            f"{wheel.name} carries a local version already; repack the wheel as it was released."
        )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _run("unpack", wheel, "--dest", work)
        tree = work / f"megatron_core-{version}"
        apply(tree)
        info = tree / f"megatron_core-{version}.dist-info"
        _relabel(info / "METADATA", version)
        info.rename(tree / f"megatron_core-{version}+{LABEL}.dist-info")
        built = work / "built"
        built.mkdir()
        _run("pack", tree, "--dest-dir", built)
        (made,) = built.iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, out / made.name))


def _relabel(metadata: Path, version: str) -> None:
    """The version with its label, and this package as a requirement, in the METADATA header."""
    header, blank, description = metadata.read_text(encoding="utf-8").partition("\n\n")
    header, changed = re.subn(
        rf"^Version: {re.escape(version)}$", f"Version: {version}+{LABEL}", header, flags=re.M
    )
    if changed != 1:
        raise PatchRefused(f"METADATA of the wheel does not say 'Version: {version}'.")
    header += f"\nRequires-Dist: megatron-packed-rope=={__version__}"
    metadata.write_text(header + blank + description, encoding="utf-8")


def _run(command: str, *arguments: Path | str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wheel", command, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PatchError(f"`wheel {command}` failed: {last}")
