"""What a step samples, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoinfer.requests.sequence import Sequence
from offload import Event


class PendingTokens:
    """The tokens that a launched step samples, on their way to the host.

    Attributes:
        sequences: the sequences that get a token; `num_pending` of each counts the token until it is read.
        check: returns for each sequence, once the step has run, why its token is unusable, or None.
    """

    def __init__(self, sequences: list[Sequence], tokens: torch.Tensor, logprobs: list[torch.Tensor], done: Event):
        self.sequences = sequences
        self._tokens, self._logprobs, self._done = tokens, logprobs, done
        self.check: Callable[[], list[Exception | None]] = lambda: [None] * len(sequences)

    def read(self) -> SampledTokens:
        """Wait until the step has run, and return what it sampled."""
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
        errors: per sequence, why its token is unusable, or None.
    """

    tokens: list[int]
    logprobs: list[tuple[float, int, list[float], list[int]] | None]
    errors: list[Exception | None]
