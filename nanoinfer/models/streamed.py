"""Weights that do not fit on the GPU: they lie in host memory, and pass to the GPU before who reads them runs.

Either each piece's pass there whole, or a layer's experts one by one, when a row chooses them (`expert_slots.py`).

What a piece reads of projections and experts is one run of bytes, in host memory and in one of two landing buffers on
the GPU, which streamed pieces use in turn. A weight's tensors are views into its buffer, at the same address in each
step, so graphs and kernels are as ever. The copy engine fills one buffer while a piece computes from the other. Norms
and routers' biases stay on the GPU, and so does what the first piece reads: nothing can be awaited before it.
Embeddings may lie in host memory for themselves (`host_table.py`), and the head, whose slices follow the pieces through
the landing buffers (`streamed_head.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.devices.registry import device_of
from nanoinfer.layers.expert_pools import share_pools
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.linear import Embedding, Head, Linear
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.expert_slots import SlotCounts, SlotSet, slot_sets
from nanoinfer.models.host_table import HostTable
from nanoinfer.models.module_tensors import ALIGNMENT, move_tensors
from nanoinfer.models.pieces import Bound, bounds
from nanoinfer.models.streamed_head import StreamedHead
from offload import Cut, KVLayout, Landing
from offload.memory.host_pool import HostPool
from offload.memory.pinned import HostArena

NUM_LANDING_BUFFERS = 2
REMEDY = "have fewer weights streamed (resident_weights_limit, gpu_memory_limit)"


@dataclass(frozen=True)
class HostPlacement:
    """Which weights lie in host memory.

    Attributes:
        pieces: numbers of the pieces whose weights are streamed in every step, ascending; not the first one.
        num_slots: of each sparse layer's experts, how many may lie on the GPU, while all lie in host memory; 0: experts
            lie where the rest of their layer does. Not beside streamed pieces.
        slot_rows: the most rows of a step that brings experts one by one; larger ones have a layer's streamed together.
        embeddings: whether the embedding table lies there, which no tied head reads.
        tables: whether a table of what layers read of a token does.
        head: whether the head does, with embeddings that are tied to it. It is streamed in every step that samples.
        require_pin: whether no other than pinned memory will do.
    """

    pieces: tuple[int, ...] = ()
    num_slots: int = 0
    slot_rows: int = 0
    embeddings: bool = False
    tables: bool = False
    head: bool = False
    require_pin: bool = False


class Group(NamedTuple):
    """Modules whose weights are filled together, and where these lie meanwhile."""

    has: Callable[[nn.Module], bool]
    device: torch.device


@dataclass(eq=False)
class WeightRun:
    """The weights of a streamed piece, or of a layer's experts: a `Transfer` to the buffer where the piece reads them.

    Attributes:
        piece: its number.
        landing: in which landing buffer, until the piece is done.
        buffer: [bytes] uint8, the run's bytes there.
        home: [bytes] uint8, the run in host memory; None: it is not filled yet.
    """

    piece: int
    landing: Landing
    buffer: Tensor
    home: Tensor | None = None
    host_blocks = ()

    def num_bytes(self, layout: KVLayout) -> int:
        return len(self.buffer)

    def copies(self, target: Tensor, host: HostPool) -> list[tuple[Tensor, Callable[[int | None], Tensor]]]:
        return [(target[: len(self.buffer)], lambda layer: self.home)]


class StreamedWeights:
    """Where the weights of a model lie that is built module by module; those of some pieces are streamed.

    Args:
        spec: of the model; `piece_bytes` is needed if pieces are streamed.

    Attributes:
        on_host: which weights are.
        runs: by number of the piece.
        slot_sets: the pools of experts that have slots.
        table: the embeddings, if they lie in host memory; layer_table: what layers read of a token, if that does;
            head_table: a head that does, and has its own weight.
        head: the slices of a head in host memory; None: it stays on the GPU.
        landing_buffers: [bytes] uint8 each; the areas of experts that have slots.
        num_bytes: bytes of the run that each piece would have, of what was taken so far.
        piece_of: the piece of each module that is streamed.
    """

    def __init__(self, spec: ModelSpec, on_host: HostPlacement, device: torch.device | str) -> None:
        self._device, self.on_host, pieces = torch.device(device), on_host, on_host.pieces
        assert not ((pieces or on_host.head) and on_host.num_slots), "experts have slots, or layers are streamed"
        places = bounds(spec)
        # A piece that ends at an attention ends with its queries; what follows belongs to the next piece.
        self._begins = {place.layer: number for number, place in enumerate(places) if place.at_attention}
        self._inside = {}
        for layer in set(range(len(spec.layers))) - self._begins.keys():
            self._inside[layer] = sum(place <= Bound(layer, False) for place in places)
        self.num_bytes = [0] * (len(places) + 1)
        self.piece_of: dict[nn.Module, int] = {}
        assert 0 not in pieces, "nothing can be awaited before the first piece, so its weights stay on the GPU"
        sizes = landing_sizes(spec.run_bytes(pieces, on_host.head))
        self.landing_buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self.runs: dict[int, WeightRun] = {}
        for turn, piece in enumerate(pieces):
            number = turn % NUM_LANDING_BUFFERS
            buffer = self.landing_buffers[number][: spec.piece_bytes[piece]]
            self.runs[piece] = WeightRun(piece, Landing(number, until=piece), buffer)
        self.arenas: dict[int, HostArena] = {}
        self.slot_sets: list[SlotSet] = []
        self.table: HostTable | None = None
        self.layer_table: HostTable | None = None
        self.head_table: HostTable | None = None
        self.head: StreamedHead | None = None
        self._spec = spec
        self._layer_of: dict[Experts, int] = {}

    # While the model is built

    def take_layer(self, number: int, layer: nn.Module) -> None:
        """Count the weights of a layer that was built just now, and move those that are streamed to their buffer."""
        num_moved = len(self.piece_of)
        for module in layer.modules():
            if isinstance(module, Linear):
                is_before = number in self._begins and module is layer.self_attn.qkv_proj
                self._take(self._piece(number, is_before), module)
            elif isinstance(module, Experts):
                self._layer_of[module] = number
        if len(self.piece_of) > num_moved:
            # Give the freed segments back to the device. Else small tensors of the next layer would settle in them and
            # the rest of each segment would stay unused: 0.13 GiB of an 8B model within 8 GiB.
            device_of(self._device).give_back()

    def take_embeddings(self, module: Embedding) -> None:
        """Take the embeddings, if they are to lie in host memory: allocated on the CPU then."""
        if module.is_on_host:
            self.table = HostTable(module, self._device)

    def take_table(self, module: Embedding) -> None:
        """Take a table of what layers read of a token, as embeddings."""
        if module.is_on_host:
            self.layer_table = HostTable(module, self._device)

    def take_head(self, head: Head) -> list[Head]:
        """Take the head, tied embeddings or a weight of its own: allocated on the CPU if it is streamed.

        Returns:
            What computes the logits: the head, or its slices.
        """
        if not self.on_host.head:
            return [head]
        if self.table is None or self.table.module is not head:
            self.head_table = HostTable(head, self._device, is_read=False)
        first, piece = len(self.on_host.pieces), len(self._spec.piece_bytes)
        options = dict(buffers=self.landing_buffers, first=first, piece=piece)
        self.head = StreamedHead(head, self._spec.head_rows, self._spec.dtype, **options)
        device_of(self._device).give_back()  # else tensors that stay would settle in the segments that are free now
        return [one.head for one in self.head.slices]

    def share_pools(self, model: nn.Module) -> nn.ParameterList:
        """Give the experts of all layers their memory, and return what stays on the GPU of those without slots."""
        if self.on_host.num_slots:
            slotted = [one for one in self._layer_of if not one.is_shared]
            self.slot_sets = slot_sets(slotted, self.on_host.num_slots, self._device)
            self.landing_buffers = [area for one in self.slot_sets for area in one.areas]
        pools = share_pools(model, device=self._device, own_pool=self._pool_of)
        for one in self.slot_sets:
            one.give(self.on_host.slot_rows)
        return pools

    def _pool_of(self, experts: Experts) -> Tensor | None:
        """Count the experts of a layer; return [num_experts, stride] uint8 where they are read if they are streamed."""
        piece, num_bytes = self._piece(self._layer_of[experts], False), experts.num_experts * experts.stride
        begin = self._count(piece, num_bytes)
        for one in self.slot_sets:
            if experts in one.layers:
                assert piece and piece not in self.runs, "a piece has experts of one layer, behind a cut"
                area = one.area_of(experts)
                self.runs[piece] = WeightRun(piece, Landing(one.landing_of(experts), until=piece), area.view(-1))
                self.piece_of[experts] = piece
                return area
        if piece not in self.on_host.pieces:
            return None
        self.piece_of[experts] = piece
        return self.runs[piece].buffer[begin : begin + num_bytes].view(experts.num_experts, experts.stride)

    def _piece(self, layer: int, is_before_attention: bool) -> int:
        return self._inside[layer] if layer in self._inside else self._begins[layer] + (not is_before_attention)

    def _count(self, piece: int, num_bytes: int) -> int:
        """Make room for a tensor in a piece's run, and return its first byte there."""
        begin = self.num_bytes[piece]
        self.num_bytes[piece] = end = begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if piece in self.on_host.pieces:
            num_counted = len(self.runs[piece].buffer)
            assert end <= num_counted, f"piece {piece} has {end} bytes, {num_counted} were counted"
        return begin

    def _take(self, piece: int, module: Linear) -> None:
        begins = {  # by the address of its storage
            tensor.untyped_storage().data_ptr(): self._count(piece, tensor.nbytes)
            for tensor in module.parameters(recurse=False)
        }
        if piece in self.on_host.pieces:
            self.piece_of[module] = piece
            move_tensors(module, begins, self.runs[piece].buffer)

    # While the weights are filled

    def groups(self) -> Iterator[Group]:
        """Yield each group of modules that are filled together.

        First comes what stays on the GPU, then embeddings in host memory, then each run, which is filled in its landing
        buffer. When the next group is asked for, the run's bytes go home, to host memory that is pinned for CUDA. Last
        comes a head in host memory.

        Raises:
            MemoryError: there is not as much host memory.
            PinError: with `HostPlacement.require_pin`, or where kernels read it, the system refused to pin it.
        """
        tables = [table.module for table in self._tables()]
        is_there = self.piece_of.keys() | set(tables)
        yield Group(lambda module: module not in is_there, self._device)
        for table in (self.table, self.layer_table):
            if table is not None:
                table.open(REMEDY)
                yield _group_of(table)
        pieces = sorted(self.runs)
        require_pin = self.on_host.require_pin or bool(self.slot_sets)  # kernels read pinned memory alone
        for number, piece in enumerate(pieces):
            for one in pieces[number : number + 2]:  # the next one is touched and pinned while this one is filled
                if one not in self.arenas:
                    self._open(one, require_pin)
            yield Group(partial(self._is_of, piece), self._device)
            run, arena = self.runs[piece], self.arenas[piece]
            arena.wait()
            run.home = arena.segment(0)
            run.home.copy_(run.buffer)
        for one in self._slotted():
            one.slots.home = self.runs[self.piece_of[one]].home.view(one.num_experts, one.stride)
        if self.head_table is not None:
            self.head_table.open(REMEDY, require_pin, may_pin=not self._was_refused())
            yield _group_of(self.head_table)
        if self.head is not None:
            self.head.find_sources()

    @property
    def is_used(self) -> bool:
        """Whether any weights lie in host memory."""
        return bool(self.runs or self._tables())

    def _tables(self) -> list[HostTable]:
        return [table for table in (self.table, self.layer_table, self.head_table) if table is not None]

    def _slotted(self) -> Iterator[Experts]:
        for one in self.slot_sets:
            yield from one.layers

    def _is_of(self, piece: int, module: nn.Module) -> bool:
        return self.piece_of.get(module) == piece

    def _open(self, piece: int, require_pin: bool) -> None:
        pinner = None if self._was_refused() else device_of(self._device).pinner
        options = dict(pinner=pinner, require_pin=require_pin, remedy=REMEDY)
        self.arenas[piece] = HostArena(1, len(self.runs[piece].buffer), **options)

    def _was_refused(self) -> bool:
        """Whether the system refused to pin a run: it is not asked again, and has said so."""
        return any(arena.unpinned_bytes for arena in self.arenas.values())

    def bring(self, module: nn.Module) -> None:
        """Copy the weights of a module to where it reads them, now, for who looks at them outside of a step."""
        piece = self.piece_of.get(module)
        if piece is not None:
            self.runs[piece].buffer.copy_(self.runs[piece].home)

    def cuts(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Return the cuts of a model's pieces with what is brought there for the pieces behind them."""
        extended = list(cuts)
        which = "in_large_steps" if self.slot_sets else "transfers"
        for piece, run in self.runs.items():
            extended[piece - 1] = replace(cuts[piece - 1], **{which: (*getattr(cuts[piece - 1], which), run)})
        if self.head is not None:
            extended[-1] = replace(extended[-1], transfers=(*extended[-1].transfers, self.head.slices[0]))
        return extended

    def head_cuts(self) -> list[Cut]:
        """Return the cuts behind each slice of the head, which bring the next one. A head on the GPU is one slice."""
        return [Cut()] if self.head is None else [*(Cut(transfers=(one,)) for one in self.head.slices[1:]), Cut()]

    def forget_slots(self) -> None:
        """Have no expert in a slot, on the current stream: what lies there may be another's, or not all of it."""
        for one in self._slotted():
            one.slots.forget()

    def slot_counts(self, counts: Sequence[list[list[int]]]) -> list[SlotCounts]:
        """Return what steps found and brought, for each layer with slots. counts: of each of `slot_sets` at a time."""
        own = zip(self.slot_sets, counts, strict=True)
        counted = [pair for one, found in own for pair in zip(one.layers, found, strict=True)]
        return sorted(SlotCounts(self._layer_of[one], *counts, one.stride) for one, counts in counted)

    def close(self) -> None:
        """Give host memory back. Nothing may be in flight."""
        for one in self._slotted():
            one.slots.home = None
        for run in self.runs.values():
            run.home = None
        if self.head is not None:
            for one in self.head.slices:
                one.sources = []
        for arena in self.arenas.values():
            arena.close()
        for table in self._tables():
            table.close()


def _group_of(table: HostTable) -> Group:
    return Group(lambda module: module is table.module, torch.device("cpu"))


def landing_sizes(run_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of the landing buffers that runs of so many bytes use in turn."""
    turns = (run_bytes[turn::NUM_LANDING_BUFFERS] for turn in range(NUM_LANDING_BUFFERS))
    return [max(turn) for turn in turns if turn]


def spread(num_pieces: int, count: int) -> tuple[int, ...]:
    """Return `count` of the pieces 1 to num_pieces - 1, spread evenly: between two, the link has time to go ahead."""
    most = num_pieces - 1
    return tuple(1 + (2 * index + 1) * most // (2 * count) for index in range(count))
