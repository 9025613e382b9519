"""Pageable blocks: memory comes when blocks are wanted, within a limit, and goes when nobody needs any."""

import pytest
import torch

from offload import KVLayout
from offload.memory.pageable_pool import PageablePool

LAYOUT = KVLayout(num_layers=2, block_size=16, part_bytes=1024)


def test_memory_comes_with_the_blocks_and_goes_with_the_last():
    pool = PageablePool(LAYOUT)
    for count in (0, 3, 4, 2, 9):
        pool.reserve(count)
    assert pool.num_blocks == 9 and pool.num_bytes == 9 * LAYOUT.block_bytes
    for block in range(9):
        for layer in range(2):
            pool.block(layer, block).fill_(10 * block + layer)
    assert all(torch.all(pool.block(layer, block) == 10 * block + layer) for block in range(9) for layer in range(2))
    pool.trim()
    assert pool.num_bytes == 0
    pool.reserve(2)
    assert pool.block(1, 1).shape == (LAYOUT.part_bytes,) and pool.num_blocks == 2


def test_what_the_limit_or_the_system_does_not_allow_is_a_memory_error():
    pool = PageablePool(LAYOUT, max_bytes=4 * LAYOUT.block_bytes)
    pool.reserve(3)
    with pytest.raises(MemoryError, match=f"host_memory_limit .{4 * LAYOUT.block_bytes} bytes, .* are taken.: raise"):
        pool.reserve(5)
    assert pool.num_blocks == 3
    pool.reserve(4)
    huge = KVLayout(num_layers=1, block_size=16, part_bytes=2**47)
    with pytest.raises(MemoryError, match="no host memory for the KV of a preempted sequence"):
        PageablePool(huge).reserve(100)
