"""Every pinned Megatron-Core release: what is wrong, patched, right, and back byte for byte.

CI runs one release per distinct upstream definition; ``make matrix`` (PACKED_ROPE_RELEASES=all)
runs every pinned one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from trees import HERE, copy_tree, digests, packed_rope, run, wheels

# One per distinct text of a replaced or wrapped definition.
DISTINCT = ["0.10.0", "0.11.0", "0.12.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"]
DISTINCT += ["0.18.2", "0.19.2"]

TAIL = {
    "tail padding in t and freqs",
    "tail padding in t only",
    "tail padding, C=2",
    "table, tail padding",
    "tokens replicated in a CP group of 2",
}
LOCAL = {
    "rank's own rows, C=2",
    "rank's own rows, C=4",
    "rank's own rows, C=2, undeclared",
}
PACKED = {
    "packed freqs, mixed resolution",
    "packed freqs, two images of 640 and 960 tokens",
    "packed freqs, C=2",
    "packed freqs, C=4, mixed",
    "packed freqs, empty segment",
    "one freqs tensor, two cu_seqlens",
    "partial rotary",
    "interleaved pairs",
    "mscale 1.2",
}
EXTRA_ROWS = {"freqs with more rows than tokens"}
BIN_TABLE = {"table as long as the bin"}


# Through GPTModel (mRoPE since 0.12, dynamic CP since 0.16).
PACKED_MROPE = {"GPTModel mRoPE, C=1"}
CUT_MROPE = {
    "GPTModel mRoPE, C=2",
    "GPTModel mRoPE, C=4",
    "GPTModel mRoPE, padded boundaries, C=2",
    "GPTModel mRoPE, ids of the rank, C=2",
    "GPTModel mRoPE, rotary_interleaved",
}
DENSE_MROPE = {"GPTModel mRoPE, one dense row, C=2"}
QWEN3 = {"GPTModel mRoPE, Qwen3 order"}
DYNAMIC = {
    "dynamic CP mRoPE, model 1, batch 2",
    "dynamic CP mRoPE, model 2, batch 1",
    "dynamic CP text, model 1, batch 2",
    "dynamic CP text, model 4, batch 2",
}


def expected_before(release: str) -> dict[str, set[str]]:
    """What upstream gets wrong, and what raises, unpatched."""
    version = tuple(map(int, release.split(".")))[:2]
    packed_is_table = version < (0, 15)
    wrong = EXTRA_ROWS | (PACKED if packed_is_table else BIN_TABLE)
    raises = TAIL | LOCAL
    if version >= (0, 12):
        wrong = wrong | QWEN3 | (PACKED_MROPE if packed_is_table else set())
        raises = raises | CUT_MROPE | (DENSE_MROPE if version == (0, 12) else set())
    if version >= (0, 16):
        raises = raises | DYNAMIC
    return {"wrong": wrong, "raises": raises}


def releases() -> list[str]:
    if os.environ.get("PACKED_ROPE_RELEASES") != "all":
        return DISTINCT
    return [pin.version for pin in wheels().pins()]


def check(tree: Path) -> dict[str, set[str]]:
    done = packed_rope("check", "--json", tree=tree)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["counts"]["wrong"] + report["counts"]["raises"] else 0)
    outcomes: dict[str, set[str]] = {
        "right": set(),
        "wrong": set(),
        "raises": set(),
        "not run": set(),
    }
    for case in report["cases"]:
        outcomes[case["outcome"]].add(case["name"])
    return outcomes


def state(tree: Path) -> str:
    return json.loads(packed_rope("status", "--json", tree=tree).stdout)["state"]


@pytest.mark.parametrize("release", releases())
def test_release(release, tmp_path):
    tree = copy_tree(release, tmp_path)
    pristine = digests(tree)
    assert state(tree) == "unpatched"
    before = check(tree)
    expected = expected_before(release)
    assert before["wrong"] == expected["wrong"]
    assert before["raises"] == expected["raises"]

    assert packed_rope("apply", tree=tree).returncode == 0
    assert state(tree) == "patched"
    patched = digests(tree)
    after = check(tree)
    assert not after["wrong"]
    assert not after["raises"]
    assert after["right"] == before["right"] | before["wrong"] | before["raises"]

    assert "nothing to change" in packed_rope("apply", tree=tree).stdout
    assert digests(tree) == patched

    inside = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "in_megatron")], tree)
    assert inside.returncode == 0, inside.stdout[-6000:] + inside.stderr[-2000:]
    print(f"{release}: {inside.stdout.splitlines()[-1]}")

    assert packed_rope("revert", tree=tree).returncode == 0
    assert state(tree) == "unpatched"
    assert digests(tree) == pristine
    record(release, before, after)


def record(release: str, before: dict[str, set[str]], after: dict[str, set[str]]) -> None:
    """For ``make matrix``, which makes the README's table of releases from it."""
    folder = os.environ.get("PACKED_ROPE_MATRIX")
    if folder:
        found = {
            "release": release,
            "before": {outcome: len(names) for outcome, names in before.items()},
            "after": {outcome: len(names) for outcome, names in after.items()},
        }
        (Path(folder) / f"{release}.json").write_text(json.dumps(found))
