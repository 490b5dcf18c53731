"""Which processes see the patch: door 1 all of them, door 2 those that import it, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trees import copy_tree, run, run_python, unpacked

from megatron.packed_rope.binding import disk

ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
HEAD = "import warnings; warnings.simplefilter('ignore')\n"
ORIGINAL = "__packed_rope_original__"


@pytest.fixture(scope="module")
def pristine():
    return unpacked("0.16.1")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    tree = copy_tree("0.16.1", tmp_path_factory.mktemp("patched"))
    disk.apply(tree)
    return tree


def works(code: str, tree: Path) -> None:
    done = run_python(HEAD + code, tree)
    assert done.returncode == 0, done.stderr[-3000:]


def fails(code: str, tree: Path) -> str:
    done = run_python(HEAD + code, tree)
    assert done.returncode != 0
    return done.stderr


def test_auto_before_megatron(pristine):
    works(
        "import megatron.packed_rope.auto\n"
        "from megatron.core.models.gpt import gpt_model\n"
        "import megatron.packed_rope; megatron.packed_rope.require_active()",
        pristine,
    )


def test_auto_after_megatron_rebinds_what_modules_hold(pristine):
    works(
        "from megatron.core.models.gpt import gpt_model\n"
        "from megatron.core.transformer import attention\n"
        "before = id(attention.apply_rotary_pos_emb)\n"
        "import megatron.packed_rope.auto\n"
        "assert id(attention.apply_rotary_pos_emb) != before\n"
        "import megatron.packed_rope; megatron.packed_rope.require_active()",
        pristine,
    )


STALE = """
import functools
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
class Layer:
    rotate = staticmethod(apply_rotary_pos_emb)
def default(rotate=apply_rotary_pos_emb):
    pass
def closure(rotate):
    return lambda: rotate
kept = closure(apply_rotary_pos_emb)
partial = functools.partial(apply_rotary_pos_emb)
import megatron.packed_rope.auto
"""


def test_auto_after_megatron_names_holders_it_cannot_rebind(pristine):
    said = fails(STALE, pristine)
    for holder in ("Layer", "default", "closure.<locals>.<lambda>", "__main__ (partial)"):
        assert f"{holder}" in said, said
    assert "PatchNotActive" in said
    assert "Import megatron.packed_rope.auto first" in said


def test_auto_twice_and_reloaded(pristine):
    works(
        "import importlib, sys, megatron.packed_rope.auto as auto\n"
        f"import {ROPE_UTILS} as rope\n"
        "bound = rope.apply_rotary_pos_emb\n"
        "importlib.reload(auto)\n"
        "assert rope.apply_rotary_pos_emb is bound\n"
        "assert sum(type(f).__name__ == '_Finder' for f in sys.meta_path) == 1\n"
        "importlib.reload(rope)\n"
        f"assert hasattr(rope.apply_rotary_pos_emb, '{ORIGINAL}')",
        pristine,
    )


def test_both_doors_bind_once(patched):
    works(
        "import megatron.packed_rope.auto\n"
        f"import {ROPE_UTILS} as rope\n"
        f"original = rope.apply_rotary_pos_emb.{ORIGINAL}\n"
        f"assert not hasattr(original, '{ORIGINAL}')\n"
        "import megatron.packed_rope; megatron.packed_rope.require_active()",
        patched,
    )


def test_without_a_door_require_active_says_what_to_do(pristine):
    said = fails("import megatron.packed_rope; megatron.packed_rope.require_active()", pristine)
    assert "PatchNotActive" in said
    assert f"{ROPE_UTILS}.apply_rotary_pos_emb is upstream's" in said
    assert "python -m megatron.packed_rope apply" in said


def test_require_active_costs_less_than_a_millisecond(patched):
    works(
        "import time, megatron.packed_rope\n"
        "from megatron.packed_rope import require_active\n"
        "require_active()\n"
        "def once():  # the thread's own time, as a busy machine is not what is measured\n"
        "    start = time.thread_time(); require_active(); return time.thread_time() - start\n"
        "best = min(once() for _ in range(300))\n"
        "assert best < 1e-3, best",
        patched,
    )


def test_the_source_of_a_hooked_module_is_still_found(pristine):
    works(
        "import inspect, megatron.packed_rope.auto\n"
        f"import {ROPE_UTILS} as rope\n"
        "assert 'def _apply_rotary_pos_emb_thd' in inspect.getsource(rope)",
        pristine,
    )


CHILD = f"""
import importlib, sys, warnings
warnings.simplefilter("ignore")
{{auto}}

