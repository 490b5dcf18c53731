"""Forks and releases to come: refused by name, forced with proof, never silently wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import copy_tree, digests, packed_rope, run_python, target_files

from megatron.packed_rope.binding import disk
from megatron.packed_rope.errors import PatchError, PatchRefused, UnknownDefinition

ROPE_UTILS = Path("megatron/core/models/common/embeddings/rope_utils.py")


def rewrite(path: Path, *changes: tuple[str, str]) -> None:
    """Change the text of a file that may be a hard link into the shared tree."""
    text = path.read_text()
    for old, new in changes:
        assert text.count(old), f"{old!r} is not in {path.name}"
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text)


HARMLESS = (
    "def _apply_rotary_pos_emb_thd(",
    "def _apply_rotary_pos_emb_thd(  # a fork's comment\n",
)


def test_an_unknown_definition_is_refused_by_name(tmp_path):
    tree = target_files("0.16.1", tmp_path)
    rewrite(tree / ROPE_UTILS, HARMLESS)
    before = digests(tree)
    with pytest.raises(UnknownDefinition) as refused:
        disk.apply(tree)
    message = str(refused.value)
    assert str(tree / ROPE_UTILS) in message
    assert "_apply_rotary_pos_emb_thd (0.16.1)" in message
    assert "0.19.0/0.19.2" in message, "what is known"
    assert "apply --force" in message, "the next step"
    assert digests(tree) == before
    files = {Path(f["path"]).name: f for f in disk.status(tree)["files"]}
    assert files["rope_utils.py"]["state"] == "unknown"
    assert files["attention.py"]["state"] == "unpatched"


def test_the_refusal_is_exit_code_1_on_the_command_line(tmp_path):
    tree = target_files("0.16.1", tmp_path)
    rewrite(tree / ROPE_UTILS, HARMLESS)
    for command in ("apply", "diff"):
        done = packed_rope(command, "--tree", str(tree))
        assert done.returncode == 1
        assert done.stderr.startswith("refused: ")
        assert "_apply_rotary_pos_emb_thd" in done.stderr


def test_a_megatron_that_is_no_namespace_package_is_refused(tmp_path):
    tree = target_files("0.14.0", tmp_path)
    (tree / "megatron/__init__.py").touch()
    with pytest.raises(PatchRefused, match=r"__init__\.py exists.*hides"):
        disk.apply(tree)


def test_a_folder_without_megatron_could_not_run(tmp_path):
    with pytest.raises(PatchError, match=r"no megatron\.core in"):
        disk.apply(tmp_path)
    assert packed_rope("status", "--tree", str(tmp_path)).returncode == 2


def test_a_missing_module_is_refused(tmp_path):
    tree = target_files("0.14.0", tmp_path)
    (tree / ROPE_UTILS).unlink()
    with pytest.raises(PatchRefused, match="is missing"):
        disk.apply(tree)


@pytest.mark.parametrize("force", [False, True])
def test_a_signature_that_lacks_what_is_needed_is_refused_even_with_force(tmp_path, force):
    tree = target_files("0.16.1", tmp_path)
    path = tree / "megatron/core/transformer/attention.py"
    rewrite(path, ("packed_seq_params", "packing"))
    with pytest.raises(PatchRefused, match="lacks the parameters packed_seq_params"):
        disk.apply(tree, force=force)


def test_force_patches_a_harmless_fork_after_checking_it(tmp_path):
    tree = copy_tree("0.16.1", tmp_path)
    rewrite(tree / ROPE_UTILS, HARMLESS)
    before = digests(tree)
    done = packed_rope("apply", "--force", "--tree", str(tree))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("patched ") == 4
    assert "check before: 23 right, 3 wrong, 17 raises; after: 43 right, 0 wrong" in done.stdout

    said = packed_rope("status", "--tree", str(tree))
    assert said.returncode == 0, said.stdout
    assert "by force: not all its definitions are known ones" in said.stdout
    assert packed_rope("apply", "--tree", str(tree)).stdout.strip() == "nothing to change"

    assert packed_rope("revert", "--tree", str(tree)).returncode == 0
    assert digests(tree) == before


def test_force_undoes_itself_where_a_right_case_turns_wrong(tmp_path):
    """A fork whose model declares, under our attribute, what its text tables are not."""
    tree = copy_tree("0.16.1", tmp_path)
    rewrite(tree / ROPE_UTILS, HARMLESS)
    rewrite(
        tree / "megatron/core/models/gpt/gpt_model.py",
        (
            "class GPTModel(",
            "def _fork(config):\n    config.packed_rope_freqs_layout = 'packed'\nclass GPTModel(",
        ),
        ("super().__init__(config=config", "_fork(config)\n        super().__init__(config=config"),
    )
    before = digests(tree)
    done = packed_rope("apply", "--force", "--tree", str(tree))
    assert done.returncode == 1, done.stdout
    assert "were right before the patch and are not after it: " in done.stderr
    assert "GPTModel text, C=1" in done.stderr
    assert digests(tree) == before


CALL = """
import torch, json
from types import SimpleNamespace
from megatron.core.models.common.embeddings import rope_utils
from megatron.packed_rope.errors import UnknownArgument
group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False,
                         multi_latent_attention=False, mrope_section=None)
t, freqs = torch.randn(10, 2, 8), torch.randn(10, 1, 1, 8)
cu = torch.tensor([0, 4, 10])
def rotate(**more):
    return rope_utils.apply_rotary_pos_emb(t, freqs, config, cu_seqlens=cu, cp_group=group, **more)
"""


@pytest.fixture(scope="module")
def future(tmp_path_factory):
    """0.16.1 with a flag that its arithmetic takes (negate) and one for THD alone (stride)."""
    tree = copy_tree("0.16.1", tmp_path_factory.mktemp("future"))
    rewrite(
        tree / ROPE_UTILS,
        ("    mscale: float = 1.0,\n", "    mscale: float = 1.0,\n    negate: bool = False,\n"),
        (
            "    cos_ = (torch.cos(freqs)",
            "    freqs = -freqs if negate else freqs\n    cos_ = (torch.cos(freqs)",
        ),
    )
    path = tree / ROPE_UTILS
    head, name, rest = path.read_text().partition("def apply_rotary_pos_emb(")
    rest = rest.replace("negate: bool = False", "negate: bool = False,\n    stride: int = 1", 1)
    path.write_text(head + name + rest)
    done = packed_rope("apply", "--force", "--tree", str(tree))
    assert done.returncode == 0, done.stderr
    return tree


def test_a_new_flag_of_upstreams_arithmetic_reaches_it(future):
    done = run_python(
        CALL + "assert torch.equal(rotate(negate=True), "
        "rope_utils._apply_rotary_pos_emb_bshd(t[:, None], -freqs)[:, 0])\n"
        "assert not torch.equal(rotate(negate=True), rotate())",
        future,
    )
    assert done.returncode == 0, done.stderr


def test_a_new_packed_keyword_is_ignored_at_its_default_and_refused_otherwise(future):
    done = run_python(
        CALL + "assert torch.equal(rotate(stride=1), rotate())\n"
        "try:\n    rotate(stride=2)\nexcept UnknownArgument as error:\n    print(error)",
        future,
    )
    assert done.returncode == 0, done.stderr
    assert "apply_rotary_pos_emb(..., stride=2)" in done.stdout
    assert "revert" in done.stdout
