"""The layer loop: the one place that walks the layers of a model, for every kind of step.

A model is cut at its attentions, one for each layer that keeps keys and values. A *segment* is what lies between two of
them: `after_attention` of one such layer, the layers up to the next one that keep recurrent states, and
`before_attention` of the next. The first segment begins with the embedding, the last one leaves the input of the head.
A *piece* is a segment with what a kind of step does around it, which is its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from nanoinfer.execution.recurrent import RecurrentStates
from nanoinfer.execution.step_tensors import StepTensors
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import KVSlots


class Around(Protocol):
    """What a kind of step does around segments: at once if the segment runs at once, else enqueued as the segment is.

    Attention i lies between segments i and i + 1.
    """

    def before(self, index: int, tensors: StepTensors) -> None:
        """Make what segment `index` reads: the inputs of the first one, else the output of attention index - 1."""

    def after(self, index: int, tensors: StepTensors) -> None:
        """Begin attention `index`, as far as its keys and values lie on the GPU; behind the last segment, the head."""


def at_once(key: Hashable, work: Callable[[], None], number: int = 0) -> None:
    """Run the work now: it is captured as part of something larger, or nothing is captured."""
    work()


class Segments:
    """Runs segments and pieces of one model.

    Args:
        gpu_kv: for each attention `[num_gpu_blocks, 2, block_size, num_kv_heads, head_dim]`.
    """

    def __init__(self, model: Decoder, gpu_kv: Sequence[Tensor], states: RecurrentStates) -> None:
        self._model, self._gpu_kv, self._states = model, gpu_kv, states
        cuts = model.spec.cuts
        begins, ends = [0, *(layer + 1 for layer in cuts)], [*cuts, len(model.spec.layers)]
        # The layers of each segment that lie between its two attentions.
        self._between = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def __len__(self) -> int:
        return len(self._between)

    def piece(
        self,
        index: int,
        tensors: StepTensors,
        around: Around,
        run: Callable[[Hashable, Callable[[], None], int], object] = at_once,
    ) -> None:
        """Run piece `index`.

        Args:
            run: runs the segment, as `Graphs.run` does.
        """
        around.before(index, tensors)
        run(("segments", len(tensors)), partial(self.run, index, tensors), index)
        around.after(index, tensors)

    def run(self, index: int, tensors: StepTensors) -> None:
        """Run segment `index` on the current stream."""
        model, between = self._model, self._between[index]
        if index == 0:
            tensors.widen_positions()
            x, normed = model.embed(tensors.token_ids.long())
            tensors.set_x(x)
        else:
            tensors.drop_q()
            normed = model.after_attention(between.start - 1, tensors.x, tensors.attention)
        for layer in between:
            normed = model.recur(layer, tensors.x, normed, tensors.rows, self._states.of_layer[layer])
        if index == len(self) - 1:
            tensors.set_x(normed)
            return
        target = KVSlots(self._gpu_kv[index], tensors.slots, tensors.q)
        tensors.q = model.before_attention(between.stop, normed, tensors.positions, target)
