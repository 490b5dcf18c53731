"""Write patches/known.toml: the fingerprint of every definition the catalogue replaces.

    python tools/fingerprints.py           write the file
    python tools/fingerprints.py --check [FILE]   exit 1 if it is not what would be written

    python tools/fingerprints.py --of TREE NAME   lines of snapshots.txt for an unpacked checkout

Commits that no wheel was made of are listed, by hand, in snapshots.txt. Only SHA-256 sums of
upstream text are stored, never the text.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import wheels  # noqa: E402

from megatron.packed_rope.binding.catalogue import FOLDER, patches  # noqa: E402
from megatron.packed_rope.binding.definitions import find_definitions  # noqa: E402

PROJECTS = {"megatron.core": "megatron-core", "megatron.bridge": "megatron-bridge"}


def render() -> str:
    lines = [
        "# Written by `make fingerprints`; do not edit. SHA-256 of the source text of each known"
    ]
    lines += ["# definition, and the releases that have it.", ""]
    for patch in patches():
        project = PROJECTS[patch.top]
        known: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for pin in wheels.pins(project):
            package = wheels.tree(pin.version, project).joinpath(*patch.top.split("."))
            path = package / patch.relative_path
            if not path.exists():
                continue
            names = {name for binding in patch.bindings for name in binding.names}
            found = find_definitions(path.read_bytes(), names)
            for binding in patch.bindings:
                definition = next((found[n] for n in binding.names if n in found), None)
                if definition is None:
                    if binding.absent is None:
                        raise SystemExit(f"{project} {pin.version} has no {binding.name}")
                    continue
                lacking = set(binding.needs) - set(definition.parameters)
                if lacking:
                    raise SystemExit(f"{project} {pin.version} {binding.name} lacks {lacking}")
                if binding.replaced:
                    known[definition.name][definition.sha256].append(pin.version)
        for name, digests in known.items():
            for snapshot, definition, digest in snapshots():
                if definition == f"{patch.module}:{name}":
                    digests[digest].append(snapshot)
            lines.append(f'["{patch.module}:{name}"]')
            lines += [f'{digest} = ["' + '", "'.join(v) + '"]' for digest, v in digests.items()]
            lines.append("")
    return "\n".join(lines)


def snapshots() -> list[list[str]]:
    """(name, module:definition, SHA-256) of definitions in commits between releases."""
    lines = Path(__file__).with_name("snapshots.txt").read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def of_tree(tree: Path, name: str) -> str:
    lines = []
    for patch in patches():
        path = tree.joinpath(*patch.module.split(".")).with_suffix(".py")
        if path.exists():
            names = {b.name for b in patch.bindings if b.replaced}
            for found in find_definitions(path.read_bytes(), names).values():
                lines.append(f"{name} {patch.module}:{found.name} {found.sha256}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        sys.exit(print(of_tree(Path(sys.argv[2]), sys.argv[3])))
    text, path = render(), FOLDER / "known.toml"
    if "--check" in sys.argv:
        if sys.argv[-1] != "--check":
            path = Path(sys.argv[-1])
        sys.exit(0 if path.read_text(encoding="utf-8") == text else f"{path} is out of date")
    path.write_text(text, encoding="utf-8")
