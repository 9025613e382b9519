"""Weights that do not fit on the GPU: they lie in host memory, and each piece's pass to the GPU before it runs.

What a piece reads of projections and experts is one run of bytes, in host memory and in one of two places on the GPU,
which streamed pieces use in turn. A weight's tensors are views into its place, at the same address in each step, so
graphs and kernels are as ever. The copy engine fills one place while a piece computes from the other. Norms,
routers' biases, tables and what the first piece reads stay on the GPU: no cut lies before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.layers.experts import Experts
from nanoinfer.layers.linear import Linear
from nanoinfer.models.base import AttentionState, ModelSpec
from offload import Cut, KVLayout, Landing
from offload.memory.host_pool import HostPool
from offload.memory.pinned import HostArena

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin in a run, as torch's allocator has it on a GPU."""
NUM_PLACES = 2
REMEDY = "have fewer weights streamed (resident_weights_limit, gpu_memory_limit)"


@dataclass(eq=False)
class WeightRun:
    """The weights of a streamed piece: a `Transfer` to the place where the piece reads them.

    Attributes:
        piece: its number.
        landing: the place, until the piece is done.
        place: [bytes] uint8, the run's bytes there.
        home: [bytes] uint8, the run in host memory; None: it is not filled yet.
    """

    piece: int
    landing: Landing
    place: Tensor
    home: Tensor | None = None
    host_blocks = ()

    def num_bytes(self, layout: KVLayout) -> int:
        return len(self.place)

    def copies(self, target: Tensor, host: HostPool) -> list[tuple[Tensor, Callable[[int | None], Tensor]]]:
        return [(target[: len(self.place)], lambda kv_layer: self.home)]


