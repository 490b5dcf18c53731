"""What importing this package loads, and that its names are there."""

from __future__ import annotations

import pytest
from trees import run_python, unpacked

import megatron.packed_rope

HEAVY = ("megatron.core", "transformer_engine", "triton")


def loaded(code: str, *names: str) -> list[str]:
    report = f"{code}\nimport sys\nprint(*(n for n in {names!r} if n in sys.modules))"
    done = run_python(report, unpacked("0.16.1"))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("import megatron.packed_rope", *HEAVY, "torch") == []


def test_using_it_loads_torch_alone():
    use = (
        "from megatron.packed_rope import PackedLayout, apply_packed_rotary, packed_position_ids\n"
        "from megatron.packed_rope import require_active"
    )
    assert loaded(use, *HEAVY, "torch") == ["torch"]


@pytest.mark.parametrize("command", ["status", "diff", "apply --help", "revert --help"])
def test_changing_files_does_not_load_torch(command):
    code = (
        "import contextlib, io\n"
        "from megatron.packed_rope.__main__ import main\n"
        "with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):\n"
        f"    with contextlib.suppress(SystemExit): main({command.split()!r})"
    )
    assert loaded(code, *HEAVY, "torch") == []


def test_every_public_name_is_there_and_listed():
    for name in megatron.packed_rope.__all__:
        assert getattr(megatron.packed_rope, name) is not None
    assert set(dir(megatron.packed_rope)) == set(megatron.packed_rope.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        megatron.packed_rope.nonsense  # noqa: B018
