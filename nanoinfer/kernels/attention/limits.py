"""Limits on when the tiles of a block are separate items. Can be imported without triton."""

SHORT_BLOCKS = 6
"""The tiles of a row may be separate items if the row reads at most this many blocks."""
MAX_TILES_APART = 128
"""Most separate tiles in a step. If there would be more, all rows are attended to block by block."""
