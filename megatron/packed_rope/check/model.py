"""A tiny GPTModel of the installed Megatron-Core on a CPU, for ``check``, the tests and examples.

Megatron-Core asks for CUDA in a few places (``torch.cuda.current_device``, ``Tensor.cuda``, pinned
memory, the CUDA random state); ``cpu_shims`` answers those on a machine without one. The stock
unfused attention refuses packed sequences, so the model attends segment by segment in plain SDPA.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_CORE = "megatron.core"


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Let Megatron-Core build and run models on a CPU."""
    random = importlib.import_module(f"{_CORE}.tensor_parallel.random")
    make_tensor = torch.tensor

    def unpinned_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make_tensor(*args, **kwargs)

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self),
        mock.patch.object(torch, "tensor", unpinned_tensor),
        mock.patch.object(
            random.CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext()
        ),
        mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
        mock.patch.object(
            random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), create=True
        ),
    ):
        yield


@contextlib.contextmanager
def one_process(cp_size: int = 1) -> Iterator[None]:
    """An initialised model-parallel state: this process alone, or the ranks of a gloo world."""
    state = importlib.import_module(f"{_CORE}.parallel_state")
    started = not torch.distributed.is_initialized()
    if started:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state.initialize_model_parallel(context_parallel_size=cp_size)
        yield
    finally:
        state.destroy_model_parallel()
        if started:
            torch.distributed.destroy_process_group()


class SegmentAttention(nn.Module):
    """Causal SDPA of each segment of a packed row; over gathered q, k and v at CP size > 1."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Any:
        """``[T, h, d]`` packed to ``[T, h * d]``; ``[S, 1, h, d]`` dense to ``[S, 1, h * d]``."""
        params = kwargs.get("packed_seq_params")
        if params is None:
            return _causal(query[:, 0], key[:, 0], value[:, 0]).flatten(1).unsqueeze(1)
        padded = params.cu_seqlens_q_padded
        boundaries = (params.cu_seqlens_q if padded is None else padded).tolist()
        world = torch.distributed.get_world_size()
        cp_size = min(self.config.context_parallel_size, world)
        if cp_size == 1:
            return _per_segment(query, key, value, boundaries).flatten(1)
        gather = importlib.import_module("torch.distributed.nn.functional").all_gather
        order = [row for r in range(cp_size) for row in zigzag_rows(boundaries, cp_size, r)]
        inverse = torch.tensor(order).argsort()
        whole = [torch.cat(gather(x.contiguous()))[inverse] for x in (query, key, value)]
        out = _per_segment(*whole, boundaries)
        mine = zigzag_rows(boundaries, cp_size, torch.distributed.get_rank())
        return out[mine].flatten(1)


def zigzag_rows(boundaries: list[int], cp_size: int, rank: int) -> list[int]:
    """Global tokens that a rank holds, written out."""
    rows: list[int] = []
    for begin, end in itertools.pairwise(boundaries):
        chunk = (end - begin) // (2 * cp_size)
        for number in (rank, 2 * cp_size - 1 - rank) if cp_size > 1 else (0, 1):
            start = begin + number * chunk
            rows += range(start, start + chunk)
    return rows if cp_size > 1 else list(range(boundaries[-1]))


def _per_segment(query: Tensor, key: Tensor, value: Tensor, boundaries: list[int]) -> Tensor:
    lengths = [end - begin for begin, end in itertools.pairwise(boundaries)]
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([_causal(*part) for part in parts])


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[s, h, d]`` each, with fewer heads in k and v under GQA."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = (
        x.transpose(0, 1) for x in (query, *(y.repeat_interleave(repeat, 1) for y in (key, value)))
    )
    attend = nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True).transpose(0, 1)


def tiny_gpt(
    position_embedding_type: str,
    *,
    layers: int = 2,
    vocabulary: int = 64,
    sequence: int = 64,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> nn.Module:
    """A GPTModel with the local layer spec; call inside ``cpu_shims`` and ``one_process``.

    ``config`` changes TransformerConfig: hidden size 64, 4 heads, 2 query groups, head dim 16,
    mrope_section [2, 3, 3] for ``position_embedding_type`` "mrope".
    """
    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "context_parallel_size": 1,
    }
    if position_embedding_type == "mrope":
        settings["mrope_section"] = [2, 3, 3]
    settings |= config or {}
    build_config = importlib.import_module(f"{_CORE}.transformer.transformer_config")
    specs = importlib.import_module(f"{_CORE}.models.gpt.gpt_layer_specs")
    gpt = importlib.import_module(f"{_CORE}.models.gpt.gpt_model")
    random = importlib.import_module(f"{_CORE}.tensor_parallel.random")
    interleaved_sections = settings.pop("interleaved_mrope", None)
    transformer_config = build_config.TransformerConfig(**settings)
    if interleaved_sections is not None:
        transformer_config.interleaved_mrope = interleaved_sections
    spec = specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    torch.manual_seed(seed)
    random.get_cuda_rng_tracker().reset()
    model = gpt.GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=sequence,
        position_embedding_type=position_embedding_type,
    )
    with torch.no_grad():  # larger weights than at the start of training: errors show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


class _Stop(Exception):
    """Carries what reached the decoder out of a model's forward."""


def freqs_of_model(model: nn.Module, **batch: Any) -> Tensor:
    """The rotary freqs that the model hands to its layers for a batch, without running them."""

    def stop(*_: Any, **kwargs: Any) -> None:
        raise _Stop(kwargs["rotary_pos_emb"])

    with mock.patch.object(type(model.decoder), "forward", stop):
        try:
            model(attention_mask=None, **batch)
        except _Stop as stopped:
            return stopped.args[0]
    raise AssertionError("the model did not call its decoder")


def packed_params(boundaries: Tensor, padded: Tensor | None = None, **changes: Any) -> Any:
    """PackedSeqParams of one packed row, as training code builds it."""
    module = importlib.import_module(f"{_CORE}.packed_seq_params")
    longest = int((boundaries[1:] - boundaries[:-1]).max())
    if padded is not None:
        longest = int((padded[1:] - padded[:-1]).max())
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    return module.PackedSeqParams(**(values | changes))
