#!/usr/bin/env python
"""Writes the table of docs/sparse.md: which sparse model fits which card in which format, by `nanoinfer.plan`.

python tools/sparse_cards.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import nanoinfer  # noqa: E402
from nanoinfer.memory.cards import card_named  # noqa: E402

DOCUMENT = ROOT / "docs" / "sparse.md"
SHAPES = (
    "olmoe-7b",
    "lfm2-8b-a1b",
    "lfm2-24b-a2b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "qwen3.6-35b-a3b",
    "qwen3-coder-next",
    "mixtral-8x7b",
    "gpt-oss-120b",
    "glm-4.5-air",
)
CARDS = ("RTX 4060", "RTX 3060", "RTX 4080", "RTX 3090", "RTX A6000", "H100 80GB")
CONTEXT = {"olmoe-7b": 4096}
DEFAULT_CONTEXT = 16384


def head() -> list[str]:
    cards = " | ".join(f"{card}, {card_named(card).memory_bytes / 2**30:g} GiB" for card in CARDS)
    return [f"| shape | format | tokens | weights, GiB | {cards} |", "| --- " * (4 + len(CARDS)) + "|"]


def rows() -> Iterator[str]:
    for shape in SHAPES:
        formats = ("as in its file",) if shape.startswith("gpt-oss") else ("bf16", "int4")
        yield from (row(shape, name) for name in formats)


def row(shape: str, name: str) -> str:
    context, cells, weights = CONTEXT.get(shape, DEFAULT_CONTEXT), [], 0.0
    for card in CARDS:
        quantised = {"quantization": name} if name == "int4" else {}
        found = nanoinfer.plan(shape, gpu=card, host_memory_limit="64GiB", max_model_len=context, **quantised)
        cells.append(_cell(found))
        weights = (found.memory.weight_bytes + found.memory.host_weight_bytes) / 2**30 if found.fits else weights
    return f"| `{shape}` | {name} | {context:,} | {f'{weights:.1f}' if weights else '-'} | {' | '.join(cells)} |"


def _cell(found: nanoinfer.Forecast) -> str:
    if not found.fits:
        return "no"
    time, memory = f"{found.ms_per_token:.0f} ms", found.memory
    if memory.num_expert_slots:
        return f"{memory.num_expert_slots} slots, {time}"
    streams = "streams, " if memory.streamed_bytes else "KV streams, " if found.streamed_bytes_per_step else ""
    return streams + time


def main() -> None:
    table = "\n".join([*head(), *rows()])
    text = re.sub(
        r"(<!-- planned: cards -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{table}\n{match[2]}",
        DOCUMENT.read_text(),
        flags=re.DOTALL,
    )
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
