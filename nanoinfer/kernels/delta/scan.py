"""Gated DeltaNet from chunk to chunk of a prompt: one program carries a tile of a head's state through a run."""

import triton
import triton.language as tl

from nanoinfer.kernels.delta.gates import exact_dot, key_head_of, parts_of, product, product_of_parts
from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["slots", "begins", "ends", "chunks"])
def delta_scan_kernel(
    mixed,  # [N, channels], rows mixed_stride apart: queries, keys, values
    state,  # [slots, VALUE_HEADS, KEY_SIZE, VALUE_SIZE] float32, slots state_stride apart
    slots,  # [N] int32
    begins,
    ends,
    chunks,  # [n] int32
    pairs,  # as `delta_chunks_kernel` and `delta_inverse_kernel` leave them
    factors,
    out,  # [N, VALUE_HEADS, VALUE_SIZE]
    num_chunks,  # n
    mixed_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDENS: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first = tl.program_id(1)
    begin = tl.load(chunks + first)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if begin < 0:
        return
    # A run's first chunk has a program, and so has the first one of all: its run may have begun before.
    if (first > 0) & (begin > tl.load(begins + begin)):
        return
    end = tl.load(ends + begin)
    key, value, order = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, CHUNK)
    has_key, has_value = key < KEY_SIZE, value < VALUE_SIZE
    own_slot = tl.load(slots + begin)
    state += head * KEY_SIZE * VALUE_SIZE
    place = state + own_slot.to(tl.int64) * state_stride + key[:, None] * VALUE_SIZE + value[None, :]
    now = tl.load(place, mask=has_key[:, None] & has_value[None, :], other=0.0)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    # Places within a chunk, and pointers to its begin: that many pointers would fill the registers.
    mixed += key_head * KEY_SIZE
    to_values = (2 * KEY_HEADS - key_head) * KEY_SIZE + head * VALUE_SIZE
    at_key, at_value = order[:, None] * mixed_stride + key[None, :], order[:, None] * mixed_stride + value[None, :]
    at_out = order[:, None] * VALUE_HEADS * VALUE_SIZE + value[None, :]
    at_pair = order[:, None] * CHUNK + order[None, :]
    for number in range(min((end - begin + CHUNK - 1) // CHUNK, num_chunks - first)):
        token = begin + number * CHUNK
        is_live = (token + order < end)[:, None]
        slot = tl.load(slots + min(token + CHUNK, end) - 1)
        here = mixed + token.to(tl.int64) * mixed_stride
        inside, has_out = is_live & has_key[None, :], is_live & has_value[None, :]
        q = tl.load(here + at_key, mask=inside, other=0.0)
        k = tl.load(here + KEY_HEADS * KEY_SIZE + at_key, mask=inside, other=0.0)
        v = tl.load(here + to_values + at_value, mask=has_out, other=0.0).to(tl.float32)
        index = ((first + number) * VALUE_HEADS + head).to(tl.int64)
        at_factor = factors + index * 5 * CHUNK + order
        pair, size = pairs + index * 6 * CHUNK * CHUNK + at_pair, CHUNK * CHUNK
        one, two, three = parts_of(now)
        found = product(k, one, two, three, WIDENS) * tl.load(at_factor)[:, None]
        if mixed.dtype.element_ty == tl.bfloat16:
            read = exact_dot(q, two, WIDENS) + exact_dot(q, one, WIDENS)
        else:
            read = product(q, one, two, three, WIDENS)
        read *= tl.load(at_factor + CHUNK)[:, None]
        one, two, three = parts_of(v - found)
        a, b, c = tl.load(pair), tl.load(pair + size), tl.load(pair + 2 * size)
        written = product_of_parts(a, b, c, one, two, three, WIDENS)
        one, two, three = parts_of(written)
        a, b = tl.load(pair + 3 * size), tl.load(pair + 4 * size)
        if mixed.dtype.element_ty == tl.bfloat16:  # two parts of what is rounded to one
            read += exact_dot(b, one, WIDENS) + exact_dot(a, two, WIDENS) + exact_dot(a, one, WIDENS)
        else:
            read += product_of_parts(a, b, tl.load(pair + 5 * size), one, two, three, WIDENS)
        tl.store(
            out + (token.to(tl.int64) * VALUE_HEADS + head) * VALUE_SIZE + at_out,
            read.to(out.dtype.element_ty),
            mask=has_out,
        )
        # The sum is rounded as others are; matrix units, adding to it, would cut it off.
        one, two, three = parts_of(written * tl.load(at_factor + 2 * CHUNK)[:, None])
        now = now * tl.load(factors + (index * 5 + 4) * CHUNK - 1) + product(k.T, one, two, three, WIDENS)
        if slot != own_slot:  # what is behind this chunk is kept, too
            target = state + slot.to(tl.int64) * state_stride + key[:, None] * VALUE_SIZE + value[None, :]
            tl.store(target, now, mask=has_key[:, None] & has_value[None, :])
    tl.debug_barrier()  # a late thread may not have read what another one writes
    tl.store(place, now, mask=has_key[:, None] & has_value[None, :])
