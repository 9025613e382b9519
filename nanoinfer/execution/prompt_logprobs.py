"""Log-probabilities of prompts: behind a prefill step the head runs over all of its tokens, slice by slice.

The logits of a long prompt would be larger than the model: 32k rows of 152k logits are 20 GB in float32. So a slice of
few rows is made at a time, and what is wanted of it goes to the host. A row's bits do not depend on its slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoinfer.execution.prefill import PrefillStep
from nanoinfer.models.decoder import Decoder
from nanoinfer.sampling.reference import logprobs_of
from nanoinfer.sampling_params import MAX_LOGPROBS
from nanoinfer.step.executor import ChunkLogprobs
from nanoinfer.step.plan import PromptChunk
from offload import Runtime, Stream


@dataclass(frozen=True)
class PendingPrompts:
    """Log-probabilities of the prompts of a launched step, on their way to the host.

    Attributes:
        counts: how many each chunk of the step has.
        values, ids: [sum of counts, 1 + top] float32 and int64, pinned, as `copy_logprobs` writes them.
    """

    counts: list[int]
    values: Tensor
    ids: Tensor

    def read(self) -> list[tuple[ChunkLogprobs, bool] | None]:
        """Return those of each chunk, once the step has run, and whether its logits are sound; None for a chunk of
        which none are wanted."""
        parts = zip(self.values.split(self.counts), self.ids.split(self.counts), strict=True)
        return [
            ((values.tolist(), ids.tolist()), not values.isnan().any()) if len(values) else None
            for values, ids in parts
        ]


class PromptLogprobs:
    """Makes log-probabilities of prompts and sends them to the host, without waiting for the device.

    Without a request that wants some nothing is launched, and no host memory is pinned before the first.

    Args:
        max_rows: the most tokens of a prefill step.
        slice_rows: rows of logits at a time, for which the memory is planned.

    Attributes:
        buffers: pinned ones, twice: one set is written while the host still reads the other. None before the first.
    """

    def __init__(self, runtime: Runtime, compute: Stream, model: Decoder, max_rows: int, slice_rows: int) -> None:
        self._runtime, self._compute, self._model = runtime, compute, model
        self._max_rows, self._slice_rows = max_rows, slice_rows
        self.buffers: deque[tuple[Tensor, Tensor]] = deque()

    def launch(self, step: PrefillStep, chunks: Sequence[PromptChunk]) -> PendingPrompts | None:
        """Enqueue what the chunks of a step want, behind its last piece; None: nothing is wanted."""
        counts = [len(chunk.next_token_ids) for chunk in chunks]
        if not (count := sum(counts)):
            return None
        if not self.buffers:
            size = self._max_rows * (1 + MAX_LOGPROBS)
            sets = [[self._runtime.staging(size, dtype) for dtype in (torch.float32, torch.int64)] for _ in range(2)]
            self.buffers = deque(map(tuple, sets))
        self.buffers.rotate()
        top = max(chunk.num_logprobs for chunk in chunks if len(chunk.next_token_ids))
        values, ids = (buffer[: count * (1 + top)].view(count, 1 + top) for buffer in self.buffers[0])
        for begin in range(0, count, self._slice_rows):
            part = slice(begin, min(begin + self._slice_rows, count))
            self._compute.run(partial(self._score, step, part, values[part], ids[part]))
        self._compute.run(partial(setattr, step, "normed", None))
        return PendingPrompts(counts, values, ids)

    def _score(self, step: PrefillStep, part: slice, values: Tensor, ids: Tensor) -> None:
        score(self._model, step.normed.index_select(0, step.scored[part]), step.scored_by[part].long(), values, ids)


def score(model: Decoder, normed: Tensor, tokens: Tensor, values: Tensor, ids: Tensor) -> None:
    """Enqueue the log-probabilities of a slice, on the current stream: `copy_logprobs` of the rows' logits.

    normed: [n, hidden_size], what the head reads; tokens: [n] int64.
    """
    copy_logprobs(model.logits(normed).float(), tokens, values, ids)


def copy_logprobs(logits: Tensor, tokens: Tensor, values: Tensor, ids: Tensor) -> None:
    """Enqueue the log-probabilities of a token of each row, and of the likeliest ones, with their copy to the host.

    Args:
        logits: [n, vocab_size] float32.
        tokens: [n] int64.
        values: [n, 1 + top] float32, out: the token's log-probability, then the top values.
        ids: [n, 1 + top] int64, out: the token's rank, then the top ids.
    """
    logprobs, ranks, top_values, top_ids = logprobs_of(logits, tokens, values.shape[1] - 1)
    values.copy_(torch.cat((logprobs[:, None], top_values), dim=1), non_blocking=True)
    ids.copy_(torch.cat((ranks[:, None], top_ids), dim=1), non_blocking=True)
