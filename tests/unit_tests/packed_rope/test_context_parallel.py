"""mRoPE and text models on real gloo groups: packed and sharded equals each sample run alone."""

from __future__ import annotations

import json

import pytest
from trees import HERE, run, unpacked

# Every release line that has mRoPE; GPTModel end to end on four of them.
ROTATION = ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]
MODEL = ["0.12.3", "0.14.0", "0.16.1", "0.19.2"]


def on_processes(script: str, processes: int, release: str) -> dict:
    torchrun = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(processes), str(HERE / "in_gloo" / script)]
    done = run(command, unpacked(release), timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{release}: {json.dumps(report)}")
    return report


@pytest.mark.parametrize("release", ROTATION)
def test_q_and_k_of_groups_of_1_2_and_4_processes(release):
    report = on_processes("rotation.py", 4, release)
    # Angles up to 50 radians and |q| below 5 in float32: 50 * 5 * 2**-24 is 1.5e-5.
    for case, difference in report["patched"].items():
        assert max(difference) < 1.5e-5, case
    sharded = {case: d for case, d in report["unpatched"].items() if not case.startswith("C=1")}
    assert len(sharded) == 4
    for case, difference in sharded.items():
        assert isinstance(difference, str) or max(difference) > 1, f"{case}: upstream was right?"
    assert any(not isinstance(d, str) for d in sharded.values()) or release == "0.12.3"


@pytest.mark.parametrize("release", MODEL)
def test_gpt_model_packed_equals_samples_alone(release):
    report = on_processes("model.py", 2, release)
    patched, unpatched = report["patched"], report["unpatched"]
    for kind in ("rope", "mrope"):
        for cp_size in (1, 2):
            logits, gradients = patched[f"{kind}, C={cp_size}"]
            assert logits == 0
            # Sums over tokens in another order, relative to the largest gradient.
            assert gradients < 2e-6
    assert unpatched["rope, C=2"] == patched["rope, C=2"]
    assert patched["text unchanged bit for bit"]
    assert patched["recomputation, C=1"]
    assert patched["recomputation, C=2"]
    assert patched["two models"] is True
    sharded = unpatched["mrope, C=2"]
    assert isinstance(sharded, str) if release == "0.12.3" else sharded[0] > 1
