"""Gated DeltaNet: prompts in the chunk form, rows that decode in the recurrent one."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nanoinfer.devices.registry import target_of
from nanoinfer.kernels.delta.chunks import delta_chunks_kernel
from nanoinfer.kernels.delta.heads import PIECE, DeltaHeads
from nanoinfer.kernels.delta.inverse import delta_inverse_kernel
from nanoinfer.kernels.delta.rows import delta_rows_kernel
from nanoinfer.kernels.delta.scan import delta_scan_kernel
from nanoinfer.kernels.launch.pdl import launch_options
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.layer.state_runs import CHUNK, StateRuns

# Of each kernel: values of a state that a program takes, warps, and loads that a loop has on their way. They follow
# from the shape alone: another choice may have other bits.
ROWS = 32, 4
"""128 bytes of each key."""
CHUNK_WARPS, INVERSE_WARPS = 4, 2
SCANS = {torch.bfloat16: (16, 4, 2)}
WIDE_SCAN = 16, 8, 2
"""Of other dtypes, whose products take more registers."""
MEMORY_AHEAD = {2: 96 * 1024, 4: 128 * 1024}
"""By the bytes of a value: what a program must be able to take for the next chunk to load while one is computed."""


def gated_delta(
    mixed: Tensor,
    decay_in: Tensor,
    beta_in: Tensor,
    rates: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    runs: StateRuns,
    num_live: Tensor,
    heads: DeltaHeads,
) -> Tensor:
    """Compute what each token reads from the state of its value head, and update the states.

    A token multiplies the state by its decay, writes beta (its value - what the state has under its key) under the key,
    and reads what the state has then under its query. Keys and queries are normed; queries are multiplied by
    key_size ** -0.5.

    Args:
        mixed: [N, channels], q and k of all key heads, then v, rows at any stride.
        decay_in, beta_in: [N, value heads], rows at any stride; the decay is
            exp(rates * softplus(decay_in + decay_bias)), beta is sigmoid(beta_in).
        rates: [value heads] float32, never above 0; decay_bias: [value heads].
        state: [slots, value heads, key_size, value_size] float32, slots at any stride; changed in place.
        runs: runs of prompts, which begin at multiples of `CHUNK`, take the chunk form, rows the recurrent one, token
            by token.
        num_live: [1] int32: rows from this number on are left as they are.

    Returns:
        [N, value heads, value_size] in the dtype of `mixed`; of padding anything.
    """
    out = torch.empty(
        len(mixed), heads.num_value_heads, heads.value_size, dtype=mixed.dtype, device=mixed.device
    )  # fmt: skip
    assert mixed.stride(1) == decay_in.stride(1) == beta_in.stride(1) == 1, "values of a row must be packed"
    assert state[0].is_contiguous() and state.dtype == torch.float32, "states are packed float32"
    gates = mixed, decay_in, beta_in, rates, decay_bias
    if len(runs.chunks):
        _prompts(gates, state, runs, out, heads)
    if len(runs.rows):
        tile, num_warps = min(ROWS[0], next_power_of_2(heads.value_size)), ROWS[1]
        delta_rows_kernel[(heads.num_value_heads * triton.cdiv(heads.value_size, tile), len(runs.rows))](
            *gates, state, *runs[:3], runs.rows, num_live, out, *(one.stride(0) for one in gates[:3]),
            state.stride(0), VALUE_SIZE=heads.value_size, BLOCK_V=tile, num_warps=num_warps, **_sizes(heads),
            **launch_options(mixed),
        )  # fmt: skip
    return out


def _prompts(gates: tuple[Tensor, ...], state: Tensor, runs: StateRuns, out: Tensor, heads: DeltaHeads) -> None:
    """Compute the chunks, so many at a time that their workspace has a fixed size; the states pass from one to the next
    in float32, so no bit depends on that."""
    mixed = gates[0]
    most, count = min(PIECE, len(runs.chunks)), heads.num_value_heads
    pairs = torch.empty(most, count, 6, CHUNK, CHUNK, dtype=torch.bfloat16, device=mixed.device)
    systems = pairs.view(torch.float32)
    factors = torch.empty(most, count, 5, CHUNK, dtype=torch.float32, device=mixed.device)
    tile, num_warps, num_stages = SCANS.get(mixed.dtype, WIDE_SCAN)
    tile = min(tile, max(16, next_power_of_2(heads.value_size)))
    strides, target = [one.stride(0) for one in gates[:3]], target_of(mixed.device)
    if target.program_memory < MEMORY_AHEAD[mixed.element_size()]:
        num_stages = 1  # of the same bits: a chunk is loaded when it is needed
    how = dict(CHUNK=CHUNK, WIDENS=not target.is_compiled)
    shared = _sizes(heads) | how | launch_options(mixed)
    shared["BLOCK_K"] = max(16, shared["BLOCK_K"])
    for some in runs.chunks.split(PIECE):
        delta_chunks_kernel[(count, len(some))](
            *gates, runs.ends, some, systems, pairs, factors, *strides, num_warps=CHUNK_WARPS, **shared
        )  # fmt: skip
        delta_inverse_kernel[(count, len(some))](
            some, systems, pairs, factors, num_warps=INVERSE_WARPS, **launch_options(mixed)
        )  # fmt: skip
        delta_scan_kernel[(count * triton.cdiv(heads.value_size, tile), len(some))](
            mixed, state, *runs[:3], some, pairs, factors, out, len(some), mixed.stride(0), state.stride(0),
            VALUE_SIZE=heads.value_size, BLOCK_V=tile, num_warps=num_warps, num_stages=num_stages, **shared,
        )  # fmt: skip


def _sizes(heads: DeltaHeads) -> dict[str, int]:
    return dict(
        KEY_HEADS=heads.num_key_heads, VALUE_HEADS=heads.num_value_heads, KEY_SIZE=heads.key_size,
        IS_TILED=heads.is_tiled, BLOCK_K=next_power_of_2(heads.key_size),
    )  # fmt: skip
