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
from nanoinfer.kernels.layer.exchange_norm import exchange_norm
from nanoinfer.kernels.layer.rms_norm import rms_norm
from nanoinfer.measure.run import measure
from nanoinfer.memory.floors import measure_floors
from nanoinfer.models.shapes import UNLIMITED, write_shape

GIB = 2**30
NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
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
    plan, peak = llm.engine.plan, llm.engine.executor.peak_bytes()
    llm.close()
    result = dict(
        planned_to_peak=plan.total_bytes / peak,  # the most of any rank
        tokens_per_second=found.tokens_per_second,
        step_ms=1e3 * found.seconds_per_token,
        prefill=found.prefill_tokens_per_second,
        streamed_bytes=found.streamed_bytes_per_step,
        start_seconds=started,
        answers=[one.token_ids[:16] for one in found.outputs[:2]],
    )
    print(f"{name:22} {size} GPU: {result['tokens_per_second']:9.1f} tok/s {result['step_ms']:8.3f} ms, prefill "
          f"{result['prefill'] or 0:8.0f}, {found.streamed_bytes_per_step / 1e9:.3f} GB streamed, plan / peak "
          f"{result['planned_to_peak']:.4f}, start {started:.0f} s", flush=True)  # fmt: skip
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


def exchange(rank: int, folder: Path, ways: list[str]) -> dict[str, float]:
    """The exchange of each way, on one of two ranks: of parts with residual and norm, and of logits; and the links."""
    device = torch.device("cuda", 0)
    found: dict[str, float] = {}
    weight = torch.ones(2560, dtype=torch.bfloat16, device=device)
    for way in ways:
        os.environ[WAY] = way
        (folder / way).mkdir(exist_ok=True)
        group = Group(folder / way, rank, 2, device)
        found["taken, MiB"] = group.taken_bytes / 2**20
        mailbox = group.mailbox
        for rows in (1, 8, 64, 512, 4096):
            x = torch.randn(rows, 2560, device=device).bfloat16()
            part, times = torch.randn(rows, 2560, device=device), 50 if rows < 4096 else 5
            if mailbox is not None and rows <= mailbox.most_rows(2560):
                options = dict(offset=False)
                work = lambda: exchange_norm(x, weight, 1e-6, part, mailbox, **options)  # noqa: E731, B023
            else:
                work = lambda: rms_norm(x, weight, 1e-6, offset=False, other=group.gather(part))  # noqa: E731, B023
            found[f"{rows} rows, residual and norm"] = graph_us(work, times)
        for rows in (1, 256):
            logits = torch.randn(rows, 75776, device=device).bfloat16()
            found[f"logits of {rows} rows"] = graph_us(lambda: group.gather(logits), 10)  # noqa: B023
        torch.cuda.synchronize()
        group.minimum(0)
        if way == "peers":
            found["link of each, both at once, GB/s"] = measure_floors(device, repeats=15).link / 1e9
            group.minimum(0)
    return found


def exchanges() -> dict[str, dict[str, float]]:
    """By way; NCCL once more where it may not reach the other's memory either."""
    visible, result = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","), {}
    for name, extra in (("peers", {}), ("host", {}), ("nccl", {}), ("nccl without peers", NO_PEERS)):
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for rank in range(2):
                order = visible if rank == 0 else [*reversed(visible)]
                command = [sys.executable, __file__, "--rank", str(rank), "--folder", folder, "--way", name.split()[0]]
                environment = os.environ | extra | dict(CUDA_VISIBLE_DEVICES=",".join(order))
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            try:
                texts = [process.communicate(timeout=60)[0] for process in processes]
                result[name] = json.loads(texts[0].splitlines()[-1])
            except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
                result[name] = {"failed": 1.0}
                print(f"{name}: {error!r}", flush=True)
            for process in processes:
                process.kill()
        for what, value in result[name].items():
            print(f"{name:20} {what:40} {value:8.1f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of rows, or `exchange`, with commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--way", choices=["peers", "host", "nccl"])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so long")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(exchange(options.rank, options.folder, [options.way])), flush=True)
        os._exit(0)  # NCCL's threads are not waited for
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
            # Packed noise is drawn by each rank for itself.
            told = "" if "quantization" in ROWS[name][-1] else f", same tokens: {same}"
            print(f"{name:22} {result[name]['ratio']:.3f} times{told}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
