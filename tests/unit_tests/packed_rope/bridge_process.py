"""Run in a process of its own: the position ids of a real Megatron-Bridge, printed as JSON.

    python bridge_process.py [in-process]

Bridge and Megatron-Core come from PYTHONPATH, patched on disk or not; "in-process" binds them by
the import hook. Bridge's package ``__init__`` files are bypassed, as they import all models
and Transformer Engine; so is what only building a model needs.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import threading
import types
import typing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from oracles import positions_packs as packs

from megatron.packed_rope.binding.live import unbound

QWEN_VL = "megatron.bridge.models.qwen_vl"
QWEN3_VL = f"{QWEN_VL}.modelling_qwen3_vl"
GLM = "megatron.bridge.models.glm_vl.modeling_glm_45v"


class Anything:
    """Stands for classes that are named on import and never used here."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class StandIn(types.ModuleType):
    """A module that has every name."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder:
    """Packages of Bridge without their ``__init__``; stand-ins for what needs a GPU build."""

    stand_ins = (
        "megatron.core.extensions.transformer_engine",
        f"{QWEN3_VL}.attention",
        f"{QWEN3_VL}.text_model",
        f"{QWEN3_VL}.transformer_block",
        f"{QWEN3_VL}.transformer_config",
        f"{QWEN3_VL}.vision_model",
        "megatron.bridge.models.gpt_provider",
        "megatron.bridge.utils",
    )

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if any(name == one or name.startswith(one + ".") for one in self.stand_ins):
            return ModuleSpec(name, self, is_package=True)
        if not name.startswith("megatron.bridge"):
            return None
        for folder in sys.path:
            package = Path(folder, *name.split("."))
            if package.is_dir():
                spec = ModuleSpec(name, self, is_package=True)
                spec.submodule_search_locations = [str(package)]
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        bare = spec.submodule_search_locations
        return types.ModuleType(spec.name) if bare else StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def bypass_packages() -> None:
    sys.meta_path.insert(0, Finder())
    if not hasattr(typing, "override"):  # Bridge asks for Python 3.12
        typing.override = lambda function: function


class Group:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE = SimpleNamespace(cp=Group(), tp=Group(), pp=Group(), dp=Group())


class LanguageModel:
    """Keeps the position ids it is given; ``then`` runs inside the caller's forward."""

    def __init__(self) -> None:
        self.rotary_pos_emb = SimpleNamespace()
        self.then = lambda: None

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> int:
        self.position_ids = position_ids
        self.then()
        return 0

    __call__ = forward


def packed_seq_params(cu: list[int], padded: list[int] | None = None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, padded = (ends and torch.tensor(ends, dtype=torch.int32) for ends in (cu, padded))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=100,
        max_seqlen_kv=100,
    )


def grids(of: Any) -> dict[str, Any]:
    """Grids of a pack or a segment, None where there are none."""
    pairs = (("image_grid_thw", of.images), ("video_grid_thw", of.videos))
    return {name: torch.tensor(thw) if thw else None for name, thw in pairs}


def row(of: Any) -> torch.Tensor:
    return torch.tensor([of.ids])


def outcome(call: Any) -> Any:
    """Lists, or what was raised."""
    try:
        found = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [each.tolist() for each in found] if isinstance(found, tuple) else found.tolist()


