"""The offload engine: runs one step layer by layer while host blocks pass through the ring.

Three streams work side by side:

    copy      host pool -> ring slot      fills a slot as soon as its last reader is done
    compute   pieces and attention        waits for a slot's fill, never for the host
    write     GPU pool -> host pool       sends full blocks to the host, once

The engine does not know what a model is: a step brings the work of each layer as functions. The order of the
operations comes from `ring_schedule`; the waits are in `Ring` and below, each with the name of its rule.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.blocks import BlockPool
from offload.layout import runs
from offload.memory.host_pool import HostPool
from offload.plan import StreamPlan, host_runs
from offload.ring import Attend, Compute, Fill, Ring, ring_schedule
from offload.runtime.base import Event, Runtime, Stream
from offload.runtime.timeline import COMPUTE, COPY, WAIT, WRITE, NoTimeline, Timeline
from offload.transfer import Transfer

# Blocks that `store` sends between two events, so that a wait for a few blocks does not wait for the whole pool.
STORE_GROUP = 64


class OffloadStep(Protocol):
    """What the engine runs in one step. The methods enqueue work on the compute stream and return at once."""

    plan: StreamPlan
    ahead: StreamPlan | None  # what the next step will stream if nothing changes
    write_through: list[tuple[int, int]]  # (GPU block, host block) of blocks that this step makes full

    def compute_all(self) -> bool:
        """Enqueue the whole step at once and return True, or False if it cannot. Asked when nothing streams."""

    def compute(self, layer: int) -> None:
        """Enqueue the piece before layer `layer`'s chunks; write the layer's new KV. `num_layers`: the last piece."""

    def attend(self, layer: int, chunk: Transfer, ring_slot: int) -> None:
        """Enqueue the work that reads a transfer in `ring_slot`, such as attention over its blocks."""


@dataclass
class OffloadCounters:
    """Running totals since the engine was made."""

    streamed_bytes: int = 0  # host to GPU, prefetched chunks that were not used included
    discarded_bytes: int = 0  # of these, chunks whose prefetch was not used
    written_bytes: int = 0  # GPU to host
    num_fills: int = 0
    num_copies: int = 0


@dataclass(frozen=True)
class _Write:
    """GPU blocks that were sent to the host together; `number` counts up in the order of the write stream."""

    number: int
    blocks: list[int]
    written: Event


@dataclass
class _Deferred:
    """Released blocks that return to their pool once all events have been reached; lower orders are reached first."""

    blocks: list[int]
    events: tuple[Event, ...]
    order: int = 0


class OffloadEngine:
    """Streams host blocks through a ring beside the compute of each layer.

    Args:
        gpu_kv: `[num_layers, num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`, the GPU pool.
        gpu_blocks: who holds which GPU block.
        host: the host pool.
        ring: the ring slots.
        compute: the stream on which the steps' work is enqueued.
    """

    def __init__(
        self,
        runtime: Runtime,
        gpu_kv: torch.Tensor,
        gpu_blocks: BlockPool,
        host: HostPool,
        ring: Ring,
        compute: Stream,
    ) -> None:
        self.runtime = runtime
        self.layout = host.layout
        self.host = host
        self.ring = ring
        self.compute = compute
        self.copy = runtime.stream("copy")
        self.write = runtime.stream("write")
        self.counters = OffloadCounters()
        self._timeline = NoTimeline()  # of the step that is being enqueued
        self._gpu_kv = gpu_kv
        self._gpu_blocks = gpu_blocks
        self._kv_ready = runtime.event()  # compute: a layer's new KV is written
        self._written = runtime.event()  # write: all write-through so far has arrived on the host
        self._has_unread_writes = False
        self._first = 0  # running number of the next step's chunk 0
        self._filled: list[tuple[int, Transfer]] = []  # chunks of the next step that are in the ring already
        self._num_writes = 0
        self._writing: deque[_Write] = deque()  # write-through that may not have run
        self._last_write: dict[int, _Write] = {}  # the newest of these by GPU block
        self._deferred_gpu: list[_Deferred] = []  # in the order in which their events are reached
        self._deferred_host: list[_Deferred] = []

    def run(self, step: OffloadStep, timeline: Timeline | None = None) -> None:
        """Enqueues one whole step. Nothing in it waits for the device.

        Args:
            timeline: records what each stream does and when; None records nothing.
        """
        self._timeline = NoTimeline() if timeline is None else timeline
        try:
            self._run(step, self._timeline)
        finally:
            self._timeline = NoTimeline()  # blocks may be written between steps, too

    def _run(self, step: OffloadStep, timeline: NoTimeline) -> None:
        plan, ring = step.plan, self.ring
        # Write-through of the step before must have arrived before its blocks are read again. One wait serves the
        # whole step: blocks that become full in this step are not in its plan.
        if self._has_unread_writes:
            self.copy.wait(self._written, "ring.fill_after_write_through")
            self._has_unread_writes = False
        self._adopt_prefetch(plan)
        timeline.begin(self.compute, COMPUTE)
        if not any(plan.chunks) and step.compute_all():
            if step.write_through:
                self._write_through(range(self.layout.num_layers), step.write_through)
                self._note_writes(step.write_through)
            timeline.lap(self.compute, COMPUTE, "whole step")
            return
        ahead = step.ahead.head(ring.num_ring_slots) if step.ahead is not None else []
        chunks = [(layer, chunk) for layer, chunks in enumerate(plan.chunks) for chunk in chunks]
        filled, self._filled = len(self._filled), []
        for operation in ring_schedule(
            plan.chunks_per_layer, ring.num_ring_slots, first=self._first, filled=filled, chunks_ahead=len(ahead)
        ):
            match operation:
                case Compute(layer):
                    step.compute(layer)
                    timeline.lap(self.compute, COMPUTE, "layer", layer=layer)
                    if step.write_through and layer < self.layout.num_layers:
                        self._write_through([layer], step.write_through)
                case Fill(number, ring_slot, is_ahead):
                    layer, chunk = (ahead if is_ahead else chunks)[number]
                    self._fill(layer, chunk, ring_slot)
                    what = "prefetch for the next step" if is_ahead else "fill of a ring slot"
                    num_bytes = chunk.num_bytes(self.layout)
                    timeline.lap(self.copy, COPY, what, num_bytes=num_bytes, layer=layer, chunk=number)
                    if is_ahead:
                        self._filled.append((layer, chunk))
                case Attend(layer, number, ring_slot):
                    ring.before_attention(self.compute, ring_slot)
                    timeline.lap(self.compute, COMPUTE, WAIT, layer=layer, chunk=number)
                    step.attend(layer, chunks[number][1], ring_slot)
                    self.runtime.poison(self.compute, ring.slots[ring_slot])
                    ring.after_attention(self.compute, ring_slot)
                    timeline.lap(self.compute, COMPUTE, "attention over a ring slot", layer=layer, chunk=number)
        self._first += len(chunks)
        if step.write_through:
            self._note_writes(step.write_through)

    def _note_writes(self, pairs: list[tuple[int, int]]) -> None:
        """Record an event behind the write-through of these blocks, for whoever reads or reuses the blocks."""
        self._written = self.runtime.event()
        self.write.record(self._written)
        self._has_unread_writes = True
        self._num_writes += 1
        write = _Write(self._num_writes, [gpu_block for gpu_block, _ in pairs], self._written)
        self._writing.append(write)
        self._last_write.update(dict.fromkeys(write.blocks, write))

    def release_gpu(self, blocks: Iterable[int]) -> None:
        """Gives back GPU blocks, each once the write-through that reads it has run."""
        self._forget_finished_writes()
        waiting: dict[int, _Deferred] = {}
        finished = []
        for block in blocks:
            if self._gpu_blocks.references(block) > 1:
                self._gpu_blocks.release([block])  # somebody else still holds it: the last release waits
                continue
            write = self._last_write.get(block)
            if write is None:
                finished.append(block)
            else:
                waiting.setdefault(write.number, _Deferred([], (write.written,), write.number)).blocks.append(block)
        self._free(self._gpu_blocks, finished)
        for deferred in waiting.values():
            insort(self._deferred_gpu, deferred, key=lambda other: other.order)

    def _forget_finished_writes(self) -> None:
        while self._writing and self._writing[0].written.query("gpu_block.reuse_after_write_through"):
            done = self._writing.popleft()
            for block in done.blocks:
                if self._last_write.get(block) is done:
                    del self._last_write[block]

    def release_host(self, blocks: Iterable[int]) -> None:
        """Gives back host blocks, once the copies that read or write them have run.

        All prefetched chunks are dropped if one of them holds a block that nobody else holds: the block may be handed
        out again with other content.
        """
        copied = self.runtime.event()
        self.copy.record(copied)
        self._deferred_host.append(_Deferred(list(blocks), (copied, self._written)))
        if self._filled:
            leaving = self._leaving_host
            if any(leaving.intersection(chunk.host_blocks) for _, chunk in self._filled):
                self._discard_prefetch()

    def reclaim(self) -> None:
        """Puts released blocks whose copies have run back into their pools."""
        self._forget_finished_writes()
        self._reclaim(self._deferred_gpu, self._gpu_blocks, "gpu_block.reuse_after_write_through")
        self._reclaim(self._deferred_host, self.host.blocks, "host_block.reuse_after_copies")

    def wait_for_gpu(self, count: int) -> None:
        """Wait, for as few copies as possible, until `count` GPU blocks are free or all released ones are."""
        self._reclaim(self._deferred_gpu, self._gpu_blocks, "gpu_block.reuse_after_write_through", wanted=count)

    def wait_for_host(self, count: int) -> None:
        """Wait, for as few copies as possible, until `count` host blocks are free or all released ones are."""
        self._reclaim(self._deferred_host, self.host.blocks, "host_block.reuse_after_copies", wanted=count)

    def take_back_gpu(self, block: int) -> bool:
        """Hold a released GPU block again that a write-through still reads. Return False if the block is no such block.

        The block may be read at once. When it is released again, it waits for that write-through as before.
        """
        for deferred in self._deferred_gpu:
            if block in deferred.blocks:
                deferred.blocks.remove(block)
                return True
        return False

    @property
    def num_deferred_gpu(self) -> int:
        """Number of released GPU blocks that a copy may still read."""
        return sum(len(deferred.blocks) for deferred in self._deferred_gpu)

    @property
    def num_deferred_host(self) -> int:
        """Number of host blocks that nobody holds any more, but that a copy may still touch."""
        return len(self._leaving_host)

    @property
    def _leaving_host(self) -> set[int]:
        released = Counter(block for deferred in self._deferred_host for block in deferred.blocks)
        return {block for block, count in released.items() if self.host.blocks.references(block) == count}

    def store(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (GPU block, host block) pairs, to the host, in this order. Later work runs beside it."""
        for begin in range(0, len(pairs), STORE_GROUP):
            group = pairs[begin : begin + STORE_GROUP]
            self._write_through(range(self.layout.num_layers), group)
            self._note_writes(group)

    def load(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (GPU block, host block) pairs, to the GPU, between steps, and wait for the copies."""
        self.runtime.synchronize()
        for layer in range(self.layout.num_layers):
            for on_gpu, on_host in self._pair_runs(layer, pairs):
                self.copy.copy(on_gpu, on_host)
                self.counters.streamed_bytes += on_host.nbytes
        self.copy.synchronize()

    def drain(self) -> None:
        """Waits until no copy is in flight, drops the prefetch and reclaims every released block."""
        self.runtime.synchronize()
        self._discard_prefetch()
        self.reclaim()

    def recover(self) -> None:
        """Forget every copy and every released block. Nothing may be in flight; the owner rebuilds both pools."""
        self._discard_prefetch()
        self._has_unread_writes = False
        self._writing.clear()
        self._last_write.clear()
        self._deferred_gpu.clear()
        self._deferred_host.clear()

    def _adopt_prefetch(self, plan: StreamPlan) -> None:
        """Keep the chunks that the step before prefetched, as far as they are the first ones of this step."""
        useful = 0
        for filled, wanted in zip(self._filled, plan.head(len(self._filled)), strict=False):
            if filled != wanted:
                break
            useful += 1
        self._discard_prefetch(useful)

    def _discard_prefetch(self, keep: int = 0) -> None:
        """Forget all but the first `keep` prefetched chunks. The copy stream refills their ring slots in order."""
        for _, chunk in self._filled[keep:]:
            self.counters.discarded_bytes += chunk.num_bytes(self.layout)
        del self._filled[keep:]

    def _fill(self, layer: int, chunk: Transfer, ring_slot: int) -> None:
        self.ring.before_fill(self.copy, ring_slot)
        slot = self.ring.bytes[ring_slot]
        assert chunk.num_bytes(self.layout) <= len(slot), "a ring slot holds less than that"
        self._timeline.begin(self.copy, COPY)
        for destination, source in chunk.copies(layer, slot, self.host):
            self.copy.copy(destination, source)
            self.counters.streamed_bytes += source.nbytes
            self.counters.num_copies += 1
        self.ring.after_fill(self.copy, ring_slot)
        self.counters.num_fills += 1

    def _write_through(self, layers: Iterable[int], pairs: list[tuple[int, int]]) -> None:
        self.compute.record(self._kv_ready)
        self.write.wait(self._kv_ready, "write_through.after_kv_is_written")
        for layer in layers:
            before = self.counters.written_bytes
            self._timeline.begin(self.write, WRITE)
            for on_gpu, on_host in self._pair_runs(layer, pairs):
                self.write.copy(on_host, on_gpu)
                self.counters.written_bytes += on_gpu.nbytes
            num_bytes = self.counters.written_bytes - before
            self._timeline.lap(self.write, WRITE, "write-through", num_bytes=num_bytes, layer=layer)

    def _pair_runs(self, layer: int, pairs: list[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(GPU, host) views of neighbouring blocks that one copy can move."""
        for gpu_block, host_block, count in runs(pairs):
            blocks = tuple(range(host_block, host_block + count))
            for place, segment, begin, part in host_runs(blocks, self.host.blocks_per_segment):
                on_gpu = self._gpu_kv[layer, gpu_block + place : gpu_block + place + part]
                yield on_gpu, self.host.run(layer, segment, begin, part)

    def _reclaim(self, deferred: list[_Deferred], pool: BlockPool, rule: str, wanted: int = 0) -> None:
        """Free the blocks whose events have been reached. While fewer than `wanted` are free, wait for the events."""
        while deferred:
            if pool.num_free < wanted:
                for event in deferred[0].events:
                    event.synchronize(rule)
            elif not all(event.query(rule) for event in deferred[0].events):
                return
            self._free(pool, deferred.pop(0).blocks)

    def _free(self, pool: BlockPool, blocks: Iterable[int]) -> None:
        freed = pool.release(blocks)
        if self.runtime.poisons:
            for block in freed:
                self._poison_block(pool, block)

    def _poison_block(self, pool: BlockPool, block: int) -> None:
        """Poison a freed block, so that whoever still reads it notices."""
        for layer in range(self.layout.num_layers):
            if pool is self._gpu_blocks:
                self.runtime.poison(self.compute, self._gpu_kv[layer, block])
            else:
                self.runtime.poison(self.write, self.host.block(layer, block))
