"""A KV format of one vector for each token and head: it is the value, and turned at its position, the key."""

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.kv.base import Field, KVFormat, KVKernels
from nanoinfer.kernels.reference import apply_rope


@triton.jit
def store(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    vectors = (kv + block.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.bfloat16)) + columns
    tl.store(vectors + (token * NUM_KV_HEADS + head) * HEAD_DIM, values.to(tl.bfloat16), mask=mask & is_v)


@triton.jit
def read(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, BLOCK_D)[None, :]
    row = (token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head
    vectors = (kv + block.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.bfloat16)) + row[:, None] * HEAD_DIM
    seen = exists[:, None] & (columns < HEAD_DIM)
    v = tl.load(vectors + columns, mask=seen, other=0.0).to(tl.float32)
    other = tl.load(vectors + (columns + HALF) % HEAD_DIM, mask=seen, other=0.0).to(tl.float32)
    table = own[0] + positions[:, None] * HEAD_DIM + columns % HALF
    cos = tl.load(table, mask=seen, other=0.0).to(tl.float32)
    sin = tl.load(table + HALF, mask=seen, other=0.0).to(tl.float32)
    k = tl.fma(tl.where(columns < HALF, -other, other), sin, v * cos)
    return k.to(like.dtype).T, v.to(like.dtype)


class OneVector(KVFormat):
    name, loads = "one_vector", 4  # a head, its other half first, cosines and sines

    def fields(self, head_dim):
        return (Field(head_dim, torch.bfloat16),)

    def encode(self, k, v):
        return (v.bfloat16(),)

    def decode(self, fields, positions, own):
        v = fields[0].float()
        positions = positions.flatten().clamp(max=len(own[0]) - 1)  # a block ends behind the last token
        return apply_rope(v.flatten(0, 1), own[0].float(), positions).view_as(v), v

    def own(self, rope, k_norm):
        return (rope,)

    def kernels(self):
        return KVKernels(store, read, stores_heads=True)
