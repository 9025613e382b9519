"""What a step samples, on its way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from nanoinfer.common.errors import RequestError
from nanoinfer.execution.prompt_logprobs import PendingPrompts, copy_logprobs
from nanoinfer.execution.tables import DeviceTable
from nanoinfer.models.expert_slots import SlotSet
from nanoinfer.sampling.settings import NOTHING_LEFT, UNSOUND
from nanoinfer.sampling_params import MAX_LOGPROBS
from nanoinfer.step.executor import Logprobs, PromptsRead, SampledToken
from offload import Event, Runtime, Stream

_NOTHING_LEFT = (
    "no token is left to go on with: allowed_token_ids, bad_words, min_tokens, structured_outputs and "
    "thinking_token_budget forbid every one whose logit is finite; allow more tokens, or give min_tokens=0"
)


class PendingTokens:
    """The tokens that a launched step samples, on their way to the host.

    Args:
        tokens: [n] int64, pinned, valid once `done` was reached; `UNSOUND` or `NOTHING_LEFT` where none could be drawn.
        lines: of `tokens`, those with log-probabilities.
        values, ids: [lines, 1 + top] float32 and int64, pinned, as `copy_logprobs` writes them.
        prompts: log-probabilities of the prompts of the step; None: nobody wants any.
        fault: why logits are unsound, as far as it is known.
        count_experts: returns `experts_read` and `fetched_bytes`, once the step has run.

    Attributes:
        done: recorded behind the step.
        made: when the step was seen to have run, if it was before the host waited for it.
        experts_read, fetched_bytes: of this step and all before it, once it was read: how many experts were read, and
            the bytes of those that were brought one by one to be read.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        lines: Sequence[int],
        values: torch.Tensor,
        ids: torch.Tensor,
        prompts: PendingPrompts | None,
        done: Event,
        fault: str,
        count_experts: Callable[[], tuple[int, int]],
    ) -> None:
        self._tokens, self._lines, self._values, self._ids, self._fault = tokens, lines, values, ids, fault
        self.done, self._count_experts, self._prompts = done, count_experts, prompts
        self.made: float | None = None
        self.experts_read = self.fetched_bytes = 0

    def read(self) -> list[SampledToken]:
        """Wait until the step has run, and return what it sampled, for each sampled row."""
        self.done.synchronize("host.read_after_step")
        tokens = self._tokens.tolist()
        self.experts_read, self.fetched_bytes = self._count_experts()
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        for line, values, ids in zip(self._lines, self._values.tolist(), self._ids.tolist(), strict=True):
            logprobs[line] = values[0], ids[0], values[1:], ids[1:]
        return list(zip(tokens, logprobs, map(self._error, tokens), strict=True))

    def read_prompts(self) -> PromptsRead:
        """Return, once the step was read, the log-probabilities of the prompt of each of its chunks, and why they are
        unusable, or None; None for a chunk of which none are wanted. Empty where no chunk has any."""
        chunks = [] if self._prompts is None else self._prompts.read()
        return [one and (one[0], None if one[1] else ValueError(self._fault)) for one in chunks]

    def _error(self, token: int) -> Exception | None:
        if token == NOTHING_LEFT:
            return RequestError(_NOTHING_LEFT, field="allowed_token_ids")
        return ValueError(self._fault) if token == UNSOUND else None


class ReadBack:
    """Sends what steps sample to the host, without waiting for the device.

    Args:
        max_rows: the most rows that sample in one step.
        fault: as in `PendingTokens`.
        experts_read: [1] int64, how many experts all steps have read; None: there are none.
        slots: the pools of experts that are brought one by one. What was counted so far, here and there, is forgotten.

    Attributes:
        buffers: pinned ones and an event behind them, twice: one set is written while the host still reads the other.
        slot_counts: of each pool, what `SlotSet.counts` was behind the newest step that was read.
    """

    def __init__(
        self, runtime: Runtime, compute: Stream, max_rows: int, fault: str, experts_read: torch.Tensor | None = None,
        slots: Sequence[SlotSet] = (),
    ) -> None:  # fmt: skip
        self._compute, self._fault, self._slots = compute, fault, slots
        self._counts = [] if experts_read is None else [experts_read, *(one.counts for one in slots)]
        for one in self._counts:
            one.zero_()
        self.slot_counts: list[list[list[int]]] = [one.counts.tolist() for one in slots]
        self._lines = DeviceTable(runtime, max_rows)
        each = max_rows * (1 + MAX_LOGPROBS)
        sizes = [(max_rows, torch.int64), (each, torch.float32), (each, torch.int64)]
        sizes += [(one.numel(), torch.int64) for one in self._counts]
        self.buffers = deque(([runtime.staging(*size) for size in sizes], runtime.event()) for _ in range(2))

    def send(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        num_logprobs: dict[int, int],
        prompts: PendingPrompts | None = None,
    ) -> PendingTokens:
        """Enqueue the copies of a step's tokens and of the log-probabilities that are wanted.

        tokens: [n] int64; logits: [n, vocab_size]; num_logprobs: as in `StepPlan`; prompts: what was launched before.
        """
        self.buffers.rotate()
        (tokens_host, values, ids, *counts), done = self.buffers[0]
        lines, top = list(num_logprobs), max(num_logprobs.values(), default=0)
        values, ids = (buffer[: len(lines) * (1 + top)].view(len(lines), 1 + top) for buffer in (values, ids))
        if lines:
            self._lines.set(self._compute, np.array(lines, dtype=np.int32))
            index = self._lines.tensor[: len(lines)]

            def look_up() -> None:
                chosen = tokens.index_select(0, index).clamp(min=0)  # a row without a token has a negative one
                copy_logprobs(logits.index_select(0, index).float(), chosen, values, ids)

            self._compute.run(look_up)
        tokens_host = tokens_host[: len(tokens)]
        if len(tokens):
            self._compute.copy(tokens_host, tokens)
        for host, device in zip(counts, self._counts, strict=True):
            self._compute.copy(host, device.view(-1))
        self._compute.record(done)
        count = partial(self._count_experts, counts)
        return PendingTokens(tokens_host, lines, values, ids, prompts, done, self._fault, count)

    @property
    def slot_totals(self) -> tuple[int, int, int, int]:
        """The sums of `slot_counts` over all layers."""
        return tuple(map(sum, zip((0,) * 4, *(layer for one in self.slot_counts for layer in one), strict=True)))

    def _count_experts(self, counts: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Return what copies of the counts say: how many experts were read, and the bytes that came one by one."""
        if not counts:
            return 0, 0
        self.slot_counts = [one.view(-1, 4).tolist() for one in counts[1:]]
        own = zip(self._slots, self.slot_counts, strict=True)
        return counts[0].item(), sum(one.fetched_bytes(count) for one, count in own)

    def forget(self) -> None:
        """Have the table uploaded again: after an exception, the one on the device may hold anything."""
        self._lines.forget()
