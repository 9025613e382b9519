"""The offload engine: runs one step section by section while host blocks pass through the ring.

Three streams work side by side:

    copy      host memory -> ring slot    fills a slot as soon as its last reader is done; a place likewise
    compute   pieces and attention        waits for a fill, never for the host
    write     GPU pool -> host pool       sends full blocks to the host, once

The engine does not know what a model is: it knows its cuts, and a step brings the work of each piece as functions. The
order of the operations comes from `ring_schedule`; the waits are below, each with the name of its rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from offload.layout import Pairs, Places, runs
from offload.lifetimes import FILLS, GPU_RULE, HOST_RULE, LOAD_RULE, STORE_RULE, WRITES
from offload.memory.host_pool import HostPool
from offload.plan import Chunk, Cut, StreamPlan, Transfer, host_runs
from offload.ring import Await, Compute, Fill, LandingBuffers, Release, Ring, Use, ring_schedule
from offload.runtime.base import Event, Runtime, Stream
from offload.runtime.throttle import throttled
from offload.runtime.timeline import COMPUTE, COPY, WAIT, WRITE, NoTimeline, Timeline

Copies = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (GPU, host) views of the same bytes

MAX_UNREAD = 32
"""Events of operations that nobody asked about; of more than these, those that were reached are forgotten."""


class OffloadStep(Protocol):
    """What the engine runs in one step. The methods enqueue work on the compute stream and return at once.

    A step goes through its pieces in *sections*: pieces between two cuts at which it wants transfers, or more of them.
    """

    stream_plan: StreamPlan
    ahead: StreamPlan | None  # what the next step will stream if nothing changes
    # For each group of layers (GPU block, host block) of the blocks that this step makes full; empty: of none.
    write_through: Sequence[Sequence[tuple[int, int]]]
    section_ends: tuple[int, ...]  # for each section the number of its last piece

    def compute(self, section: int) -> None:
        """Enqueue the pieces of a section; write the new KV of the attentions at their cuts."""

    def use(self, cut: int, chunk: Chunk, ring_slot: int) -> None:
        """Enqueue the attention over a chunk of KV, which lies in `ring_slot`."""


@dataclass
class OffloadCounters:
    """Running totals since the engine was made."""

    streamed_bytes: int = 0  # host to GPU, prefetched transfers that were not used included
    discarded_bytes: int = 0  # of these, what was prefetched and not used
    written_bytes: int = 0  # GPU to host
    num_fills: int = 0


class OffloadEngine:
    """Streams host blocks through a ring beside the compute of each layer.

    Args:
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool.
        host: the host pool.
        ring: the ring slots.
        compute: the stream on which the steps' work is enqueued.
        cuts: of the model, one behind each piece.
        landing_buffers: where transfers lie that do not pass through the ring.
        states: `[num_slots, slot_bytes]` uint8, what sequences keep besides blocks; None: nothing.

    Attributes:
        copy, write: the streams of fills and of write-through. While a link is emulated, they take its time.
        prefetched: (cut, transfer) of each transfer of the next step that is on the GPU already.
        unread: for each rule of those who wait, operations whose copies may not have run, with an event behind each.
    """

    def __init__(
        self,
        runtime: Runtime,
        gpu_kv: torch.Tensor,
        host: HostPool,
        ring: Ring,
        compute: Stream,
        cuts: Sequence[Cut],
        landing_buffers: LandingBuffers,
        states: torch.Tensor | None = None,
    ) -> None:
        self.runtime, self.host, self.layout, self.ring, self.compute = runtime, host, host.layout, ring, compute
        self.cuts, self.landing_buffers = cuts, landing_buffers
        self.copy, self.write = self._streams = runtime.stream("copy"), runtime.stream("write")
        self.counters = OffloadCounters()
        self._timeline = NoTimeline()  # of the newest step
        self._gpu_kv, self._states = gpu_kv, states
        self._kv_ready = runtime.event()  # compute: a layer's new KV is written
        self._room_made = runtime.event()  # compute: nothing uses what a load overwrites
        self._written = runtime.event()  # write: all write-through so far has arrived on the host
        self._has_unread_writes = False
        self._first = 0  # ring slot of the next step's first transfer
        # What the copies of the newest plan's transfers join, for each transfer and target: made once for all cuts, and
        # for all steps that have this plan.
        self._copies: dict[tuple[Transfer, int], list] = {}
        self._copies_of: StreamPlan | None = None
        self.prefetched: list[tuple[int, Transfer]] = []
        self._operation = 0  # the newest one that was run
        self.unread: dict[tuple[str, str], deque[tuple[int, Event]]] = {
            (GPU_RULE, WRITES): deque(), (HOST_RULE, WRITES): deque(), (HOST_RULE, FILLS): deque(),
            (STORE_RULE, WRITES): deque(), (LOAD_RULE, FILLS): deque(),
        }  # fmt: skip

    def run(
        self, step: OffloadStep, operation: int, gone: Collection[int] = (), timeline: Timeline | None = None
    ) -> None:
        """Enqueue one whole step. Nothing in it waits for the device.

        Args:
            operation: number under which the step's copies are acknowledged (see `BlockLifetimes.begin`); 0: it copies
                no block of the host pool, so nobody asks.
            gone: host blocks that nobody holds any more. Prefetched transfers are dropped if one of them holds such a
                block: it may have been handed out again, with other content.
            timeline: records what each stream does and when; None records nothing.
        """
        assert operation or not any(step.write_through), "a step that copies blocks has a number"
        self._operation = operation or self._operation
        self.drop_prefetch(gone)
        self._timeline = timeline = NoTimeline() if timeline is None else timeline
        plan, ring, landing, num_fills = step.stream_plan, self.ring, self.landing_buffers, self.counters.num_fills
        self._begin(plan)
        timeline.begin(self.compute, COMPUTE)
        wanted, ahead, begin = plan.transfers, step.ahead, 0
        filled, self.prefetched = len(self.prefetched), []
        needs_ahead = () if ahead is None else ahead.needs
        schedule = ring_schedule(
            step.section_ends, plan.needs, ring.num_ring_slots, first=self._first, filled=filled, ahead=needs_ahead
        )
        for part in schedule:
            match part:
                case Compute(section, last):
                    step.compute(section)
                    timeline.lap(self.compute, COMPUTE, "section", cut=last)
                    if written := self._written_by(step.write_through, begin, last):
                        self._write_through((place, self._pair_runs(place, pairs)) for place, pairs in written)
                    begin = last + 1
                case Fill(number, target, is_place, is_ahead):
                    cut, transfer = (ahead.transfers if is_ahead else wanted)[number]
                    num_bytes = self._fill(cut, transfer, target, is_place)
                    what = "prefetch for the next step" if is_ahead else "fill"
                    timeline.lap(self.copy, COPY, what, num_bytes=num_bytes, cut=cut, number=number)
                    if is_ahead:
                        self.prefetched.append((cut, transfer))
                case Use(cut, number, ring_slot):
                    self.compute.wait(ring.copied[ring_slot], "ring.attention_after_fill")
                    timeline.lap(self.compute, COMPUTE, WAIT, cut=cut, number=number)
                    step.use(cut, wanted[number][1], ring_slot)
                    self.runtime.poison(self.compute, ring.bytes[ring_slot])
                    self.compute.record(ring.used[ring_slot])
                    timeline.lap(self.compute, COMPUTE, "use of a ring slot", cut=cut, number=number)
                case Await(cut, number, place):
                    self.compute.wait(landing.copied[place], "place.piece_after_fill")
                    timeline.lap(self.compute, COMPUTE, WAIT, cut=cut, number=number)
                case Release(place):
                    self.runtime.poison(self.compute, landing.bytes[place])
                    self.compute.record(landing.used[place])
        self._first = (self._first + plan.num_through_ring) % ring.num_ring_slots
        if any(step.write_through):
            self._note_writes()
        if operation and self.counters.num_fills > num_fills:
            copied = self.runtime.event()
            self.copy.record(copied)
            self._note(FILLS, copied)

    def _begin(self, plan: StreamPlan) -> None:
        """Have what a step is going to copy follow what the steps before it have left."""
        # Write-through of the step before must have arrived before its blocks are read again. One wait serves the
        # whole step: blocks that become full in this step are not in its plan.
        if self._has_unread_writes:
            self.copy.wait(self._written, "ring.fill_after_write_through")
            self._has_unread_writes = False
        self._adopt_prefetch(plan)
        if plan is not self._copies_of:
            self._copies, self._copies_of = {}, plan

    def _written_by(
        self, full: Sequence[Sequence[tuple[int, int]]], first: int, last: int
    ) -> list[tuple[int, Sequence[tuple[int, int]]]]:
        """Return what pieces `first` to `last` write of blocks that become full, for `_write_through`.

        full: for each group (GPU block, host block) pairs, or nothing.
        """
        written = [cut.writes for cut in self.cuts[first : last + 1] if cut.writes is not None] if full else []
        return [(place, full[group]) for group, place in written if full[group]]

    def _note_writes(self) -> None:
        """Record an event behind the write-through so far, for whoever reads or reuses the blocks."""
        self._written = self.runtime.event()
        self.write.record(self._written)
        self._has_unread_writes = True
        self._note(WRITES, self._written)

    def _note(self, kind: str, event: Event) -> None:
        for (rule, what), unread in self.unread.items():
            if what == kind:
                while len(unread) >= MAX_UNREAD and unread[0][1].query(rule):
                    unread.popleft()
                unread.append((self._operation, event))

    # Acknowledgements

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        """Whether all copies of this kind up to this operation have run; see `Acknowledgements`."""
        assert operation <= self._operation, f"operation {operation} was not run yet"
        unread = self.unread.get((rule, kind), deque())
        while unread and unread[0][0] <= operation:
            if not unread[0][1].query(rule):
                return False
            unread.popleft()
        return True

    def wait(self, kind: str, operation: int, rule: str) -> None:
        """Wait until `has_run` is true."""
        unread = self.unread.get((rule, kind), deque())
        while unread and unread[0][0] <= operation:
            unread[0][1].synchronize(rule)
            unread.popleft()

    @torch.inference_mode()  # an error may have left the step before
    def store(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        """Copy whole blocks, (GPU block, host block) pairs, to the host, in this order. Later work runs beside it.

        of_states: pieces of states, each of at most a block's bytes: (slot * pieces of a slot + piece, host block).
        places: those of a block that are copied.
        """
        self._operation, self._timeline = operation, NoTimeline()
        self._write_through(enumerate(self._moved(pairs, of_states, places)))
        self._note_writes()

    @torch.inference_mode()
    def load(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        """Copy what `store` copies, to the GPU. Work that does not read it runs beside it."""
        self._operation = operation
        self.compute.record(self._room_made)
        self.copy.wait(self._room_made, "load.fill_after_compute")  # steps in flight may use what the blocks held
        self.copy.wait(self._written, "load.fill_after_store")
        for on_gpu, on_host in chain.from_iterable(self._moved(pairs, of_states, places)):
            self.copy.copy(on_gpu, on_host)
        copied = self.runtime.event()
        self.copy.record(copied)
        self._note(FILLS, copied)

    def emulate_link(self, bytes_per_second: float | None) -> None:
        """From now on, copies take the time of a link of this rate in each direction; None: of the machine's own.

        For benchmarks, between steps; it waits for all streams. See `runtime/throttle.py`.
        """
        self.runtime.synchronize()
        self.copy, self.write = self._streams
        if bytes_per_second is not None:
            assert bytes_per_second > 0, f"a link of {bytes_per_second} bytes per second"
            self.copy, self.write = (throttled(one, bytes_per_second, self.runtime.link()) for one in self._streams)
            self.runtime.synchronize()

    def fence_landing_buffers(self) -> None:
        """Have whoever fills a place next wait for what was enqueued on the compute stream so far.

        For work behind a step that uses the places by itself. The step has fetched nothing ahead (`OffloadStep.ahead`).
        """
        assert all(transfer.landing is None for _, transfer in self.prefetched), "a place is filled for the next step"
        for used in self.landing_buffers.used:
            self.compute.record(used)

    def drain(self) -> None:
        """Wait until no copy is in flight, and drop the prefetch."""
        self.runtime.synchronize()
        self._discard_prefetch()

    def recover(self, operation: int) -> None:
        """Forget every copy of the operations up to `operation`, run or not. Nothing may be in flight."""
        self._operation = operation
        self._discard_prefetch()
        self._has_unread_writes = False
        for unread in self.unread.values():
            unread.clear()

    def _adopt_prefetch(self, plan: StreamPlan) -> None:
        """Keep what the step before prefetched, as far as they are the first ones of this step."""
        useful = 0
        for filled, wanted in zip(self.prefetched, plan.transfers, strict=False):
            if filled != wanted:
                break
            useful += 1
        self._discard_prefetch(useful)

    def drop_prefetch(self, gone: Collection[int]) -> None:
        """Drop all that was prefetched if one of them holds a host block that nobody holds any more."""
        if gone and any(set(gone).intersection(transfer.host_blocks) for _, transfer in self.prefetched):
            self._discard_prefetch()

    def _discard_prefetch(self, keep: int = 0) -> None:
        """Forget all but the first `keep` prefetched transfers. The copy stream fills their targets again, in order."""
        for _, transfer in self.prefetched[keep:]:
            self.counters.discarded_bytes += transfer.num_bytes(self.layout)
        del self.prefetched[keep:]

    def _fill(self, cut: int, transfer: Transfer, target: int, is_place: bool) -> int:
        """Bring what is wanted at a cut into the ring slot, or to the place, and return its bytes."""
        buffers = self.landing_buffers if is_place else self.ring
        copies = self._copies.get((transfer, target))
        if copies is None:
            memory = buffers.bytes[target]
            what = "the place" if is_place else "a ring slot"
            assert transfer.num_bytes(self.layout) <= len(memory), f"{what} holds less than that"
            copies = self._copies[transfer, target] = list(transfer.copies(memory, self.host))
        counters, before, read = self.counters, self.counters.streamed_bytes, self.cuts[cut].reads
        if is_place:
            self.copy.wait(buffers.used[target], "place.fill_after_last_piece")
        else:
            self.copy.wait(buffers.used[target], "ring.fill_after_attention")
        self._timeline.begin(self.copy, COPY)
        for destination, source in copies:
            self.copy.copy(destination, source(read and read.place))
            counters.streamed_bytes += destination.nbytes
        self.copy.record(buffers.copied[target])
        counters.num_fills += 1
        return counters.streamed_bytes - before

    def _write_through(self, wanted: Iterable[tuple[int, Copies]]) -> None:
        """Copy parts of blocks to the host. wanted: places of a block, each with what is copied of it."""
        self.compute.record(self._kv_ready)
        self.write.wait(self._kv_ready, "write_through.after_kv_is_written")
        for place, copies in wanted:
            before = self.counters.written_bytes
            self._timeline.begin(self.write, WRITE)
            for on_gpu, on_host in copies:
                self.write.copy(on_host, on_gpu)
                self.counters.written_bytes += on_gpu.nbytes
            num_bytes = self.counters.written_bytes - before
            self._timeline.lap(self.write, WRITE, "write-through", num_bytes=num_bytes, cut=place)

    def _moved(self, pairs: Pairs, of_states: bool, places: Places) -> list[Copies]:
        """Return what is copied of each place of blocks, or of each piece of states."""
        wanted = range(*(places or (0, self.layout.num_places)))
        if of_states:
            return [self._piece_parts(*pair, wanted) for pair in pairs]
        return [self._pair_runs(place, pairs) for place in wanted]

    def _piece_parts(self, piece: int, host_block: int, wanted: range) -> Copies:
        """Yield (GPU, host) views of a piece of a state: a block's parts hold its bytes, one after the other."""
        size, num_places = self.layout.part_bytes, self.layout.num_places
        slot, piece = divmod(piece, -(-self._states.shape[1] // self.layout.block_bytes))
        for place in wanted:
            begin = (piece * num_places + place) * size
            on_gpu = self._states[slot, begin : begin + size]
            if len(on_gpu):
                yield on_gpu, self.host.block(place, host_block)[: len(on_gpu)]

    def _pair_runs(self, place: int, pairs: Sequence[tuple[int, int]]) -> Copies:
        """Yield (GPU, host) views of neighbouring blocks that one copy can move."""
        for gpu_block, host_block, count in runs(pairs):
            blocks = tuple(range(host_block, host_block + count))
            for offset, segment, begin, part in host_runs(blocks, self.host.blocks_per_segment):
                on_gpu = self._gpu_kv[place, gpu_block + offset : gpu_block + offset + part]
                yield on_gpu, self.host.run(segment, begin, part)[place]
