"""Instructions that make two weights of two packed codes whose products with scales are in float32.

The bits of a code at bit b of a float32 number, and zeros elsewhere, are the code times 2**(b - 149), also where they
reach into the exponent's lowest bit. With the scale times 2**(149 - b), one multiplication and addition makes a weight
of it, which is rounded to the model's dtype together with another. What is added is minus the minimum, or the zero
times the scale, which is exact: so all but a sum with a minimum is exact, and that is rounded as in the reference.

Bits of planes are shifted to their places together, as many as fit beside each other (`POSITIONS`). The lowest bit of
all bounds the scales, which must not become infinite: to less than 1/32 for codes of 4 and 8 bits, and more for others.
"""

from __future__ import annotations

import torch

from nanoinfer.kernels.linear.packing import IQ4_VALUES, Packing

POSITIONS = {
    2: (18, 20, 22, 18, 20, 22, 18, 20),
    3: (18, 21, 18, 21, 18, 21, 18, 21),
    4: (16, 20, 16, 20),
    5: (19, 19, 19, 19),
    6: (18, 18, 18, 18),
    8: (16, 16),
}
"""By the bits of a code: the lowest bit of the codes of each plane."""
IQ4_BYTES = bytes(value + 128 for value in IQ4_VALUES)
"""What takes the place of codes of the kind "iq4"; its zero is 128."""


def positions_of(packing: Packing) -> tuple[int, ...] | None:
    """Return the lowest bit of each plane's codes; None: there are no instructions for such weights."""
    if packing.scale_words is None:
        return None
    return (16,) * packing.planes if packing.kind == "iq4" else POSITIONS[packing.bits]


def largest_scale(packing: Packing) -> float:
    """Return what all magnitudes of scales, and of their factors, must be below."""
    return 2.0 ** (min(positions_of(packing)) - 21)


def _expansion(bits: int, plane: int, is_bf16: bool) -> str:
    """Return instructions that make $0 two weights.

    $1: two words, or with 3, 5 and 6 bits a column, and $2 another; then two scales, and two numbers to be added.
    """
    position, is_wide = POSITIONS[bits][plane], bits in (3, 5, 6)
    lines, first = ["{", ".reg .b32 a, b;", ".reg .f32 x, y;"], 3 if is_wide else 2
    for number, (target, product) in enumerate((("a", "x"), ("b", "y"))):
        source = f"${1 + number}" if is_wide else "$1"
        if bits == 8:
            lines += [f"prmt.b32 {target}, {source}, 0, 0x4{2 * number + plane}44;"]
        else:
            left = position - bits * plane - (0 if is_wide else 16 * number)
            shift = f"shl.b32 {target}, {source}, {left};" if left > 0 else f"shr.u32 {target}, {source}, {-left};"
            lines += [shift if left else f"mov.b32 {target}, {source};"]
            lines += [f"and.b32 {target}, {target}, 0x{(1 << bits) - 1 << position:08X};"]
        lines += [f"mov.b32 {product}, {target};"]
        lines += [f"fma.rn.f32 {product}, {product}, ${first + number}, ${first + 2 + number};"]
    return "\n".join([*lines, f"cvt.rn.{'bf16x2' if is_bf16 else 'f16x2'}.f32 $0, y, x;", "}"])


def _table_expansion(plane: int, is_bf16: bool) -> str:
    """As `_expansion`, of codes of the kind "iq4": a byte is found for each of the four codes of a word at once."""
    words = [int.from_bytes(IQ4_BYTES[begin : begin + 4], "little") for begin in range(0, 16, 4)]
    lines = ["{", ".reg .b32 a, b, c, d, e, m, t;", ".reg .f32 x, y;"]
    lines += [f"mov.b32 {name}, 0x{word:08X};" for name, word in zip("abcd", words, strict=True)]
    for number, product in enumerate("xy"):
        lines += [f"shr.u32 t, $1, {16 * number};" if number else "mov.b32 t, $1;"]
        # Three bits of a code say which byte of eight it is, the fourth which eight.
        lines += ["and.b32 m, t, 0x7777;", "prmt.b32 e, a, b, m;", "prmt.b32 m, c, d, m;"]
        lines += ["shr.u32 t, t, 1;", "and.b32 t, t, 0x4444;", "or.b32 t, t, 0x3210;", "prmt.b32 e, e, m, t;"]
        lines += [f"prmt.b32 e, e, 0, 0x4{plane}44;", f"mov.b32 {product}, e;"]
        lines += [f"fma.rn.f32 {product}, {product}, ${2 + number}, ${4 + number};"]
    return "\n".join([*lines, f"cvt.rn.{'bf16x2' if is_bf16 else 'f16x2'}.f32 $0, y, x;", "}"])


_CASES = [("int", bits, is_bf16) for bits in POSITIONS for is_bf16 in (True, False)]
WIDE_EXPANSIONS = [[_expansion(bits, p, is_bf16) for p in range(len(POSITIONS[bits]))] for _, bits, is_bf16 in _CASES]
"""By number and plane."""
_CASES += [("iq4", 4, True), ("iq4", 4, False)]
WIDE_EXPANSIONS += [[_table_expansion(p, is_bf16) for p in range(4)] for is_bf16 in (True, False)]


def wide_number_of(packing: Packing, dtype: torch.dtype) -> int:
    """Return the number in `WIDE_EXPANSIONS` for weights of the model's dtype; -1: there is none."""
    if dtype not in (torch.bfloat16, torch.float16):
        return -1
    return _CASES.index((packing.kind, packing.bits, dtype == torch.bfloat16))
