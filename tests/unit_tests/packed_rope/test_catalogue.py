"""The catalogue is what the script makes from the pinned wheels, and holds no upstream text."""

from __future__ import annotations

import importlib
import inspect

import pytest
from trees import ROOT, run

from megatron.packed_rope.binding.catalogue import FOLDER, known_definitions, patches

BINDINGS = [(patch, binding) for patch in patches() for binding in patch.bindings]


def test_the_fingerprints_are_what_the_script_makes():
    done = run([str(ROOT / "tools" / "fingerprints.py"), "--check"])
    assert done.returncode == 0, done.stderr


def test_the_script_notices_a_fingerprint_that_differs(tmp_path, monkeypatch):
    changed = (FOLDER / "known.toml").read_text().replace('"0.16.1"', '"0.16.9"', 1)
    other = tmp_path / "known.toml"
    other.write_text(changed)
    done = run([str(ROOT / "tools" / "fingerprints.py"), "--check", str(other)])
    assert done.returncode == 1
    assert "is out of date" in done.stderr


@pytest.mark.parametrize(("patch", "binding"), BINDINGS, ids=[b.name for _, b in BINDINGS])
def test_every_entry_is_complete_and_its_factory_exists(patch, binding):
    factory = binding.load_factory()
    assert list(inspect.signature(factory).parameters)[:2] == ["module", "original"]
    assert factory.__doc__ or importlib.import_module(factory.__module__).__doc__
    assert binding.why
    assert binding.affects
    if binding.replaced:
        assert known_definitions()[f"{patch.module}:{binding.name}"]
