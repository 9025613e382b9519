"""Put partials computed by another library in their places in the workspace."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch.sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["items", "num_items"])
def store_partials_kernel(
    item_out,  # [capacity, NUM_Q_HEADS, HEAD_DIM], any float type
    item_lse,  # [capacity, NUM_Q_HEADS] float32
    items,  # [capacity, 4] int32
    num_items,  # [1] int32
    out,  # [capacity, NUM_Q_HEADS, HEAD_DIM] float32
    lse,  # [capacity, NUM_Q_HEADS] float32
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    item = tl.program_id(0)
    head = tl.program_id(1)
    if item < tl.load(num_items):
        source = item.to(tl.int64) * NUM_Q_HEADS + head
        target = tl.load(items + item * 4 + 3).to(tl.int64) * NUM_Q_HEADS + head
        columns = tl.arange(0, BLOCK_D)
        in_head = columns < HEAD_DIM
        value = tl.load(item_lse + source)
        # flash-attn says +inf where a row saw no key; the workspace says -inf
        tl.store(lse + target, tl.where(value == float("inf"), float("-inf"), value))
        row = tl.load(item_out + source * HEAD_DIM + columns, mask=in_head)
        tl.store(out + target * HEAD_DIM + columns, row.to(tl.float32), mask=in_head)


def store_partials(
    item_out: Tensor, item_lse: Tensor, items: Tensor, num_items: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Copy row i of item_out, item_lse to partial items[i, 3] for i < num_items; later rows are dropped.

    item_out: [capacity, num_q_heads, head_dim]; item_lse: [capacity, num_q_heads] float32; both contiguous.
    """
    capacity, num_q_heads, head_dim = item_out.shape
    if capacity == 0:
        return
    store_partials_kernel[(capacity, num_q_heads)](
        item_out, item_lse, items, num_items, out, lse,
        NUM_Q_HEADS=num_q_heads, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
