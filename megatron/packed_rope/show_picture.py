"""The picture of ``show``: a bar over the tokens per rank and release, in it the rows they read.

A span has the tint of its segment where it reads the right rows; hatched red where it does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BackendNotAvailable
from .show import SHOULD, RankView, Span, rows_of, title, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .upstream_rows import Pack

TINTS = ("#cfe3f7", "#fbe3c0", "#d3edd0", "#e4d6f0", "#f7d9e3", "#d9ecec")
INK, RED, PINK, GREY = "#222222", "#b71c1c", "#fdecea", "#e4e4e4"
POINTS = 10
BAR, LEFT, BARS, MARGIN = 0.46, 2.3, 7.2, 0.15  # inches
DIGIT = 0.62 * POINTS / 72
"""Width of a digit in inches, with some air."""


def picture(pack: Pack, ranks: list[RankView], out: Path) -> None:
    """Draw what all ranks read into a .png or .svg file.

    Raises:
        BackendNotAvailable: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendNotAvailable(
            "a picture needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    rows = len(ranks[0].sides) + 1  # one for the tokens' numbers
    width, head = LEFT + BARS + MARGIN, 0.5
    height = head + len(ranks) * rows * BAR + MARGIN
    settings = {"hatch.linewidth": 0.5, "svg.hashsalt": "show", "font.size": POINTS}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), dpi=110)
        at = {"va": "center", "color": INK, "weight": "bold"}
        figure.text(MARGIN / width, 1 - head / 2 / height, title(pack), **at)
        for rank, rank_view in enumerate(ranks):
            bottom = height - head - (rank + 1) * rows * BAR
            box = (LEFT / width, bottom / height, BARS / width, rows * BAR / height)
            axes = figure.add_axes(box)
            axes.set(xlim=(0, max(pack.local_tokens, 1)), ylim=(rows - 0.5, -0.5))
            axes.axis("off")
            _numbers(axes, pack, rank, rank_view)
            for y, side in enumerate(rank_view.sides, start=1):
                _label(axes, y, side, verdict(pack, [rank_view], side))
                _bar(axes, y, pack, rank_view, side)
        figure.savefig(out, metadata={"Software" if out.suffix == ".png" else "Date": None})


def _numbers(axes: Axes, pack: Pack, rank: int, rank_view: RankView) -> None:
    """The first token of each segment, above its bars, where there is room."""
    name = f"rank {rank}, local token" if pack.cp_size > 1 else "token"
    axes.text(-0.02, 0.2, name, ha="right", va="center", transform=axes.get_yaxis_transform())
    free, segment = 0.0, None
    for span in rank_view.spans:
        inches = BARS / pack.local_tokens
        starts_segment = span.segment != segment
        segment = span.segment
        if (starts_segment or inches > 3 * DIGIT) and span.begin * inches >= free:
            axes.text(span.begin, 0.2, f" {span.begin}", ha="left", va="center", color="#777777")
            free = (span.begin * inches) + DIGIT * (len(str(span.begin)) + 1.5)


def _label(axes: Axes, y: int, side: str, outcome: str) -> None:
    """Name of a side left of its bar, and what comes of it below."""
    place = {"ha": "right", "va": "center", "transform": axes.get_yaxis_transform()}
    if side == SHOULD:
        axes.text(-0.02, y, "row it should read", color=INK, **place)
        return
    raises, right = outcome.startswith("raises"), outcome == "right"
    short = "raises" if raises else outcome
    axes.text(-0.02, y - 0.16, side, color=INK, weight="bold", **place)
    axes.text(-0.02, y + 0.22, short, color=INK if right else RED, size=POINTS - 2, **place)


def _bar(axes: Axes, y: int, pack: Pack, rank_view: RankView, side: str) -> None:
    if side in rank_view.refused:
        whole = Span(0, 0, pack.local_tokens, {}, frozenset())
        _box(axes, y, pack, whole, f"raises: {rank_view.refused[side]}", GREY, RED)
        return
    for span in rank_view.spans:
        if span.segment == len(pack.lengths):
            _box(axes, y, pack, span, "padding", GREY, INK)
        elif side in span.wrong:
            _box(axes, y, pack, span, rows_of(span, side), PINK, RED, hatch="////")
        else:
            tint = TINTS[span.segment % len(TINTS)]
            _box(axes, y, pack, span, rows_of(span, side), tint, INK)


def _box(
    axes: Axes, y: int, pack: Pack, span: Span, words: str, face: str, ink: str, hatch: str = ""
) -> None:
    """A span as a box, its words inside if they fit."""
    from matplotlib.patches import Rectangle

    length = span.end - span.begin
    box = Rectangle((span.begin, y - 0.4), length, 0.8, facecolor=face, hatch=hatch)
    box.set(edgecolor=RED if hatch else "#888888", linewidth=0.7, clip_on=False)
    axes.add_patch(box)
    if len(words) * DIGIT < length * BARS / pack.local_tokens:
        behind = {"facecolor": face, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
        at = {"ha": "center", "va": "center", "color": ink}
        axes.text(span.begin + length / 2, y, words, bbox=behind if hatch else None, **at)
