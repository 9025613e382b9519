"""Device functions that the decode and prefill kernels share: logits of a tile and one step of the online softmax.

Every operation whose rounding could depend on how the compiler fuses it is written as an explicit fma, so that the
masked and the unmasked copy of a loop, and both kernels' callers, round alike.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """a @ b with float32 accumulation."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def tile_logits(q, k_t, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """q [M, D] @ k_t [D, N]: logits up to the factor TO_LOG2, which the softmax step folds in."""
    logits = dot(q, k_t, PRECISION, WIDEN)
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1): exact limits at both ends, no NaN
        doubled = tl.exp2(logits * (2 * SCALE / SOFTCAP * 1.4426950408889634))
        logits = SOFTCAP * (1.0 - 2.0 / (doubled + 1.0))
    return logits


@triton.jit
def finite(peak):
    """The peak, or 0 where nothing was seen: -inf - -inf would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def fold(acc, m, l, tile_acc, tile_m, tile_l):
    """Fold one more tile of keys into the running state.

    State and tile: sums acc [..., D] and l [...] of exponentials relative to the peak m [...], base 2, float32. Both
    have the same form, so no bit depends on which kernel folds them or where they lay in between. A tile without a key
    (zeros, -inf) changes no bit either.
    """
    m_new = tl.maximum(m, tile_m)
    m_finite = finite(m_new)
    alpha = tl.exp2(m - m_finite)
    beta = tl.exp2(tile_m - m_finite)
    spread = tl.broadcast_to(tl.expand_dims(alpha, -1), acc.shape)
    acc = tl.fma(acc, spread, tile_acc * tl.expand_dims(beta, -1))
    return acc, m_new, tl.fma(l, alpha, tile_l * beta)


@triton.jit
def finished(acc, m, l):
    """Return the mean that the sums stand for and its natural log-sum-exp; 0 and -inf without a key."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    natural = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l_safe)) * 0.6931471805599453)
    return acc * tl.expand_dims(1.0 / l_safe, -1), natural


@triton.jit
def attend_tile(acc, m, l, logits, v, TO_LOG2: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Attend to one tile separately and fold it: logits [M, N] are -inf where masked; v [N, D]."""
    tile_m = tl.max(logits, 1) * TO_LOG2
    p = tl.exp2(tl.fma(logits, tl.full(logits.shape, TO_LOG2, tl.float32), -finite(tile_m)[:, None]))
    return fold(acc, m, l, dot(p.to(v.dtype), v, PRECISION, WIDEN), tile_m, tl.sum(p, 1))


@triton.jit
def softmax_step(acc, m, l, logits, v, TO_LOG2: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Fold one tile into (acc [M, D], m [M], l [M]); FlashAttention-2, algorithm 1, with exponents in base 2.

    logits [M, N] are -inf where masked. A row that has seen no key keeps m = -inf, l = 0, acc = 0. A tile that is
    masked for the whole row leaves its state as it was, bit for bit, so skipping such a tile changes nothing.
    """
    m_new = tl.maximum(m, tl.max(logits, 1) * TO_LOG2)
    m_finite = finite(m_new)
    p = tl.exp2(tl.fma(logits, tl.full(logits.shape, TO_LOG2, tl.float32), -m_finite[:, None]))
    alpha = tl.exp2(m - m_finite)
    l = tl.fma(l, alpha, tl.sum(p, 1))
    p = p.to(v.dtype)
    acc = acc * alpha[:, None]
    if WIDEN:
        acc = acc + dot(p, v, PRECISION, WIDEN)
    else:
        acc = tl.dot(p, v, acc, input_precision=PRECISION)
    return acc, m_new, l
