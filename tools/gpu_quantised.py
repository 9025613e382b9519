"""Cases of `make gpu-bench`: weights of 4 and 8 bits."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from gpu_common import Bench
from torch import Tensor

from nanoinfer.layers.linear import Linear
from nanoinfer.measure.run import free_memory, measure
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read
from offload.runtime.cuda import CudaRuntime
from offload.runtime.timeline import COMPUTE

FORMATS = {
    "bf16": {},
    "int4": dict(quantization="int4"),
    "int4, int8 head": dict(quantization="int4", head_quantization="int8"),
    "int8, int8 head": dict(quantization="int8", head_quantization="int8"),
    "fp8, int8 head": dict(quantization="fp8", head_quantization="int8"),
}
CONTEXTS = (1024, 32768)
ROWS = (1, 16, 64, 128, 256, 512, 768, 2048)
REPLAYS = 15


def quantised(bench: Bench) -> dict:
    """Decode steps and prefill of one sequence in each format, with the bytes of its weights."""
    result = {}
    for name, options in FORMATS.items():
        contexts = [bench.tokens(context) for context in CONTEXTS]
        length = max(contexts) + 64
        llm = bench.llm(bench.large, max_model_len=length, max_num_seqs=1, gpu_memory_limit=bench.limit(60), **options)
        for context in contexts:
            measure(llm, [context], 4, seed=1)
            bench.measure(llm, [context], 40)
        held = {"weight_bytes": llm.engine.runner.spec.weight_bytes}
        for context, found in zip(contexts, bench.release(llm), strict=True):
            wide = result.get(f"bf16, 1 x {context}", found)
            found["ratio_to_bf16"] = found["seconds_per_token"] / wide["seconds_per_token"]
            found["prefill_ratio_to_bf16"] = found["time_to_first_token"] / wide["time_to_first_token"]
            result[f"{name}, 1 x {context}"] = found | held
    return result


def packed_products(bench: Bench) -> dict:
    """Seconds of a layer's four products for several numbers of rows: the mean over all layers of a model.

    So no weight lies in the cache from the time before. Of each model also what it holds, beside what was planned.
    """
    result = {}
    for name in ("bf16", "int4", "int8", "fp8"):
        free_memory()
        before = _allocated(bench)
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = read_checkpoint(write_shape(bench.large, directory))
            checkpoint = quantised_while_read(checkpoint, None if name == "bf16" else name, None)
            model = load_model(checkpoint, read_spec(checkpoint, "auto"), bench.device, seed=0, max_position=64)
        spec, held = model.spec, _allocated(bench) - before
        if bench.is_cuda:
            planned = spec.weight_bytes + spec.gpu_scratch_bytes + spec.rope_bytes(64)
            result[f"{name}, loaded"] = dict(held_bytes=held, planned_bytes=planned, held_to_planned=held / planned)
        for rows in dict.fromkeys(max(1, rows // bench.scale) for rows in ROWS):
            found = _seconds_of_products(model, rows)
            wide, one = result.get(f"bf16, rows: {rows}", found), result.get(f"{name}, rows: 1", found)
            found["ratio_to_bf16"] = found["seconds"] / wide["seconds"]
            found["ratio_to_one_row"] = found["seconds"] / one["seconds"]
            result[f"{name}, rows: {rows}"] = found
        del model
    return result


def _allocated(bench: Bench) -> int:
    return torch.cuda.memory_allocated(bench.device) if bench.is_cuda else 0


def _seconds_of_products(model: Decoder, rows: int) -> dict:
    def projection(module: Linear, x: Tensor, residual: Tensor) -> None:
        module(x)

    def gate(module: Linear, x: Tensor, residual: Tensor) -> None:
        module(x, activation="silu")

    def added(module: Linear, x: Tensor, residual: Tensor) -> None:
        module.project_add_norm(residual, x, model.norm)

    kinds = {
        "qkv": (projection, [layer.self_attn.qkv_proj for layer in model.layers]),
        "o, with its sum and norm": (added, [layer.self_attn.o_proj for layer in model.layers]),
        "gate_up": (gate, [layer.mlp.gate_up_proj for layer in model.layers]),
        "down, with its sum and norm": (added, [layer.mlp.down_proj for layer in model.layers]),
    }
    found = {}
    for name, (work, modules) in kinds.items():
        options = dict(dtype=model.spec.dtype, device=next(modules[0].parameters()).device)
        x = torch.randn(rows, modules[0].in_features, **options)
        residual = torch.zeros(rows, modules[0].num_rows, **options)
        found[f"{name}: seconds"] = timed(lambda: [work(module, x, residual) for module in modules], x.device) / len(
            modules
        )
    return {"seconds": sum(found.values())} | found


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of some work, which a GPU runs from a graph."""
    work()
    seconds = []
    if device.type != "cuda":
        for _ in range(3):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)
    runtime = CudaRuntime(device)
    stream, start, end = runtime.stream(COMPUTE), runtime.event(timed=True), runtime.event(timed=True)
    graph = runtime.capture(stream, work)
    for _ in range(REPLAYS):
        stream.record(start)
        stream.run(graph)
        stream.record(end)
        runtime.synchronize()
        seconds.append(end.seconds_since(start))
    return statistics.median(seconds)
