"""The layer loop: the one place that walks the pieces of a model, for every kind of step.

A model is a list of pieces with cuts between them (`models/pieces.py`). A kind of step does something *around* pieces,
which is its attention. Pieces between two cuts at which a step wants something from host memory are a *section*: one
graph, where they are captured. A step that wants nothing has one section.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.pieces import DeviceState
from nanoinfer.models.step_tensors import StepTensors
from offload import Chunk, KVLayout, StreamPlan


class StepHooks(Protocol):
    """What a kind of step does around pieces: at once if the piece runs at once, else enqueued as the piece is.

    Behind the layers come the slices of the head, one where it stays on the GPU; none in a step that samples nothing.
    """

    def begin(self, tensors: StepTensors) -> None:
        """Make the inputs of the first piece."""

    def attend(self, layer: int, tensors: StepTensors) -> None:
        """Begin the attention of a layer, counted among those with attention, as far as what it reads is on the GPU."""

    def end_attention(self, layer: int, tensors: StepTensors) -> None:
        """Make the attention's output, which the next piece reads."""

    def end(self, tensors: StepTensors) -> None:
        """Take what the last layer left."""

    def head(self, number: int, tensors: StepTensors) -> None:
        """Make the logits of a slice of the head."""


def run_now(key: Hashable, work: Callable[[], None], number: int = 0) -> None:
    """Run the work now: it is captured as part of something larger, or nothing is captured."""
    work()


class Pieces:
    """Runs the pieces of one model. Slices of the head are numbered behind them.

    Attributes:
        attention_at: cut -> the layer whose attention lies there, counted among those with attention; None: there is
            none.
        sinks: layer with attention -> its sinks, [num_q_heads], or None.
        own: layer with attention -> what the KV format wants of it, as `KVFormat.own` returns it.
        reads: layer with attention -> where it reads keys and values.
        cuts: one behind each piece, and behind each slice of the head.
        group_of: layer with attention -> number of the group of layers whose blocks it reads.
        ends_without_kv: for each section of a step in which no KV streams, the number of its last piece.
        ends_with_kv: the same for a step in which KV may stream at every attention.
    """

    def __init__(self, model: Decoder, held: DeviceState, most_rows: int = 0) -> None:
        """most_rows: of a step that is not large, see `Cut.in_large_steps`; 0: none is."""
        self._pieces, self._held = model.pieces(), held
        self._most_rows = most_rows or sys.maxsize
        self.sinks, self.own, self.reads = model.attention_sinks(), model.kv_own(), model.spec.kv_read
        self.group_of, self._num_groups = [read.group for read in self.reads], len(model.spec.kv_groups)
        self.cuts = (*(piece.cut for piece in self._pieces), *model.streamed.head_cuts())
        last = len(self.cuts) - 1
        numbers = itertools.count()
        self.attention_at = [None if cut.reads is None else next(numbers) for cut in self.cuts]
        self._without_kv: dict[bool, StreamPlan] = {}
        self.ends_without_kv = tuple(i for i, cut in enumerate(self.cuts) if cut.transfers or i == last)
        reads = [i for i, cut in enumerate(self.cuts) if cut.reads is not None]
        self.ends_with_kv = tuple(sorted({*self.ends_without_kv, *reads}))

    def __len__(self) -> int:
        """The number of pieces, without the head."""
        return len(self._pieces)

    def piece_indices(self, samples: bool) -> range:
        """The numbers of all pieces and slices of a step."""
        return range(len(self.cuts) if samples else len(self))

    @property
    def one_of_each_kind(self) -> list[int]:
        """The first piece of each kind, ascending, with those behind which they begin that read what these leave."""
        first = {piece.kind(): i for i, piece in reversed([*enumerate(self._pieces)])}
        found = set(first.values())
        for i in reversed(range(1, len(self))):
            if i in found and self.cuts[i - 1].reads is None:
                found.add(i - 1)
        return sorted(found)

    def run_with_hooks(
        self,
        index: int,
        tensors: StepTensors,
        hooks: StepHooks,
        run: Callable[[Hashable, Callable[[], None], int], object] = run_now,
    ) -> None:
        """Run a piece, or a slice of the head, and what a kind of step does around it.

        Args:
            run: runs the piece, as `Graphs.run` does with the key of a prefill step.
        """
        if index >= len(self):
            hooks.head(index - len(self), tensors)
            return
        if index == 0:
            hooks.begin(tensors)
        elif (layer := self.attention_at[index - 1]) is not None:
            hooks.end_attention(layer, tensors)
        run(("prefill", len(tensors)), partial(self.run, index, tensors), index)
        if index == len(self) - 1:
            hooks.end(tensors)
        elif (layer := self.attention_at[index]) is not None:
            hooks.attend(layer, tensors)

    def run(self, index: int, tensors: StepTensors) -> None:
        """Run a piece on the current stream."""
        self._pieces[index].run(tensors, self._held)

    # What passes at the cuts

    def plan(self, chunks: Sequence[Sequence[Chunk]], num_rows: int = 1, samples: bool = True) -> StreamPlan:
        """Return what passes in a step.

        chunks: for each group the KV chunks of each of its layers; num_rows: tokens and padding; samples: whether
            the step has logits. Without, it brings nothing of the head.
        """
        is_large = num_rows > self._most_rows
        if any(chunks) or is_large:
            return self._plan(chunks, is_large, samples)
        if samples not in self._without_kv:
            self._without_kv[samples] = self._plan([()] * self._num_groups, False, samples)
        return self._without_kv[samples]

    def _plan(self, chunks: Sequence[Sequence[Chunk]], is_large: bool, samples: bool) -> StreamPlan:
        kv = [() if cut.reads is None else chunks[cut.reads.group] for i, cut in enumerate(self.cuts)]
        own = [cut.transfers + (cut.in_large_steps if is_large else ()) for cut in self.cuts]
        if not samples:  # the cut behind the last piece brings the first slice
            own[len(self) - 1 :] = [()] * (len(own) - len(self) + 1)
        return StreamPlan(tuple([*some, *more] if more else some for some, more in zip(kv, own, strict=True)))

    def common_bytes(self, plan: StreamPlan, layout: KVLayout) -> int:
        """Return the bytes that pass in a step besides KV."""
        return sum(one.num_bytes(layout) for _, one in plan.transfers if not isinstance(one, Chunk))
