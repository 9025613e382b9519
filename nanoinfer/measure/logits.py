"""The logits of every sampled token."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.requests.sequence import Sequence
from offload import Event

MAX_LOGITS_BYTES = 4 * 2**30


def check_can_keep(num_tokens: int, vocab_size: int, advice: str, copies: int = 1) -> None:
    """Raise ValueError if the logits of so many generated tokens, kept `copies` times, would take too much memory."""
    num_bytes = 4 * num_tokens * vocab_size * copies
    if num_bytes > MAX_LOGITS_BYTES:
        raise ValueError(
            f"{num_tokens} generated tokens have {num_bytes / 2**30:.1f} GiB of logits to compare, "
            f"{MAX_LOGITS_BYTES / 2**30:.0f} GiB are allowed: {advice}"
        )


class LogitsRecorder:
    """Keeps the raw logits of every sampled token without waiting for the step that runs.

    Args:
        is_wanted: tells by request id whether to keep a request's logits. Other logits cost neither time nor memory.

    Attributes:
        rows: (request id, number of the completion) -> one row per sampled token, [vocab_size] float32, CPU.
    """

    def __init__(self, engine: LLMEngine, is_wanted: Callable[[str], bool] = lambda request_id: True) -> None:
        self.rows: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self._runner, self._is_wanted = engine.runner, is_wanted
        self._unread: deque[tuple[list[Sequence], list[torch.Tensor], Event]] = deque()
        engine.on_logits = self._observe

    def _observe(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Copy the step's logits on the compute stream, before the next step overwrites them."""
        lines = [i for i, sequence in enumerate(sequences) if self._is_wanted(sequence.request_id)]
        if lines:
            copies: list[torch.Tensor] = []
            event = self._runner.runtime.event()
            all_of_them = slice(None) if len(lines) == len(sequences) else lines
            self._runner.compute.run(lambda: copies.append(logits[all_of_them].clone()))
            self._runner.compute.record(event)
            self._unread.append(([sequences[i] for i in lines], copies, event))

    def collect(self, keep: int) -> None:
        """Fetch the logits of all steps except the newest `keep`, which may still run."""
        while len(self._unread) > keep:
            sequences, copies, event = self._unread.popleft()
            event.synchronize("verify.read_after_step")
            for sequence, row in zip(sequences, copies[0].cpu().float(), strict=True):
                self.rows[sequence.request_id, sequence.index].append(row)
