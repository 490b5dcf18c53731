"""The diff is one that git takes on a checkout laid out as upstream's, and takes back."""

from __future__ import annotations

import subprocess

import pytest
from trees import copy_tree, digests, packed_rope, run_python, target_files

from megatron.packed_rope.binding import disk
from megatron.packed_rope.binding.diff import diff

RELEASES = ["0.10.0", "0.12.3", "0.14.0", "0.16.1", "0.19.2"]
SEES_THE_PATCH = """
import warnings
warnings.simplefilter("ignore")
from megatron.packed_rope import require_active
require_active()
"""


def git(tree, *arguments, **kwargs):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    return subprocess.run(
        ["git", "-C", str(tree), *identity, *arguments], capture_output=True, check=True, **kwargs
    )


@pytest.mark.parametrize("release", RELEASES)
def test_git_applies_the_diff_and_takes_it_back(release, tmp_path):
    tree = copy_tree(release, tmp_path)
    git(tree, "init", "-q")
    git(tree, "add", "megatron")
    git(tree, "commit", "-qm", "as released")
    before = digests(tree)
    done = packed_rope("diff", "--tree", str(tree))
    assert done.returncode == 0, done.stderr
    patch = tmp_path / "packed_rope.diff"
    patch.write_text(done.stdout)

    git(tree, "apply", "--check", str(patch))
    git(tree, "apply", str(patch))
    assert disk.status(tree)["state"] == "patched"
    assert run_python(SEES_THE_PATCH, tree).returncode == 0
    assert digests(tree) == digests_after_apply(release, tmp_path, tree)

    git(tree, "apply", "-R", str(patch))
    assert digests(tree) == before
    assert git(tree, "status", "--porcelain", "megatron").stdout == b""


def digests_after_apply(release, tmp_path, tree):
    """The same files as ``apply`` makes."""
    (tmp_path / "other").mkdir()
    other = copy_tree(release, tmp_path / "other")
    disk.apply(other)
    return digests(other)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda content: content.rstrip(b"\n"), id="no final newline"),
        pytest.param(lambda content: content.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(lambda content: content + b"# \x0c form feed\n", id="form feed"),
    ],
)
def test_unusual_files_too(tmp_path, change):
    tree = target_files("0.14.0", tmp_path)
    path = tree / "megatron/core/models/common/embeddings/rope_utils.py"
    path.write_bytes(change(path.read_bytes()))
    before = digests(tree)
    git(tree, "init", "-q")
    patch = diff(tree)
    git(tree, "apply", input=patch)
    assert disk.status(tree)["state"] == "patched"
    git(tree, "apply", "-R", input=patch)
    assert digests(tree) == before


def test_a_patched_tree_has_nothing_left_to_change(tmp_path):
    tree = target_files("0.14.0", tmp_path)
    disk.apply(tree)
    assert diff(tree) == b""
