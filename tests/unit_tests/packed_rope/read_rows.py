"""Process of test_show: which row of freqs each token reads in the Megatron-Core on the path.

Reads packs as JSON from stdin, ``[cu_seqlens, freqs, cp_size, tokens, max_seqlen]`` each, and
prints for every pack and rank the rows, or null where the release raises. Row r of freqs holds the
angle r * STEP, so the rotated (1, 0) tells the row.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from megatron.packed_rope.check.fakes import accepted, fake_config, fake_cp
from megatron.packed_rope.check.model import cpu_shims

STEP = 1e-3
ROTARY_DIM = 6


def freqs_of(kind: str, rows: int, group) -> torch.Tensor:
    """``[rows, 1, 1, 6]`` angles; of mRoPE, what the release's own embedding makes for the rank."""
    if kind != "mrope":
        angles = torch.arange(rows, dtype=torch.float64) * STEP
        return angles[:, None, None, None].expand(rows, 1, 1, ROTARY_DIM)
    from megatron.core.models.common.embeddings import rotary_pos_embedding as module

    embedding = module.MultimodalRotaryEmbedding(
        ROTARY_DIM, 1.0, seq_len_interpolation_factor=1 / STEP, rotary_base=10000
    )
    embedding.cp_group = group
    positions = torch.arange(rows).expand(3, 1, rows)
    return embedding(positions, [1, 1, 1]).double()


def rows_read(pack: list, rank: int) -> list[int] | None:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb as rotate

    cu_seqlens, kind, cp_size, tokens, max_seqlen = pack
    rows = {
        "packed": cu_seqlens[-1],
        "per_sequence": max_seqlen,
        "packed_local": tokens,
        "mrope": tokens * cp_size,
    }
    t = torch.zeros(tokens, 1, ROTARY_DIM, dtype=torch.float64)
    t[..., 0] = 1
    with fake_cp(cp_size, rank) as group:
        keywords = accepted(rotate, cp_group=group, max_seqlen=max_seqlen)
        boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
        try:
            freqs = freqs_of(kind, rows[kind], group)
            out = rotate(t, freqs, fake_config(), cu_seqlens=boundaries, **keywords)
            out = out.reshape(tokens, ROTARY_DIM)
        except (RuntimeError, IndexError, AssertionError):
            return None
    angles = torch.atan2(out[:, ROTARY_DIM // 2], out[:, 0])
    return (angles / STEP).round().long().tolist()


def main() -> None:
    packs = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    with cpu_shims():
        read = [[rows_read(pack, rank) for rank in range(pack[2])] for pack in packs]
    print(json.dumps(read))


if __name__ == "__main__":
    main()
