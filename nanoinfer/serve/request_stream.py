"""The stream of outputs from the engine's thread to one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from nanoinfer.outputs import StreamOutput
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.tokenizing import Prompt

Output = tuple[int, StreamOutput]
"""The index of a prompt, and what one of its completions gained."""


class ReaderLeft(Exception):
    """Nobody reads the outputs any more. Our own, for `AsyncLLM` needs no HTTP."""


class RequestStream:
    """Outputs of the prompts of one HTTP request. One asyncio task reads them; call all methods on that task's loop.

    Attributes:
        prompts: (text or None, token ids) of each prompt.
        limits: what `params` ask of the choice of tokens.
        wants_deltas: True: outputs come token by token. False: one output for each completion, at its prompt's end.
        name: the id of the HTTP answer.
        arrival: `time.perf_counter` at the arrival of the HTTP request.
        charge: the bytes of the HTTP request among those that wait; closed at its first token.
        has_started: whether the first token was read; used on the engine's thread.
        on_end, on_close: called when the stream has ended, and when its running requests must be aborted; set by
            `AsyncEngine.submit`.
    """

    on_end: Callable[[RequestStream], None]
    on_close: Callable[[RequestStream], None]

    def __init__(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        limits: TokenLimits | None = None,
        *,
        name: str,
        wants_deltas: bool,
        arrival: float,
        charge: ExitStack,
    ) -> None:
        self.prompts, self.params, self.limits = prompts, params, limits
        self.name, self.wants_deltas = name, wants_deltas
        self.arrival, self.charge, self.has_started = arrival, charge, False
        self._num_running = len(prompts)
        self._outputs: list[Output] = []
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self._is_silent = self._is_nudged = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def has_ended(self) -> bool:
        return self._num_running == 0 or self._error is not None

    async def next(self) -> list[Output]:
        """Return all outputs since the last call, and wait if there are none; [] when all prompts have ended, or when
        `nudge` has found nothing new.

        Raises:
            ApiError: the engine failed, or the server shut down before the end.
            ReaderLeft: `close` was called.
        """
        while not self._outputs and not self.has_ended and not self._is_nudged:
            self._has_news.clear()
            await self._has_news.wait()
        outputs, self._outputs, self._is_nudged = self._outputs, [], False
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def put(self, place: int, output: StreamOutput) -> None:
        self._outputs.append((place, output))
        self._is_silent = False
        self._has_news.set()

    def nudge(self) -> None:
        """Have `next` return, if there was no output since the last call of this."""
        if self._is_silent and not self.has_ended:
            self._is_nudged = True
            self._has_news.set()
        self._is_silent = True

    def end_one(self) -> None:
        """Note that one of the prompts has ended."""
        if not self.has_ended:
            self._num_running -= 1
            if self._num_running == 0:
                self._end()

    def fail(self, error: Exception) -> None:
        """End the stream and abort its running requests. Outputs that came before can still be read."""
        if not self.has_ended:
            self._error = error
            self._end()
            self.on_close(self)

    def close(self) -> None:
        """Stop reading: abort the requests that still run. May be called again, and after the end."""
        self.fail(ReaderLeft())

    def _end(self) -> None:
        self.charge.close()
        self.on_end(self)
        self._has_news.set()
