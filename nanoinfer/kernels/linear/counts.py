"""How many rows matrix products have: a few agreed numbers, to which they are padded."""

MAX_ROWS = 512
"""The library computes products of more rows than this, at row counts where it keeps our order of sums."""


def padded_rows(num_rows: int) -> int:
    """Return what `num_rows` rows are padded to: above `MAX_ROWS` one of a few counts, each checked at start."""
    if num_rows <= MAX_ROWS:
        return num_rows
    step = 256 if num_rows <= 4096 else 512 if num_rows <= 8192 else 1024
    return -(-num_rows // step) * step


def padded_counts(max_rows: int) -> list[int]:
    """Return all values of `padded_rows` for more than `MAX_ROWS` and up to `max_rows` rows."""
    return sorted({padded_rows(count) for count in range(MAX_ROWS + 1, max_rows + 1)})
