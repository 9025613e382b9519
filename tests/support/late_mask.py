"""Tokens that a sequence may go on with, which depend on its last one: the host uploads them while the layers run."""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer import LLMEngine
from nanoinfer.requests.sequence import Sequence

MASK_RULE = "the sampling comes after the mask's upload"


class LateMask:
    """Bans three quarters of the vocabulary in each step of an engine, others for each last token.

    The upload has a stream of its own. The buffers are free again without a wait: the step that read them was read.

    Attributes:
        num_banned: how often rows were banned tokens, of sequences that go on and of those that have ended.
        num_ahead: in how many steps the layers had not run yet when the mask was made, as far as the runtime tells.
    """

    def __init__(self, engine: LLMEngine, *, is_late: bool = True) -> None:
        runtime, num_elements = engine.runner.runtime, engine.plan.max_num_seqs * engine.vocab_size
        self._runner, self._stream, self._uploaded = engine.runner, runtime.stream("mask"), runtime.event()
        self._on_host = runtime.staging(num_elements, torch.uint8).view(torch.bool)
        self._on_device = torch.zeros(num_elements, dtype=torch.bool, device=runtime.device)
        self._banned = [(np.arange(engine.vocab_size) + i) % 4 > 0 for i in range(4)]
        self.num_banned = {"alive": 0, "ended": 0}
        self.num_ahead = 0
        engine.on_logits, engine.samples_late = self._apply, is_late

    def _apply(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        compute, stream = self._runner.compute, self._stream
        for sequence in sequences:
            self.num_banned["alive" if sequence.finish_reason is None else "ended"] += 1
        self.num_ahead += bool(getattr(compute, "queue", ()))
        on_host, on_device = self._on_host[: logits.numel()], self._on_device[: logits.numel()]
        for row, sequence in zip(on_host.view(logits.shape).numpy(), sequences, strict=True):
            row[:] = self._banned[(3 * sequence.token_ids[-1] + 1) % 4]
        stream.copy(on_device, on_host)
        stream.record(self._uploaded)
        compute.wait(self._uploaded, MASK_RULE)
        compute.run(lambda: logits.masked_fill_(on_device.view(logits.shape), -torch.inf))
