"""When the tiles of a block lie apart. Known without triton."""

SHORT_BLOCKS = 6
"""Of a row that reads so many blocks at most, the tiles may be attended to apart."""
MAX_TILES_APART = 128
"""They are while a step has no more of them than these; else all rows are attended to block by block."""
