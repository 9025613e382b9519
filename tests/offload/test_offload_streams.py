"""The offload engine on the simulated runtime: any legal order of streams gives the same numbers, and each wait counts.

A toy stands in for the model. Sequences grow token by token; the "KV" of a token is one whole number, and "attention"
is a weighted sum over all full blocks, which float32 holds exactly. So a stale, early or overwritten block shows as a
wrong number or a NaN, or the runtime reports the race between two copies.
"""

import functools
import itertools
import random
from typing import NamedTuple

import pytest
import torch
from engines import RULES
from simulated import RaceError, SimulatedRuntime

from offload import (
    BlockLifetimes,
    BlockPool,
    Chunk,
    Cut,
    HostPool,
    KVLayout,
    KVPlace,
    Landing,
    LandingBuffers,
    OffloadEngine,
    Ring,
    Staging,
    StreamPlan,
    pack,
)
from offload.blocks import GPU
from offload.engine import MAX_UNREAD
from offload.lifetimes import GPU_RULE, WRITES

LAYOUT = KVLayout(num_places=3, part_bytes=16)  # two tokens' keys, then their values, as float32
NUM_SEEDS = 200


class PlainArena:
    """Host memory that is ready at once."""

    def __init__(self, num_segments: int, segment_bytes: int) -> None:
        self._segments = [torch.zeros(segment_bytes, dtype=torch.uint8) for _ in range(num_segments)]

    def segment(self, index: int) -> torch.Tensor:
        return self._segments[index]

    def wait(self, num_segments: int | None = None) -> None:
        pass


def kv_value(sequence: int, token: int, layer: int) -> float:
    return float((sequence * 131 + token * 17 + layer * 7) % 97 + 1)


def numbers_in(memory: torch.Tensor) -> torch.Tensor:
    """The numbers that a pool, a ring slot or a part of a block holds, [..., bytes] uint8."""
    return memory.view(torch.float32)


def plan_of(chunks: list[Chunk]) -> StreamPlan:
    return StreamPlan((*[chunks] * LAYOUT.num_places, ()))


class ToySequence:
    def __init__(self, number: int) -> None:
        self.number = number
        self.num_tokens = 0
        self.tail: int | None = None  # GPU block
        self.host: list[int] = []


