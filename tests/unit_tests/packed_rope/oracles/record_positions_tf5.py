"""Record what get_rope_index of transformers 5.x gives on random packs, each segment alone.

transformers 5.x does not fit into the environment of the tests, so its numbers are kept in
cases/positions_tf5.json:

    python -m venv venv-tf5
    venv-tf5/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
    cd tests/unit_tests/packed_rope
    venv-tf5/bin/python -m oracles.record_positions_tf5
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from oracles import positions_transformers
from oracles.positions_packs import Pack, random_pack

TARGET = Path(__file__).parents[1] / "cases" / "positions_tf5.json"
FAMILIES = {  # how 5.x moves the counter
    "qwen2_vl": "hw",
    "qwen2_5_vl": "hw",
    "qwen3_vl": "hw",
    "qwen3_5": "hw",
    "glm4v": "hw",
    "ernie4_5_vl_moe": "hw",
    "qwen2_5_omni": "max",
    "qwen3_omni_moe": "max",
}
PACKS = 12
SECONDS = (0.25, 0.5, 1.0, 2.0, 3.0)  # products that float32 holds exactly, in whatever order


def case(pack: Pack, seed: int, advance: str) -> dict[str, Any]:
    return {
        "family": pack.family,
        "advance": advance,
        "seed": seed,
        "ids": pack.ids,
        "types": pack.types,
        "cu_seqlens": pack.cu_seqlens,
        "images": pack.images,
        "videos": pack.videos,
        "seconds": pack.seconds,
        "tokens_per_second": pack.tokens_per_second,
        "positions": positions_transformers.positions(pack, with_types=True).tolist(),
    }


def main() -> None:
    cases = [
        case(random_pack(family, seed, SECONDS, max_media=12), seed, advance)
        for family, advance in FAMILIES.items()
        for seed in range(1, PACKS + 1)
    ]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in cases)
    about = f"get_rope_index of transformers {transformers.__version__}, each segment alone"
    TARGET.write_text(f'{{"about": {json.dumps(about)}, "cases": [\n{lines}\n]}}\n')
    print(f"{TARGET}: {len(cases)} packs, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
