"""How products are cut and padded: by the shape of a weight, and to numbers of rows that everybody agrees on."""

MAX_ROWS = 512
"""Products of more rows are the library's, at counts where it keeps our order of sums."""
LONG_SIZE = 4096
"""From this size on, sums that are added to the residual are made of `NUM_PARTS`."""
NUM_PARTS = 2


def padded_rows(num_rows: int) -> int:
    """The number of rows that so many are padded to: above `MAX_ROWS` one of few, each of which is checked at start."""
    if num_rows <= MAX_ROWS:
        return num_rows
    step = 256 if num_rows <= 4096 else 512 if num_rows <= 8192 else 1024
    return -(-num_rows // step) * step


def padded_counts(max_rows: int) -> list[int]:
    """All that `padded_rows` gives for more than `MAX_ROWS`, up to `max_rows`, rows."""
    return sorted({padded_rows(count) for count in range(MAX_ROWS + 1, max_rows + 1)})


def num_parts(size: int) -> int:
    """Parts of equal size of a sum over `size` columns, added up in float32, ascending, before it is rounded.

    One core adds up a column of the matrix units in `size / 16` dependent steps: for a long sum of few rows that lasts
    longer than reading the weight. The cut depends on the weight alone, so every number of rows has the same bits.
    """
    return NUM_PARTS if size >= LONG_SIZE and size % (NUM_PARTS * 128) == 0 else 1
