"""Compiles every Triton kernel for a GPU that need not be there: `python compile_kernels.py 90` for compute capability 9.0.

The interpreter accepts what the compiler refuses, such as a variable that changes its shape in a loop. Prints the names
of the kernels that were compiled, one per line.
"""

import sys
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

ARCHITECTURE = int(sys.argv[1])
IS_HOPPER = ARCHITECTURE >= 90
SHARED_MEMORY = (227 if IS_HOPPER else 99) * 1024


class NoGpu:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_only(kernel, grid):
    """What `kernel[grid]` gives here: compiles for the arguments and launches nothing."""

    def launch(*args, **kwargs):
        assert kwargs.get("PDL", IS_HOPPER) == IS_HOPPER, f"{kernel.__name__} would be compiled in another form"
        compiled.add(kernel.__name__)
        return kernel.warmup(*args, grid=grid, **kwargs)

    return launch


compiled: set[str] = set()
driver.set_active(NoGpu())
jit.JITFunction.__getitem__ = compile_only

from sampling_cases import make_state

from nanoinfer.kernels import (
    decode_partial,
    layers,
    merge,
    prefill,
    sample,
    step_inputs,
    store_partials,
    tile_linear,
    update_rows,
)
from nanoinfer.kernels.shape import KernelShape, prefill_tiles
from nanoinfer.sampler import RowSampling

for name, module in list(sys.modules.items()):
    if name.startswith("nanoinfer.kernels.") and hasattr(module, "launch_options"):
        module.launch_options = lambda x: {"PDL": IS_HOPPER, "launch_pdl": IS_HOPPER}
tile_linear.takes_descriptors = lambda device, size, itemsize: IS_HOPPER and size * itemsize % 16 == 0


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def floats(*shape):
    return zeros(*shape, dtype=torch.float32)


def compile_layers() -> None:
    eight, weight, wide = zeros(8, 2560), zeros(2560), zeros(6144, 2560)
    for other in (None, eight.clone(), floats(2, 8, 2560)):
        layers.rms_norm(eight, weight, 1e-6, offset=other is None, other=other)
    for num_tokens in (1, 16):
        layers.linear(zeros(num_tokens, 2560), wide, zeros(6144))
    layers.linear(zeros(32, 2560), wide, activation="silu")
    layers.linear(zeros(16, 333), zeros(100, 333))
    layers.linear_parts(eight, wide, 2)
    for num_tokens in (64, 500):
        layers.linear(zeros(num_tokens, 1024), zeros(4096, 1024), zeros(4096))
        layers.linear(zeros(num_tokens, 1024), zeros(6144, 1024), activation="silu")
    layers.linear_parts(zeros(64, 8192), zeros(1024, 8192), 2)
    layers.linear(zeros(64, 333), zeros(100, 333))
    layers.act_and_mul(zeros(8, 512), "gelu_pytorch_tanh")


def compile_attention(head_dim: int, kv_dtype: torch.dtype, *, is_common: bool) -> None:
    """is_common: with the tiles that a GPU gets, with and without a window, and the merge. Other shapes have small tiles,
    for they take half the time: the same code."""
    q, kv = zeros(8, 32, head_dim), zeros(4, 2, 256, 8, head_dim, dtype=kv_dtype)
    shape = KernelShape(
        num_q_heads=32, num_kv_heads=8, head_dim=head_dim, block_size=256, scale=0.1, softcap=None,
        dtype=torch.bfloat16, tma=IS_HOPPER and head_dim == 128, interpreted=False,
    )  # fmt: skip
    qkv, table, slots = zeros(8, 48, head_dim), zeros(100, head_dim), torch.zeros(8, dtype=torch.int64)
    weights = zeros(head_dim), zeros(head_dim)
    layers.norm_rope_store(qkv, 32, 8, weights, 1e-6, False, table, slots, kv, slots, q)
    out, lse, state = floats(8, 32, head_dim), floats(8, 32), (floats(8, 32, head_dim), floats(8, 32), floats(8, 32))
    tables = (ints(2), ints(1), ints(1), ints(1), ints(1))
    tiles = prefill_tiles(shape, SHARED_MEMORY)
    if not is_common:
        tiles = replace(tiles, block_m=64, block_n=32, num_warps=4)
    for window in (None, 100) if is_common else (100,):
        decode_partial.decode_partial(
            q, kv, ints(8, 4), ints(1), ints(8), ints(8), ints(8), out, lse, window=window, shape=shape, num_programs=33
        )
        prefill.prefill(
            q, kv, q.clone(), state, tables, ints(1, 4),
            max_query_len=8, store_state=False, window=window, shape=shape, tiles=tiles,
        )  # fmt: skip
    for batch_size in (8, 64) if is_common else ():
        merge.merge(out, lse, ints(batch_size + 1), ints(batch_size), zeros(batch_size, 32, head_dim))


def compile_step() -> None:
    wide = torch.zeros(4, dtype=torch.int64)
    update_rows.update_rows(ints(2, 12), wide, ints(4), ints(4, 9), -1)
    step_inputs.step_inputs(ints(4), wide, ints(4), ints(4, 9), wide, ints(4), wide, wide, 256)
    store_partials.store_partials(
        zeros(4, 32, 128), floats(4, 32), ints(4, 4), ints(1), floats(4, 32, 128), floats(4, 32)
    )
    vocab_size = 151_936
    state, rows = make_state([RowSampling(temperature=1.0)] * 2, vocab_size, sample)
    state.sample(zeros(2, vocab_size), rows, torch.zeros(2, dtype=torch.int64))


compile_layers()
compile_attention(128, torch.bfloat16, is_common=True)
compile_attention(80, torch.bfloat16, is_common=False)
if ARCHITECTURE >= 89:
    compile_attention(128, torch.float8_e4m3fn, is_common=False)
compile_step()
print("\n".join(sorted(compiled)))