class StreamedWeights:
    """Where the weights of a model lie that is built module by module; those of some pieces are streamed.

    Args:
        spec: of the model; `piece_bytes` is needed if pieces are streamed.
        pieces: numbers of the streamed pieces, ascending; not the first one.

    Attributes:
        runs: by number of the piece.
        places: [bytes] uint8 each.
        num_bytes: bytes of the run that each piece would have, of what was taken so far.
        piece_of: the piece of each module that is streamed.
    """

    def __init__(self, spec: ModelSpec, pieces: Sequence[int], device: torch.device | str) -> None:
        self._device = torch.device(device)
        attentions = spec.kv_layers
        # Piece i ends with the queries of attention i; what follows that attention belongs to piece i + 1.
        self._begins = {layer: number for number, layer in enumerate(attentions)}
        self._inside = {}
        for layer, state in enumerate(spec.layers):
            if not isinstance(state, AttentionState):
                self._inside[layer] = sum(one < layer for one in attentions)
        self.num_bytes = [0] * (len(attentions) + 1)
        self.piece_of: dict[nn.Module, int] = {}
        assert 0 not in pieces, "what the first piece reads has no cut before it"
        sizes = place_sizes(spec.piece_bytes, pieces)
        self.places = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self.runs: dict[int, WeightRun] = {}
        for turn, piece in enumerate(pieces):
            place = turn % NUM_PLACES
            memory = self.places[place][: spec.piece_bytes[piece]]
            self.runs[piece] = WeightRun(piece, Landing(place, until=piece), memory)
        self.arenas: dict[int, HostArena] = {}

    # While the model is built

    def take_layer(self, number: int, layer: nn.Module) -> None:
        """Count the weights of a layer that was built just now, and move those that are streamed to their place."""
        for module in layer.modules():
            if isinstance(module, Linear):
                is_before = number in self._begins and module is layer.self_attn.qkv_proj
                self._take(self._piece(number, is_before), module)

    def pool_of(self, number: int, experts: Experts) -> Tensor | None:
        """Count the experts of a layer; return [num_experts, stride] uint8 in their place if they are streamed."""
        piece, num_bytes = self._piece(number, False), experts.num_experts * experts.stride
        begin = self._count(piece, num_bytes)
        if piece not in self.runs:
            return None
        self.piece_of[experts] = piece
        return self.runs[piece].place[begin : begin + num_bytes].view(experts.num_experts, experts.stride)

    def _piece(self, layer: int, is_before_attention: bool) -> int:
        return self._inside[layer] if layer in self._inside else self._begins[layer] + (not is_before_attention)

    def _count(self, piece: int, num_bytes: int) -> int:
        """Make room for a tensor in a piece's run, and return its first byte there."""
        begin = self.num_bytes[piece]
        self.num_bytes[piece] = end = begin + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if piece in self.runs:
            found = len(self.runs[piece].place)
            assert end <= found, f"piece {piece} has {end} bytes, {found} were counted"
        return begin

    def _take(self, piece: int, module: Linear) -> None:
        begins = {  # by the address of its storage
            tensor.untyped_storage().data_ptr(): self._count(piece, tensor.nbytes)
            for tensor in module.parameters(recurse=False)
        }
        if piece not in self.runs:
            return
        self.piece_of[module] = piece
        place = self.runs[piece].place
        with torch.no_grad():
            for tensor in _tensors(vars(module)):
                begin = begins.get(tensor.untyped_storage().data_ptr())
                if begin is not None:
                    begin += place.storage_offset() + tensor.storage_offset() * tensor.element_size()
                    where = begin // tensor.element_size(), tensor.shape, tensor.stride()
                    tensor.set_(place.untyped_storage(), *where)

    # While the weights are filled

    def groups(self, require_pin: bool = False) -> Iterator[Callable[[nn.Module], bool]]:
        """Yield for each group of modules that are filled together whether a module belongs to it.

        First comes what stays on the GPU, then each run, which is filled in its place. When the next group is asked
        for, the run's bytes go home, to host memory that is pinned for CUDA.

        Raises:
            MemoryError: there is not as much host memory.
            PinError: with `require_pin`, the system refused to pin it.
        """
        yield lambda module: module not in self.piece_of
        pieces = list(self.runs)
        for number, piece in enumerate(pieces):
            for one in pieces[number : number + 2]:  # the next one is touched and pinned while this one is filled
                if one not in self.arenas:
                    self._open(one, require_pin)
            yield partial(self._is_of, piece)
            run, arena = self.runs[piece], self.arenas[piece]
            arena.wait()
            run.home = arena.segment(0)
            run.home.copy_(run.place)

    def _is_of(self, piece: int, module: nn.Module) -> bool:
        return self.piece_of.get(module) == piece

    def _open(self, piece: int, require_pin: bool) -> None:
        # Where the system refused once, it is not asked again, and has said so.
        pin = self._device.type == "cuda" and not any(arena.unpinned_bytes for arena in self.arenas.values())
        options = dict(pin=pin, require_pin=require_pin, remedy=REMEDY)
        self.arenas[piece] = HostArena(1, len(self.runs[piece].place), **options)

    def bring(self, module: nn.Module) -> None:
        """Have the weights of a module in its place now, for who looks at them outside of a step."""
        piece = self.piece_of.get(module)
        if piece is not None:
            self.runs[piece].place.copy_(self.runs[piece].home)

    def cuts(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Return the cuts of a model's pieces with what is brought there for the pieces behind them."""
        found = list(cuts)
        for piece, run in self.runs.items():
            found[piece - 1] = Cut(cuts[piece - 1].kv_layer, (*cuts[piece - 1].transfers, run))
        return found

    def close(self) -> None:
        """Give host memory back. Nothing may be in flight."""
        for run in self.runs.values():
            run.home = None
        for arena in self.arenas.values():
            arena.close()


def place_sizes(piece_bytes: Sequence[int], pieces: Sequence[int]) -> list[int]:
    """Return the bytes of the places that these pieces use in turn. piece_bytes: of each piece's run."""
    turns = (pieces[turn::NUM_PLACES] for turn in range(NUM_PLACES))
    return [max(piece_bytes[piece] for piece in turn) for turn in turns if turn]


def spread(num_pieces: int, count: int) -> tuple[int, ...]:
    """Return `count` of the pieces 1 to num_pieces - 1, spread evenly: between two, the link has time to go ahead."""
    most = num_pieces - 1
    return tuple(1 + (2 * index + 1) * most // (2 * count) for index in range(count))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's attributes, and of the plain objects that hold some of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, SimpleNamespace):
        yield from _tensors(vars(value))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
