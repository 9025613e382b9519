"""A model as pieces with cuts between them: what the engine runs, captures and measures.

A piece runs on the device without the host. At a cut the engine acts: it attends to keys and values, which may lie
anywhere, and waits for what the model wants from host memory. A cut at which nothing is wanted costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nanoinfer.models.step_tensors import StepTensors
from offload import Cut, KVLayout, Transfer


@dataclass(frozen=True)
class Held:
    """What pieces find on the device at fixed addresses, beside the weights.

    Attributes:
        gpu_kv: for each layer with attention `[num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`.
        states: layer -> its recurrent state of all rows.
        places: the places of the model's cuts, each [bytes] uint8.
    """

    gpu_kv: Sequence[Tensor]
    states: Mapping[int, Tensor]
    places: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Piece:
    """What a model computes between two cuts.

    Attributes:
        kind: says of which kind it is, when that is asked. Pieces of one kind launch the same kernels with the same
            sizes, so one of them is measured and warmed up.
        run: enqueues the work on the current stream; may be captured.
        cut: behind the piece. Behind the last one lies the head, and no attention: a transfer only of its first slice.
    """

    kind: Callable[[], Hashable]
    run: Callable[[StepTensors, Held], None]
    cut: Cut = Cut()


def place_bytes(pieces: Sequence[Piece], layout: KVLayout) -> tuple[int, ...]:
    """Return the bytes of each place that a cut of these pieces names: enough for the largest transfer."""
    own = [transfer for piece in pieces for transfer in piece.cut.transfers if transfer.landing is not None]
    sizes: dict[int, int] = {}
    for transfer in own:
        place, num_bytes = transfer.landing.place, transfer.num_bytes(layout)
        sizes[place] = max(sizes.get(place, 0), num_bytes)
    return tuple(sizes[place] for place in range(len(sizes)))


class RingTransfer(Transfer, Protocol):
    """A transfer of a model's cut that passes through the ring: at most a ring slot's bytes.

    Those follow from `ring_slot_bytes`, and with a short `max_model_len` there are fewer (`memory/plan.py`).

    Attributes:
        kind: transfers of one kind are used alike: captured once for each ring slot, whichever comes first.
    """

    @property
    def kind(self) -> Hashable: ...

    def use(self, x: Tensor, num_live: Tensor, slot: Tensor) -> None:
        """Enqueue the work that reads the ring slot on the current stream; may be captured.

        x: [N, hidden_size], the residual sum, of which the first `num_live` rows, [1] int32 on the device, may be
        changed; slot: [bytes] uint8.
        """
