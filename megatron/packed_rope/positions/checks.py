"""Checks of values: boundaries, grids and media tokens of a packed row must agree.

Each check is one ``errors.require``: on CPU its explanation below walks the row and names the
segment and the figures; the loops run for no row that is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import (
    PackedInputError,
    PackedRopeError,
    PositionIdsError,
    SegmentLengthError,
    require,
)

if TYPE_CHECKING:
    from .media import Media

IMAGE, VIDEO = 1, 2
"""Kinds of tokens, as in mm_token_type_ids of transformers 5.x; any other value counts as text."""

_COUNTABLE = 2**24
_MOST_TOKENS = 2**31 - 1  # as far as int32 counts
_NAMES = {IMAGE: "image", VIDEO: "video"}


def check_boundaries(
    cu: Tensor, padded: Tensor, real_n: Tensor, length_n: Tensor, num_tokens: int, cp_size: int
) -> None:
    """Boundaries begin at 0, do not decrease, and fit their padding and the whole row."""

    def explain() -> PackedRopeError:
        for name, ends in (("cu_seqlens", cu), ("cu_seqlens_padded", padded)):
            if ends[0]:
                return PackedInputError(f"{name} begins at {int(ends[0])}; expected 0.")
        for i, (real, length) in enumerate(zip(real_n.tolist(), length_n.tolist(), strict=True)):
            if real < 0 or length < 0:
                return SegmentLengthError(f"boundaries decrease at segment {i}; expected no such.")
            if real > length:
                return SegmentLengthError(
                    f"segment {i} has {real} tokens in cu_seqlens and room for {length} in "
                    "cu_seqlens_padded; expected no segment longer than its padded length."
                )
        shares = f", {num_tokens // cp_size} on each of {cp_size} ranks" if cp_size > 1 else ""
        return SegmentLengthError(
            f"the boundaries end at {int(padded[-1])}; the row has {num_tokens} tokens{shares}. "
            "Pass the boundaries before CP sharding, and cu_seqlens_padded where segments are "
            "padded."
        )

    fits = (real_n >= 0) & (real_n <= length_n) & (padded[-1] <= num_tokens)
    require(
        fits & (cu[0] == 0) & (padded[0] == 0),
        "packed_rope: boundaries must begin at 0, not decrease, and fit their padding and the row",
        explain,
    )


def check_grids(
    grids: Tensor,
    num_images: int,
    frames_m: Tensor,
    times: Tensor,
    merge: int,
    temporal_merge: int,
) -> None:
    """Grids are positive and divisible by what is merged; tokens and times can be counted.

    ``frames_m``: frames after merging. ``times``: how long media last, in positions.
    """
    tokens = (frames_m.double() * grids[:, 1] * grids[:, 2]).sum() / merge**2

    def explain() -> PackedRopeError:
        if not tokens <= _MOST_TOKENS:
            return PositionIdsError(
                f"the grids make {tokens.item():.0f} tokens; expected at most {_MOST_TOKENS}."
            )
        for g, (thw, time) in enumerate(zip(grids.tolist(), times.tolist(), strict=True)):
            kind, index = (IMAGE, g) if g < num_images else (VIDEO, g - num_images)
            factors = (temporal_merge if kind == VIDEO else 1, merge, merge)
            if any(size < 1 or size % factor for size, factor in zip(thw, factors, strict=True)):
                return PositionIdsError(
                    f"{_NAMES[kind]}_grid_thw[{index}] is {tuple(thw)}; expected positive "
                    f"multiples of {factors}, the patches merged into one token on each axis."
                )
            if not 0 <= time <= _COUNTABLE:
                break
        return PositionIdsError(
            f"{_NAMES[kind]} {index} lasts for {time} positions (frames * second_per_grid_ts * "
            f"tokens_per_second); expected 0 to {_COUNTABLE}, as far as float32 counts."
        )

    ok = (tokens <= _MOST_TOKENS) & (grids >= 1).all() & (grids[:, 1:] % merge == 0).all()
    ok = ok & ((times >= 0) & (times <= _COUNTABLE)).all()
    if temporal_merge > 1:
        ok = ok & (grids[num_images:, 0] % temporal_merge == 0).all()
    require(
        ok,
        "packed_rope: a media grid is no multiple of what is merged, or second_per_grid_ts is not "
        "a time",
        explain,
    )


def check_media(
    is_image_T: Tensor,
    is_video_T: Tensor,
    segments_T: Tensor,
    medium_T: Tensor,
    inside_T: Tensor,
    media: Media,
    splits_videos: bool,
) -> None:
    """Media tokens per kind are those of the grids, and no block is cut or interrupted.

    ``inside_T`` is the index of each token in its block, 0 for text and padding.
    """
    images = media.start[media.num_images]
    counts_fit = (is_image_T.sum() == images) & (is_video_T.sum() == media.start[-1] - images)
    # A token inside a block follows one of the same medium, in the same segment.
    begins_T = inside_T[1:] == 0
    goes_on_T = (medium_T[1:] == medium_T[:-1]) & (segments_T[1:] == segments_T[:-1])

    def explain() -> PositionIdsError:
        kinds_T = is_image_T * IMAGE + is_video_T * VIDEO
        return _explain_media(kinds_T.tolist(), segments_T.tolist(), media, splits_videos)

    require(
        counts_fit & (begins_T | goes_on_T).all(),
        "packed_rope: media tokens do not match the grids, or a block crosses a segment boundary",
        explain,
    )


def _explain_media(
    kinds: list[int], segments: list[int], media: Media, splits_videos: bool
) -> PositionIdsError:
    """Walk the row, block by block, to where tokens and grids part."""
    blocks: dict[int, list[tuple[int, int]]] = {IMAGE: [], VIDEO: []}  # (grid, tokens) of each
    for g, (thw, tokens) in enumerate(
        zip(media.grids.tolist(), media.block.tolist(), strict=False)
    ):
        kind, index = (IMAGE, g) if g < media.num_images else (VIDEO, g - media.num_images)
        blocks[kind] += [(index, tokens)] * (thw[0] if kind == VIDEO and splits_videos else 1)
    totals = " and ".join(
        f"{kinds.count(kind)} {name} tokens where {name}_grid_thw makes "
        f"{sum(tokens for _, tokens in blocks[kind])}"
        for kind, name in _NAMES.items()
        if kind in kinds or blocks[kind]
    )
    found = _first_mismatch(kinds, segments, blocks)  # consumes blocks
    return PositionIdsError(
        f"{found}. The row has {totals}. Each segment needs the tokens and the grids of its own "
        "media, whole and in the order of the row."
    )


def _first_mismatch(
    kinds: list[int], segments: list[int], blocks: dict[int, list[tuple[int, int]]]
) -> str:
    seen = {IMAGE: 0, VIDEO: 0}  # tokens of the current block of a kind
    last = {IMAGE: (0, 0), VIDEO: (0, 0)}  # token and segment of the last of them

    def unfinished(kind: int, until: str) -> str:
        grid, tokens = blocks[kind][0]
        return (
            f"segment {last[kind][1]}: a block of {_NAMES[kind]}_grid_thw[{grid}] has {tokens} "
            f"tokens, but {seen[kind]} of them come {until}"
        )

    for j, (kind, segment) in enumerate(zip(kinds, segments, strict=True)):
        if kind not in blocks:
            continue
        if not blocks[kind]:
            return f"segment {segment}: token {j} is an {_NAMES[kind]} token, and no grid is left"
        if seen[kind] and last[kind][1] != segment:
            return unfinished(kind, f"before the segment ends and segment {segment} begins")
        if seen[kind] and last[kind][0] != j - 1:
            return unfinished(kind, f"before another token, {last[kind][0] + 1}, interrupts it")
        seen[kind], last[kind] = seen[kind] + 1, (j, segment)
        if seen[kind] == blocks[kind][0][1]:
            seen[kind] = 0
            del blocks[kind][0]
    for kind, name in _NAMES.items():
        if seen[kind]:
            return unfinished(kind, "before the row ends")
        if blocks[kind]:
            return f"{name}_grid_thw[{blocks[kind][0][0]}] has no tokens in the row"
    return "media and grids agree"  # the walk must find what the check found
