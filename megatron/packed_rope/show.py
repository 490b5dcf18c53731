"""``show``: which row of freqs every token reads, as it should be and as upstream releases read it.

A span is a run of local tokens within a segment, all right or all wrong, whose rows follow each
other (or are one and the same) on every side. Text needs torch, a picture matplotlib.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .errors import PackedInputError
from .upstream_rows import FREQS, MAIN, Pack, Refused, right_rows, upstream_rows

SHOULD = "should read"
DEFAULT_RELEASES = ["0.14.0", "0.16.1", MAIN]
MOST_LINES = 24
FORMATS = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m megatron.packed_rope show``."""
    add = parser.add_argument
    add("--cu-seqlens", required=True, metavar="0,640,1600", help="boundaries, before CP sharding")
    add("--cp", type=int, default=1, metavar="C", help="context-parallel size (1)")
    add(
        "--freqs",
        choices=tuple(FREQS),
        default="packed",
        help="; ".join(f"{name}: {meaning}" for name, meaning in FREQS.items()),
    )
    add(
        "--release",
        nargs="+",
        default=DEFAULT_RELEASES,
        metavar="X",
        help=f"0.10.0 to 0.19.x, or {MAIN}; by default {' '.join(DEFAULT_RELEASES)}",
    )
    add("--tokens", type=int, metavar="N", help="local tokens of a rank, tail padding included")
    add(
        "--max-seqlen",
        type=int,
        metavar="N",
        help="what the batch says is its longest segment, and the rows of a table (the longest)",
    )
    add("-o", "--out", type=Path, metavar="FILE", help="also draw it, as .png or .svg")


def run(arguments: argparse.Namespace) -> int:
    """Print the text form, draw the picture if asked for; 0."""
    pack = Pack(
        _integers(arguments.cu_seqlens),
        freqs=arguments.freqs,
        cp_size=arguments.cp,
        tokens=arguments.tokens,
        max_seqlen=arguments.max_seqlen,
    )
    out: Path | None = arguments.out
    if out is not None and out.suffix not in FORMATS:
        raise PackedInputError(f"picture {out.name!r}; expected a name in {' or '.join(FORMATS)}.")
    ranks = [view(pack, arguments.release, rank) for rank in range(pack.cp_size)]
    print(text(pack, ranks))
    if out is not None:
        from .show_picture import picture

        picture(pack, ranks, out)
        print(f"\nwrote {out}")
    return 0


def _integers(listed: str) -> list[int]:
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError:
        raise PackedInputError(
            f"cu_seqlens {listed!r}; expected integers separated by commas, such as 0,640,1600."
        ) from None


@dataclass(frozen=True)
class Span:
    """Local tokens ``[begin, end)`` and what they read."""

    segment: int
    """n of n segments: tail padding."""
    begin: int
    end: int
    rows: dict[str, tuple[int, int]]
    """First and last row, by side: ``SHOULD`` and every release that does not raise."""
    wrong: frozenset[str]
    """Sides that are wrong here."""


@dataclass(frozen=True)
class RankView:
    """What the tokens of one rank read."""

    sides: list[str]
    spans: list[Span]
    refused: dict[str, str]
    """Releases that raise, and why."""

    def wrong_tokens(self, side: str) -> int:
        return sum(span.end - span.begin for span in self.spans if side in span.wrong)


def view(pack: Pack, releases: list[str], rank: int) -> RankView:
    """Spans of a rank's tokens, with what each release and ``SHOULD`` read."""
    sides, refused = {SHOULD: right_rows(pack, rank)}, {}
    for release in releases:
        try:
            sides[release] = upstream_rows(release, pack, rank)
        except Refused as reason:
            refused[release] = str(reason)
    right, tail = sides[SHOULD], len(pack.lengths)
    segments = pack.segments(rank)

    def wrong(token: int) -> frozenset[str]:
        if segments[token] == tail:
            return frozenset()
        return frozenset(side for side, rows in sides.items() if rows[token] != right[token])

    def steps(token: int) -> list[int]:
        return [rows[token + 1] - rows[token] for rows in sides.values()]

    spans, begin = [], 0
    for end in range(1, pack.local_tokens + 1):
        if end < pack.local_tokens and segments[end] == segments[begin]:
            if segments[begin] == tail:
                continue
            follows = steps(begin) == steps(end - 1) and set(steps(begin)) <= {0, 1}
            if follows and wrong(end) == wrong(begin):
                continue
        rows = {side: (read[begin], read[end - 1]) for side, read in sides.items()}
        spans.append(Span(segments[begin], begin, end, rows, wrong(begin)))
        begin = end
    return RankView([SHOULD, *releases], spans, refused)


def rows_of(span: Span, side: str) -> str:
    """The rows a span reads, as ``640..1599``, or one number."""
    first, last = span.rows[side]
    return str(first) if first == last else f"{first}..{last}"


def title(pack: Pack) -> str:
    boundaries = [str(boundary) for boundary in pack.cu_seqlens]
    if len(boundaries) > 10:
        boundaries = [*boundaries[:6], "...", *boundaries[-2:]]
    return f"cu_seqlens {','.join(boundaries)}; C = {pack.cp_size}; {FREQS[pack.freqs]}"


def verdict(pack: Pack, ranks: list[RankView], side: str) -> str:
    """One line on a release: right, wrong for how many tokens of all ranks, or why it raises."""
    for rank_view in ranks:
        if side in rank_view.refused:
            return f"raises: {rank_view.refused[side]}"
    wrong = sum(rank_view.wrong_tokens(side) for rank_view in ranks)
    tokens = pack.real_tokens * len(ranks)
    return f"wrong row for {wrong} of {tokens} tokens" if wrong else "right"


def text(pack: Pack, ranks: list[RankView]) -> str:
    """A table per rank, a line per span, and a verdict per release."""
    sides = ranks[0].sides
    lines = [title(pack), ""]
    for rank, rank_view in enumerate(ranks):
        table = [["segment", f"tokens of rank {rank}" if pack.cp_size > 1 else "tokens", *sides]]
        for span in rank_view.spans:
            tokens = str(span.begin)
            if span.end - span.begin > 1:
                tokens += f"..{span.end - 1}"
            is_tail = span.segment == len(pack.lengths)
            cells = [_cell(span, side, rank_view, is_tail) for side in sides]
            table.append(["padding" if is_tail else str(span.segment), tokens, *cells])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        shown = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if len(shown) > MOST_LINES:
            cut = len(shown) - MOST_LINES
            half = MOST_LINES // 2
            shown = [*shown[:half], f"... {cut} more spans ...", *shown[-half:]]
        lines += [*shown, ""]
    releases = [side for side in sides if side != SHOULD]
    width = max(map(len, releases), default=0)
    lines += [f"{release:{width}}  {verdict(pack, ranks, release)}" for release in releases]
    return "\n".join(lines)


def _cell(span: Span, side: str, rank_view: RankView, is_tail: bool) -> str:
    if side in rank_view.refused:
        return "raises"
    if is_tail:
        return "any"
    return rows_of(span, side) + (" WRONG" if side in span.wrong else "")
