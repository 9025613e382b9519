"""Where weights are cut in two: sums whose terms two devices may hold half of are sums of two parts, on one device too.

Output and down projections, also of a shared expert, are always such sums. Part 0 has the columns before the *cut*, in
ascending order, part 1 the others. Each is a float32 sum of its own; a bias belongs to part 0. They are added in order,
in float32, before anything is rounded. The cut follows from the whole weight alone, so the bits are the same for any
number of rows, and for a device that holds the columns of one part.

A block of a format that lies across a cut, as blocks of 256 columns may where heads have 64 or 80, belongs to both
parts: each takes its own columns of it, and zeros for the others.
"""

from __future__ import annotations

from math import lcm

LEAST = 16
"""Cuts are multiples of this where there are as many columns: matrix units take so many terms of a sum at a time."""
WHOLE = 256
"""From twice as many columns on a cut is a multiple of this, which no format's block lies across."""


def columns_cut(size: int, block: int = LEAST) -> int:
    """Return the columns of part 0 of a sum whose columns may be divided anywhere: half of them, rounded up.

    block: neighbouring columns of the weight's format that belong together. Neither part is empty, if there are two
    columns.
    """
    half = -(-size // 2)
    for unit in (WHOLE if size >= 2 * WHOLE else lcm(block, LEAST), LEAST):
        if (cut := -(-half // unit) * unit) < size:
            return cut
    return half


def heads_cut(num_q_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the query and KV heads of part 0 of an output projection: half of the KV heads, and of an odd number one
    more, with their query heads. A single KV head belongs to both parts, which have half of its query heads each."""
    if num_kv_heads == 1:
        return -(-num_q_heads // 2), 1
    num_first = -(-num_kv_heads // 2)
    return num_first * (num_q_heads // num_kv_heads), num_first


def divided(size: int, cut: int) -> tuple[int, ...]:
    """Return the sizes of what lies before a cut and behind it; nothing is left out that is empty."""
    return (cut, size - cut) if 0 < cut < size else (size,)
