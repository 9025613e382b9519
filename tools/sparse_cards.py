#!/usr/bin/env python
"""Prints which sparse model fits which card in which format, by `nanoinfer.plan`: the table of docs/sparse.md.

python tools/sparse_cards.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nanoinfer  # noqa: E402
from nanoinfer.memory.cards import LEFT_GIB  # noqa: E402

SHAPES = ("olmoe-7b", "gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "glm-4.5-air")
CARDS = {f"{size} GB": f"{LEFT_GIB[size]:g}GiB" for size in (8, 12, 16, 24, 48, 80)}
CONTEXT = {"olmoe-7b": 4096}
DEFAULT_CONTEXT = 16384


def main() -> None:
    print("| shape | format | tokens | weights, GiB | " + " | ".join(CARDS) + " |")
    print("| --- " * (4 + len(CARDS)) + "|")
    for shape in SHAPES:
        formats = ("as in its file",) if shape.startswith("gpt-oss") else ("bf16", "int4")
        for name in formats:
            context, cells, weights = CONTEXT.get(shape, DEFAULT_CONTEXT), [], 0.0
            for memory in CARDS.values():
                quantised = {"quantization": name} if name == "int4" else {}
                found = nanoinfer.plan(
                    shape,
                    gpu_memory_limit=memory,
                    host_memory_limit="64GiB",
                    max_model_len=context,
                    max_num_batched_tokens=1024,
                    **quantised,
                )
                streams = found.fits and found.streamed_bytes_per_step
                cells.append(_streams(found) if streams else "fits" if found.fits else "no")
                weights = (
                    (found.memory.weight_bytes + found.memory.host_weight_bytes) / 2**30 if found.fits else weights
                )
            print(
                f"| `{shape}` | {name} | {context:,} | {f'{weights:.1f}' if weights else '-'} | "
                + " | ".join(cells)
                + " |",
                flush=True,
            )


def _streams(found: nanoinfer.Forecast) -> str:
    if found.memory.num_expert_slots:
        return f"{found.memory.num_expert_slots} slots"
    return "streams" if found.memory.streamed_bytes else "KV streams"


if __name__ == "__main__":
    main()
