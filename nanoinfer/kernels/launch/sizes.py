"""Sides of tiles, which are powers of two."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def largest_tile(block_size: int, at_most: int) -> int:
    """Return the largest power of two that divides block_size, up to at_most: a tile of keys never crosses a block."""
    return min(at_most, block_size & -block_size)
