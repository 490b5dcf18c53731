"""Inputs with right values: cases/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases"


def load_cases(name: str) -> list[dict[str, Any]]:
    return json.loads((CASES / name).read_text())["cases"]