def child(queue):
    rope = importlib.import_module("{ROPE_UTILS}")
    queue.put(hasattr(rope.apply_rotary_pos_emb, "{ORIGINAL}"))

if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    seen = queue.get(timeout=120)
    process.join()
    sys.exit(0 if seen else 3)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("door", ["on disk", "in process"])
def test_children_of_multiprocessing(method, door, pristine, patched, tmp_path):
    script = tmp_path / "script.py"
    auto = "import megatron.packed_rope.auto" if door == "in process" else ""
    script.write_text(CHILD.format(auto=auto))
    tree = pristine if auto else patched
    done = run([str(script), method], tree)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_plain_subprocess_is_covered_by_door_1_alone(pristine, patched):
    seen = f"import {ROPE_UTILS} as rope; print(hasattr(rope.apply_rotary_pos_emb, '{ORIGINAL}'))"
    child = (
        "import megatron.packed_rope.auto, subprocess, sys\n"
        f"out = subprocess.check_output([sys.executable, '-W', 'ignore', '-c', {seen!r}])\n"
        "print(out.decode())"
    )
    assert run_python(HEAD + child, pristine).stdout.strip() == "False"
    assert run_python(HEAD + child, patched).stdout.strip() == "True"


TORCHRUN = f"""
import sys, warnings
warnings.simplefilter("ignore")
import torch
torch.distributed.init_process_group("gloo")
import {ROPE_UTILS} as rope
seen = torch.tensor([float(hasattr(rope.apply_rotary_pos_emb, "{ORIGINAL}"))])
torch.distributed.all_reduce(seen)
assert "megatron.packed_rope.auto" not in sys.modules
torch.distributed.destroy_process_group()
assert seen.item() == 2, seen
"""


def test_both_processes_of_torchrun_see_the_patch(patched, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    torchrun = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = run([*torchrun, "--nproc-per-node", "2", str(script)], patched)
    assert done.returncode == 0, done.stderr[-3000:]


def test_bound_functions_pickle_by_upstreams_own_name(patched):
    works(
        "import pickle\n"
        f"import {ROPE_UTILS} as rope\n"
        "from megatron.core.transformer.attention import Attention\n"
        "for function in (rope.apply_rotary_pos_emb, rope._apply_rotary_pos_emb_thd,\n"
        "                 Attention.forward):\n"
        "    pickled = pickle.dumps(function)\n"
        "    assert pickle.loads(pickled) is function\n"
        "    assert b'packed_rope' not in pickled",
        patched,
    )


COMPILED = f"""
import torch
from types import SimpleNamespace
import {ROPE_UTILS} as rope
group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False,
                         multi_latent_attention=False, mrope_section=None)
def caller(t, freqs, cu):
    return rope.apply_rotary_pos_emb(t * 2, freqs, config, cu_seqlens=cu, cp_group=group)
t, freqs = torch.randn(10, 2, 8), torch.randn(10, 1, 1, 8)
cu = torch.tensor([0, 4, 10], dtype=torch.int32)
compiled = torch.compile(caller, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(t, freqs, cu), caller(t, freqs, cu), rtol=0, atol=0)
whole = rope._apply_rotary_pos_emb_bshd((t * 2)[:, None], freqs)[:, 0]
assert torch.equal(compiled(t, freqs, cu), whole)
"""


def test_a_compiled_caller_runs_the_bound_function(patched):
    works(COMPILED, patched)


def test_status_shows_what_another_package_binds_in_the_process(patched, tmp_path):
    (tmp_path / "their_framework.py").write_text(
        f"import {ROPE_UTILS} as rope\nrope._apply_rotary_pos_emb_thd = lambda *a, **k: None\n"
    )
    path = {"PYTHONPATH": f"{patched}:{Path(sys.modules['trees'].ROOT)}:{tmp_path}"}
    command = ["-W", "ignore", "-m", "megatron.packed_rope", "status"]
    assert run(command, env=path).returncode == 0
    done = run([*command, "--import", "their_framework"], env=path)
    assert done.returncode == 1
    assert "rope_utils._apply_rotary_pos_emb_thd is upstream's or another package's" in done.stdout