class Qwen3VL:
    """The real get_rope_index and Qwen3VLModel.forward, a language model that only listens."""

    def __init__(self) -> None:
        modules = (importlib.import_module(f"{QWEN3_VL}.{name}") for name in ("rope", "utils"))
        self.function = next(m.get_rope_index for m in modules if hasattr(m, "get_rope_index"))
        self.module = importlib.import_module(f"{QWEN3_VL}.model")
        self.model = SimpleNamespace(
            pre_process=False,
            use_dist_train=False,
            config=SimpleNamespace(spatial_merge_size=packs.MERGE, sequence_parallel=False),
            image_token_id=packs.IMAGE,
            video_token_id=packs.VIDEO,
            vision_start_token_id=packs.VISION_START,
            pg_collection=ONE,
            language_model=LanguageModel(),
        )

    def index(self, ids: torch.Tensor, **more: Any) -> Any:
        tokens = (packs.IMAGE, packs.VIDEO, packs.VISION_START)
        return self.function(packs.MERGE, *tokens, ids, **more)

    def forward(self, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        self.module.Qwen3VLModel.forward(self.model, ids, **more)
        return self.model.language_model.position_ids


def qwen3_vl() -> dict[str, Any]:
    qwen = Qwen3VL()
    pack = packs.mixed_pack("qwen3_vl")
    pack.segments[:] = segments = [segment for segment in pack.segments if segment.ids]
    params = packed_seq_params(pack.cu_seqlens)
    ids = row(pack)
    found: dict[str, Any] = {
        "cu_seqlens": pack.cu_seqlens,
        "alone": [qwen.index(row(each), **grids(each))[0][:, 0].tolist() for each in segments],
        "told": outcome(lambda: qwen.index(ids, packed_seq_params=params, **grids(pack))),
        "untold": outcome(lambda: qwen.index(ids, **grids(pack))),
    }
    # Segments padded to a multiple of 4: Bridge's own way to say so.
    padded, padded_ids = [0], []
    for segment in segments:
        padded_ids += segment.ids + [0] * (-len(segment.ids) % 4)
        padded.append(len(padded_ids))
    found["padded"] = {
        "boundaries": padded,
        "found": outcome(
            lambda: qwen.index(
                torch.tensor([padded_ids]),
                packed_seq_params=packed_seq_params(pack.cu_seqlens, padded),
                **grids(pack),
            )
        ),
    }
    # What is no flat packed row must stay as it is.
    two = packs.Pack("qwen3_vl", [segments[0], segments[0]])
    batch = torch.tensor([segments[0].ids] * 2)
    length = len(segments[0].ids)
    rows = packed_seq_params([0, length, 2 * length])
    left = torch.tensor([[0, 0, *segments[0].ids]])
    found["unchanged"] = [
        outcome(lambda: qwen.index(ids, **grids(pack))),
        outcome(lambda: qwen.index(torch.tensor([[5, 6, 7, 8]]))),
        outcome(lambda: qwen.index(batch, **grids(two))),
        outcome(lambda: qwen.index(batch, attention_mask=torch.ones_like(batch), **grids(two))),
        outcome(lambda: qwen.index(batch, packed_seq_params=rows, **grids(two))),
        outcome(
            lambda: qwen.index(
                row(segments[0]),
                packed_seq_params=packed_seq_params([0, length]),
                **grids(segments[0]),
            )
        ),
        outcome(lambda: qwen.index(left, attention_mask=(left != 0).long(), **grids(segments[0]))),
        # One row of a batch that is packed later, padded on the left: no flat packed row.
        outcome(
            lambda: qwen.index(
                left,
                attention_mask=(left != 0).long(),
                packed_seq_params=packed_seq_params([0, length]),
                **grids(segments[0]),
            )
        ),
    ]
    rope = importlib.import_module(f"{QWEN3_VL}.rope")
    found["rotary classes"] = {
        name: list(inspect.signature(value.forward).parameters)
        for name, value in vars(rope).items()
        if isinstance(value, type) and value.__module__ == rope.__name__
    }
    return found | {"forward": qwen3_vl_forward(qwen)}


def qwen3_vl_forward(qwen: Qwen3VL) -> dict[str, Any]:
    """0.3 knows no videos, 0.6 no empty segments, 0.4 indexes by the mask it makes of integers."""
    pack = packs.random_pack("qwen3_vl", 20, kind="image")
    pack.segments[:] = segments = [segment for segment in pack.segments if segment.ids]
    ids, model = row(pack), qwen.model.language_model
    packed = {
        "packed_seq_params": packed_seq_params(pack.cu_seqlens),
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        **grids(pack),
    }
    found: dict[str, Any] = {
        "alone": [qwen.index(row(each), **grids(each))[0][:, 0].tolist() for each in segments],
        "whole": qwen.index(ids, **grids(pack))[0].tolist(),
        "packed": outcome(lambda: qwen.forward(ids, **packed)),
    }
    during: dict[str, Any] = {}

    def look() -> None:
        """Inside a packed forward: another thread, then a dense forward of another model."""
        thread = threading.Thread(
            target=lambda: during.update(thread=outcome(lambda: qwen.index(ids, **grids(pack))[0]))
        )
        thread.start()
        thread.join()
        during["nested dense"] = outcome(lambda: Qwen3VL().forward(ids, **grids(pack)))
        during["after nested"] = outcome(lambda: qwen.index(ids, **grids(pack))[0])
        raise KeyError("the language model fails")

    model.then = look
    with contextlib.suppress(KeyError):
        qwen.forward(ids, **packed)
    model.then = lambda: None
    during["after an error"] = outcome(lambda: qwen.index(ids, **grids(pack))[0])
    during["dense forward"] = outcome(lambda: qwen.forward(ids, **grids(pack)))
    return found | {"during": during}


def borrowed(family: str) -> dict[str, Any]:
    """Qwen25VLModel or GLM45VModel, with the real get_rope_index of transformers."""
    from oracles import positions_transformers as oracle

    name = f"{QWEN_VL}.modeling_qwen25_vl" if family == "qwen2_5_vl" else GLM
    module = importlib.import_module(name)
    model = module.Qwen25VLModel if family == "qwen2_5_vl" else module.GLM45VModel
    pack = packs.mixed_pack(family, seconds=(1.0, 2.0))
    pack.segments[:] = [segment for segment in pack.segments if segment.ids]  # 0.6: none empty
    stand_in = oracle.stand_in(family, pack.tokens_per_second)
    held = SimpleNamespace(
        pre_process=False,
        config=stand_in.config,
        get_rope_index=MethodType(stand_in.get_rope_index.__func__, stand_in),
        language_model=LanguageModel(),
    )
    method = held.get_rope_index
    seconds = {"second_per_grid_ts": torch.tensor(pack.seconds)} if family == "qwen2_5_vl" else {}

    def forward(**more: Any) -> torch.Tensor:
        model.forward(held, row(pack), **grids(pack), **seconds, **more)
        return held.language_model.position_ids

    found = {
        "alone": oracle.positions(pack).tolist(),
        "dense": outcome(forward),
        "packed": outcome(lambda: forward(packed_seq_params=packed_seq_params(pack.cu_seqlens))),
        "dense afterwards": outcome(forward),
        "without seconds": None,
        "exchanged": held.get_rope_index is not method,
    }
    if seconds:
        seconds.clear()
        params = packed_seq_params(pack.cu_seqlens)
        found["without seconds"] = outcome(lambda: forward(packed_seq_params=params))
        pack.segments[:] = [with_seconds(segment, 1.0) for segment in pack.segments]
        found["alone, 1 s"] = oracle.positions(pack).tolist()
    return found


def with_seconds(segment: packs.Segment, seconds: float) -> packs.Segment:
    segment.seconds[:] = [seconds] * len(segment.seconds)
    return segment


def main() -> None:
    if "in-process" in sys.argv:
        importlib.import_module("megatron.packed_rope.auto")
    bypass_packages()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
    report = {"qwen3_vl": qwen3_vl()}
    report |= {family: borrowed(family) for family in ("qwen2_5_vl", "glm4v")}
    report["not bound"] = list(unbound())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
