"""Typed errors, and the one way this package checks values that live in tensors.

Every message says what was found, what was expected and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AmbiguousFreqsLayout",
    "BackendNotAvailable",
    "FreqsError",
    "PackedInputError",
    "PackedRopeError",
    "PatchError",
    "PatchNotActive",
    "PatchRefused",
    "PositionIdsError",
    "SegmentLengthError",
    "UnknownArgument",
    "UnknownDefinition",
    "require",
]


class PackedRopeError(Exception):
    """Base of every error this package raises on purpose."""


class PackedInputError(PackedRopeError, ValueError):
    """A tensor or an option has the wrong shape, dtype, device or value."""


class SegmentLengthError(PackedInputError):
    """A segment's length does not fit the context-parallel layout or the tokens at hand."""


class FreqsError(PackedInputError):
    """freqs have the wrong shape, or too few rows for the tokens that read them."""


class AmbiguousFreqsLayout(PackedInputError):
    """The rows of freqs can be read in two ways, and nobody declared which is meant."""


class PositionIdsError(PackedInputError):
    """Media tokens, grids and segments of a packed row contradict each other."""


class UnknownArgument(PackedRopeError, TypeError):
    """Upstream passed a packed-only argument whose meaning this version does not know."""


class BackendNotAvailable(PackedRopeError, RuntimeError):
    """A rotation backend was asked for by name, and it is not installed here."""


class PatchError(PackedRopeError, RuntimeError):
    """Applying, reverting or reading the patch on disk failed; nothing was left half done."""


class PatchRefused(PatchError):
    """The target is one that must not be patched, as it is or from here."""


class UnknownDefinition(PatchRefused):
    """The installed source of a function is none of those the catalogue knows."""


class PatchNotActive(PackedRopeError, RuntimeError):
    """Upstream names are not bound to this package's functions in this process."""


def require(ok: Tensor, message: str, explain: Callable[[], PackedRopeError]) -> None:
    """Raise unless the boolean tensor ``ok`` is true everywhere.

    On CPU in eager mode the error is the typed one that ``explain`` builds, which may read
    values in order to name them. On an accelerator, under ``FakeTensorMode`` and under
    ``torch.compile`` a typed error would need a device-to-host read, so there the check is
    ``torch._assert_async`` with ``message``.
    """
    import torch  # not at the top: the command line patches files without loading torch

    if ok.dim():
        ok = ok.all()
    if type(ok) is torch.Tensor and ok.device.type == "cpu" and not torch.compiler.is_compiling():
        if not ok:
            raise explain()
    else:
        torch._assert_async(ok, message)
