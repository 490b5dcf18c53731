"""Fetch upstream wheels by pinned hash into an ignored cache, and unpack them.

    python tools/wheels.py                 every release in wheels.txt
    python tools/wheels.py 0.14.0 0.16.1   these releases of megatron-core

A wheel unpacked onto PYTHONPATH serves the tests under any Python from 3.10; so the CPython tag it
was built for does not matter here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("PACKED_ROPE_CACHE", ROOT / ".cache"))


class Pin(NamedTuple):
    project: str
    version: str
    python: str
    sha256: str


def pins(project: str = "megatron-core") -> Iterator[Pin]:
    """Pinned releases of a project, oldest first."""
    for line in (Path(__file__).parent / "wheels.txt").read_text().splitlines():
        if line.startswith(f"{project}=="):
            requirement, python, sha256 = line.split()
            yield Pin(project, requirement.partition("==")[2], python, sha256)


def tree(version: str, project: str = "megatron-core") -> Path:
    """Folder of an unpacked release, fetched if it is not there yet."""
    folder = CACHE / "trees" / project / version
    if not folder.is_dir():
        unpacked = Path(tempfile.mkdtemp(dir=_made(folder.parent)))
        with zipfile.ZipFile(wheel(version, project)) as archive:
            archive.extractall(unpacked)
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unpacked)
    return folder


def wheel(version: str, project: str = "megatron-core") -> Path:
    """The wheel of a release, fetched if it is not there yet, checked against its pin always."""
    pin = next(pin for pin in pins(project) if pin.version == version)
    folder = _made(CACHE / "wheels")
    stem = project.replace("-", "_")
    found = list(folder.glob(f"{stem}-{version}-*.whl"))
    if not found:
        print(f"fetching {project} {version}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as new:
            _download(pin, Path(new))
            (downloaded,) = Path(new).glob("*.whl")
            os.replace(downloaded, folder / downloaded.name)
        found = list(folder.glob(f"{stem}-{version}-*.whl"))
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != pin.sha256:
        raise SystemExit(f"{found[0]} has SHA-256 {digest}; expected {pin.sha256}. Delete it.")
    return found[0]


def _download(pin: Pin, folder: Path) -> None:
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "any")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--python-version", pin.python, "--implementation", "cp"]
    for platform in platforms:
        command += ["--platform", platform]
    command += ["--dest", str(folder), f"{pin.project}=={pin.version}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    for release in sys.argv[1:] or [pin.version for pin in pins()]:
        print(tree(release))
