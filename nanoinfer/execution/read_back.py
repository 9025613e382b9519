"""What a step samples, on its way to the host."""

from __future__ import annotations

import torch

from nanoinfer.sampling.settings import UNSOUND
from offload import Event


class PendingTokens:
    """The tokens that a launched step samples, on their way to the host.

    Args:
        count: number of tokens.
        tokens: [at least count] int64, pinned, valid once `done` was reached; `UNSOUND` where none could be drawn.
        logprobs: what `logprobs_of` returns for the places in `wanted`.
        fault: why logits are unsound, as far as it is known.

    Attributes:
        done: recorded behind the step.
        made: when the step was seen to have run, if it was before the host waited for it.
    """

    def __init__(
        self,
        count: int,
        tokens: torch.Tensor,
        logprobs: list[torch.Tensor],
        wanted: list[int],
        done: Event,
        fault: str,
    ) -> None:
        self._count, self._tokens, self._logprobs, self._wanted, self.done = count, tokens, logprobs, wanted, done
        self._fault = fault
        self.made: float | None = None

    def read(self) -> list[tuple[int, tuple[float, int, list[float], list[int]] | None, Exception | None]]:
        """Wait until the step has run, and return what it sampled.

        Returns:
            For each sampled row its token; None, or the token's log-probability, its rank, top values and top ids; and
            None, or why the token is unusable.
        """
        self.done.synchronize("host.read_after_step")
        logprobs: list[tuple[float, int, list[float], list[int]] | None] = [None] * self._count
        if self._wanted:
            for place, *values in zip(self._wanted, *(tensor.tolist() for tensor in self._logprobs), strict=True):
                logprobs[place] = tuple(values)
        tokens = self._tokens[: self._count].tolist()
        errors = [ValueError(self._fault) if token == UNSOUND else None for token in tokens]
        return list(zip(tokens, logprobs, errors, strict=True))
