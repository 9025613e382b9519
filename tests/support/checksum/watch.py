"""Which bytes an engine reads and writes, and when: what a flipped byte must change follows from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from simulated import SimulatedRuntime, SimulatedStream
from torch import Tensor

import checksum.mixing
from nanoinfer import LLMEngine
from offload.memory.host_pool import HostPool
from offload.runtime.base import poison_of


class WatchedRuntime(SimulatedRuntime):
    """Notes what each operation reads and writes; before operation `flip_at` it flips a bit of a byte.

    Attributes:
        accesses: (number of the operation, "read", "write" or "copy", address, bytes, address of the copy).
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accesses: list[tuple[float, str, int, int, int]] = []
        self.number = 0
        self.flip_at: int | None = None
        self.flipped: Callable[[], Tensor] | None = None

    def filled(self, buffer: Tensor) -> None:
        """Note that the host writes a staging buffer now, between two operations."""
        if checksum.mixing.note is not None:
            self.accesses.append((self.number - 0.5, "write", buffer.data_ptr(), buffer.nbytes, 0))

    def begin(self, monkeypatch, flip_at: int | None = None, flipped: Callable[[], Tensor] | None = None) -> None:
        """Note accesses from now on, or flip a byte before an operation from now on. flipped: what is: [1] uint8."""
        self.synchronize()
        self.flip_at, self.flipped, self.number = flip_at, flipped, 0
        monkeypatch.setattr(checksum.mixing, "note", self.note if flipped is None else None)

    def note(self, kind: str, memory: Tensor, copied_to: int = 0) -> None:
        self.accesses.append((self.number, kind, memory.data_ptr(), memory.nbytes, copied_to))

    def poison(self, stream: SimulatedStream, tensor: Tensor) -> None:
        def fill() -> None:
            tensor.fill_(poison_of(tensor.dtype))
            if checksum.mixing.note is not None:
                self.note("write", tensor)

        stream.run(fill)

    def _execute(self, stream: SimulatedStream) -> None:
        if self.number == self.flip_at:
            byte = self.flipped()
            byte ^= 64  # of the highest byte of a float32 it makes NaN of some
        operation = stream.queue[0]
        super()._execute(stream)
        if operation.reads is not None and checksum.mixing.note is not None:
            read, written = operation.reads, operation.writes
            self.accesses.append((self.number, "copy", read.begin, read.end - read.begin, written.begin))
        self.number += 1

    def matters(self, address: int, number: int) -> bool:
        """Whether a byte is read before it is written again, from an operation on, itself or what is copied of it."""
        first = next((i for i, access in enumerate(self.accesses) if access[0] >= number), len(self.accesses))
        open_ = [(address, first)]
        while open_:
            address, first = open_.pop()
            for index, (_, kind, begin, size, copied_to) in enumerate(self.accesses[first:], first):
                if begin <= address < begin + size:
                    if kind == "read":
                        return True
                    if kind == "write":
                        break
                    open_.append((copied_to + address - begin, index + 1))
                elif kind == "copy" and copied_to <= address < copied_to + size:
                    break
        return False


def _segments(host: HostPool) -> list[Tensor]:
    sizes = [host.blocks_per_segment] * (host.num_blocks // host.blocks_per_segment)
    sizes += [host.num_blocks % host.blocks_per_segment] if host.num_blocks % host.blocks_per_segment else []
    return [host.run(number, 0, size) for number, size in enumerate(sizes)] if host.num_bytes else []


def memory_of(engine: LLMEngine) -> dict[str, list[Tensor]]:
    """Return the buffers of an engine by what they are, each as bytes."""
    runner, streamed = engine.runner, engine.runner.model.streamed
    on_gpu = {
        name: one for name, one in runner.model.named_parameters() if "embed" not in name and one.is_floating_point()
    }
    areas = [(place.data_ptr(), place.data_ptr() + place.nbytes) for place in streamed.landing_buffers]
    stays = [one for one in on_gpu.values() if not any(a <= one.data_ptr() < b for a, b in areas)]
    splits = runner.decode_program.attention.splits
    items = [(one.begin_of_items + 4, buffer) for one in splits for buffer in one.table.staging.buffers]
    found = {
        "GPU block": [runner.gpu_kv],
        "host block": _segments(runner.offload.host),
        "ring slot": list(runner.ring.bytes),
        "weight": stays,
        "landing": [] if streamed.slot_sets else streamed.landing_buffers,
        "weight on the host": [run.home for run in streamed.runs.values() if run.home is not None],
        "slot": [one.layers[0].slots.pool for one in streamed.slot_sets],
        "expert on the host": [experts.slots.home for one in streamed.slot_sets for experts in one.layers],
        "staging": [buffer[begin:] for begin, buffer in items],
    }
    return {name: [one.detach().reshape(-1).view(torch.uint8) for one in some] for name, some in found.items() if some}


def draws(runtime: WatchedRuntime, memory: dict[str, list[Tensor]], generator: random.Random) -> Iterator[tuple]:
    """Yield (kind, index of the buffer, byte, operation): half of them of bytes that some operation reads."""
    read = [access for access in runtime.accesses if access[1] != "write"]
    while True:
        kind = generator.choice(list(memory))
        index = generator.randrange(len(memory[kind]))
        buffer, number = memory[kind][index], generator.randrange(runtime.number)
        begin = buffer.data_ptr()
        own = [one for one in read if one[2] < begin + buffer.numel() and begin < one[2] + one[3]]
        if own and generator.random() < 0.8:
            at, _, address, size, _ = generator.choice(own)
            first, last = max(address, begin), min(address + size, begin + buffer.numel())
            byte, number = generator.randrange(first, last) - begin, int(max(0, at - generator.randrange(-2, 20)))
        else:
            byte = generator.randrange(buffer.numel())
        yield kind, index, byte, min(number, runtime.number - 1)
