"""Rotary position embeddings that are right and fast for packed (THD) batches on Megatron-Core.

Public names load on first use: importing this package loads neither torch, nor megatron.core,
Transformer Engine or Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import require_active as require_active
    from .errors import AmbiguousFreqsLayout as AmbiguousFreqsLayout
    from .errors import BackendNotAvailable as BackendNotAvailable
    from .errors import FreqsError as FreqsError
    from .errors import PackedInputError as PackedInputError
    from .errors import PackedRopeError as PackedRopeError
    from .errors import PatchError as PatchError
    from .errors import PatchNotActive as PatchNotActive
    from .errors import PatchRefused as PatchRefused
    from .errors import PositionIdsError as PositionIdsError
    from .errors import SegmentLengthError as SegmentLengthError
    from .errors import UnknownArgument as UnknownArgument
    from .errors import UnknownDefinition as UnknownDefinition
    from .layout import PackedLayout as PackedLayout
    from .positions import packed_position_ids as packed_position_ids
    from .rotary import apply_packed_rotary as apply_packed_rotary

__version__ = "0.1.0"

_HOME = {
    "PackedLayout": "layout",
    "apply_packed_rotary": "rotary",
    "packed_position_ids": "positions",
    "require_active": "binding",
    "AmbiguousFreqsLayout": "errors",
    "BackendNotAvailable": "errors",
    "FreqsError": "errors",
    "PackedInputError": "errors",
    "PackedRopeError": "errors",
    "PatchError": "errors",
    "PatchNotActive": "errors",
    "PatchRefused": "errors",
    "PositionIdsError": "errors",
    "SegmentLengthError": "errors",
    "UnknownArgument": "errors",
    "UnknownDefinition": "errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
