"""A repacked wheel: installs as megatron-core==X, brings the patch, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from trees import ROOT, environment, packed_rope, wheels

import megatron.packed_rope as product
from megatron.packed_rope.binding.wheel import repack
from megatron.packed_rope.errors import PatchError, PatchRefused

RELEASES = ["0.12.3", "0.14.0", "0.16.1"]
LABEL = f"packedrope.{product.__version__}"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A wheel of this package, built from a copy of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("megatron/packed_rope", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source))
    (wheel,) = out.iterdir()
    return wheel


def pip(python: str | Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(python), "-m", "pip", *arguments],
        env=environment() | {"PYTHONPATH": "", "PIP_NO_INPUT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="these wheels are built for CPython 3.11"
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_repacked_wheel_is_a_drop_in(release, ours, tmp_path):
    original = wheels().wheel(release)
    done = packed_rope("wheel", str(original), "-o", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "dist").iterdir()
    assert made.name == original.name.replace(release, f"{release}+{LABEL}")

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    # torch, pip and the like come from the environment of the tests: nothing is downloaded.
    (site / "borrowed.pth").write_text(str(everything_but_us(tmp_path)) + "\n")
    before = files_below(site)

    install = ["install", "--no-deps", "--no-index", "--ignore-installed"]
    pip(python, *install, str(original))
    complaints = broken_requirements(python)
    pip(python, "uninstall", "-y", "megatron-core")
    pip(python, *install, str(made))
    own = [line.replace(release, f"{release}+{LABEL}") for line in complaints]
    (lacking,) = set(broken_requirements(python)) - set(own)
    assert "requires megatron-packed-rope" in lacking
    pip(python, *install, str(ours))
    # Nothing to complain of but what the release itself asks and this environment lacks
    # (0.12.3: flask-restful and others, 0.14.0: numpy < 2).
    assert broken_requirements(python) == own
    if release == "0.16.1":
        assert broken_requirements(python) == []
    pip(python, "install", "--no-index", "--no-deps", f"megatron-core=={release}")  # satisfied
    report = json.loads(isolated(python, tmp_path, "check", "--json"))
    assert str(site) in report["path"]
    assert report["counts"]["wrong"] == report["counts"]["raises"] == 0
    assert report["counts"]["right"] > 20

    pip(python, "uninstall", "-y", "megatron-core", "megatron-packed-rope")
    assert files_below(site) == before


def everything_but_us(folder: Path) -> Path:
    """The packages of this environment, less this one (which is there as an editable install)."""
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if "packed_rope" not in path.name:
            (borrowed / path.name).symlink_to(path)
    return borrowed


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def broken_requirements(python: Path) -> list[str]:
    """Lines of ``pip check``; none where all requirements are met."""
    done = subprocess.run(
        [str(python), "-m", "pip", "check"],
        env=environment() | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    assert done.returncode == (lines != ["No broken requirements found."])
    return sorted(lines) if done.returncode else []


def isolated(python: Path, folder: Path, *arguments: str) -> str:
    command = [str(python), "-W", "ignore", "-m", "megatron.packed_rope", *arguments]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_repacked_wheel_is_in_its_record(tmp_path):
    made = repack(wheels().wheel("0.14.0"), tmp_path)
    with zipfile.ZipFile(made) as archive:
        info = f"megatron_core-0.14.0+{LABEL}.dist-info"
        record = archive.read(f"{info}/RECORD").decode().splitlines()
        assert sorted(line.split(",")[0] for line in record) == sorted(archive.namelist())
        metadata = archive.read(f"{info}/METADATA").decode()
    assert f"\nVersion: 0.14.0+{LABEL}\n" in metadata
    assert f"\nRequires-Dist: megatron-packed-rope=={product.__version__}\n" in metadata


def test_what_is_no_megatron_wheel_is_refused(tmp_path):
    other = tmp_path / "torch-2.0-py3-none-any.whl"
    other.touch()
    patched = tmp_path / f"megatron_core-0.14.0+{LABEL}-py3-none-any.whl"
    patched.touch()
    broken = tmp_path / "megatron_core-0.14.0-py3-none-any.whl"
    broken.write_bytes(b"not a zip file")
    out = tmp_path / "dist"
    with pytest.raises(PatchRefused, match="is no Megatron-Core wheel"):
        repack(other, out)
    with pytest.raises(PatchRefused, match="carries a local version already"):
        repack(patched, out)
    with pytest.raises(PatchError, match="`wheel unpack` failed"):
        repack(broken, out)
    assert not out.exists()
