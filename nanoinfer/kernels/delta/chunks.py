"""Gated DeltaNet within chunks of a prompt: what its chunks need of each other's tokens, all of them at once.

Token i of a chunk writes beta_i (v_i - what it finds). It finds what the state before the chunk has left, and what the
tokens before it in the chunk have written: a triangular system, (I + A) written = beta (v - left of the state). Its
inverse depends on keys and gates alone: `inverse` makes it, and `scan` multiplies with it.
"""

import triton
import triton.language as tl

from nanoinfer.kernels.delta.gates import (
    beta,
    decay,
    exact_dot,
    exp,
    key_head_of,
    parts_of,
    product_of_parts,
    scale_of_key,
    scale_of_query,
)
from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs


@triton.jit
def decays(step):
    """Return the decays of a chunk's tokens from its begin, the logarithm: float32, in a large part and a small one.

    The large parts are multiples of 2^-10 below 2^14, so their sums are exact, and the difference of two sums has the
    bits of a short one. Below -200 nothing is left of a state, so no step is longer.
    """
    step = tl.where(step < -200.0, -200.0, step)
    large = tl.floor(step * 1024.0) * 0.0009765625
    return tl.cumsum(large, axis=0), tl.cumsum(step - large, axis=0)


@triton.jit(do_not_specialize_on_alignment=["ends", "chunks"])
def delta_chunks_kernel(
    mixed,  # [N, channels], rows mixed_stride apart: queries, keys, values
    decay_in,  # [N, VALUE_HEADS], rows decay_stride apart
    beta_in,  # [N, VALUE_HEADS], rows beta_stride apart
    rates,  # [VALUE_HEADS] float32
    decay_bias,  # [VALUE_HEADS]
    ends,  # [N] int32
    chunks,  # [n] int32
    systems,  # [n, VALUE_HEADS, 3, CHUNK, CHUNK] float32, the memory of pairs: A is the first of three
    pairs,  # [n, VALUE_HEADS, 6, CHUNK, CHUNK] bfloat16: the last three are parts of queries by keys times decays
    factors,  # [n, VALUE_HEADS, 5, CHUNK] float32, of keys that find, queries, keys that are written; decays; beta
    mixed_stride,
    decay_stride,
    beta_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDENS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, place = tl.program_id(0), tl.program_id(1) * VALUE_HEADS + tl.program_id(0)
    begin = tl.load(chunks + tl.program_id(1))
    wait_for_inputs(PDL)
    let_next_in(PDL)
    if begin < 0:
        return
    # Behind the last token zeros are computed, which change nothing of the others.
    order, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token, is_live = (begin + order).to(tl.int64), begin + order < tl.load(ends + begin)
    of_decay = tl.load(decay_in + token * decay_stride + head, mask=is_live, other=0.0)
    step = decay(of_decay, tl.load(rates + head), tl.load(decay_bias + head))
    large, small = decays(tl.where(is_live, step, 0.0))
    much = tl.load(beta_in + token * beta_stride + head, mask=is_live, other=0.0)
    much = tl.where(is_live, beta(much, mixed), 0.0)
    since, last = exp(large + small), order == CHUNK - 1
    until_end = (tl.sum(tl.where(last, large, 0.0)) - large) + (tl.sum(tl.where(last, small, 0.0)) - small)

    inside = is_live[:, None] & (key < KEY_SIZE)[None, :]
    at_key = mixed + key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED) * KEY_SIZE
    at_key += token[:, None] * mixed_stride + key[None, :]
    q = tl.load(at_key, mask=inside, other=0.0)
    k = tl.load(at_key + KEY_HEADS * KEY_SIZE, mask=inside, other=0.0)
    of_query, of_key = scale_of_query(q.to(tl.float32), KEY_SIZE), scale_of_key(k.to(tl.float32))
    at = factors + place * 5 * CHUNK + order
    tl.store(at, since * of_key)
    tl.store(at + CHUNK, since * of_query)
    tl.store(at + 2 * CHUNK, exp(until_end) * of_key)
    tl.store(at + 3 * CHUNK, since)
    tl.store(at + 4 * CHUNK, much)
    is_before = order[:, None] > order[None, :]
    between = (large[:, None] - large[None, :]) + (small[:, None] - small[None, :])
    between = exp(tl.where(is_before, between, 0.0)) * of_key[None, :]
    if mixed.dtype.element_ty == tl.bfloat16:
        by_keys, by_queries = exact_dot(k, k.T, WIDENS), exact_dot(q, k.T, WIDENS)
    else:
        k1, k2, k3 = parts_of(k.to(tl.float32))
        q1, q2, q3 = parts_of(q.to(tl.float32))
        by_keys = product_of_parts(k1, k2, k3, k1.T, k2.T, k3.T, WIDENS)
        by_queries = product_of_parts(q1, q2, q3, k1.T, k2.T, k3.T, WIDENS)
    by_keys, by_queries = by_keys * between, by_queries * between
    place, at = place.to(tl.int64), order[:, None] * CHUNK + order[None, :]
    tl.store(systems + place * 3 * CHUNK * CHUNK + at, tl.where(is_before, by_keys * (of_key * much)[:, None], 0.0))
    by_queries = tl.where(order[:, None] >= order[None, :], by_queries * of_query[:, None], 0.0)
    first, second, third = parts_of(by_queries)
    pairs += (place * 6 + 3) * CHUNK * CHUNK
    tl.store(pairs + at, first)
    tl.store(pairs + CHUNK * CHUNK + at, second)
    if mixed.dtype.element_ty != tl.bfloat16:
        tl.store(pairs + 2 * CHUNK * CHUNK + at, third)