class Toy:
    """Random growth, ends and starts of sequences over tight pools."""

    def __init__(self, seed: int, dropped_rule: str | None, num_ring_slots: int, blocks_per_slot: int) -> None:
        self.random = random.Random(seed)
        self.runtime = SimulatedRuntime(seed, dropped_rule)
        self.compute_stream = self.runtime.stream("compute")
        pool = torch.zeros(LAYOUT.pool_shape(6), dtype=torch.uint8)
        self.gpu_kv = numbers_in(pool)
        self.gpu_blocks = BlockPool(6, first=1)
        host = HostPool(LAYOUT, num_blocks=12, blocks_per_segment=3, arena=PlainArena(4, 3 * LAYOUT.block_bytes))
        ring = Ring(self.runtime, LAYOUT, num_ring_slots, blocks_per_slot)
        cuts = [*(Cut(reads=KVPlace(0, layer), writes=KVPlace(0, layer)) for layer in range(LAYOUT.num_places)), Cut()]
        places = LandingBuffers(self.runtime, [])
        self.engine = OffloadEngine(self.runtime, pool, host, ring, self.compute_stream, cuts, places)
        self.lifetimes = BlockLifetimes(self.gpu_blocks, BlockPool(host.num_blocks), self.engine, self._poison)
        self.staging = Staging(self.runtime, 8, torch.float32)
        self.new_kv = torch.zeros(8)
        self.sums = torch.zeros(LAYOUT.num_places)
        self.sums_host = torch.zeros(LAYOUT.num_places)
        self.sums_read = self.runtime.event()
        self.sequences: list[ToySequence] = []
        self.num_started = 0

    def _poison(self, pool: str, blocks: list[int]) -> None:
        for layer, block in itertools.product(range(LAYOUT.num_places), blocks):
            if pool == GPU:
                self.runtime.poison(self.compute_stream, self.gpu_kv[layer, block])
            else:
                self.runtime.poison(self.engine.write, self.engine.host.block(layer, block))

    def run(self) -> None:
        operation = self.lifetimes.begin([gpu_block for gpu_block, _ in self.full])
        self.engine.run(self, operation, self.lifetimes.take_gone())

    def store(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:  # each as an operation of its own
            self.engine.store([pair], self.lifetimes.begin(pair[:1]))

    def drain(self) -> None:
        self.engine.drain()
        self.lifetimes.reclaim()

    # The step, as the engine sees it

    @property
    def write_through(self) -> list[list[tuple[int, int]]]:
        return [self.full]

    @property
    def section_ends(self) -> tuple[int, ...]:
        last = LAYOUT.num_places
        return tuple(range(last + 1)) if self.stream_plan.transfers else (last,)

    def compute(self, section: int) -> None:
        for layer in range(LAYOUT.num_places) if len(self.section_ends) == 1 else [section]:
            self._compute(layer)

    def _compute(self, layer: int) -> None:
        if layer == LAYOUT.num_places:
            return
        writes = [(sequence.tail, (sequence.num_tokens - 1) % 2) for sequence in self.sequences]

        def work() -> None:
            for place, (block, offset) in enumerate(writes):
                self.gpu_kv[layer, block, offset::2] = self.new_kv[place] + layer * 1000
            self.sums[layer] = 0

        self.compute_stream.run(work)

    def use(self, layer: int, chunk: Chunk, ring_slot: int) -> None:
        def work() -> None:
            slot = numbers_in(self.engine.ring.slots[ring_slot])
            for place in range(len(chunk.blocks)):
                self.sums[layer] += (chunk.begin + place + 1) * slot[place].sum()

        self.compute_stream.run(work)

    def step(self) -> None:
        self.lifetimes.reclaim()
        self._start_and_end()
        for sequence in self.sequences:
            if sequence.tail is None:
                self.lifetimes.wait_for_gpu(1)
                (sequence.tail,) = self.gpu_blocks.allocate(1)
        streamed = [block for sequence in self.sequences for block in sequence.host]
        expected = self._expected()
        self.stream_plan = self.ahead = plan_of(pack(streamed, self.engine.ring.blocks_per_slot))
        self.full = []
        for sequence in self.sequences:
            sequence.num_tokens += 1
            if sequence.num_tokens % 2 == 0:
                self.lifetimes.wait_for_host(1)
                (host_block,) = self.lifetimes.host_blocks.allocate(1)
                sequence.host.append(host_block)
                self.full.append((sequence.tail, host_block))
        values = [kv_value(sequence.number, sequence.num_tokens - 1, 0) for sequence in self.sequences]
        self.staging.acquire()[: len(values)] = torch.tensor(values)
        self.staging.upload(self.compute_stream, self.new_kv)
        self.run()
        self.compute_stream.copy(self.sums_host, self.sums)
        self.compute_stream.record(self.sums_read)
        for sequence in self.sequences:
            if sequence.num_tokens % 2 == 0:
                self.lifetimes.release_gpu([sequence.tail])
                sequence.tail = None
        if self.random.random() < 0.5:  # a host that runs ahead leaves more room for wrong orders
            self.sums_read.synchronize("host.read_after_step")
            assert torch.equal(self.sums_host, expected), f"{self.sums_host} instead of {expected}"

    def _start_and_end(self) -> None:
        if self.sequences and (self.random.random() < 0.2 or self.lifetimes.host_blocks.num_used > 8):
            ended = self.sequences.pop(self.random.randrange(len(self.sequences)))
            self.sums_read.synchronize("host.read_after_step")
            self.lifetimes.release_host(ended.host)
            if ended.tail is not None:
                self.lifetimes.release_gpu([ended.tail])
        while len(self.sequences) < 2:
            self.sequences.append(ToySequence(self.num_started))
            self.num_started += 1

    def _expected(self) -> torch.Tensor:
        """The sums over all full blocks as they stand before the step, from the formula alone."""
        sums = []
        for layer in range(LAYOUT.num_places):
            total, place = 0.0, 0
            for sequence in self.sequences:
                for block in range(len(sequence.host)):
                    place += 1
                    tokens = (2 * block, 2 * block + 1)
                    total += place * sum(2 * (kv_value(sequence.number, t, 0) + layer * 1000) for t in tokens)
            sums.append(total)
        return torch.tensor(sums)

    def finish(self) -> None:
        """Ends everything; both pools must be as at the start."""
        self.sums_read.synchronize("host.read_after_step")
        for sequence in self.sequences:
            self.lifetimes.release_host(sequence.host)
            if sequence.tail is not None:
                self.lifetimes.release_gpu([sequence.tail])
        self.drain()
        assert self.gpu_blocks.num_free == 5 and self.lifetimes.host_blocks.num_free == 12


@functools.cache
def rules() -> list[str]:
    """Every rule that a run enforces."""
    toy = play(seed=0)
    return sorted(toy.runtime.rules_seen)


def play(seed: int, dropped_rule: str | None = None, num_steps: int = 24) -> Toy:
    num_ring_slots, blocks_per_slot = random.Random(seed).choice([(1, 1), (2, 1), (2, 3), (3, 2), (5, 1), (4, 4)])
    toy = Toy(seed, dropped_rule, num_ring_slots, blocks_per_slot)
    for _ in range(num_steps):
        toy.step()
    toy.finish()
    return toy


def test_every_legal_order_gives_the_same_numbers(fuzz):
    for seed in range(NUM_SEEDS if fuzz else NUM_SEEDS // 6):
        play(seed)


def test_the_toy_sees_every_rule_of_the_offload_package():
    assert rules() == RULES


@pytest.mark.parametrize("rule", rules())
def test_each_wait_removed_is_noticed(rule):
    for seed in range(NUM_SEEDS):
        try:
            play(seed, dropped_rule=rule)
        except (AssertionError, RaceError):
            return
    pytest.fail(f"{NUM_SEEDS} seeds ran without {rule!r} and nothing went wrong: the wait or the test is not needed")


def test_a_step_that_copies_blocks_has_a_number():
    """Nobody could wait for its copies."""
    toy = Toy(seed=3, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
    toy.stream_plan, toy.ahead, toy.full = plan_of([]), None, [(1, 0)]
    with pytest.raises(AssertionError, match="has a number"):
        toy.engine.run(toy, 0)
    assert not any(stream.queue for stream in toy.runtime.streams), "nothing was enqueued"


class Bytes(NamedTuple):
    """A transfer to a place."""

    content: torch.Tensor
    landing: Landing
    host_blocks = ()

    def num_bytes(self, layout: KVLayout) -> int:
        return len(self.content)

    def copies(self, target: torch.Tensor, host: HostPool) -> list:
        return [(target[: len(self.content)], lambda layer: self.content)]


@pytest.mark.parametrize("place", [0, 1])
def test_who_fills_a_place_waits_for_what_read_it_behind_the_step_before(place):
    """As log-probabilities of a prompt do, which bring a streamed head by themselves: to both places."""
    for seed in range(20):
        toy = Toy(seed, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
        engine, compute = toy.engine, toy.compute_stream
        engine.landing_buffers = LandingBuffers(toy.runtime, [torch.zeros(8, dtype=torch.uint8) for _ in range(2)])
        found, content = torch.zeros(8, dtype=torch.uint8), torch.full((8,), 7, dtype=torch.uint8)
        compute.copy(engine.landing_buffers.bytes[place], content)
        for _ in range(5):  # so that the copy stream may come first
            compute.run(lambda: None)
        compute.copy(found, engine.landing_buffers.bytes[place])
        engine.fence_landing_buffers()
        brought = Bytes(torch.full((8,), 9, dtype=torch.uint8), Landing(place, until=LAYOUT.num_places))
        toy.stream_plan = StreamPlan(((brought,), *[()] * LAYOUT.num_places))
        toy.ahead, toy.full = None, []
        toy.run()
        toy.runtime.synchronize()
        assert torch.equal(found, content), f"seed {seed}"


def test_prefetch_crosses_the_step_boundary():
    toy = Toy(seed=3, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
    host_blocks = toy.lifetimes.host_blocks.allocate(3)
    toy.stream_plan = toy.ahead = plan_of(pack(host_blocks, 1))
    toy.full = []
    per_step = 3 * LAYOUT.num_places
    for step in range(1, 4):
        toy.run()
        assert toy.engine.counters.num_fills == step * per_step + 2, "the next step's first chunks are filled already"
    assert toy.engine.counters.discarded_bytes == 0


@pytest.mark.parametrize("freed", [0, 1])
def test_a_freed_block_drops_the_prefetch_that_holds_it(freed):
    toy = Toy(seed=3, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
    host_blocks = toy.lifetimes.host_blocks.allocate(3)
    toy.stream_plan = toy.ahead = plan_of(pack(host_blocks, 1))
    toy.full = []
    toy.run()
    toy.lifetimes.release_host(host_blocks[2:])
    toy.stream_plan = toy.ahead = plan_of(pack(host_blocks[:2], 1))
    toy.run()
    assert toy.engine.counters.discarded_bytes == 0, "the last block was not prefetched"
    toy.lifetimes.release_host(host_blocks[freed : freed + 1])
    toy.run()
    assert toy.engine.counters.discarded_bytes == 2 * LAYOUT.part_bytes, "it may have other content"


def test_store_and_load_move_whole_blocks_both_ways():
    toy = Toy(seed=1, dropped_rule=None, num_ring_slots=2, blocks_per_slot=2)
    original = torch.arange(toy.gpu_kv.numel(), dtype=torch.float32).view_as(toy.gpu_kv)
    toy.gpu_kv.copy_(original)
    toy.store([(1, 2), (2, 3), (3, 4), (5, 0)])
    toy.drain()
    toy.gpu_kv.zero_()
    toy.engine.load([(5, 0), (1, 2), (2, 3), (3, 4)], toy.lifetimes.begin())
    toy.drain()
    assert torch.equal(toy.gpu_kv[:, [1, 2, 3, 5]], original[:, [1, 2, 3, 5]])


@pytest.mark.parametrize("rule", [None, "load.fill_after_store"])
def test_a_load_comes_behind_the_store_of_what_it_brings(rule):
    num_wrong = 0
    for seed in range(20):
        toy, content = storing_toy(seed, rule)
        try:
            toy.engine.load([(0, 0)], toy.lifetimes.begin())
            toy.drain()
            num_wrong += not torch.equal(toy.gpu_kv[:, 0], content[:, 1])
        except RaceError:
            num_wrong += 1
    assert bool(num_wrong) == (rule is not None)


def test_a_stream_that_waits_for_nothing_is_reported_as_a_deadlock():
    runtime = SimulatedRuntime(seed=0)
    a, b = runtime.stream("a"), runtime.stream("b")
    first, second = runtime.event(), runtime.event()
    first.num_recorded = second.num_recorded = 1  # recorded by a stream that never comes so far
    a.wait(first, "a")
    b.wait(second, "b")
    with pytest.raises(RuntimeError, match="deadlock"):
        runtime.synchronize()


def storing_toy(seed: int, dropped_rule: str | None = None) -> tuple[Toy, torch.Tensor]:
    """GPU blocks 1 to 5 are on their way to the host, one event for each; and what each of them holds."""
    toy = Toy(seed, dropped_rule=dropped_rule, num_ring_slots=2, blocks_per_slot=2)
    content = torch.arange(1, toy.gpu_kv.numel() + 1, dtype=torch.float32).view_as(toy.gpu_kv)
    toy.gpu_kv.copy_(content)
    on_gpu, on_host = toy.gpu_blocks.allocate(5), toy.lifetimes.host_blocks.allocate(5)
    toy.store(list(zip(on_gpu, on_host, strict=True)))
    return toy, content


def is_queued(toy: Toy, name: str) -> bool:
    return any(stream.name == name and stream.queue for stream in toy.runtime.streams)


def test_who_wants_one_block_waits_for_the_first_copy_only():
    """Neither for the blocks that were sent behind it, nor for those of the other pool."""
    num_still_writing = num_deferred = 0
    for seed in range(20):
        toy, _ = storing_toy(seed)
        toy.lifetimes.release_gpu([5, 4, 2, 1, 3])  # the order in which they are given back does not matter
        toy.lifetimes.wait_for_gpu(1)
        assert toy.gpu_blocks.num_free >= 1 and toy.gpu_blocks.references(1) == 0, "the first one that was sent"
        num_still_writing += is_queued(toy, "write")
        num_deferred += toy.lifetimes.num_deferred_gpu == 4
        toy.lifetimes.wait_for_gpu(5)
        assert toy.gpu_blocks.num_free == 5 and toy.lifetimes.num_deferred_gpu == 0
    assert num_still_writing > 5 and num_deferred > 5, "it waited for all of them"


def test_who_wants_a_host_block_does_not_wait_for_those_of_the_gpu():
    num_writing = 0
    for seed in range(20):
        toy, _ = storing_toy(seed)
        toy.drain()
        toy.lifetimes.release_host([0, 1])
        toy.store([(1, 2), (2, 3), (3, 4)])
        toy.lifetimes.release_gpu([1, 2, 3])
        toy.lifetimes.wait_for_host(9)
        assert toy.lifetimes.host_blocks.num_free >= 9
        num_writing += is_queued(toy, "write")
    assert num_writing > 5


def test_a_block_is_reused_only_when_it_has_been_stored():
    """As soon as a block is free it is written to: what arrives on the host must be what it held."""
    for seed in range(60):
        toy, content = storing_toy(seed)
        toy.lifetimes.release_gpu([1, 2, 3, 4, 5])
        for _ in range(5):
            toy.lifetimes.wait_for_gpu(1)
            (block,) = toy.gpu_blocks.allocate(1)
            toy.compute_stream.run(lambda block=block: toy.gpu_kv[:, block].fill_(torch.nan))
        toy.runtime.synchronize()
        for layer in range(LAYOUT.num_places):
            for place in range(5):
                stored = numbers_in(toy.engine.host.block(layer, place))
                assert torch.equal(stored, content[layer, place + 1]), f"seed {seed}"


def test_a_block_that_is_written_twice_waits_for_the_second_time():
    """The first copy completes after the second was noted: it says nothing of the second."""
    num_pending = 0
    for seed in range(60):
        toy, content = storing_toy(seed)
        (_, first) = toy.engine.unread[GPU_RULE, WRITES][0]
        toy.lifetimes.host_blocks.allocate(1)
        toy.store([(1, 5)])  # again, to another host block
        toy.runtime.advance(lambda first=first: first.is_reached)
        toy.lifetimes.reclaim()  # forgets the writes that have run
        toy.lifetimes.release_gpu([1])
        num_pending += toy.lifetimes.num_deferred_gpu
        toy.lifetimes.wait_for_gpu(1)
        toy.compute_stream.run(lambda toy=toy: toy.gpu_kv[:, 1].fill_(torch.nan))
        toy.runtime.synchronize()
        assert torch.equal(numbers_in(toy.engine.host.block(0, 5)), content[0, 1]), f"seed {seed}"
    assert num_pending > 5


@pytest.mark.parametrize("place", ["compute", "use"])
def test_prefetch_is_forgotten_when_a_step_fails_behind_it(place):
    """It lies in ring slots that the next step counts from another place."""
    for calls in (1, 5, 9):
        toy = Toy(seed=3, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
        host_blocks = toy.lifetimes.host_blocks.allocate(3)
        toy.stream_plan = toy.ahead = plan_of(pack(host_blocks, 1))
        toy.full = []
        toy.run()
        original, counted = getattr(toy, place), itertools.count(1)

        def failing(*arguments, original=original, counted=counted, calls=calls):
            if next(counted) == min(calls, LAYOUT.num_places + 1 if place == "compute" else 9):
                raise RuntimeError("out of luck")
            original(*arguments)

        setattr(toy, place, failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            toy.run()
        toy.runtime.synchronize()
        toy.lifetimes.recover()
        toy.engine.recover(toy.lifetimes.operation)
        setattr(toy, place, original)
        before = toy.engine.counters.num_fills
        toy.run()
        assert toy.engine.counters.num_fills == before + 3 * LAYOUT.num_places + 2, (
            "what a failed step prefetched was used"
        )


def test_of_many_operations_in_flight_none_is_forgotten_that_has_not_run():
    """However many were noted behind it: its block is free only when it has been stored."""
    num_pending = 0
    for seed in range(20):
        toy, content = storing_toy(seed)
        toy.lifetimes.host_blocks.allocate(1)
        toy.store([(2, 5)] * (2 * MAX_UNREAD))
        assert is_queued(toy, "write")
        toy.lifetimes.release_gpu([1])
        num_pending += toy.lifetimes.num_deferred_gpu
        toy.lifetimes.wait_for_gpu(1)
        toy.compute_stream.run(lambda toy=toy: toy.gpu_kv[:, 1].fill_(torch.nan))
        toy.runtime.synchronize()
        assert torch.equal(numbers_in(toy.engine.host.block(0, 0)), content[0, 1]), f"seed {seed}"
    assert num_pending == 20


def test_events_that_nobody_asks_about_do_not_pile_up():
    toy = Toy(seed=3, dropped_rule=None, num_ring_slots=2, blocks_per_slot=1)
    host_blocks = toy.lifetimes.host_blocks.allocate(4)
    toy.stream_plan = toy.ahead = plan_of(pack(host_blocks[:3], 1))
    toy.full = [(1, host_blocks[3])]
    toy.gpu_blocks.allocate(1)
    for _ in range(100):
        toy.run()
        toy.runtime.synchronize()
    assert all(len(unread) <= 33 for unread in toy.engine.unread.values())
    assert any(len(unread) > 3 for unread in toy.engine.unread.values())
