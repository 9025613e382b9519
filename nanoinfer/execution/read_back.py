"""What a step samples, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoinfer.requests.sequence import Sequence
from offload import Event


class PendingTokens:
    """What a step that was launched samples: on its way to the host.

    Attributes:
        sequences: those that get a token; each one's `num_pending` counts it until it is read.
        check: says of each of them, once the step has run, why its token is no use; None: it is.
    """

    def __init__(self, sequences: list[Sequence], tokens: torch.Tensor, logprobs: list[torch.Tensor], done: Event):
        self.sequences = sequences
        self._tokens, self._logprobs, self._done = tokens, logprobs, done
        self.check: Callable[[], list[Exception | None]] = lambda: [None] * len(sequences)

    def read(self) -> SampledTokens:
        """Waits until the step has run."""
        self._done.synchronize("host.read_after_step")
        logprobs: list[tuple[float, int, list[float], list[int]] | None] = [None] * len(self.sequences)
        wanted = [i for i, sequence in enumerate(self.sequences) if sequence.params.logprobs is not None]
        if wanted:
            for i, *values in zip(wanted, *(tensor.tolist() for tensor in self._logprobs), strict=True):
                logprobs[i] = tuple(values)
        return SampledTokens(self._tokens[: len(self.sequences)].tolist(), logprobs, self.check())


@dataclass(frozen=True)
class SampledTokens:
    """What a step sampled, one entry per sequence.

    Attributes:
        logprobs: per sequence, None or (log-probability of the token, its rank, top values, top ids).
        errors: per sequence, why its token is no use; None: it is.
    """

    tokens: list[int]
    logprobs: list[tuple[float, int, list[float], list[int]] | None]
    errors: list[Exception | None]
