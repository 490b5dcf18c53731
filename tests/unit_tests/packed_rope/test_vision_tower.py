"""A vision tower of transformers rotated by the installed Megatron-Core gives its own output."""

from __future__ import annotations

import json

import pytest
from trees import ROOT, copy_tree, run

from megatron.packed_rope.binding import disk

ROUNDING = 1e-5


def tower(tree):
    done = run([str(ROOT / "examples" / "vision_tower.py"), "--json"], tree)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout), done.returncode


@pytest.mark.parametrize("release", ["0.14.0", "0.16.1"])
def test_two_images_in_one_row(release, tmp_path):
    tree = copy_tree(release, tmp_path)
    before, failed = tower(tree)
    assert failed == (release == "0.14.0")
    for first, second in before.values():
        assert first < ROUNDING, "the first image starts at row 0, so it is right in any case"
        assert (second > 1000 * ROUNDING) == (release == "0.14.0")
    disk.apply(tree)
    after, failed = tower(tree)
    assert not failed
    assert max(max(pair) for pair in after.values()) < ROUNDING
