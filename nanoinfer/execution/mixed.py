"""A mixed step: chunks of prompts and the next tokens of decoding sequences go through all layers together.

Between the attentions all tokens are rows of the same small step, so the weights are read once for both. Each kind
attends as it would alone: the prompt chunks by the prefill attention, the decode rows by the splits of their blocks,
wherever the blocks lie. A host block that both read streams once, in the ring chunks of the prompts' history.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from nanoinfer.execution.decode import DecodeStep
from nanoinfer.execution.prefill import PrefillStep
from nanoinfer.models.step_tensors import StepTensors
from offload import Chunk, OffloadStep


class MixedStep(OffloadStep):
    """One mixed step as the offload engine runs it (see `offload.OffloadStep`), and what it does around pieces.

    Args:
        prefill: planned with the sequences of `decode` after the chunks, and with the write-through of all sequences.
        decode: planned beside what the prefill step streams.
        count: number of sequences of `decode`.
    """

    def __init__(self, prefill: PrefillStep, decode: DecodeStep, count: int) -> None:
        self._prefill, self._decode, self._count = prefill, decode, count
        self._attention, self._resources = decode.program.attention, decode.program.resources
        self._compute = self._resources.compute
        # Ring chunks of the decode rows come first: some of them may be in the ring already.
        self.chunks = [[*ours, *theirs] for ours, theirs in zip(decode.chunks, prefill.chunks, strict=True)]
        num_rows, self.section_ends = len(prefill.tensors), prefill.section_ends
        self.stream_plan = self._resources.pieces.plan(self.chunks, num_rows)
        self._whole_rows = self._attention.whole_rows and not any(self.chunks)
        self.ahead = None if prefill.takes_landing_buffers else decode.ahead  # as if the decode rows went on alone
        self.write_through = prefill.write_through
        self.shares: np.ndarray | None = None  # as in `DecodeStep`

    @property
    def readers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each group two parallel arrays: a sequence's number (prompt chunks first), a host block it reads."""
        result, first = [], len(self._prefill.lengths)
        for (chunks, theirs), (rows, ours) in zip(self._prefill.readers, self._decode.readers, strict=True):
            result.append((np.concatenate([chunks, first + rows]), np.concatenate([theirs, ours])))
        return result

    def compute(self, section: int) -> None:
        self._resources.pieces.run_with_hooks(section, self._prefill.tensors, self, self._resources.graphs.run)

    def use(self, cut: int, chunk: Chunk, ring_slot: int) -> None:
        if chunk.tag is not None:
            self._prefill.use(cut, chunk, ring_slot)
        self._decode.use(cut, chunk, ring_slot)

    # Around pieces

    def begin(self, tensors: StepTensors) -> None:
        self._compute.run(self._copy_inputs)
        self._prefill.begin(tensors)

    def attend(self, layer: int, tensors: StepTensors) -> None:
        self._compute.run(lambda: self._attend_gpu(layer))

    def end_attention(self, layer: int, tensors: StepTensors) -> None:
        self._compute.run(lambda: self._attention.end(layer, self._rows(layer)[1], self._whole_rows))
        self._prefill.end_attention(layer, tensors)

    def end(self, tensors: StepTensors) -> None:
        self._prefill.end(tensors)

    def head(self, number: int, tensors: StepTensors | None) -> None:
        self._prefill.head(number, tensors)

    def _copy_inputs(self) -> None:
        rows = self._prefill.tensors.input_rows(self._count, self._prefill.num_tokens)
        self._decode.program.copy_inputs(*rows, whole_rows=self._whole_rows)

    def _attend_gpu(self, layer: int) -> None:
        q, out = self._rows(layer)
        self._attention.begin(layer, q, out, self._whole_rows)
        if self.chunks[self._resources.pieces.reads[layer].group]:
            self._decode.program.copy_queries(q)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        shape = self._resources.model.spec.attention_of[layer]
        return self._prefill.tensors.attention_rows(shape, self._count, self._prefill.num_tokens)
