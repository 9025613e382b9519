#!/usr/bin/env python
"""The project's GPU measurements, each with the floors of the same run, written to docs/measurements/latest.json.

    make gpu-bench            or            python tools/gpu_bench.py --only offload_32k,resident
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.bench.floors import measure_floors  # noqa: E402
from nanoinfer.bench.hf import load_reference, measure_reference  # noqa: E402
from nanoinfer.bench.measure import Row, add_floor, measure, release  # noqa: E402
from nanoinfer.bench.report import versions  # noqa: E402
from nanoinfer.bench.shapes import write_shape  # noqa: E402
from offload.pinned import HostArena  # noqa: E402

GIB = 2**30


def source_sha256() -> str:
    """SHA-256 over every source file in sorted path order: path, NUL, bytes, NUL."""
    digest = hashlib.sha256()
    folders = ("nanoinfer", "offload")
    for path in sorted(str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.py")):
        digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()


class Bench:
    """What all cases share. `scale` shrinks contexts and sizes, to try the code without a GPU."""

    def __init__(self, shape: str | None, scale: int, device: torch.device) -> None:
        self.device, self.scale = device, scale
        self.large, self.small = shape or "qwen3-4b", shape or "qwen3-0.6b"

    def llm(self, shape: str, **arguments) -> LLM:
        with tempfile.TemporaryDirectory() as directory:
            return LLM(
                write_shape(shape, directory),
                load_format="dummy",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                progress_bar=False,
                **arguments,
            )

    def tokens(self, count: int) -> int:
        return max(64, count // self.scale)

    def measured(self, llm: LLM, lengths: list[int], output_len: int) -> Row:
        """One case with floors before and after."""
        before = measure_floors(self.device)
        row = measure(llm, lengths, output_len, 0, None, False)
        add_floor(row, llm, lengths, output_len, (before, measure_floors(self.device)))
        return row

    # Cases

    def offload_32k(self) -> dict:
        """Batch 1, everything streamed, several rings; bits against resident mode."""
        context = self.tokens(32768)
        common = dict(max_model_len=context + 64, max_num_seqs=1)
        resident = self.llm(self.large, **common)
        wanted = measure(resident, [context], 28, 0, None, False).outputs
        release(resident)
        result = {}
        for num_ring_slots, mib in ((8, 32), (4, 32), (8, 8), (8, 4)):
            llm = self.llm(
                self.large,
                enable_cpu_offload=True,
                num_ring_slots=num_ring_slots,
                ring_slot_bytes=mib * 2**20,
                host_memory_limit=int(1.02 * (context + 512) * self._token_bytes(self.large)) + 2**28,
                **common,
            )
            row = self.measured(llm, [context], 28)
            figures = _figures(row) | {"ring_mib": llm.engine.runner.ring.num_bytes / 2**20}
            result[f"{num_ring_slots} x {mib} MiB"] = figures | {"bit_identical_to_resident": row.outputs == wanted}
            release(llm)
        return result

    def prefill_128k_12gib(self) -> dict:
        """131,072 tokens of context within a 12 GiB limit."""
        context = self.tokens(131072)
        limit = 12 * GIB
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self.device)
        llm = self.llm(
            self.large,
            enable_cpu_offload=True,
            gpu_memory_limit=limit,
            host_memory_limit=int(1.02 * (context + 512) * self._token_bytes(self.large)) + 2**28,
            max_model_len=context + 64,
            max_num_seqs=4,
        )
        row = measure(llm, [context], 16, 0, None, False)
        peak = row.peak_gpu_bytes - before if row.peak_gpu_bytes is not None else None
        floors = measure_floors(self.device)
        add_floor(row, llm, [context], 16, (floors, floors))
        release(llm)
        figures = _figures(row) | {"limit_bytes": limit, "peak_reserved_bytes": peak}
        return figures | {"under_limit": None if peak is None else peak <= limit}

    def pin_32gib(self) -> dict:
        """A 32 GiB host pool, twice: the first time the machine may have to find the memory, the second it has it."""
        num_segments = max(1, 32 // self.scale)
        result = {}
        for attempt in ("first", "again"):
            begin = time.perf_counter()
            arena = HostArena(num_segments, GIB if self.scale == 1 else 2**20, pin=self.device.type == "cuda")
            arena.wait(1)
            usable = time.perf_counter() - begin
            arena.wait()
            seconds = time.perf_counter() - begin
            result[attempt] = {
                "bytes": arena.mapped_bytes,
                "seconds_to_first_segment": usable,
                "seconds": seconds,
                "seconds_per_gib": seconds / (arena.mapped_bytes / GIB),
            }
            arena.close()
            del arena
            gc.collect()
        return result

    def resident(self) -> dict:
        """Resident decode."""
        result = {}
        for batch, context in ((1, 1024), (1, 32768), (8, 4096)):
            context = self.tokens(context)
            llm = self.llm(self.large, max_model_len=context + 64, max_num_seqs=batch, gpu_memory_limit=self._limit(60))
            measure(llm, [context], 4, 1, None, False)
            result[f"{batch} x {context}"] = _figures(self.measured(llm, [context] * batch, 40))
            release(llm)
        return result

    def offload_batch(self) -> dict:
        """Several sequences, everything streamed."""
        generator = random.Random(0)
        cases = {
            "4 x 32k": [self.tokens(32768)] * 4,
            "16 x 2k to 6k": [self.tokens(generator.randint(2048, 6144)) for _ in range(16)],
        }
        result = {}
        for name, lengths in cases.items():
            tokens = sum(lengths) + 300 * len(lengths)
            llm = self.llm(
                self.large,
                enable_cpu_offload=True,
                max_model_len=max(lengths) + 64,
                max_num_seqs=len(lengths),
                num_ring_slots=8,
                host_memory_limit=int(1.02 * tokens * self._token_bytes(self.large)) + 2**29,
            )
            # Prefill and decode take turns, so the first sequences have decoded a while before the last one starts.
            result[name] = _figures(self.measured(llm, lengths, 40))
            release(llm)
        return result

    def batch_throughput(self) -> dict:
        """256 requests of 100 to 1,024 tokens in and out, temperature 0.6: nano-vllm's own benchmark."""
        count = max(4, 256 // self.scale)
        generator = random.Random(0)
        high = 1024 if self.scale == 1 else 120
        prompts = [
            [generator.randrange(2000 if self.scale > 1 else 10000) for _ in range(generator.randint(100, high))]
            for _ in range(count)
        ]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=generator.randint(100, high)) for _ in prompts
        ]
        if self.scale > 1:
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=8) for _ in prompts]
        llm = self.llm(self.small, max_model_len=4096, max_num_seqs=256, gpu_memory_limit=self._limit(100))
        llm.generate([prompts[0]], SamplingParams(temperature=0.6, max_tokens=4), use_tqdm=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(param.max_tokens for param in params)
        release(llm)
        return {"output_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}

    def hf_offloaded(self) -> dict:
        """transformers' offloaded caches on the same weights."""
        context = self.tokens(32768)
        result = {}
        for mode in ("hf", "hf-static"):
            with tempfile.TemporaryDirectory() as directory:
                model_dir = str(write_shape(self.large, directory))
                model = load_reference(model_dir, dtype="auto", device=self.device, load_format="dummy", seed=0)
            floors = measure_floors(self.device)
            result[mode] = _figures(measure_reference(mode, model, self.device, [context], 10, 0, floors, False))
            del model
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return result

    def _limit(self, gib: int) -> int | None:
        return gib * GIB if self.device.type == "cuda" else None

    def _token_bytes(self, shape: str) -> int:
        """KV bytes of one token over all layers."""
        with tempfile.TemporaryDirectory() as directory:
            config = json.loads((write_shape(shape, directory) / "config.json").read_text())
        size = {"bfloat16": 2, "float32": 4}[config["dtype"]]
        return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * size


def _figures(row: Row) -> dict:
    """The row without what did not apply."""
    return {name: value for name, value in row.figures().items() if value is not None}


CASES: dict[str, Callable[[Bench], dict]] = {
    name: getattr(Bench, name)
    for name in (
        "pin_32gib",
        "offload_32k",
        "prefill_128k_12gib",
        "resident",
        "offload_batch",
        "batch_throughput",
        "hf_offloaded",
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"cases, separated by commas, of {', '.join(CASES)}")
    parser.add_argument("--out", default=str(ROOT / "docs" / "measurements" / "latest.json"))
    parser.add_argument("--shape", help="another shape for all cases, such as tiny")
    parser.add_argument("--scale", type=int, default=1, help="divide contexts and sizes, to try the code")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}: choose from {', '.join(CASES)}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(options.shape, options.scale, device)
    floors = measure_floors(device)
    record = {
        "command": "python tools/gpu_bench.py " + " ".join(sys.argv[1:]),
        "versions": versions(device),
        "source_sha256": source_sha256(),
        "floors": {"link_bytes_per_second": floors.link, "device_bytes_per_second": floors.device},
        "cases": {},
    }
    for name in names:
        begin = time.perf_counter()
        try:
            record["cases"][name] = CASES[name](bench)
        except Exception as error:  # one case must not lose the others
            traceback.print_exc()
            record["cases"][name] = {"failed": f"{type(error).__name__}: {error}"}
            gc.collect()
        record["cases"][name]["case_seconds"] = round(time.perf_counter() - begin, 1)
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {_summary(record['cases'][name])}", flush=True)
    return 0 if all("failed" not in case for case in record["cases"].values()) else 1


def _summary(case: dict) -> str:
    """The figures that one looks at first."""
    wanted = ("seconds_per_token", "ratio_to_floor", "time_to_first_token", "seconds_per_gib", "tokens_per_second",
              "peak_reserved_bytes", "under_limit", "bit_identical_to_resident", "failed")  # fmt: skip

    def short(figures: dict) -> str:
        values = {name: figures[name] for name in wanted if name in figures}
        return ", ".join(f"{n}={v:.5g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())

    parts = [short(case)] + [f"[{name}] {short(part)}" for name, part in case.items() if isinstance(part, dict)]
    return " ".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
