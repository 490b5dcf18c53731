"""A synthetic task in which positions matter, its samples, and how they are packed.

A picture is a grid of cells, one of them marked; after it a question token asks for the row or the
column of the mark, and the next token is the answer. A video asks for the frame, a text for the
place of the marked letter. Samples: text only, one image, images of different sizes, a video.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 64
LETTERS = range(10, 20)  # tokens 0 to 9 are the answers
MARK, ASK, ROW, COLUMN, FRAME, TIME, PADDING = range(20, 27)
VISION_START, VISION_END, IMAGE, VIDEO = range(30, 34)
IGNORED = -100

MERGE = 2
"""Patches that the tower merges into one cell, along height and width each."""
PATCH_VALUES = 3 * 2 * 2 * 2
"""Numbers in a patch: channels, frames of a temporal patch, height, width."""
KINDS = ("text", "image", "images", "video")


@dataclass
class Sample:
    """One sequence of L tokens and its pictures, in the order of the tokens."""

    input_ids: Tensor  # [L] int64
    labels: Tensor  # [L] int64, the token that follows where it is an answer, else IGNORED
    image_patches: Tensor  # [P, PATCH_VALUES]
    image_grids: Tensor  # [images, 3] frames, height, width in patches
    video_patches: Tensor
    video_grids: Tensor


@dataclass
class PackedRow:
    """Samples end to end; ``cu_seqlens_padded`` says where they lie if each is padded."""

    row: Sample
    cu_seqlens: Tensor  # [n + 1] int32, real tokens
    cu_seqlens_padded: Tensor  # [n + 1] int32

    def real_tokens(self) -> Tensor:
        """Indices of the tokens that are not padding."""
        starts = self.cu_seqlens_padded[:-1].tolist()
        lengths = self.cu_seqlens.diff().tolist()
        parts = zip(starts, lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in parts])


class _Writer:
    """Collects the parts of a sample."""

    def __init__(self, family: str, generator: random.Random) -> None:
        self.family, self.random = family, generator
        self.ids: list[int] = []
        self.patches: dict[int, list[Tensor]] = {IMAGE: [], VIDEO: []}
        self.grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}

    def letters(self, marked: bool) -> None:
        letters = [self.random.choice(LETTERS) for _ in range(self.random.randint(3, 9))]
        if marked:
            place = self.random.randrange(len(letters))
            letters = [*letters[:place], MARK, *letters[place:], ASK, place]
        self.ids += letters

    def picture(self, kind: int, frames: int, height: int, width: int) -> None:
        """Sizes in cells; patches come cell by cell, as Qwen's processors order them."""
        cells = frames * height * width
        marked = self.random.randrange(cells)
        noise = torch.Generator().manual_seed(self.random.randrange(2**31))
        patches = 0.1 * torch.randn(cells, MERGE**2, PATCH_VALUES, generator=noise)
        patches[marked] += 1
        self.patches[kind].append(patches.flatten(0, 1))
        self.grids[kind].append([frames, height * MERGE, width * MERGE])
        # Qwen3-VL writes every frame of a video as a block of its own, after its time.
        blocks = frames if kind == VIDEO and self.family == "qwen3_vl" else 1
        for _ in range(blocks):
            self.ids += [TIME] * (blocks > 1)
            self.ids += [VISION_START, *[kind] * (cells // blocks), VISION_END]
        rest, column = divmod(marked, width)
        frame, row = divmod(rest, height)
        answers = {ROW: row, COLUMN: column} if kind == IMAGE else {FRAME: frame}
        question = self.random.choice(list(answers))
        self.ids += [question, answers[question]]

    def sample(self) -> Sample:
        labels = [IGNORED] * len(self.ids)
        for place, (token, following) in enumerate(itertools.pairwise(self.ids)):
            if token in (ASK, ROW, COLUMN, FRAME):
                labels[place] = following

        def grids(kind: int) -> Tensor:
            return torch.tensor(self.grids[kind], dtype=torch.int64).reshape(-1, 3)

        def patches(kind: int) -> Tensor:
            return torch.cat([torch.empty(0, PATCH_VALUES), *self.patches[kind]])

        ids = torch.tensor(self.ids)
        images, videos = (patches(IMAGE), grids(IMAGE)), (patches(VIDEO), grids(VIDEO))
        return Sample(ids, torch.tensor(labels), *images, *videos)


def make_samples(family: str, count: int = 8) -> list[Sample]:
    """``count`` samples, all kinds in turn; always the same ones."""
    generator = random.Random(0)
    samples = []
    for number in range(count):
        writer = _Writer(family, generator)
        kind = KINDS[number % len(KINDS)]
        writer.letters(marked=kind == "text")
        if kind == "video":
            writer.picture(VIDEO, generator.randint(2, 3), 2, generator.randint(2, 3))
        for _ in range({"image": 1, "images": 3}.get(kind, 0)):
            writer.picture(IMAGE, 1, generator.randint(2, 5), generator.randint(2, 5))
        samples.append(writer.sample())
    return samples


def pack(samples: list[Sample], multiple: int = 1) -> PackedRow:
    """One row of all samples, each padded to a multiple (of 2 C under context parallelism)."""
    lengths = [len(sample.input_ids) for sample in samples]
    padded = [-(-length // multiple) * multiple for length in lengths]
    ids, labels = [], []
    for sample, length, whole in zip(samples, lengths, padded, strict=True):
        ids += [sample.input_ids, torch.full((whole - length,), PADDING)]
        labels += [sample.labels, torch.full((whole - length,), IGNORED)]
    media = ("image_patches", "image_grids", "video_patches", "video_grids")
    joined = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in media}
    row = Sample(torch.cat(ids), torch.cat(labels), **joined)
    return PackedRow(row, _boundaries(lengths), _boundaries(padded))


def _boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
