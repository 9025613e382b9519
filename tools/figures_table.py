#!/usr/bin/env python
"""Writes the table of docs/serve.md that says which figures /metrics and the log's line under load have.

python tools/figures_table.py            (after a change in nanoinfer/engine/figures.py)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nanoinfer.engine.figures import COUNTER, FIGURES  # noqa: E402

DOCUMENT = ROOT / "docs" / "serve.md"


def table() -> str:
    rows = [("`nanoinfer:` in /metrics", "kind", "in the log", "what"), ("---",) * 4]
    for figure in FIGURES:
        name, log = figure.metric + "_total" * (figure.kind == COUNTER), figure.log.partition(":")[0]
        if figure.metric or log:
            rows.append((f"`{name}`" if figure.metric else "", figure.kind, f"`{log}`" if log else "", figure.meaning))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill_in(text: str) -> str:
    """The text with what stands between `<!-- figures -->` and `<!-- end -->` written anew."""
    marks = r"(<!-- figures -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda match: f"{match[1]}{table()}{match[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(fill_in(DOCUMENT.read_text()))
