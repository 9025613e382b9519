"""What both forms of Gated DeltaNet make of a token's inputs, each in one function."""

import triton
import triton.language as tl

from nanoinfer.kernels.layer.rms_norm import rounded


@triton.jit
def scale_of_key(x):
    """Return what keys, float32, are multiplied by: one by their length, that of the last dimension."""
    return tl.rsqrt(tl.sum(x * x, axis=len(x.shape) - 1) + 1e-6)


@triton.jit
def scale_of_query(x, SIZE: tl.constexpr):
    """Return what queries, float32, are multiplied by: as keys, and by SIZE ** -0.5."""
    root: tl.constexpr = SIZE**-0.5
    return scale_of_key(x) * root


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), and x above 20. Of a small exp(x) the rounding of 1 + exp(x) cancels; a NaN stays one."""
    grown = tl.exp(tl.where(x > 20.0, 20.0, x))
    above = 1.0 + grown
    rest = tl.where(above == 1.0, 1.0, above - 1.0)
    value = tl.where(above == 1.0, grown, tl.log(above) * (grown / rest))
    return tl.where(x > 20.0, x, value)


@triton.jit
def decay(decay_in, rate, decay_bias):
    """Return the logarithm of what a state is multiplied by, float32: never above 0."""
    return rate * softplus(decay_in.to(tl.float32) + decay_bias.to(tl.float32))


@triton.jit
def beta(beta_in, like):
    """Return how much of a value is written: a sigmoid, rounded to the dtype of the pointer `like`; float32."""
    return rounded(tl.sigmoid(beta_in.to(tl.float32)), like)


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, IS_TILED: tl.constexpr):
    """Return the key head that a value head belongs to."""
    if IS_TILED:
        return head % KEY_HEADS
    else:
        return head // (VALUE_HEADS // KEY_HEADS)


@triton.jit
def exact_dot(a, b, WIDENS: tl.constexpr):
    """Return a @ b of values of 16 bits, or of float32 ones: the interpreter has no products of bfloat16."""
    if WIDENS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDENS: tl.constexpr):
    """Return a @ b in float32, of values as the model has them, or float32 ones.

    Products of values of 16 bits are exact. A bfloat16 takes a third of a float32's bits, so three products of bfloat16
    have all bits of b.
    """
    if b.dtype.primitive_bitwidth == 16:
        return exact_dot(a, b, WIDENS)
    elif a.dtype == tl.bfloat16:
        first = b.to(tl.bfloat16)
        rest = b - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        return exact_dot(a, third, WIDENS) + exact_dot(a, second, WIDENS) + exact_dot(a, first, WIDENS)
    else:
        return tl.dot(a.to(tl.float32), b, input_precision=PRECISION)
