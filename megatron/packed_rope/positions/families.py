"""How each family of vision-language models counts: the rows of data that the pass reads.

A text token takes the running counter c on all three axes (time, height, width) and moves it by
one. Media tokens come in blocks of t frames of h rows of w tokens; the token in frame k, row y,
column x takes (c + f(k), c + y, c + x), and the block then moves c. Families differ in f, in
whether a video is one block or one per frame, and in how far a block moves c.

Sources, read and run against: transformers 4.57.6 and 5.24.0 (``get_rope_index`` of each model);
for Ernie 4.5 VL, which 4.57 does not have, 5.24.0 and Baidu's own processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..errors import PackedInputError, PositionIdsError

ADVANCES: Final = {
    "max": "by the largest position of the block on any axis, plus 1 (transformers 4.x, vLLM)",
    "hw": "by the larger of the block's height and width (transformers 5.x)",
}


@dataclass(frozen=True)
class Family:
    """One family's rules."""

    in_seconds: bool = False
    """f(k) is frame k's time: k * second_per_grid_t * tokens_per_second; else it is k itself."""
    image_seconds: float = 1.0
    """Seconds between frames of an image. Images have one frame, so this hardly ever shows."""
    splits_videos: bool = False
    """Every frame of a video is a block of its own, with text (a timestamp) before it: k is 0."""
    temporal_merge: int = 1
    """Frames of a video's grid that are merged into one frame of tokens."""
    float_time: bool = False
    """f(k) is not rounded down, so positions are float32."""
    advances: tuple[str, ...] = ("max", "hw")
    """The ways to move the counter that this family is known to be used with."""

    def time(self, frames: Tensor, seconds: Tensor, rate: float) -> Tensor:
        """f(k) of frames k (int32), ``seconds`` apart (float32), at ``rate`` positions per second.

        int32, or float64 for float time. The two products are rounded to float32 one by one.
        """
        if not self.in_seconds:
            return frames
        time = frames.float() * seconds * rate
        return time.double() if self.float_time else time.int()


_QWEN2_VL = Family()
_QWEN2_5_VL = Family(in_seconds=True, image_seconds=0.0)
_FRAME_BY_FRAME = Family(splits_videos=True)
_ERNIE4_5_VL = Family(temporal_merge=2)
_QWEN2_5_OMNI = Family(in_seconds=True, advances=("max",))
_QWEN3_OMNI = Family(in_seconds=True, float_time=True, advances=("max",))

# Names are the model_type of the checkpoints' config. Qwen3.6 checkpoints carry those of Qwen3.5.
FAMILIES: Final = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _FRAME_BY_FRAME,
    "qwen3_vl_moe": _FRAME_BY_FRAME,
    "qwen3_5": _FRAME_BY_FRAME,
    "qwen3_5_moe": _FRAME_BY_FRAME,
    "glm4v": _FRAME_BY_FRAME,
    "glm4v_moe": _FRAME_BY_FRAME,
    "glm46v": _FRAME_BY_FRAME,
    "ernie4_5_vl": _ERNIE4_5_VL,
    "ernie4_5_vl_moe": _ERNIE4_5_VL,
    "qwen2_5_omni": _QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen3_omni": _QWEN3_OMNI,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
}


def family_rules(family: str, advance: str) -> Family:
    """The rules of ``family``, if it is known and known to move its counter by ``advance``.

    Raises:
        PositionIdsError: unknown family, or a family never used with ``advance``.
        PackedInputError: unknown ``advance``.
    """
    if advance not in ADVANCES:
        ways = "; ".join(f"{name!r} moves the counter {how}" for name, how in ADVANCES.items())
        raise PackedInputError(f"advance {advance!r}; expected one of two: {ways}.")
    if family not in FAMILIES:
        raise PositionIdsError(
            f"family {family!r} is not known; expected one of {', '.join(FAMILIES)} (model_type of "
            "the checkpoint's config; Qwen3.6 uses the names of 3.5)."
        )
    rules = FAMILIES[family]
    if advance not in rules.advances:
        raise PositionIdsError(
            f"family {family!r} with advance {advance!r}; expected one of {rules.advances}, as no "
            "release of transformers counts otherwise for it."
        )
    return rules
