#!/usr/bin/env python
"""Steps and prefill of this clone and of others, on one GPU in turn: what a change costs, and whether bits are equal.

python tools/gpu_compare.py OTHER_CLONE... [--seconds 500]

First all clones compile their kernels at once, then each is measured in a process of its own, forwards and backwards as
often as there is time. A figure is the least of a clone's medians; "bits" is a digest of tokens and log-probabilities.
Clones from before an option was there are given none of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
INT4 = dict(quantization="int4", head_quantization="int8")
LARGE = [(1, 1024), (8, 4096), (64, 1024)]
# name: shape, (rows, tokens) of steps, tokens of a prefill, GPU GiB, arguments
CASES: dict[str, tuple[str, list[tuple[int, int]], int, float, dict]] = {
    "4B": ("qwen3-4b", LARGE, 32768, 60, {}),
    "4B int4": ("qwen3-4b", LARGE, 0, 60, INT4),
    "30B-A3B int4": ("qwen3-30b-a3b", LARGE, 0, 60, INT4),
    "gpt-oss-20b": ("gpt-oss-20b", LARGE, 0, 60, {}),
    "28 slots": (
        "qwen3-30b-a3b", [(1, 1024), (4, 1024)], 0, 28, INT4 | dict(expert_slots=28, host_memory_limit="24GiB"),
    ),
    "4B, KV streamed": (
        "qwen3-4b", [(1, 16384)], 0, 60,
        dict(enable_cpu_offload=True, resident_kv_limit=0, host_memory_limit="6GiB"),
    ),
    "8B, weights streamed": ("qwen3-8b", [(1, 1024)], 0, 8, dict(host_memory_limit="24GiB")),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clones", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--scale", type=int, default=1, help="divide contexts, to try the code")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what a process of one clone does
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        return measure_one(options.measure, options.scale, options.warm)
    if not options.clones:
        parser.error("name another clone of this repository, to compare this one with")
    return compare([*(clone.resolve() for clone in options.clones), HERE], options)


def compare(clones: list[Path], options: argparse.Namespace) -> int:
    begin, found, longest = time.monotonic(), [{} for _ in clones], 0.0
    with tempfile.TemporaryDirectory() as directory:

        def start(number: int, *arguments: str) -> tuple[subprocess.Popen, Path]:
            out = Path(directory) / f"{number}-{time.monotonic_ns()}.json"
            command = [sys.executable, __file__, "--measure", str(out), "--scale", str(options.scale), *arguments]
            environment = os.environ | dict(TRITON_CACHE_DIR=f"{directory}/cache{number}")
            return subprocess.Popen(command, cwd=clones[number], env=environment), out

        for process, _ in [start(number, "--warm") for number in range(len(clones))]:
            process.wait()
        turn = 0
        while turn == 0 or time.monotonic() - begin + len(clones) * longest < options.seconds:
            for number in range(len(clones))[:: -1 if turn % 2 else 1]:
                now = time.monotonic()
                process, out = start(number)
                process.wait()
                longest = max(longest, time.monotonic() - now)
                for name, value in (json.loads(out.read_text()) if out.exists() else {}).items():
                    found[number].setdefault(name, []).append(value)
            turn += 1
    print(report(clones, found))
    return 0


def report(clones: list[Path], found: list[dict[str, list]]) -> str:
    lines = ["  ".join(["case".ljust(32), *(str(clone)[-24:].rjust(24) for clone in clones), "times"])]
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name, []) for one in found]
        if any(isinstance(value, str) for some in values for value in some):
            cells, ratios = ["/".join(sorted(set(map(str, some)))) for some in values], []
        else:
            least = [min(some, default=math.nan) for some in values]
            cells, ratios = [f"{value:,.1f} us" for value in least], [f"{least[-1] / one:.4f}" for one in least[:-1]]
        lines.append("  ".join([name.ljust(32), *(cell.rjust(24) for cell in cells), *ratios]))
    return "\n".join(lines)


def measure_one(out: Path, scale: int, is_warm: bool) -> int:
    """Measure the clone in whose folder this runs, and write its figures behind each case."""
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tools")]
    import torch
    from gpu_common import Bench

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench, figures = Bench(None, scale, device), {}
    for name, case in CASES.items():
        try:
            figures |= _case(bench, name, *case, is_warm)
        except Exception as error:  # a clone may not have it
            figures[f"{name}, bits"] = f"{type(error).__name__}: {error}"[:60]
        out.write_text(json.dumps(figures))
    return 0


def _case(bench, name, shape, steps, prefill, gib, arguments, is_warm) -> dict:
    from nanoinfer.measure.run import measure, release

    if not bench.is_cuda:
        shape = "tiny-sparse" if "a3b" in shape or "oss" in shape else "tiny"
        arguments = {
            key: value for key, value in arguments.items() if not key.endswith("_limit") and key != "expert_slots"
        }
    steps = [(max(1, rows // bench.scale), bench.tokens(tokens)) for rows, tokens in steps]
    prefill = prefill and bench.tokens(prefill)
    longest = max(prefill, *(tokens + 50 + rows * tokens // 8192 for rows, tokens in steps)) + 64
    rows = sorted({rows for rows, _ in steps})
    sizes = dict(max_model_len=longest, max_num_seqs=rows[-1], cuda_graph_batch_sizes=rows, max_num_batched_tokens=8192)
    llm = bench.llm(shape, gpu_memory_limit=bench.limit(gib), **sizes, **arguments)
    outputs = measure(llm, [bench.tokens(1024)], 8, with_logprobs=True).outputs
    found = {f"{name}, bits": hashlib.sha256(repr(outputs).encode()).hexdigest()[:12]}
    for count, tokens in steps:
        row = measure(llm, [64 if is_warm else tokens] * count, 6 if is_warm else 40 + count * tokens // 8192)
        found[f"{name}, {count} x {tokens}"] = row.seconds_per_token * 1e6
    if prefill:
        seconds = [measure(llm, [prefill], 1, seed=seed).time_to_first_token for seed in range(1 if is_warm else 2)]
        found[f"{name}, prefill of {prefill}"] = min(seconds) * 1e6
    release(llm)
    return found


if __name__ == "__main__":
    sys.exit(main())
