"""Pageable blocks: memory comes when blocks are wanted, within a limit, and goes when nobody holds any."""

import pytest
import torch

from offload import KVLayout
from offload.memory.pageable_pool import PageablePool

LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.float32)


def test_memory_comes_with_the_blocks_and_goes_with_the_last():
    pool = PageablePool(LAYOUT)
    assert pool.num_bytes == 0
    held = []
    for count in (3, 1, 5):
        pool.reserve(count)
        held += pool.blocks.allocate(count)
    assert sorted(held) == list(range(9)) and pool.num_bytes == 9 * LAYOUT.block_bytes
    for block in held:
        for layer in range(2):
            pool.block(layer, block).fill_(10 * block + layer)
    assert all(torch.all(pool.block(layer, block) == 10 * block + layer) for block in held for layer in range(2))
    pool.blocks.release(held[1:])
    pool.trim()
    assert pool.num_bytes == 9 * LAYOUT.block_bytes, "somebody still holds a block"
    pool.reserve(8)
    assert pool.num_bytes == 9 * LAYOUT.block_bytes, "there is room"
    pool.blocks.release(held[:1])
    pool.trim()
    assert pool.num_bytes == 0 and pool.blocks.num_blocks == 0
    pool.reserve(2)
    assert pool.blocks.allocate(2) == [0, 1] and pool.block(1, 1).shape == LAYOUT.block_shape


def test_what_the_limit_or_the_system_does_not_allow_is_a_memory_error():
    pool = PageablePool(LAYOUT, max_bytes=4 * LAYOUT.block_bytes)
    pool.reserve(3)
    with pytest.raises(MemoryError, match=f"host_memory_limit .{4 * LAYOUT.block_bytes} bytes, .* are taken.: raise"):
        pool.reserve(5)
    assert pool.num_bytes == 3 * LAYOUT.block_bytes and pool.blocks.num_free == 3
    pool.reserve(4)
    huge = KVLayout(num_layers=1, block_size=16, num_kv_heads=2**20, head_dim=2**20, dtype=torch.float32)
    with pytest.raises(MemoryError, match="no host memory for the KV of a preempted sequence"):
        PageablePool(huge).reserve(100)


def test_an_interrupt_while_memory_is_taken_does_no_harm(monkeypatch):
    """The recovery rebuilds the pool's numbers; memory that was taken for nothing goes with the last block."""
    pool = PageablePool(LAYOUT)
    pool.reserve(1)
    (held,) = pool.blocks.allocate(1)
    pool.block(0, held).fill_(7)

    def interrupted(count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool.blocks, "grow", interrupted)
        pool.reserve(4)
    pool.blocks.rebuild([held])
    pool.reserve(2)
    for block in pool.blocks.allocate(2):
        pool.block(0, block).zero_()
    assert torch.all(pool.block(0, held) == 7)
