"""What ``apply`` would change, as an ordinary diff with paths relative to the tree's root."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from .disk import patched_contents
from .tree import find_tree


def diff(directory: Path | None = None) -> bytes:
    """A unified diff that ``git apply`` takes in the tree, and ``git apply -R`` takes back.

    Raises:
        PatchRefused, UnknownDefinition: as ``apply`` would.
    """
    tree = find_tree(directory)
    roots = [folder.parents[1] for folder in tree.packages.values()]  # site-packages, as a rule
    if directory is not None:
        roots = [directory.resolve()]
    out = b""
    for path, (old, new) in patched_contents(tree).items():
        if old == new:
            continue
        root = next(root for root in roots if path.is_relative_to(root))
        name = path.relative_to(root).as_posix().encode()
        lines = difflib.diff_bytes(
            difflib.unified_diff,
            _lines(old),
            _lines(new),
            b"a/" + name,
            b"b/" + name,
        )
        for line in lines:
            out += line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
    return out


def _lines(content: bytes) -> list[bytes]:
    """Lines as git sees them: they end in a newline, whatever comes before it."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)
