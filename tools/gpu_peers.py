"""Cases of `make gpu-bench` that measure beside others: transformers' offloaded caches, and llama.cpp."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from gpu_common import Bench, figures
from gpu_gguf import write_random_gguf

from nanoinfer.bench.hf import CACHES, load_reference, measure_reference
from nanoinfer.measure.run import free_memory, measure
from nanoinfer.memory.floors import measure_floors
from nanoinfer.models.shapes import write_shape

CURVE = (1024, 4096, 8192, 16384, 32768)
FEWER = CURVE[::2]  # for others, which take longer to prepare a context
LLAMA_SECONDS = 200  # until a run of llama-bench counts as hung
# name: file, prompt tokens, output tokens, depths, repetitions, and whether the KV cache lies on the host
LLAMA_RUNS = {
    "f16": ("f16", 0, 64, FEWER, 3, False),
    "Q4_K_M": ("q4km", 0, 64, (1024, 32768), 3, False),
    "f16, prefill": ("f16", 32768, 0, (0,), 2, False),
    "f16, KV on the host": ("f16", 0, 6, FEWER[:2], 1, True),
}


def curve(bench: Bench) -> dict:
    """Decode steps of one sequence over its length: all streamed, within 12 GiB, and resident within 12 GiB."""
    contexts = [bench.tokens(context) for context in CURVE]
    longest = contexts[-1] + 64
    offload = dict(enable_cpu_offload=True, host_memory_limit=bench.host_bytes(bench.large, longest))
    settings = {
        "streamed": (contexts, offload | dict(resident_kv_limit=0)),
        "offload": (contexts, offload),
        "resident": (contexts[:-1], {}),  # 32k tokens and the weights take more than 12 GiB
    }
    result = {}
    for mode, (found, arguments) in settings.items():
        common = dict(max_model_len=found[-1] + 64, max_num_seqs=1, gpu_memory_limit=bench.limit(12))
        llm = bench.llm(bench.large, **(common | arguments))
        measure(llm, [found[0]], 4, seed=1)  # compiles the kernels
        for context in found:
            bench.measure(llm, [context], 24)
        result |= {f"{mode}, {context}": case for context, case in zip(found, bench.release(llm), strict=True)}
    return result


def hf_offloaded(bench: Bench) -> dict:
    """transformers' offloaded caches on the same weights, over the context."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(write_shape(bench.large, directory))
        reference = load_reference(model_dir, dtype="auto", device=bench.device, load_format="dummy", seed=0)
    result, contexts = {}, [bench.tokens(context) for context in FEWER]
    for mode in CACHES:
        for context in contexts:
            before = measure_floors(bench.device)
            row = measure_reference(mode, *reference, [context], 12)
            row.add_floor(before, measure_floors(bench.device))
            result[f"{mode}, {context}"] = figures(row)
            free_memory()
        result[mode] = result[f"{mode}, {contexts[-1]}"]
    del reference
    free_memory()
    return result


def llama_cpp(bench: Bench) -> dict:
    """llama.cpp's own bench, on random weights of the same shape: decode and prefill in 16 bits and in Q4_K_M.

    `--llama-cpp DIR` names the folder with llama-bench and llama-quantize, built with CUDA.
    """
    result: dict = {}
    with tempfile.TemporaryDirectory() as directory:
        files = {name: Path(directory) / f"{name}.gguf" for name in ("f16", "q4km")}
        write_random_gguf(files["f16"], bench.large)
        _run(bench, "llama-quantize", files["f16"], files["q4km"], "Q4_K_M", "16")
        for name, (file, prompt, output, depths, repetitions, on_host) in LLAMA_RUNS.items():
            for depth in depths:
                depth //= bench.scale
                options = ["-p", prompt // bench.scale, "-n", output, "-d", depth, "-r", repetitions, "-t", 16]
                options += ["-ngl", 99, "-fa", 1, "-b", 8192, "-ub", 4096, "-nkvo", int(on_host)]
                printed = _run(bench, "llama-bench", "-m", files[file], "-o", "json", *options)
                (run,) = json.loads(printed)
                rate = statistics.median(run["samples_ts"])
                tokens = {"prefill_tokens_per_second": rate} if prompt else {"seconds_per_token": 1 / rate}
                result[f"{name}, {depth or prompt // bench.scale}"] = tokens
        result["build"] = run["build_number"]
    return result


def _run(bench: Bench, program: str, *arguments: object) -> str:
    """Run a program of llama.cpp and return what it prints."""
    command = [str(bench.llama_cpp / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LLAMA_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
