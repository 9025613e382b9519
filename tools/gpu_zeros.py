#!/usr/bin/env python
"""Decode steps with int4 weights with zeros beside those without, by turns in one process, on a GPU of 80 GB.

python tools/gpu_zeros.py [SHAPE] [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from gpu_common import GIB, Bench

from nanoinfer.measure.run import measure, release

FORMATS = ("int4-symmetric", "int4")
SEQUENCES = (1, 64)
CONTEXT, TOKENS = 1024, 100


def main() -> None:
    shape, rounds = (*sys.argv[1:], "qwen3-4b")[0], int((*sys.argv[2:], 5)[0])
    bench = Bench(shape, 1, torch.device("cuda", 0))
    options = dict(max_model_len=CONTEXT + TOKENS + 64, max_num_seqs=max(SEQUENCES), gpu_memory_limit=32 * GIB)
    engines = {name: bench.llm(shape, quantization=name, **options) for name in FORMATS}
    for count in SEQUENCES:
        seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
        for number in range(rounds + 1):  # the first one warms up
            for name in FORMATS if number % 2 else reversed(FORMATS):
                found = measure(engines[name], [CONTEXT] * count, TOKENS).figures()["seconds_per_token"]
                seconds[name] += [found] if number else []
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        for name in FORMATS:
            ratio = medians[name] / medians[FORMATS[0]]
            print(f"{count} x {CONTEXT}, {name}: {1000 * medians[name]:.3f} ms a step, {ratio:.4f} of {FORMATS[0]}")
    for llm in engines.values():
        release(llm)


if __name__ == "__main__":
    main()
