"""From the projections to queries, and to keys and values in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from nanoinfer.layers.norm import RMSNorm


@dataclass(frozen=True)
class KVSlots:
    """Where a layer's new keys, values and queries go.

    kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer of the GPU pool; slots: [N] int32 or int64, block
    * block_size + offset, a negative one is skipped; q: [N, num_q_heads, head_dim], None: a new tensor.
    """

    kv: Tensor
    slots: Tensor
    q: Tensor | None = None


def norm_rotate_store(
    operations: ModuleType,
    qkv: Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rope: Tensor,
    positions: Tensor,
    target: KVSlots,
) -> Tensor:
    """Apply norm and rotation to query and key heads; write keys and values to `target`.

    operations: of the device; qkv: [N, num_q_heads + 2 * num_kv_heads, head_dim]; norms: of a query and of a key head;
    rope: `rope_table`; positions: [N] int64. Returns the queries, [N, num_q_heads, head_dim], packed.
    """
    q = target.q
    if q is None:
        num_tokens, num_heads, head_dim = qkv.shape
        q = qkv.new_empty(num_tokens, num_heads - 2 * target.kv.shape[3], head_dim)
    weights = None if norms is None else (norms[0].weight, norms[1].weight)
    eps, offset = (0.0, False) if norms is None else (norms[0].eps, norms[0].offset)
    operations.norm_rope_store(qkv, weights, eps, offset, rope, positions, target.kv, target.slots, q)
    return q
