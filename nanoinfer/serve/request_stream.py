"""The stream of outputs from the engine's thread to one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from starlette.requests import ClientDisconnect

from nanoinfer.outputs import RequestOutput, StreamOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.tokenizing import Prompt

Item = tuple[int, StreamOutput | RequestOutput]


class RequestStream:
    """Outputs of the prompts of one HTTP request. One asyncio task reads them; call all methods on that task's loop.

    Attributes:
        prompts: (text or None, token ids) of each prompt; each item has the index of its prompt in this list.
        wants_deltas: True: the items are `StreamOutput`s, token by token. False: the items are `RequestOutput`s, one
            for each prompt, at its end.
        arrival: `time.perf_counter` at the arrival of the HTTP request.
        charge: the bytes of the HTTP request among those that wait; closed at its first token.
        has_started: whether the first token was read; used on the engine's thread.
        on_end, on_close: called when the stream has ended, and when its running requests must be aborted; set by
            `AsyncEngine.submit`.
    """

    on_end: Callable[[RequestStream], None]
    on_close: Callable[[RequestStream], None]

    def __init__(
        self, prompts: list[Prompt], params: SamplingParams, *, wants_deltas: bool, arrival: float, charge: ExitStack
    ) -> None:
        self.prompts, self.params, self.wants_deltas = prompts, params, wants_deltas
        self.arrival, self.charge, self.has_started = arrival, charge, False
        self._num_running = len(prompts)
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def has_ended(self) -> bool:
        return self._num_running == 0 or self._error is not None

    async def next(self) -> list[Item]:
        """Return all items since the last call, and wait if there are none; [] when all prompts have ended.

        Raises:
            ApiError: the engine failed, or the server shut down before the end.
            ClientDisconnect: `close` was called.
        """
        if not self._items and not self.has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error
        return items

    def put(self, place: int, output: StreamOutput | RequestOutput) -> None:
        self._items.append((place, output))
        self._wake()

    def end_one(self) -> None:
        """Note that one of the prompts has ended."""
        if self.has_ended:
            return
        self._num_running -= 1
        if self._num_running == 0:
            self.charge.close()
            self.on_end(self)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream and abort its running requests. Items that came before can still be read."""
        if self.has_ended:
            return
        self._error = error
        self.charge.close()
        self.on_end(self)
        self.on_close(self)
        self._wake()

    def close(self) -> None:
        """Stop reading: abort the requests that still run. May be called again, and after the end."""
        self.fail(ClientDisconnect())

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
