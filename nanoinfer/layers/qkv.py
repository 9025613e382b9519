"""From the projections to queries, and to keys and values in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.layers.fused import fused_kernels
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rope import apply_rope


@dataclass(frozen=True)
class KVSlots:
    """Where a layer's new keys, values and queries go.

    kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer of the GPU pool; slots: [N] int32 or int64, block
    * block_size + offset, a negative one is skipped; q: [N, num_q_heads, head_dim], None: a new tensor.
    """

    kv: Tensor
    slots: Tensor
    q: Tensor | None = None

    def store(self, k: Tensor, v: Tensor) -> None:
        """Write k and v, [N, num_kv_heads, head_dim] each, to their slots."""
        kept = self.slots >= 0
        slots, block_size = self.slots[kept].long(), self.kv.shape[2]
        block, offset = slots // block_size, slots % block_size
        # As bytes: torch stores no float8 by index on the CPU.
        pool = self.kv.view(torch.uint8) if self.kv.dtype.itemsize == 1 else self.kv
        for place, values in enumerate((k[kept], v[kept])):
            pool[block, place, offset] = _stored(values, self.kv.dtype).view(pool.dtype)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to the KV cache's dtype.

    float8 has no infinity: without the clamp, values above its largest would become NaN.
    """
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def norm_rotate_store(
    qkv: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rope: Tensor,
    positions: Tensor,
    target: KVSlots,
) -> Tensor:
    """Apply norm and rotation to query and key heads; write keys and values to `target`.

    qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim]; norms: of a query and of a key head; rope: `rope_table`;
    positions: [N] int64. Returns the queries, [N, num_q_heads, head_dim], packed.
    """
    q, num_kv_heads = target.q, target.kv.shape[3]
    num_q_heads = qkv.shape[1] - 2 * num_kv_heads
    if q is None:
        q = torch.empty(len(qkv), num_q_heads, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    if qkv.is_cuda:
        weights = None if norms is None else (norms[0].weight, norms[1].weight)
        eps, offset = (0.0, False) if norms is None else (norms[0].eps, norms[0].offset)
        fused_kernels().norm_rope_store(qkv, weights, eps, offset, rope, positions, target.kv, target.slots, q)
        return q
    qk, v = qkv.split((num_q_heads + num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        # [num_qk_heads, head_dim]: each head with its own weight.
        weight = torch.cat((norms[0].weight.expand(num_q_heads, -1), norms[1].weight.expand(num_kv_heads, -1)))
        qk = norms[0].norm(qk, weight, norms[0].eps)
    rotated, k = apply_rope(qk, rope, positions).split((num_q_heads, num_kv_heads), dim=1)
    q.copy_(rotated)
    target.store(k, v)
    return q
