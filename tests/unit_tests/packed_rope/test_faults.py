"""What can go wrong while files are changed: a typed error, nothing half done, a true status."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trees import copy_tree, digests, environment, packed_rope, run, run_python, target_files

from megatron.packed_rope.binding import disk, files
from megatron.packed_rope.errors import PatchError, PatchRefused

EMBEDDINGS = Path("megatron/core/models/common/embeddings")
ROPE_UTILS = EMBEDDINGS / "rope_utils.py"
CALL_IT = """
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
"""


@pytest.fixture
def tree(tmp_path):
    return target_files("0.14.0", tmp_path)


def state(tree: Path) -> str:
    return disk.status(tree)["state"]


def refuse(code: int):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code), "rope_utils.py")

    return fail


@pytest.mark.parametrize(
    ("call", "code"),
    [("_stage", errno.EACCES), ("_stage", errno.EROFS), ("_stage", errno.ENOSPC)],
    ids=["read-only folder", "read-only file system", "disk full"],
)
def test_a_file_system_that_refuses_leaves_every_file_as_it_was(tree, monkeypatch, call, code):
    before = digests(tree)
    monkeypatch.setattr(files, call, refuse(code))
    with pytest.raises(PatchError, match=r"Nothing\s+was changed"):
        disk.apply(tree)
    assert digests(tree) == before
    assert state(tree) == "unpatched"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_is_refused_for_real(tree):
    before = digests(tree)
    folder = tree / EMBEDDINGS
    folder.chmod(0o555)
    try:
        with pytest.raises(PatchError, match="Nothing was changed"):
            disk.apply(tree)
    finally:
        folder.chmod(0o755)
    assert digests(tree) == before


def test_a_disk_that_fills_up_on_the_third_file_undoes_the_first_two(tree, monkeypatch):
    before = digests(tree)
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(PatchError, match="No space left"):
        disk.apply(tree)
    assert len(calls) > 3, "the files that had been moved were moved back"
    assert digests(tree) == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda b: b.rstrip(b"\n"), id="no final newline"),
        pytest.param(lambda b: b.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(lambda b: b.replace(b"\n", b"\r\n").removesuffix(b"\r\n"), id="CRLF, no end"),
        pytest.param(lambda b: b"# -*- coding: latin-1 -*-\n" + b + b"# caf\xe9\n", id="latin-1"),
        pytest.param(lambda b: b + b"\n\n\x0c\n", id="form feed"),
    ],
)
def test_unusual_files_are_patched_run_and_come_back_byte_for_byte(tmp_path, change):
    tree = copy_tree("0.14.0", tmp_path)
    path = tree / ROPE_UTILS
    content = change(path.read_bytes())
    path.unlink()  # a hard link to the shared tree
    path.write_bytes(content)
    before = digests(tree)
    disk.apply(tree)
    assert state(tree) == "patched"
    done = run_python(CALL_IT + "print(apply_rotary_pos_emb.__packed_rope_original__)", tree)
    assert done.returncode == 0, done.stderr
    assert disk.revert(tree)
    assert digests(tree) == before


def test_a_file_that_python_cannot_decode_is_refused(tree):
    path = tree / ROPE_UTILS
    path.write_bytes(path.read_bytes() + b"# caf\xe9\n")
    before = digests(tree)
    with pytest.raises(PatchRefused, match="cannot be read as Python"):
        disk.apply(tree)
    assert digests(tree) == before


def test_a_symlinked_site_packages_is_patched_where_it_lies(tree, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tree)
    before = digests(tree)
    changed = disk.apply(link)
    assert all(path.is_relative_to(tree.resolve()) for path in changed)
    assert state(tree) == state(link) == "patched"
    disk.revert(link)
    assert digests(tree) == before


def test_a_link_that_leaves_the_package_is_refused(tree, tmp_path):
    outside = tmp_path / "elsewhere.py"
    (tree / ROPE_UTILS).rename(outside)
    (tree / ROPE_UTILS).symlink_to(outside)
    content = outside.read_bytes()
    with pytest.raises(PatchRefused, match="outside"):
        disk.apply(tree)
    assert outside.read_bytes() == content


def test_the_other_end_of_a_hard_link_stays_untouched(tree, tmp_path):
    cache = tmp_path / "cache.py"
    os.link(tree / ROPE_UTILS, cache)
    content = cache.read_bytes()
    disk.apply(tree)
    assert cache.read_bytes() == content
    assert (tree / ROPE_UTILS).read_bytes() != content


def test_two_applies_at_once_patch_once(tree):
    command = [sys.executable, "-m", "megatron.packed_rope", "apply", "--tree", str(tree)]
    both = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = sorted(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == "nothing to change\n"
    assert outputs[1].count("patched ") == 4
    assert (tree / ROPE_UTILS).read_bytes().count(b">>> megatron-packed-rope 0") == 1


KILLED = """
import os, sys
from megatron.packed_rope.binding import disk, files
replace = os.replace
def once(source, target):
    replace(source, target)
    os._exit(9)
