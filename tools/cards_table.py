#!/usr/bin/env python
"""Writes README's tables of what fits on which card, by `nanoinfer.plan`.

python tools/cards_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import nanoinfer  # noqa: E402

README = ROOT / "README.md"
CARDS = ("RTX 4060", "RTX 3060", "RTX 4070", "RTX 4080", "RTX 3090", "RTX 4090")
CONTEXT = 32_768


class Row(NamedTuple):
    """How the table calls it, and what is planned. quantization: of the weights; None: as in the checkpoint;
    head_quantization: of head and embeddings."""

    name: str
    shape: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    context: int = CONTEXT
    head_quantization: str | None = None


TABLES = {
    "cards": (
        *(
            Row(f"{name}, int4, int8 head", name.lower(), "int4", head_quantization="int8")
            for name in ("Qwen3.5-9B", "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3-Coder-Next")
        ),
        *(
            Row(f"Gemma 4 {name}, int4, int8 head", f"gemma-4-{name.lower()}", "int4", head_quantization="int8")
            for name in ("E2B", "E4B", "12B", "26B-A4B", "31B")
        ),
        *(
            Row(f"LFM2 {name}, int4, int8 head", f"lfm2-{name.lower()}", "int4", head_quantization="int8")
            for name in ("8B-A1B", "24B-A2B")
        ),
        Row("Qwen3-4B, bf16", "qwen3-4b"),
        Row("Qwen3-4B, int4", "qwen3-4b", "int4"),
        Row("Qwen3-8B, int4", "qwen3-8b", "int4"),
        Row("Qwen3-14B, int4", "qwen3-14b", "int4"),
        Row("gpt-oss-20b, MXFP4", "gpt-oss-20b"),
        Row("Qwen3-30B-A3B, int4", "qwen3-30b-a3b", "int4"),
    ),
    "kv": tuple(
        Row(f"{context // 1024}k, KV in {said}", "llama-3.1-8b", "int4", kv, context)
        for context in (32_768, 131_072)
        for kv, said in (("auto", "16 bits"), ("int8", "int8"))
    ),
}


def head() -> list[str]:
    sizes = [nanoinfer.plan("tiny", gpu=card, host_memory_limit="64GiB").budget_bytes / 2**30 for card in CARDS]
    cards = " | ".join(f"{card}, {size:.1f} GiB" for card, size in zip(CARDS, sizes, strict=True))
    return [f"| tokens/s | {cards} |", "| --- " * (1 + len(CARDS)) + "|"]


def line(row: Row) -> str:
    return f"| {row.name} | " + " | ".join(_cell(row, card) for card in CARDS) + " |"


def _cell(row: Row, card: str) -> str:
    """The most tokens per second, or why there are none."""
    asked = dict(max_model_len=row.context, quantization=row.quantization, kv_cache_dtype=row.kv_cache_dtype)
    asked |= dict(head_quantization=row.head_quantization)
    found = nanoinfer.plan(row.shape, gpu=card, host_memory_limit="64GiB", **asked)
    if not found.fits:
        return "no"
    rate = found.tokens_per_second
    return f"{rate:.{1 if rate < 10 else 0}f}" + (", streams" if found.streamed_bytes_per_step else "")


def main() -> None:
    text = README.read_text()
    for name, rows in TABLES.items():
        table = "\n".join([*head(), *map(line, rows)])
        place = rf"(<!-- planned: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(place, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)
    README.write_text(text)


if __name__ == "__main__":
    main()
