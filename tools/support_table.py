"""Write the README's table of releases from what ``make matrix`` recorded.

python tools/support_table.py FOLDER README.md
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

BEGIN, END = "<!-- releases: written by make matrix -->", "<!-- end of releases -->"


def table(records: list[dict]) -> str:
    """Markdown: one line for each run of releases with the same figures."""
    lines = [
        "| Megatron-Core | as released: right / wrong / raises | patched: right / wrong / raises |",
        "|---|---|---|",
    ]
    records = sorted(records, key=lambda r: tuple(map(int, r["release"].split("."))))
    for figures, group in itertools.groupby(records, key=_figures):
        releases = [record["release"] for record in group]
        lines.append(f"| {', '.join(releases)} | {figures[0]} | {figures[1]} |")
    return "\n".join(lines)


def _figures(record: dict) -> tuple[str, str]:
    return tuple(
        " / ".join(str(record[state][outcome]) for outcome in ("right", "wrong", "raises"))
        for state in ("before", "after")
    )


if __name__ == "__main__":
    folder, readme = Path(sys.argv[1]), Path(sys.argv[2])
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    text = readme.read_text(encoding="utf-8")
    made = f"{BEGIN}\n{table(records)}\n{END}"
    changed, count = re.subn(
        re.escape(BEGIN) + r".*?" + re.escape(END), lambda _: made, text, flags=re.DOTALL
    )
    if count != 1 or not records:
        sys.exit(f"{readme} has {count} marked tables, {folder} {len(records)} records; expected 1")
    readme.write_text(changed, encoding="utf-8")
