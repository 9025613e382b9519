"""Case of `make gpu-bench`: prefill attention, ours beside what else is installed, on one chunk of a long prompt."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from gpu_common import Bench
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoinfer.attention.base import KeyRange
from nanoinfer.attention.registry import make_backend
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.load import read_checkpoint, read_spec

CHUNK, CONTEXT, BLOCK_SIZE = 8192, 32768, 256
MATRIX_SIDE = 8192  # of the product whose rate is the floor
LIBRARIES = {"torch, cuDNN": SDPBackend.CUDNN_ATTENTION, "torch, flash": SDPBackend.FLASH_ATTENTION}


def prefill_attention(bench: Bench) -> dict:
    """One layer's attention of the last 8,192 tokens of a prompt of 32,768.

    The libraries get the keys and values gathered, history and diagonal as two calls, and are spared the merge of both.
    """
    device, dtype = bench.device, torch.bfloat16 if bench.is_cuda else torch.float32
    with tempfile.TemporaryDirectory() as directory:
        model_spec = read_spec(read_checkpoint(write_shape(bench.large, directory)), dtype)
    spec = replace(model_spec.attention, block_size=BLOCK_SIZE)
    chunk, context = (max(BLOCK_SIZE, count // bench.scale) for count in (CHUNK, CONTEXT))
    begin, num_blocks = context - chunk, context // BLOCK_SIZE
    heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    q = torch.randn(chunk, heads[0], heads[2], dtype=dtype, device=device)
    kv = torch.randn(num_blocks, 2, BLOCK_SIZE, *heads[1:], dtype=dtype, device=device)
    order = torch.randperm(num_blocks, device=device)
    operations = 4 * heads[0] * heads[2] * chunk * (begin + chunk / 2)
    result = {"chunk": chunk, "context": context, "operations": operations, "matrix_rate": _matrix_rate(bench, dtype)}

    def note(name: str, work: Callable[[], object]) -> None:
        try:
            seconds = _seconds(bench, work)
        except (RuntimeError, ImportError, ValueError) as error:  # not installed, or not for this machine
            result[name] = {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
            return
        floor = operations / result["matrix_rate"]
        result[name] = {
            "seconds": seconds,
            "operations_per_second": operations / seconds,
            "ratio_to_floor": seconds / floor,
        }

    backend = make_backend("auto", spec, device, False)
    note(f"ours ({backend.name})", _ours(backend, q, kv, order, begin))
    keys, values = (kv[order, part].reshape(1, context, *heads[1:]).transpose(1, 2) for part in (0, 1))
    for name, library in LIBRARIES.items():
        note(name, _library(library, q[None].transpose(1, 2), keys, values, begin))
    note("flash-attn", _flash_attn(q, keys, values))
    return result


def _ours(backend, q: Tensor, kv: Tensor, order: Tensor, begin: int) -> Callable[[], object]:
    key_range = KeyRange.of_one(len(q), order.int()[None], begin=begin)
    out = torch.empty_like(q)
    return lambda: backend.prefill(q, kv, key_range, None, out, None)


def _library(library: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, begin: int) -> Callable[[], object]:
    def attend() -> None:
        with sdpa_kernel(library):
            if begin:
                F.scaled_dot_product_attention(q, keys[:, :, :begin], values[:, :, :begin], enable_gqa=True)
            late = keys[:, :, begin:], values[:, :, begin:]
            F.scaled_dot_product_attention(q, *late, is_causal=True, enable_gqa=True)

    return attend


def _flash_attn(q: Tensor, keys: Tensor, values: Tensor) -> Callable[[], object]:
    def attend() -> None:
        from flash_attn import flash_attn_func

        flash_attn_func(q[None], keys.transpose(1, 2), values.transpose(1, 2), causal=True)

    return attend


def _matrix_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product."""
    side = max(256, MATRIX_SIDE // bench.scale)
    a, b = (torch.randn(side, side, dtype=dtype, device=bench.device) for _ in range(2))
    return 2 * side**3 / _seconds(bench, lambda: a @ b)


def _seconds(bench: Bench, work: Callable[[], object], repeats: int = 7) -> float:
    """Median of several calls, the device's part included; the first one is left out."""
    times = []
    for _ in range(repeats + 1):
        if bench.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if bench.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
