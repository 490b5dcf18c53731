"""The fused path on patched releases, the stand-in in Transformer Engine's place."""

from __future__ import annotations

import re

import pytest
from trees import HERE, copy_tree, packed_rope, run

# The oldest and the newest release with mRoPE, and two between whose wrappers differ.
RELEASES = ["0.12.3", "0.14.0", "0.16.1", "0.19.2"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_fused_path_is_right(release, tmp_path):
    tree = copy_tree(release, tmp_path)
    assert packed_rope("apply", tree=tree).returncode == 0
    cases = str(HERE / "fused_cases.py")
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", cases], tree)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Nothing was left out on the way: no test skipped, deselected or expected to fail.
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d{2,} passed in [\d.]+s.*", last), last
    print(f"{release}: {last}")
