"""Random packed rows of text, images, videos and audio, as each model family's processor lays them.

A segment is a list of runs: text tokens, or one block of media tokens. Plain Python and one seed
per pack, so that the same pack can be made again in an environment with another transformers.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

IMAGE, VIDEO, AUDIO = 10, 20, 30
VISION_START, VISION_END = 99, 98
VIDEO_START, VIDEO_END = 97, 96
AUDIO_START, AUDIO_END = 95, 94
WORDS = range(40, 90)
MERGE = 2

SECONDS = {"qwen2_5_vl", "qwen2_5_omni", "qwen3_omni_moe"}
FRAME_BY_FRAME = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe"}
GLM = {"glm4v", "glm4v_moe"}
OMNI = {"qwen2_5_omni", "qwen3_omni_moe"}
KINDS = ("text", "image", "video", "mixed")


@dataclass
class Run:
    """Text (``grid`` None), or one block of (frames, rows, columns) of media tokens."""

    ids: list[int]
    kind: int = 0  # 0 text, 1 image, 2 video
    grid: tuple[int, int, int] | None = None
    seconds: float = 0.0


@dataclass
class Segment:
    runs: list[Run] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    videos: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    audio_lengths: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for run in self.runs for token in run.ids]

    @property
    def types(self) -> list[int]:
        """mm_token_type_ids."""
        return [run.kind for run in self.runs for _ in run.ids]

    def text(self, *ids: int) -> None:
        self.runs.append(Run(list(ids)))

    def block(self, token: int, kind: int, grid: tuple[int, int, int], seconds: float) -> None:
        frames, rows, columns = grid
        self.runs.append(Run([token] * (frames * rows * columns), kind, grid, seconds))


@dataclass
class Pack:
    family: str
    segments: list[Segment]
    tokens_per_second: int | None = None

    @property
    def ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]

    @property
    def types(self) -> list[int]:
        return [kind for segment in self.segments for kind in segment.types]

    @property
    def images(self) -> list[list[int]]:
        return [grid for segment in self.segments for grid in segment.images]

    @property
    def videos(self) -> list[list[int]]:
        return [grid for segment in self.segments for grid in segment.videos]

    @property
    def seconds(self) -> list[float]:
        return [value for segment in self.segments for value in segment.seconds]

    @property
    def cu_seqlens(self) -> list[int]:
        ends = [0]
        for segment in self.segments:
            ends.append(ends[-1] + len(segment.ids))
        return ends


def add_image(segment: Segment, rows: int, columns: int, frames: int = 1) -> None:
    segment.images.append([frames, rows * MERGE, columns * MERGE])
    segment.text(VISION_START)
    segment.block(IMAGE, 1, (frames, rows, columns), 0.0)
    segment.text(VISION_END)


def add_video(
    segment: Segment, family: str, frames: int, rows: int, columns: int, seconds: float = 1.0
) -> None:
    merged = 2 if family.startswith("ernie") else 1
    segment.videos.append([frames * merged, rows * MERGE, columns * MERGE])
    segment.seconds.append(seconds)
    if family not in FRAME_BY_FRAME:
        segment.text(VISION_START)
        segment.block(VIDEO, 2, (frames, rows, columns), seconds)
        segment.text(VISION_END)
        return
    if family in GLM:
        segment.text(VIDEO_START)
    for frame in range(frames):
        if family not in GLM:
            segment.text(*(WORDS[0] + (frame + i) % 10 for i in range(1 + frame % 3)))
        segment.text(VISION_START)
        segment.block(IMAGE if family in GLM else VIDEO, 2, (1, rows, columns), 0.0)
        segment.text(VISION_END)
        if family in GLM:
            segment.text(WORDS[frame % 10])
    if family in GLM:
        segment.text(VIDEO_END)


def add_audio(segment: Segment, family: str, mel_frames: int) -> None:
    """Audio tokens count as text; how many there are is each model's own convolution."""
    if family == "qwen2_5_omni":
        tokens = ((mel_frames - 1) // 2 + 1 - 2) // 2 + 1
    else:
        rest = (mel_frames % 100 - 1) // 2 + 1
        tokens = ((rest - 1) // 2 + 1 - 1) // 2 + 1 + mel_frames // 100 * 13
    segment.audio_lengths.append(mel_frames)
    segment.text(AUDIO_START, *[AUDIO] * tokens, AUDIO_END)


def random_pack(
    family: str,
    seed: int,
    seconds: tuple[float, ...] = (1.0, 2.0, 3.0),
    max_media: int = 200,
    kind: str | None = None,
) -> Pack:
    """A pack of up to ``max_media`` media: text, images, videos or a mix; some segments empty."""
    rng = random.Random(f"{family}-{seed}")
    media = min(max_media, rng.choice((50, 200)) if seed % 10 == 0 else rng.randint(1, 16))
    pack = Pack(family, [], rng.choice((1, 2, 4, 25)) if family in SECONDS else None)
    drawn = rng.choice(KINDS)
    kind = kind or drawn
    side = 2 if media > 20 else 5
    while media > 0 or not pack.segments:
        segment = Segment()
        pack.segments.append(segment)
        least = 0 if len(pack.segments) > 1 else 1  # transformers cannot do with no token at all
        segment.text(*rng.choices(WORDS, k=rng.choice((least, 1, 4, 9))))
        here = min(media, rng.choice((0, 1, 1, 2, 4, 25)))
        media -= max(here, 1)  # a segment of text uses one up too, so packs end
        for _ in range(here):
            rows, columns = rng.randint(1, side), rng.randint(1, side)
            what = rng.choice(("image", "video", "audio", "text")) if kind == "mixed" else kind
            if what == "image":
                add_image(segment, rows, columns)
            elif what == "video":
                frames = rng.randint(1, side + 1)
                add_video(segment, family, frames, rows, columns, rng.choice(seconds))
            elif what == "audio" and family in OMNI:
                add_audio(segment, family, rng.randint(5, 120))
            # Two media may follow each other with nothing but their markers between them.
            segment.text(*rng.choices(WORDS, k=rng.choice((0, 0, 1, 5))))
    return pack


def mixed_pack(family: str, seed: int = 20, seconds: tuple[float, ...] = (0.35, 1.7)) -> Pack:
    """A pack that has it all: images, videos, audio where the family knows it, many segments."""
    for attempt in itertools.count():
        pack = random_pack(family, seed + 1000 * attempt, seconds, kind="mixed")
        if min(len(pack.images), len(pack.videos), len(pack.segments)) > 2:
            return pack
    raise AssertionError  # count() does not end
