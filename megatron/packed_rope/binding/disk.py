"""Door 1: patch the files of an installed Megatron-Core or of a checkout, and take it out again."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import PatchRefused, UnknownDefinition
from .block import add_block, strip_block
from .catalogue import known_definitions, module_names
from .definitions import find_definitions
from .files import clean, locked, write_all
from .live import unbound
from .tree import Target, Tree, find_tree


@dataclass(frozen=True)
class FileStatus:
    """State of one upstream file; the fields are those of ``status --json``."""

    module: str
    path: str
    state: str
    """``patched``, ``unpatched``, ``outdated`` (block of another version), ``edited`` (patched, and
    changed since) or ``unknown`` (not patched, and no known definition)."""
    detail: str


def status(directory: Path | None = None) -> dict[str, Any]:
    """What is patched on disk, file by file, and what this process has bound.

    The returned dict is what ``status --json`` prints:

    - ``packed_rope``, ``megatron_core``: versions;
    - ``state``: ``patched``, ``partly patched`` or ``unpatched``, of all files on disk;
    - ``files``: for each file ``module``, ``path``, ``state`` and ``detail`` (see ``FileStatus``);
    - ``loaded``: catalogued modules that this process has imported;
    - ``not_bound``: one line for each name of theirs that is not bound to this package.
    """
    tree = find_tree(directory)
    files = [_status_of(tree, target) for target in tree.targets()]
    states = {file.state for file in files}
    overall = "patched" if states == {"patched"} else "partly patched"
    if not states & {"patched", "outdated", "edited"}:
        overall = "unpatched"
    return {
        "packed_rope": __version__,
        "megatron_core": tree.version,
        "state": overall,
        "files": [asdict(file) for file in files],
        "loaded": [name for name in module_names() if name in sys.modules],
        "not_bound": list(unbound()),
    }


def _status_of(tree: Tree, target: Target) -> FileStatus:
    stripped = strip_block(target.path.read_bytes())
    problem = _problem(target, stripped.content, tree.version)
    if stripped.version is None:
        state, detail = ("unpatched", "") if problem is None else ("unknown", str(problem))
    elif stripped.version != __version__:
        state = "outdated"
        detail = f"patched by version {stripped.version}; apply again for {__version__}"
    elif not stripped.as_patched:
        state = "edited"
        detail = "changed after it was patched" + (f": {problem}" if problem else "")
    elif problem is not None:
        state, detail = "patched", "by force: not all its definitions are known ones"
    else:
        state, detail = "patched", ""
    return FileStatus(target.patch.module, str(target.path), state, detail)


def apply(directory: Path | None = None, *, force: bool = False) -> list[Path]:
    """Patch every file of the catalogue; returns those that changed (none the second time).

    Raises:
        UnknownDefinition: a definition to replace is none of the known ones (not with ``force``,
            nor where this version has patched it by force already).
        PatchRefused: not rank 0; a definition lacks what the patch needs; no namespace package.
        PatchError: no megatron.core, or the file system refused. Nothing is half done.
    """
    _refuse_other_ranks("apply")
    tree = find_tree(directory)
    with locked(tree.core):
        return _write(tree, patched_contents(tree, force=force))


def revert(directory: Path | None = None) -> list[Path]:
    """Take the block out of every file that has one; returns those that changed."""
    _refuse_other_ranks("revert")
    tree = find_tree(directory)
    with locked(tree.core):
        contents = {}
        for target in tree.targets():
            content = target.path.read_bytes()
            contents[target.path] = (content, strip_block(content).content)
        return _write(tree, contents)


def patched_contents(tree: Tree, *, force: bool = False) -> dict[Path, tuple[bytes, bytes]]:
    """Path -> (content, content with the block) of every file, all checked first."""
    contents = {}
    for target in tree.targets():
        content = target.path.read_bytes()
        stripped = strip_block(content)
        problem = _problem(target, stripped.content, tree.version)
        # What this version patched, it patched by force: nothing has changed since.
        forced = force or (stripped.as_patched and stripped.version == __version__)
        if problem is not None and not (forced and isinstance(problem, UnknownDefinition)):
            raise problem
        contents[target.path] = (content, add_block(stripped.content))
    return contents


def _write(tree: Tree, contents: dict[Path, tuple[bytes, bytes]]) -> list[Path]:
    clean(list(contents))
    changed = {path: new for path, (old, new) in contents.items() if new != old}
    write_all(changed)
    return list(changed)


def _problem(target: Target, source: bytes, release: str) -> PatchRefused | None:
    """Why the definitions in this file cannot be bound, if they cannot."""
    patch = target.patch
    names = {name for binding in patch.bindings for name in binding.names}
    try:
        found = find_definitions(source, names)
    except (SyntaxError, UnicodeDecodeError) as error:
        return PatchRefused(
            f"{target.path} cannot be read as Python: {error}. Nothing was changed."
        )
    for binding in patch.bindings:
        definition = next((found[name] for name in binding.names if name in found), None)
        if definition is None:
            if binding.absent is None:
                return PatchRefused(
                    f"{target.path} ({release}) defines no {' or '.join(binding.names)}; this "
                    "Megatron is none the patch was made for. Nothing was changed."
                )
            continue
        where = f"{target.path}:{definition.line}: {definition.name} ({release})"
        lacking = [name for name in binding.needs if name not in definition.parameters]
        if lacking:
            return PatchRefused(
                f"{where} lacks the parameters {', '.join(lacking)} that the patch needs; it has "
                f"{', '.join(definition.parameters)}. Nothing was changed."
            )
        known = known_definitions().get(f"{patch.module}:{definition.name}", {})
        if binding.replaced and definition.sha256 not in known:
            releases = ", ".join("/".join(versions) for versions in known.values()) or "none"
            return UnknownDefinition(
                f"{where} is none of the {len(known)} known definitions ({releases}); its SHA-256 "
                f"is {definition.sha256[:12]}... If this fork did not change packed RoPE, run "
                "`python -m megatron.packed_rope apply --force` (with the same --tree, if any): "
                "it applies, runs the checks, and undoes everything if a case that was right no "
                "longer is. Nothing was changed."
            )
    return None


def _refuse_other_ranks(command: str) -> None:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        raise PatchRefused(
            f"RANK is {rank}: files are changed once, before a job starts, and by rank 0 alone. "
            f"Run `python -m megatron.packed_rope {command}` in the image or on the node, not in "
            "the job."
        )