files.os.replace = once
disk.{command}(__import__("pathlib").Path({tree!r}))
"""


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_kill_between_two_files_is_seen_and_repaired(tree, command):
    before = digests(tree)
    if command == "revert":
        disk.apply(tree)
    done = run_python(KILLED.format(command=command, tree=str(tree)))
    assert done.returncode == 9
    assert state(tree) == "partly patched"
    disk.apply(tree)
    assert state(tree) == "patched"
    assert not list(tree.rglob(".*packed_rope*")), "leftovers of the killed run"
    disk.revert(tree)
    assert digests(tree) == before


def test_a_half_patched_tree_is_told_and_reverted(tree):
    before = digests(tree)
    disk.apply(tree)
    attention = next(f for f in disk.status(tree)["files"] if f["module"].endswith("attention"))
    original = disk.strip_block(Path(attention["path"]).read_bytes()).content
    Path(attention["path"]).write_bytes(original)
    assert state(tree) == "partly patched"
    disk.revert(tree)
    assert digests(tree) == before


def test_megatron_reinstalled_after_apply_is_unpatched_again(tree, tmp_path):
    disk.apply(tree)
    shutil.rmtree(tree)
    target_files("0.14.0", tmp_path)
    assert state(tree) == "unpatched"


def test_a_block_of_another_version_is_told_and_replaced(tree, monkeypatch):
    from megatron.packed_rope.binding import block

    before = digests(tree)
    with monkeypatch.context() as older:
        older.setattr(block, "__version__", "0.0.9")
        disk.apply(tree)
    assert {f["state"] for f in disk.status(tree)["files"]} == {"outdated"}
    assert len(disk.apply(tree)) == 4
    assert state(tree) == "patched"
    disk.revert(tree)
    assert digests(tree) == before


def test_an_edit_after_apply_is_told_and_kept_by_revert(tree):
    path = tree / ROPE_UTILS
    disk.apply(tree)
    path.write_bytes(b"# a user's edit\n" + path.read_bytes())
    edited = next(f for f in disk.status(tree)["files"] if f["module"].endswith("rope_utils"))
    assert edited["state"] == "edited"
    disk.revert(tree)
    assert path.read_bytes().startswith(b"# a user's edit\n")
    assert b"packed-rope" not in path.read_bytes()


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_ranks_other_than_0_are_refused(tree, command):
    before = digests(tree)
    done = packed_rope(command, "--tree", str(tree), env={"RANK": "3"})
    assert done.returncode == 1
    assert "RANK is 3" in done.stderr
    assert digests(tree) == before
    assert packed_rope(command, "--tree", str(tree), env={"RANK": "0"}).returncode == 0


def test_a_reader_that_stops_early_gets_no_traceback(tree):
    command = [sys.executable, "-W", "ignore", "-m", "megatron.packed_rope", "diff"]
    with subprocess.Popen(
        [*command, "--tree", str(tree)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as reader:
        reader.stdout.close()  # long before there is anything to read
        assert reader.stderr.read() == ""
    assert reader.returncode == 1


def test_without_our_package_a_patched_megatron_refuses_to_import(tmp_path):
    tree = copy_tree("0.14.0", tmp_path)
    disk.apply(tree)
    without_us = {"PYTHONPATH": _path_without_us(tree)}
    done = run(["-S", "-c", CALL_IT], tree, env=without_us, cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError")
    assert "Install megatron-packed-rope 0.1.0 again" in last
    assert "python -m megatron.packed_rope revert" in last
    assert "deleting the block" in last


def _path_without_us(tree: Path) -> str:
    """A path with torch and the release on it, but not this package (``-S``: no .pth either)."""
    import torch

    return os.pathsep.join([str(tree), str(Path(torch.__file__).parents[1])])


OTHERS_PATCH = """
import json, warnings
warnings.simplefilter("ignore")
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention
{patch}
from megatron.packed_rope import PatchNotActive, require_active
from megatron.packed_rope.binding.disk import status
try:
    require_active()
    said = None
except PatchNotActive as error:
    said = str(error)
print(json.dumps([said, status()["not_bound"]]))
"""


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("pass", None),
        (
            "rope_utils._apply_rotary_pos_emb_thd = lambda *a, **k: None",
            "rope_utils._apply_rotary_pos_emb_thd",
        ),
        (
            "attention.apply_rotary_pos_emb = lambda *a, **k: None",
            "attention.apply_rotary_pos_emb",
        ),
        ("attention.Attention.forward = lambda self: None", "Attention.forward"),
    ],
    ids=["none", "late-bound function", "copied function", "method"],
)
def test_another_patch_bound_after_ours_is_named(tmp_path, patch, named):
    tree = copy_tree("0.14.0", tmp_path)
    disk.apply(tree)
    done = run_python(OTHERS_PATCH.format(patch=patch), tree)
    assert done.returncode == 0, done.stderr
    said, not_bound = json.loads(done.stdout)
    if named is None:
        assert said is None
        assert not_bound == []
    else:
        assert named in said
        assert "python -m megatron.packed_rope apply" in said
        assert any(named in line for line in not_bound)
