"""Write new tokens' keys and values into their slots of the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.shape import next_power_of_2


@triton.jit(
    do_not_specialize=["k_stride", "v_stride"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def store_kv_kernel(
    k,  # [num_tokens, ROW] rows of num_kv_heads * head_dim values, k_stride apart
    v,
    kv,  # [num_blocks, 2, BLOCK_SIZE, ROW]
    slot_mapping,  # [num_tokens] int32 or int64
    k_stride,
    v_stride,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        # head_dim is a multiple of 16, and so is every stride of whole heads
        k_row = token * tl.multiple_of(k_stride, 16)
        v_row = token * tl.multiple_of(v_stride, 16)
        columns = tl.arange(0, TILE)
        inside = columns < ROW
        target = kv + (slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE) * ROW + columns
        tl.store(target, tl.load(k + k_row + columns, mask=inside), mask=inside)
        tl.store(target + BLOCK_SIZE * ROW, tl.load(v + v_row + columns, mask=inside), mask=inside)


def store_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """k, v: [num_tokens, num_kv_heads, head_dim], packed rows at any stride; kv: [num_blocks, 2, block_size, ...].

    slot_mapping: [num_tokens] int32 or int64, block * block_size + offset; tokens with a negative slot are skipped.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    row = num_kv_heads * head_dim
    store_kv_kernel[(num_tokens,)](
        k, v, kv, slot_mapping, k.stride(0), v.stride(0),
        BLOCK_SIZE=kv.shape[2], ROW=row, TILE=next_power_of_2(row), num_warps=4,
    )  # fmt: skip
