"""How the layout of freqs and the CP group of a batch reach the rotation.

Shapes cannot tell a table from packed rows, so whoever makes the freqs says what they are, on the
model's TransformerConfig: the config is the only thing that reaches the rotation inside activation
recomputation, which runs in another thread with detached tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from ..errors import AmbiguousFreqsLayout, PackedInputError
from ..layout import AUTO, FREQS_LAYOUTS, PACKED, PER_SEQUENCE
from ..rotary import cp_size_and_rank

LAYOUT_ATTRIBUTE = "packed_rope_freqs_layout"
"""Attribute of TransformerConfig: one of FREQS_LAYOUTS, set by the user or the maker of freqs."""

CP_GROUP_ATTRIBUTE = "_packed_rope_cp_group"
"""Attribute of TransformerConfig while attention runs on a batch with its own CP group."""


class SingleRankGroup:
    """A CP group of one, for batches that say local_cp_size = 1 and carry no group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


SINGLE_RANK = SingleRankGroup()


def is_thd(packed_seq_params: Any) -> bool:
    """Whether the batch is packed; hybrid CP and LLaVA pass PackedSeqParams with sbhd tensors."""
    return packed_seq_params is not None and packed_seq_params.qkv_format == "thd"


def declare(config: Any, layout: str) -> None:
    """Declare what freqs of this model's rows are, unless the user already did."""
    if getattr(config, LAYOUT_ATTRIBUTE, None) is None:
        setattr(config, LAYOUT_ATTRIBUTE, layout)


def freqs_layout(config: Any, *, num_rows: int, num_tokens: int, cp_size: int) -> str:
    """The declared layout of freqs, or what follows from the kind of model.

    Raises:
        PackedInputError: the declared value is none of the layouts.
        AmbiguousFreqsLayout: undeclared mRoPE freqs that can be read in two ways.
    """
    declared = getattr(config, LAYOUT_ATTRIBUTE, None)
    if declared is not None:
        if declared not in FREQS_LAYOUTS:
            raise PackedInputError(
                f"config.{LAYOUT_ATTRIBUTE} is {declared!r}; expected one of {FREQS_LAYOUTS}."
            )
        return declared
    if getattr(config, "multi_latent_attention", False):
        return PER_SEQUENCE
    if getattr(config, "mrope_section", None) is not None:
        if num_rows >= num_tokens * cp_size:
            return PACKED
        if num_rows == num_tokens:
            raise AmbiguousFreqsLayout(
                f"mRoPE freqs of {num_rows} rows for {num_tokens} local tokens at cp_size "
                f"{cp_size}: they are either this rank's own rows, or a whole packed row that was "
                "cut without regard to its segments. Set "
                f"config.{LAYOUT_ATTRIBUTE} = 'packed_local' if the rows were selected segment by "
                "segment; else pass the rows of the whole pack and set it to 'packed'."
            )
    return AUTO


def batch_cp_group(packed_seq_params: Any) -> Any | None:
    """The CP group of this very batch (dynamic CP, 0.16+), or None where it carries none."""
    if getattr(packed_seq_params, "local_cp_size", None) == 1:
        return SINGLE_RANK
    return getattr(packed_seq_params, "cp_group", None)


def cp_of(*groups: Any) -> tuple[int, int]:
    """CP size and rank of the first group that is given, else of the initialised parallel state."""
    for group in groups:
        if group is not None:
            return cp_size_and_rank(group)
    state = sys.modules["megatron.core.parallel_state"]
    group = state.get_context_parallel_group(check_initialized=False)
    return (1, 0) if group is None else cp_size_and_rank(group)


def argument_reader(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function from a call's (args, kwargs) to what was given by name, defaults left out.

    Upstream's parameters gained names and places over the releases; the names are those of the
    installed definition, read once.
    """
    names = tuple(inspect.signature(function).parameters)

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args)), **kwargs}  # noqa: B905 (trailing args are optional)

    return given
