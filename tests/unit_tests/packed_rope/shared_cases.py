"""Inputs with right values (cases/*.json), and the config attributes that rope_utils reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = Path(__file__).parent / "cases"


def load_cases(name: str) -> list[dict[str, Any]]:
    return json.loads((CASES / name).read_text())["cases"]


def transformer_config(**changes: Any) -> SimpleNamespace:
    """The attributes of TransformerConfig that the rotation reads."""
    values = {
        "apply_rope_fusion": False,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "mrope_section": None,
    }
    return SimpleNamespace(**(values | changes))
