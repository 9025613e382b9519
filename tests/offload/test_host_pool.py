"""The host pool: of its segments, the last one may hold fewer blocks."""

import pytest

from offload import HostBlocks, HostPool, KVLayout
from offload.memory.pinned import PAGE_BYTES, HostArena, Pinner

LAYOUT = KVLayout(num_places=2, part_bytes=2048)
PER_SEGMENT = max(4, PAGE_BYTES // LAYOUT.block_bytes)


class AllIsPinned(Pinner):
    def register(self, address: int, num_bytes: int) -> str | None:
        return None

    def unregister(self, address: int) -> None:
        pass


@pytest.fixture(params=[1, PER_SEGMENT - 1, PER_SEGMENT])
def pool(request):
    """Of two whole segments, and of one with so many blocks."""
    last, size = request.param, LAYOUT.block_bytes
    with HostArena(3, PER_SEGMENT * size, last_segment_bytes=last * size, pinner=AllIsPinned()) as arena:
        yield HostPool(LAYOUT, 2 * PER_SEGMENT + last, PER_SEGMENT, arena)


def test_no_block_is_handed_out_that_the_last_segment_has_not(pool):
    assert pool.wait_for(pool.num_blocks) == (pool.num_blocks, None)
    blocks = HostBlocks(pool, pool.num_blocks)
    blocks.wait_for(3 * PER_SEGMENT)
    assert blocks.num_blocks == pool.num_blocks
    for block in blocks.allocate(blocks.num_free):
        for layer in range(LAYOUT.num_places):
            pool.block(layer, block).fill_(block)
    for block in range(pool.num_blocks):
        assert all((pool.block(layer, block) == block).all() for layer in range(LAYOUT.num_places)), "they overlap"
