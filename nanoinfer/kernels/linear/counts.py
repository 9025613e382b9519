"""How matrix products are cut (by the shape of the weight) and padded (to a few agreed numbers of rows)."""

MAX_ROWS = 512
"""The library computes products of more rows than this, at row counts where it keeps our order of sums."""
LONG_SIZE = 2048
"""Sums over this many columns or more that are added to the residual are computed in `NUM_PARTS` parts."""
NUM_PARTS = 2


def padded_rows(num_rows: int) -> int:
    """Return what `num_rows` rows are padded to: above `MAX_ROWS` one of a few counts, each checked at start."""
    if num_rows <= MAX_ROWS:
        return num_rows
    step = 256 if num_rows <= 4096 else 512 if num_rows <= 8192 else 1024
    return -(-num_rows // step) * step


def padded_counts(max_rows: int) -> list[int]:
    """Return all values of `padded_rows` for more than `MAX_ROWS` and up to `max_rows` rows."""
    return sorted({padded_rows(count) for count in range(MAX_ROWS + 1, max_rows + 1)})


def num_parts(size: int) -> int:
    """Return into how many equal parts a sum over `size` columns is cut.

    The parts are added in float32, in ascending order, before the sum is rounded. The matrix units of one core take
    `size / 16` dependent steps for a sum: for a long sum and few rows, that lasts longer than reading the weight. The
    cut depends on the weight alone, so the bits are the same for any number of rows. Four parts of 9,728 columns make a
    step of one row 1% shorter in int4 and 1% longer in bfloat16 on an H200, and products of 512 rows 6% to 9% longer.
    """
    return NUM_PARTS if size >= LONG_SIZE and size % (NUM_PARTS * 128) == 0 else 1
