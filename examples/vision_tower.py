"""Two images in one packed row: a Qwen2-VL vision tower rotated by the installed Megatron-Core.

The tower (transformers, random weights, depth 2) computes its own output; then again with q and k
rotated by ``apply_rotary_pos_emb`` of the installed Megatron-Core in packed (THD) form. Prints the
largest difference per image; exit code 1 if an image differs by more than float32 rounding.

    python examples/vision_tower.py [--json]
"""

from __future__ import annotations

import json
import sys
import warnings
from unittest import mock

import torch
from torch import Tensor

from megatron.packed_rope.check.fakes import accepted, fake_config, fake_cp

PAIRS = {
    "24 and 32 patches": [[1, 4, 6], [1, 8, 4]],
    "640 and 960 patches": [[1, 20, 32], [1, 24, 40]],
}
ROUNDING = 1e-5


def build_tower():
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    torch.manual_seed(0)
    config = Qwen2VLVisionConfig(depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2)
    config._attn_implementation = "sdpa"
    return qwen, qwen.Qwen2VisionTransformerPretrainedModel(config).eval()


def megatron_rotary(freqs: Tensor, cu_seqlens: Tensor):
    """The tower's rotation of q and k, done by the installed Megatron-Core at CP size 1."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    config = fake_config()

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        with fake_cp(size=1, rank=0) as group:
            keywords = accepted(apply_rotary_pos_emb, cu_seqlens=cu_seqlens, cp_group=group)
            return tuple(apply_rotary_pos_emb(x, freqs, config, **keywords) for x in (q, k))

    return rotate


@torch.no_grad()
def errors_per_image(grids: list[list[int]]) -> list[float]:
    qwen, tower = build_tower()
    grid_thw = torch.tensor(grids)
    patches = torch.randn(int(grid_thw.prod(-1).sum()), 3 * 2 * 14 * 14)
    own = tower(patches, grid_thw)
    angles = tower.rot_pos_emb(grid_thw)
    freqs = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    tokens = grid_thw.prod(-1)
    cu_seqlens = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).int()
    with mock.patch.object(qwen, "apply_rotary_pos_emb_vision", megatron_rotary(freqs, cu_seqlens)):
        rotated = tower(patches, grid_thw)
    merged = (tokens // tower.spatial_merge_size**2).tolist()
    differences = (rotated - own).abs().split(merged)
    return [difference.max().item() for difference in differences]


def main() -> int:
    warnings.simplefilter("ignore")
    errors = {name: errors_per_image(grids) for name, grids in PAIRS.items()}
    if "--json" in sys.argv:
        print(json.dumps(errors))
    else:
        for name, (first, second) in errors.items():
            print(f"  {name:20}  first image {first:.1e}  second image {second:.1e}")
    return 0 if max(max(pair) for pair in errors.values()) <= ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
