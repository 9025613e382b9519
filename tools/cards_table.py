#!/usr/bin/env python
"""Writes README's table of what fits on which card, by `nanoinfer.plan`.

python tools/cards_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import nanoinfer  # noqa: E402

README = ROOT / "README.md"
CARDS = ("RTX 4060", "RTX 3060", "RTX 4070", "RTX 4080", "RTX 3090", "RTX 4090")
# Shape, format of its weights (None: as in the checkpoint), and how the table calls both.
ROWS = (
    ("qwen3-4b", None, "Qwen3-4B, bf16"),
    ("qwen3-4b", "int4", "Qwen3-4B, int4"),
    ("qwen3-8b", "int4", "Qwen3-8B, int4"),
    ("qwen3-14b", "int4", "Qwen3-14B, int4"),
    ("gpt-oss-20b", None, "gpt-oss-20b, MXFP4"),
    ("qwen3-30b-a3b", "int4", "Qwen3-30B-A3B, int4"),
)
CONTEXT = 32_768


def head() -> list[str]:
    sizes = [nanoinfer.plan("tiny", gpu=card, host_memory_limit="64GiB").budget_bytes / 2**30 for card in CARDS]
    cards = " | ".join(f"{card}, {size:.1f} GiB" for card, size in zip(CARDS, sizes, strict=True))
    return [f"| tokens/s | {cards} |", "| --- " * (1 + len(CARDS)) + "|"]


def row(shape: str, quantization: str | None, name: str) -> str:
    return f"| {name} | " + " | ".join(_cell(shape, quantization, card) for card in CARDS) + " |"


def _cell(shape: str, quantization: str | None, card: str) -> str:
    """The most tokens per second, or why there are none."""
    found = nanoinfer.plan(shape, gpu=card, host_memory_limit="64GiB", max_model_len=CONTEXT, quantization=quantization)
    if not found.fits:
        return "no"
    rate = found.tokens_per_second
    return f"{rate:.{1 if rate < 10 else 0}f}" + (", streams" if found.streamed_bytes_per_step else "")


def main() -> None:
    table = "\n".join([*head(), *(row(*one) for one in ROWS)])
    text = re.sub(
        r"(<!-- planned: cards -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{table}\n{match[2]}",
        README.read_text(),
        flags=re.DOTALL,
    )
    README.write_text(text)


if __name__ == "__main__":
    main()
