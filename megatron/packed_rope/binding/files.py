"""Change several files together: all of them, or none.

New content is staged beside each file and moved over it, so that no file is ever half written and
another hard link to the old one (as package caches make) stays as it was. A hard link to the old
file is kept until all are moved, so that undoing needs no room on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import PatchError

_STAGED = ".{}.packed_rope_new"
_KEPT = ".{}.packed_rope_old"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder (no lock file is left); waits for another holder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise PatchError(f"cannot lock {folder}: {error}. Nothing was changed.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Give every file its new content, keeping owner and mode; undo all if one fails.

    Raises:
        PatchError: the file system refused; every file is as it was before.
    """
    moved: list[Path] = []
    try:
        for path, content in contents.items():
            _stage(path, content)
        for path in contents:
            _keep(path)
        for path in contents:
            os.replace(_beside(path, _STAGED), path)
            moved.append(path)
            _drop_bytecode(path)
    except BaseException as error:
        for path in moved:
            os.replace(_beside(path, _KEPT), path)
            _drop_bytecode(path)
        clean(contents)
        if isinstance(error, OSError):
            raise PatchError(
                f"cannot change {error.filename or 'a file'}: {error.strerror or error}. Nothing "
                "was changed. Run as a user who may write there, on a disk with room."
            ) from error
        raise
    clean(contents)


def clean(paths: Mapping[Path, bytes] | list[Path]) -> None:
    """Remove what this or a killed earlier run left beside the files."""
    for path in paths:
        for pattern in (_STAGED, _KEPT):
            _beside(path, pattern).unlink(missing_ok=True)


def _beside(path: Path, pattern: str) -> Path:
    return path.with_name(pattern.format(path.name))


def _stage(path: Path, content: bytes) -> None:
    staged = _beside(path, _STAGED)
    staged.unlink(missing_ok=True)
    with open(staged, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    old = path.stat()
    os.chmod(staged, old.st_mode)
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(staged, old.st_uid, old.st_gid)


def _keep(path: Path) -> None:
    kept = _beside(path, _KEPT)
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:  # a file system without hard links
        shutil.copy2(path, kept)


def _drop_bytecode(path: Path) -> None:
    """Bytecode of the old text must not be taken for the new one's (unchecked or same second)."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        with contextlib.suppress(OSError):
            cached.unlink()
