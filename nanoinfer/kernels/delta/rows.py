"""Gated DeltaNet of rows that decode, the recurrent form: each state is read once, and written behind each token."""

import triton
import triton.language as tl

from nanoinfer.kernels.delta.gates import beta, decay, exp, key_head_of, scale_of_key, scale_of_query
from nanoinfer.kernels.launch.pdl import let_next_in, wait_for_inputs


@triton.jit(do_not_specialize_on_alignment=["slots", "begins", "ends", "rows", "num_live"])
def delta_rows_kernel(
    mixed,  # [N, channels], rows mixed_stride apart: queries, keys, values
    decay_in,  # [N, VALUE_HEADS], rows decay_stride apart
    beta_in,  # [N, VALUE_HEADS], rows beta_stride apart
    rates,  # [VALUE_HEADS] float32
    decay_bias,  # [VALUE_HEADS]
    state,  # [slots, VALUE_HEADS, KEY_SIZE, VALUE_SIZE] float32, slots state_stride apart
    slots,  # [N] int32
    begins,
    ends,
    rows,  # [n] int32
    num_live,  # [1] int32
    out,  # [N, VALUE_HEADS, VALUE_SIZE]
    mixed_stride,
    decay_stride,
    beta_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.load(rows + tl.program_id(1))
    is_row = (row >= 0) & (row < tl.load(num_live))
    if tl.load(begins + row, mask=is_row, other=-2) != row:  # a run's first token has a program, which computes all
        wait_for_inputs(PDL)  # or the kernel behind would start before the one before is done
        let_next_in(PDL)
        return
    key, value = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = key < KEY_SIZE, value < VALUE_SIZE
    state += head * KEY_SIZE * VALUE_SIZE
    place = key[:, None] * VALUE_SIZE + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    end = tl.load(ends + row)
    # The kernel before this one makes the inputs. It leaves this state as it is, so its bytes may be on their way.
    now = tl.load(state + tl.load(slots + row).to(tl.int64) * state_stride + place, mask=inside, other=0.0)
    rate, bias = tl.load(rates + head), tl.load(decay_bias + head)
    wait_for_inputs(PDL)
    let_next_in(PDL)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, IS_TILED)
    # One loop whatever a run's length is: drafted or not, a token's sums are those of the same instructions.
    for number in range(end - row):
        index = (row + number).to(tl.int64)
        inputs = mixed + index * mixed_stride
        at_key = inputs + key_head * KEY_SIZE + key
        q = tl.load(at_key, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(at_key + KEY_HEADS * KEY_SIZE, mask=has_key, other=0.0).to(tl.float32)
        q, k = q * scale_of_query(q, KEY_SIZE), k * scale_of_key(k)
        at_value = inputs + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value
        v = tl.load(at_value, mask=has_value, other=0.0).to(tl.float32)
        now *= exp(decay(tl.load(decay_in + index * decay_stride + head), rate, bias))
        written = (v - tl.sum(now * k[:, None], axis=0)) * beta(tl.load(beta_in + index * beta_stride + head), mixed)
        now += k[:, None] * written[None, :]
        read = tl.sum(now * q[:, None], axis=0)
        tl.debug_barrier()  # a late thread may not have read what another one writes
        tl.store(state + tl.load(slots + index).to(tl.int64) * state_stride + place, now, mask=inside)
        at_out = out + (index * VALUE_HEADS + head) * VALUE_SIZE + value
        tl.store(at_out, read.to(out.dtype.element_ty), mask=has_value)
