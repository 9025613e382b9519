"""A block is handed out again only when no copy can touch it any more, however slowly copies are acknowledged."""

import random
import sys
from collections import Counter

import pytest

from offload import BlockLifetimes, BlockPool
from offload.lifetimes import FILLS, WRITES


class Copies:
    """The copies of each operation, and how far those of each kind have run."""

    def __init__(self, generator: random.Random, num_gpu: int, num_host: int) -> None:
        self.gpu_blocks, self.host_blocks = BlockPool(num_gpu), BlockPool(num_host)
        self.lifetimes = BlockLifetimes(self.gpu_blocks, self.host_blocks, self)
        self.generator, self.num_waits = generator, 0
        self.touched: dict[str, dict[int, tuple[set, set]]] = {WRITES: {}, FILLS: {}}  # operation: GPU, host blocks
        self.done = {WRITES: 0, FILLS: 0}

    def run(self, writes: list[tuple[int, int]], fills: set[int]) -> None:
        operation = self.lifetimes.begin([gpu for gpu, _ in writes])
        self.touched[WRITES][operation] = {gpu for gpu, _ in writes}, {host for _, host in writes}
        self.touched[FILLS][operation] = set(), set(fills)

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        if self.generator.random() < 0.3:
            self.done[kind] = max(self.done[kind], self.generator.randint(self.done[kind], self.lifetimes.operation))
        return self.done[kind] >= operation

    def wait(self, kind: str, operation: int, rule: str) -> None:
        self.num_waits += self.done[kind] < operation
        self.done[kind] = max(self.done[kind], operation)

    def in_flight(self, place: int) -> set[int]:
        """Blocks of a pool (0: GPU, 1: host) that a copy may still touch."""
        return {
            block
            for kind, operations in self.touched.items()
            for operation, blocks in operations.items()
            if operation > self.done[kind]
            for block in blocks[place]
        }


@pytest.mark.parametrize("seed", range(30))
def test_no_block_is_handed_out_while_a_copy_may_touch_it(seed):
    generator = random.Random(seed)
    copies = Copies(generator, 12, 10)
    lifetimes, held, on_host, num_handed, num_taken_back = copies.lifetimes, [], [], 0, 0
    for _ in range(300):
        event = generator.random()
        if event < 0.35 and copies.gpu_blocks.num_free + lifetimes.num_deferred_gpu:
            lifetimes.wait_for_gpu(1)
            (block,) = copies.gpu_blocks.allocate(1)
            assert block not in copies.in_flight(0)
            held.append(block)
            num_handed += 1
        elif event < 0.6:
            writes = []
            for gpu_block in generator.sample(held, min(len(held), generator.randint(0, 3))):
                if copies.host_blocks.num_free + lifetimes.num_deferred_host:
                    lifetimes.wait_for_host(1)
                    (block,) = copies.host_blocks.allocate(1)
                    assert block not in copies.in_flight(1)
                    on_host.append(block)
                    writes.append((gpu_block, block))
            copies.run(writes, set(generator.sample(on_host, generator.randint(0, len(on_host)))))
        elif event < 0.7 and held:
            copies.gpu_blocks.hold(block := generator.choice(held))
            held.append(block)
        elif event < 0.75 and on_host:
            copies.host_blocks.hold(block := generator.choice(on_host))
            on_host.append(block)
        elif event < 0.85 and held:
            gone = [held.pop(generator.randrange(len(held))) for _ in range(generator.randint(1, len(held)))]
            lifetimes.release_gpu(gone)
            if generator.random() < 0.3 and lifetimes.take_back_gpu(block := generator.choice(gone)):
                held.append(block)
                num_taken_back += 1
        elif event < 0.95 and on_host:
            gone = [on_host.pop(generator.randrange(len(on_host))) for _ in range(generator.randint(1, len(on_host)))]
            lifetimes.release_host(gone)
            assert set(lifetimes.take_gone()) == set(gone) - set(on_host)
        else:
            lifetimes.reclaim()
        assert all(copies.gpu_blocks.references(block) >= held.count(block) for block in held)
        released = Counter(block for deferred in lifetimes.deferred_host for block in deferred.blocks)
        leaving = [block for block, count in released.items() if copies.host_blocks.references(block) == count]
        assert lifetimes.num_deferred_host == len(leaving)
    lifetimes.release_gpu(held)
    lifetimes.release_host(on_host)
    lifetimes.wait_for_gpu(12)
    lifetimes.wait_for_host(10)
    assert copies.gpu_blocks.num_free == 12 and copies.host_blocks.num_free == 10
    assert num_handed > 20 and copies.num_waits


def num_calls(function) -> int:
    """How many functions are called, those of the interpreter included."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(1) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_release_looks_at_what_it_releases_only_and_who_asks_for_their_number_at_none():
    """256 rows of 128 blocks that ended in one step held the host for 0.3 s, and then each verdict for 7 ms."""
    copies = Copies(random.Random(0), 1, 2000)
    lifetimes, rows = copies.lifetimes, [copies.host_blocks.allocate(20) for _ in range(100)]
    releases, counts = [], []
    for row in rows:
        releases.append(num_calls(lambda row=row: lifetimes.release_host(row)))
        counts.append(num_calls(lambda: lifetimes.num_deferred_host))
    assert lifetimes.num_deferred_host == 2000
    assert len(set(releases)) == 1 and len(set(counts)) == 1


def test_what_nobody_holds_is_named_once():
    copies = Copies(random.Random(0), 4, 4)
    blocks = copies.host_blocks.allocate(3)
    copies.host_blocks.hold(blocks[0])
    copies.lifetimes.release_host(blocks[:2])
    assert copies.lifetimes.take_gone() == (blocks[1],), "the first one is still held"
    assert copies.lifetimes.take_gone() == ()
    copies.lifetimes.release_host(blocks[:1])
    assert copies.lifetimes.take_gone() == (blocks[0],)


def test_a_block_whose_write_has_run_is_free_when_it_is_released():
    copies = Copies(random.Random(0), 3, 1)
    blocks = copies.gpu_blocks.allocate(2)
    copies.run([(blocks[0], 0)], set())
    copies.run([(blocks[1], 0)], set())
    copies.wait(WRITES, 1, "")
    copies.has_run = lambda kind, operation, rule: copies.done[kind] >= operation
    copies.lifetimes.release_gpu(blocks)
    assert copies.gpu_blocks.num_free == 2 and copies.lifetimes.num_deferred_gpu == 1
