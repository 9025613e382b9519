"""Instructions that make two weights of two packed codes at a time, which triton does not choose by itself.

A 4-bit code becomes a number with one logical operation: the code is put into the lowest bits of the number 128
(bfloat16) or 1024 (float16), whose last bit counts 1, and 128 or 1024 plus the zero is subtracted, exactly. The trick
is from Kim et al., arXiv:2211.10017. An 8-bit code has one bit too many for bfloat16; that bit chooses what is
subtracted. The bits of e4m3 lie where bfloat16 has them, in one plane as they are and in the other 4 places away on
either side (see `packing`), those of e2m1 at the end of the exponent; a power of two corrects the exponent.

Most weights need less: see `Packing.folded`. The bits of an integer in the lowest bits of a bfloat16, and zeros above,
are this integer times 2**-133, also where they reach into the exponent's lowest bit. With the scale times 2**133 and
minus the zero times the scale, which is exact, for the zero is a power of two, one multiplication and addition gives
the weight, rounded once. Of other zeros that product would be rounded, so they are subtracted from the codes, as
integers times 2**-129. A plane whose codes lie 4 places lower is not shifted: the subtraction multiplies it with 16.
Weights that are quantised here have only scales whose product with the zero is exact.
"""

from __future__ import annotations

import torch

from nanoinfer.kernels.linear.packing import Packing


def _twice(bits: int) -> str:
    return f"0x{bits << 16 | bits:08X}"


def _float8_bits(plane: int) -> list[str]:
    """Return instructions that put the e4m3 codes of a plane into t, where bfloat16 has their bits."""
    if plane == 0:
        return [f"and.b32 t, $1, {_twice(0x87F0)};"]
    lines = ["shl.b32 t, $1, 4;", f"mov.b32 g, {_twice(0x80F0)};", "shr.u32 m, $1, 4;"]
    return [*lines, f"and.b32 m, m, {_twice(0x0700)};", "lop3.b32 t, t, g, m, 0xEA;"]


def _float4_bits(plane: int, is_bf16: bool) -> list[str]:
    """Return instructions that put the e2m1 codes of a plane into t, where a 16-bit number has their bits."""
    lowest = 6 if is_bf16 else 9  # of the three bits below the sign
    lines = []
    for target, shift in (("t", lowest - 4 * plane), ("m", 12 - 4 * plane)):
        lines.append(f"{'shl.b32' if shift > 0 else 'shr.u32'} {target}, $1, {abs(shift)};")
    lines += [f"and.b32 t, t, {_twice(7 << lowest)};", f"mov.b32 g, {_twice(0x8000)};"]
    return [*lines, "lop3.b32 t, t, m, g, 0xF8;"]


def _expansion(kind: str, bits: int, plane: int, is_bf16: bool, has_zeros: bool, is_widened: bool) -> str:
    """Return instructions that make $0 two weights of two words in $1 and two scales in $2; $3: two negative zeros.

    is_widened: whether float16 products become bfloat16.
    """
    dtype = "bf16x2" if is_bf16 else "f16x2"
    one, magic = (0x3F80, 0x4300) if is_bf16 else (0x3C00, 0x6400)
    lines = ["{", ".reg .b32 t, m, g, o, z;", f"mov.b32 o, {_twice(one)};", f"mov.b32 z, {_twice(0x8000)};"]
    if kind == "fp8":
        lines += _float8_bits(plane)
        if not is_bf16:  # whose exponents begin 3 places higher
            lines += [f"and.b32 m, t, {_twice(0x07F0)};", "shl.b32 m, m, 3;", f"mov.b32 g, {_twice(0x8000)};"]
            lines += ["lop3.b32 t, t, g, m, 0xEA;"]
        lines += [f"mov.b32 o, {_twice(0x7B80 if is_bf16 else 0x5C00)};", f"fma.rn.{dtype} t, t, o, z;"]
    elif kind == "fp4":
        lines += _float4_bits(plane, is_bf16)
        lines += [f"mov.b32 o, {_twice(0x7E80 if is_bf16 else 0x7400)};", f"fma.rn.{dtype} t, t, o, z;"]
    else:
        lines += [f"shr.u32 t, $1, {bits * plane};" if plane else "mov.b32 t, $1;"]
        if bits == 8 and is_bf16:
            # 128 is subtracted where the highest bit, which is left out, is set; elsewhere 256.
            lines += [f"mov.b32 m, {_twice(0x0080)};", f"mov.b32 g, {_twice(0xC380)};", "lop3.b32 g, t, m, g, 0x6A;"]
            lines += [f"mov.b32 m, {_twice(0x007F)};", f"mov.b32 z, {_twice(magic)};", "lop3.b32 t, t, m, z, 0xEA;"]
            lines += [f"mov.b32 z, {_twice(0x8000)};"]
        else:
            lines += [f"mov.b32 m, {_twice((1 << bits) - 1)};", f"mov.b32 g, {_twice(magic)};"]
            lines += ["lop3.b32 t, t, m, g, 0xEA;", f"mov.b32 g, {_twice(0x8000 | magic | 1 << bits - 1)};"]
        lines += [f"fma.rn.{dtype} t, t, o, {'$3' if has_zeros else 'g'};"]
    # A sum with -0 changes nothing: GPUs before Hopper multiply two bfloat16 at a time only so.
    if not is_widened:
        return "\n".join([*lines, f"fma.rn.{dtype} $0, t, $2, z;", "}"])
    lines += [f"fma.rn.{dtype} t, t, $2, z;", ".reg .b16 h, i;", ".reg .f32 a, b;", "mov.b32 {h, i}, t;"]
    return "\n".join([*lines, "cvt.f32.f16 a, h;", "cvt.f32.f16 b, i;", "cvt.rn.bf16x2.f32 $0, b, a;", "}"])


