"""A KV format of 8-bit codes with a 16-bit scale for each token and head. Released memory has scales that are NaN."""

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.kv.base import Field, KVFormat, KVKernels


@triton.jit
def store(
    kv, block, token, head, is_v, columns, values, mask,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    scale = (tl.max(tl.abs(values), 1)[:, None] / 127).to(tl.float16)
    codes = tl.floor(values / tl.maximum(scale.to(tl.float32), 1e-7) + 0.5)
    row = (tl.where(is_v, BLOCK_SIZE, 0) + token) * NUM_KV_HEADS + head
    part = kv + block.to(tl.int64) * STRIDE
    tl.store(part.to(tl.pointer_type(tl.int8)) + row * HEAD_DIM + columns, codes.to(tl.int8), mask=mask)
    scales = (part + 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float16))
    tl.store(scales + row + columns * 0, tl.broadcast_to(scale, values.shape), mask=mask & (columns == 0))


@triton.jit
def read(
    kv, kv_rows, own, block, token, start, head, positions, exists, like,
    STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)[None, :]
    row = (token + start + tl.arange(0, exists.shape[0])) * NUM_KV_HEADS + head
    part = kv + block.to(tl.int64) * STRIDE
    codes = part.to(tl.pointer_type(tl.int8)) + row[:, None] * HEAD_DIM + columns
    scales = (part + 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float16)) + row
    seen = exists[:, None] & (columns < HEAD_DIM)
    k = tl.load(codes, mask=seen, other=0).to(tl.float32)
    k *= tl.load(scales, mask=exists, other=0.0).to(tl.float32)[:, None]
    v = tl.load(codes + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, mask=seen, other=0).to(tl.float32)
    v *= tl.load(scales + BLOCK_SIZE * NUM_KV_HEADS, mask=exists, other=0.0).to(tl.float32)[:, None]
    return k.to(like.dtype).T, v.to(like.dtype)


class Int8Heads(KVFormat):
    name = "int8_heads"

    def fields(self, head_dim):
        return Field(head_dim, torch.int8), Field(head_dim, torch.int8), Field(1, torch.half), Field(1, torch.half)

    def encode(self, k, v):
        scales = [(x.float().abs().amax(-1, keepdim=True) / 127).half() for x in (k, v)]
        codes = [(x / s.float().clamp_min(1e-7) + 0.5).floor().to(torch.int8) for x, s in zip((k, v), scales)]
        return *codes, *scales

    def decode(self, fields, positions, own):
        return fields[0] * fields[2].float(), fields[1] * fields[3].float()

    def kernels(self):
        return KVKernels(store, read, stores_heads=True)
