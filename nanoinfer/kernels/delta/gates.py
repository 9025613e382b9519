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
def exp(x):
    """Return exp(x) of float32 up to 80 to the last bit or the one before it; a NaN stays one.

    `tl.exp` is an approximation on GPUs, which errs by some bits, always to the same side: over thousands of tokens
    a state sums that up.
    """
    x = tl.where(x < -104.0, -104.0, x)  # which is 0
    times = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - times * 0.693359375) - times * -2.12194440e-4  # the first product is exact
    sum = 1.9875691500e-4 * rest + 1.3981999507e-3
    sum = sum * rest + 8.3334519073e-3
    sum = sum * rest + 4.1665795894e-2
    sum = sum * rest + 1.6666665459e-1
    sum = sum * rest + 5.0000001201e-1
    sum = 1.0 + (sum * (rest * rest) + rest)
    # 2^times is a number of its bits alone, or two such: below 2^-126 there is one for each half.
    times = tl.where(times == times, times, 0.0).to(tl.int32)
    half = times >> 1
    first, second = ((half + 127) << 23).to(tl.float32, bitcast=True), ((times - half + 127) << 23)
    return sum * first * second.to(tl.float32, bitcast=True)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), and x above 20. Of a small exp(x) the rounding of 1 + exp(x) cancels; a NaN stays one."""
    grown = exp(tl.where(x > 20.0, 20.0, x))
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
    """Return a @ b of bfloat16, each product exact: the interpreter has none, and takes float32.

    Where b is narrow, its columns are the rows of the product. Hopper's own matrix instructions take 64 rows; so these
    are those of all NVIDIA's GPUs, with operands in registers. With Hopper's, as Triton 3.6 and ptxas of CUDA 12.8
    compile the scan, some shapes read shared memory outside of the program's; why is not known.
    """
    if WIDENS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif b.shape[1] < 64:
        return tl.dot(b.T, a.T).T
    else:
        return tl.dot(a, b)


@triton.jit
def of_bits(bits):
    """Return bfloat16 of the upper half of int32 bits."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def part_of(x):
    """Return x in bfloat16, a third of a float32's bits, and what that leaves out. In whole numbers, because GPUs
    convert as slowly as they take roots; half of the last bit is rounded up."""
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    return of_bits(bits), x - bits.to(tl.float32, bitcast=True)


@triton.jit
def parts_of(x):
    """Return three parts of bfloat16, which have all bits of a float32 between them, and its NaN."""
    first, rest = part_of(x)
    second, rest = part_of(rest)
    return first, second, of_bits(rest.to(tl.int32, bitcast=True))


@triton.jit
def product_of_parts(a, a_second, a_third, b, b_second, b_third, WIDENS: tl.constexpr):
    """Return a @ b in float32 of two float32 in three parts each. What is left out is below a float32's last bit."""
    least = exact_dot(a_third, b, WIDENS) + exact_dot(a_second, b_second, WIDENS) + exact_dot(a, b_third, WIDENS)
    return least + exact_dot(a_second, b, WIDENS) + exact_dot(a, b_second, WIDENS) + exact_dot(a, b, WIDENS)


@triton.jit
def product(a, b, b_second, b_third, WIDENS: tl.constexpr):
    """Return a @ b in float32, b in three parts. Values as a model has them: of float16 two parts have all bits."""
    if a.dtype == tl.bfloat16:
        return exact_dot(a, b_third, WIDENS) + exact_dot(a, b_second, WIDENS) + exact_dot(a, b, WIDENS)
    else:
        first, second, third = parts_of(a.to(tl.float32))
        return product_of_parts(first, second, third, b, b_second, b_third, WIDENS)
