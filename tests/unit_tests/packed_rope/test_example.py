"""examples/packed_vlm on unpacked releases: patched, packed is unpacked, at C = 1 and 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trees import ROOT, copy_tree, environment, packed_rope

EXAMPLE = ROOT / "examples" / "packed_vlm"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the example is not here")


@pytest.fixture(scope="module", params=["0.14.0", "0.16.1"])
def patched(request, tmp_path_factory) -> Path:
    pytest.importorskip("transformers", minversion="4.57")
    tree = copy_tree(request.param, tmp_path_factory.mktemp("example"))
    assert packed_rope("apply", tree=tree).returncode == 0
    return tree


def run_example(tree: Path, out: Path, *options: str, ranks: int = 1) -> dict:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(launch if ranks > 1 else []), str(EXAMPLE / "run.py"), "--out", str(out)]
    process = subprocess.run(
        [sys.executable, *command, *options],
        env=environment(tree) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert out.exists(), process.stderr[-3000:]
    return json.loads(out.read_text()) | {"code": process.returncode}


@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_is_unpacked_once_patched(patched, tmp_path, ranks):
    result = run_example(patched, tmp_path / "out.json", "--steps", "3", ranks=ranks)
    assert result["code"] == 0
    assert result["cp_size"] == ranks
    assert set(result["families"]) == {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
    for family in result["families"].values():
        differences = [family[name] for name in ("loss", "logits", "gradients", "curve")]
        assert max(differences) < 1e-6
        assert len(family["packed"]) == 3
        # Labels are read, and learnt from.
        assert family["packed"][-1] < family["packed"][0]


def test_packed_is_not_unpacked_in_0_14_as_released(tmp_path):
    tree = copy_tree("0.14.0", tmp_path)
    options = ("--steps", "1", "--families", "qwen2_vl")
    result = run_example(tree, tmp_path / "out.json", *options)
    assert result["code"] == 1
    assert result["families"]["qwen2_vl"]["loss"] > 1e-2
