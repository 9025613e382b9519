"""What two GPUs of one host give, beside one of them: decode, prefill, streamed KV, and the exchange by itself.

    python tools/gpu_ranks.py [--only NAME,...] [--json FILE]

Each row is measured with one GPU and with two in turn, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanoinfer import LLM
from nanoinfer.execution.group import WAY, Group
from nanoinfer.kernels.layer.rms_norm import rms_norm
from nanoinfer.measure.run import measure
from nanoinfer.models.shapes import UNLIMITED, write_shape

GIB = 2**30
# name: shape, sequences, tokens of each, output tokens, engine arguments
ROWS = {
    "4b 1x1k": ("qwen3-4b", 1, 1024, 60, {}),
    "4b 8x4k": ("qwen3-4b", 8, 4096, 60, {}),
    "4b 32k streamed": ("qwen3-4b", 1, 32768, 24, dict(enable_cpu_offload=True, resident_kv_limit=0)),
    "31b int4 1x1k": ("gemma-4-31b", 1, 1024, 40, dict(quantization="int4")),
    "30b-a3b int4 1x1k": ("qwen3-30b-a3b", 1, 1024, 40, dict(quantization="int4")),
    "30b-a3b int4 64x1k": ("qwen3-30b-a3b", 64, 1024, 40, dict(quantization="int4")),
    "0.6b 256x550": ("qwen3-0.6b", 256, 550, 60, {}),
}


def row(name: str, size: int) -> dict:
    """One row with so many GPUs."""
    shape, batch, context, output_len, arguments = ROWS[name]
    options = dict(load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, progress_bar=False)
    options |= dict(hf_overrides=UNLIMITED, max_model_len=context + output_len + 24, max_num_seqs=batch)
    options |= dict(gpu_memory_limit=60 * GIB, host_memory_limit=24 * GIB) | arguments
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(write_shape(shape, directory), tensor_parallel_size=size, **options)
    started = time.perf_counter() - begin
    measure(llm, [context], 4, seed=1)
    found = measure(llm, [context] * batch, output_len + batch * context // 8192)
    llm.close()
    result = dict(
        tokens_per_second=found.tokens_per_second,
        step_ms=1e3 * found.seconds_per_token,
        prefill=found.prefill_tokens_per_second,
        streamed_bytes=found.streamed_bytes_per_step,
        start_seconds=started,
        answers=[one.token_ids[:16] for one in found.outputs[:2]],
    )
    print(f"{name:22} {size} GPU: {result['tokens_per_second']:9.1f} tok/s {result['step_ms']:8.3f} ms, prefill "
          f"{result['prefill'] or 0:8.0f}, start {started:.0f} s", flush=True)  # fmt: skip
    return result


def graph_us(work: Callable[[], object], times: int = 50, repeats: int = 20) -> float:
    """Microseconds of one call within a graph of many, the median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(times):
                work()
        found = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / times)
    return statistics.median(found)


def exchange(rank: int, folder: Path) -> dict[str, float]:
    """The exchange of each way, on one of two ranks: of parts with residual and norm, and of logits."""
    device = torch.device("cuda", 0)
    found: dict[str, float] = {}
    weight = torch.ones(2560, dtype=torch.bfloat16, device=device)
    for way in ("peers", "nccl"):
        os.environ[WAY] = way
        (folder / way).mkdir(exist_ok=True)
        group = Group(folder / way, rank, 2, device)
        gather = group.gather
        found[f"{group.way}: taken MiB"] = group.taken_bytes / 2**20
        for rows in (1, 8, 64, 512, 4096):
            x = torch.randn(rows, 2560, device=device).bfloat16()
            part, times = torch.randn(rows, 2560, device=device), 50 if rows < 4096 else 5
            found[f"{way}: {rows} rows, residual and norm"] = graph_us(
                lambda: rms_norm(x, weight, 1e-6, offset=False, other=gather(part)), times
            )
            found[f"{way}: {rows} rows alone"] = graph_us(lambda: gather(part), times)
        for rows in (1, 256):
            logits = torch.randn(rows, 75776, device=device).bfloat16()
            found[f"{way}: logits of {rows} rows"] = graph_us(lambda: gather(logits), 10)
    x = torch.randn(1, 2560, device=device).bfloat16()
    parts = torch.randn(2, 1, 2560, device=device)
    found["the norm of 1 row alone"] = graph_us(lambda: rms_norm(x, weight, 1e-6, offset=False, other=parts))
    torch.cuda.synchronize()
    group.minimum(0)
    return found


def exchanges() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank", "1", "--folder", folder]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment = os.environ | dict(CUDA_VISIBLE_DEVICES=",".join(reversed(visible)))
        with subprocess.Popen(command, env=environment) as other:
            try:
                found = exchange(0, Path(folder))
            finally:
                if other.poll() is None:
                    time.sleep(3)
                    other.kill()
    for name, value in found.items():
        print(f"{name:40} {value:8.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of rows, or `exchange`, with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so long")
    options = parser.parse_args()
    if options.rank is not None:
        exchange(options.rank, options.folder)
        return
    begin, wanted = time.perf_counter(), options.only.split(",") if options.only else ["exchange", *ROWS]
    result = dict(card=torch.cuda.get_device_name(0), way=os.environ.get(WAY, "peers"))
    for name in wanted:
        if time.perf_counter() - begin > options.seconds:
            print(f"{name}: no time left", flush=True)
        elif name == "exchange":
            result[name] = exchanges()
        else:
            one, two = row(name, 1), row(name, 2)
            result[name] = dict(one=one, two=two, ratio=two["tokens_per_second"] / one["tokens_per_second"])
            same = one.pop("answers") == two.pop("answers")
            print(f"{name:22} {result[name]['ratio']:.3f} times, same tokens: {same}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