def _folded(kind: str, bits: int, plane: int, has_zeros: bool) -> str:
    """As `_expansion`, with scales that the power of two lies in; $3: minus the products of zero and scale.

    has_zeros: $3 has two zeros times -2**-129.
    """
    lines = ["{", ".reg .b32 t, m, g, z;"]
    if kind == "fp8":
        lines += [*_float8_bits(plane), f"mov.b32 z, {_twice(0x8000)};", "fma.rn.bf16x2 $0, t, $2, z;"]
    elif kind == "fp4":
        lines += [*_float4_bits(plane, True), f"mov.b32 z, {_twice(0x8000)};", "fma.rn.bf16x2 $0, t, $2, z;"]
    elif bits == 8:  # a byte of each word, and zero above it
        lines += [f"prmt.b32 t, $1, 0, {'0x4341' if plane else '0x4240'};", "fma.rn.bf16x2 $0, t, $2, $3;"]
    elif has_zeros:  # two planes share a shift
        is_high = plane % 2
        lines += ["shr.u32 t, $1, 8;" if plane > 1 else "mov.b32 t, $1;"]
        lines += [f"and.b32 t, t, {_twice(0x00F0 if is_high else 0x000F)};"]
        lines += [f"mov.b32 m, {_twice(0x3F80 if is_high else 0x4180)};", "fma.rn.bf16x2 t, t, m, $3;"]  # 1 or 16
        lines += [f"mov.b32 z, {_twice(0x8000)};", "fma.rn.bf16x2 $0, t, $2, z;"]
    else:  # into the bits 4 to 7, which the second plane has them in
        shift = 4 * plane - 4
        lines += ["mov.b32 t, $1;" if not shift else f"shr.u32 t, $1, {shift};" if shift > 0 else "shl.b32 t, $1, 4;"]
        lines += [f"and.b32 t, t, {_twice(0x00F0)};", "fma.rn.bf16x2 $0, t, $2, $3;"]
    return "\n".join([*lines, "}"])


_CASES = [
    (kind, bits, is_bf16, has_zeros, is_widened)
    for kind, bits in (("int", 4), ("int", 8), ("fp8", 8), ("fp4", 4))
    for is_bf16, is_widened in ((False, False), (True, False), (False, True))
    for has_zeros in (False, True)
]
_FOLDED_CASES = [("int", 4, False), ("int", 8, False), ("fp8", 8, False), ("fp4", 4, False), ("int", 4, True)]
EXPANSIONS = [[_expansion(k, b, p, *how) for p in range(16 // b)] for k, b, *how in _CASES]
"""By number and plane."""
EXPANSIONS += [[_folded(k, b, p, zeros) for p in range(16 // b)] for k, b, zeros in _FOLDED_CASES]


PRODUCT_OF_HALVES = "\n".join(
    ["{", ".reg .b16 a, b, z;", "mov.b32 {a, b}, $1;", "mov.b16 z, 0x8000;", "fma.rn.bf16 a, a, b, z;"]
    + ["mov.b32 $0, {a, a};", "}"]
)
"""Makes both halves of $0 the product of the two bfloat16 in $1."""
PAIR_OF_BYTES = "\n".join(["{", ".reg .b32 t;", "prmt.b32 t, $1, 0, $2;", "shr.u32 $0, t, 1;", "}"])
"""Makes the halves of $0 two bytes of $1 where a bfloat16 has its exponent. $2: which ones, as `prmt` takes it."""


def number_of(packing: Packing, dtype: torch.dtype, folds: bool, fold_products: bool = False) -> int:
    """Return the number in `EXPANSIONS` for weights of the model's dtype.

    folds: see `Packing.can_fold`; fold_products: see `Folding.zeros`.
    """
    if folds:
        return len(_CASES) + _FOLDED_CASES.index((packing.kind, packing.bits, packing.has_zeros and not fold_products))
    is_bf16 = packing.scale_dtype != torch.float16
    is_widened = not is_bf16 and dtype == torch.bfloat16
    return _CASES.index((packing.kind, packing.bits, is_bf16, packing.has_zeros, is_widened))
