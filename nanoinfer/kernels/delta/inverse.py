"""Gated DeltaNet: the inverse of the triangular system of a chunk; see `chunks`."""

import triton
import triton.language as tl

from nanoinfer.kernels.delta.gates import parts_of
from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs


@triton.jit
def one_of(blocks, number, INDEX: tl.constexpr):
    return tl.sum(tl.where(number == INDEX, blocks, 0.0), axis=0)


@triton.jit
def product(a, b):
    """Return a @ b of blocks of 16, which are as small as products of matrix units."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def store_parts(at, block):
    first, second, third = parts_of(block)
    tl.store(at, first)
    tl.store(at + 64 * 64, second)
    tl.store(at + 2 * 64 * 64, third)


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def delta_inverse_kernel(
    chunks,  # [n] int32
    systems,  # [n, value heads, 3, 64, 64] float32, the memory of pairs: the first of three is A
    pairs,  # [n, value heads, 6, 64, 64] bfloat16: the first three become parts of (I + A)^-1 times beta
    factors,  # [n, value heads, 5, 64] float32: the last one is beta
    PDL: tl.constexpr,
):
    """Blocks of 16 on the diagonal are inverted row by row, all four at once; those below follow from them in turn.

    What lies below one block of the diagonal and left of another is -(the other's inverse) (what A has there, and what
    it has beside the blocks between them, times what these have become).
    """
    place = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunks + tl.program_id(1))
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if begin < 0:
        return
    order = tl.arange(0, 16)
    at = systems + place * 3 * 64 * 64
    number, row, column = tl.arange(0, 4)[:, None, None], order[None, :, None], order[None, None, :]
    below = tl.load(at + (number * 16 + row) * 64 + number * 16 + column)
    blocks = tl.where(row == column, 1.0, tl.zeros_like(below))
    for index in range(1, 16):
        line = tl.sum(tl.where(row == index, below, 0.0), axis=1)  # this row of each
        line = tl.sum(line[:, :, None] * blocks, axis=1)
        blocks -= tl.where((row == index) & (column < index), line[:, None, :], 0.0)
    i00, i11, i22, i33 = (
        one_of(blocks, number, 0),
        one_of(blocks, number, 1),
        one_of(blocks, number, 2),
        one_of(blocks, number, 3),
    )
    at += order[:, None] * 64 + order[None, :]
    step: tl.constexpr = 16 * 64
    a10, a20, a30 = tl.load(at + step), tl.load(at + 2 * step), tl.load(at + 3 * step)
    a21, a31, a32 = tl.load(at + 2 * step + 16), tl.load(at + 3 * step + 16), tl.load(at + 3 * step + 32)
    i10, i21, i32 = -product(i11, product(a10, i00)), -product(i22, product(a21, i11)), -product(i33, product(a32, i22))
    i20 = -product(i22, product(a20, i00) + product(a21, i10))
    i31 = -product(i33, product(a31, i11) + product(a32, i21))
    i30 = -product(i33, product(a30, i00) + product(a31, i10) + product(a32, i20))
    beta = factors + (place * 5 + 4) * 64 + order
    first, second, third = tl.load(beta)[None, :], tl.load(beta + 16)[None, :], tl.load(beta + 32)[None, :]
    fourth = tl.load(beta + 48)[None, :]
    at, nothing = pairs + place * 6 * 64 * 64 + order[:, None] * 64 + order[None, :], tl.zeros([16, 16], tl.float32)
    tl.debug_barrier()  # a late thread may not have read what another one writes
    store_parts(at, i00 * first)
    store_parts(at + 16, nothing)
    store_parts(at + 32, nothing)
    store_parts(at + 48, nothing)
    at += step
    store_parts(at, i10 * first)
    store_parts(at + 16, i11 * second)
    store_parts(at + 32, nothing)
    store_parts(at + 48, nothing)
    at += step
    store_parts(at, i20 * first)
    store_parts(at + 16, i21 * second)
    store_parts(at + 32, i22 * third)
    store_parts(at + 48, nothing)
    at += step
    store_parts(at, i30 * first)
    store_parts(at + 16, i31 * second)
    store_parts(at + 32, i32 * third)
    store_parts(at + 48, i33 * fourth)
