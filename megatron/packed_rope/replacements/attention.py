"""megatron.core.transformer.attention: the CP group of the batch, not of the model.

Attention hands the rotation the model's static context-parallel group, also where a batch carries
its own (dynamic CP, 0.16+). The wrapper leaves the batch's group on the config for the duration of
the call; recomputation runs ``forward`` again, so it is there then too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .declarations import CP_GROUP_ATTRIBUTE, argument_reader, batch_cp_group, is_thd


def attention_forward(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    given = argument_reader(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = given((self, *args), kwargs).get("packed_seq_params")
        group = batch_cp_group(params) if is_thd(params) else None
        if group is None:
            return original(self, *args, **kwargs)
        before = getattr(self.config, CP_GROUP_ATTRIBUTE, None)
        setattr(self.config, CP_GROUP_ATTRIBUTE, group)
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self.config, CP_GROUP_ATTRIBUTE, before)

    return forward
