"""Limits on waiting: sequences without a place in the engine, and bytes of requests before their first token."""

from __future__ import annotations

from nanoinfer.common.errors import RequestError
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.serve.errors import OverloadedError

MAX_BODY_BYTES = 32 * 2**20
DEFAULT_QUEUE_BYTES = 8 * MAX_BODY_BYTES


class QueueLimit:
    """Limit on the sequences that wait for a place among the running ones.

    Args:
        max_queue: the most sequences that may wait.

    Raises:
        ValueError: `max_queue` is below 1, so no request would ever be accepted.
    """

    def __init__(self, max_queue: int) -> None:
        if max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}, it must be at least 1: else nothing is ever taken")
        self._max_queue = max_queue
        self._num_places = self._num_queued = 0

    def count(self, engine: LLMEngine) -> None:
        """Count the sequences that lack a place even after the next step. Used on the engine's thread."""
        waiting, running = len(engine.scheduler.waiting), len(engine.scheduler.running)
        self._num_places = engine.plan.max_num_seqs
        self._num_queued = waiting - (self._num_places - running)  # a negative number counts free places

    def check(self, num_new: int) -> None:
        """Refuses `num_new` sequences if they would exceed the limit, as of the last `count`.

        Raises:
            RequestError: the server could never accept so many sequences at once.
            OverloadedError: too many sequences wait at the moment.
        """
        num_queued = self._num_queued  # once: the engine's thread may count meanwhile
        if num_queued + num_new <= self._max_queue:
            return
        possible = self._max_queue + self._num_places
        if num_new > possible:
            raise RequestError(
                f"the request has {num_new} completions (prompts times n), the server runs {self._num_places} at once "
                f"and queues {self._max_queue}: send at most {possible} in one request, or start the server with "
                "a larger --max-queue",
                field="prompt",
            )
        raise OverloadedError(
            f"{max(0, num_queued)} sequences wait, the request has {num_new} and the server queues at most "
            f"{self._max_queue}: try again later"
        )


class WaitingBytes:
    """The bytes of all waiting requests together, with a limit. Used only on the event loop.

    Args:
        limit: in bytes.

    Raises:
        ValueError: the limit is smaller than the longest allowed body.
    """

    def __init__(self, limit: int) -> None:
        if limit < MAX_BODY_BYTES:
            raise ValueError(f"max_queue_bytes is {limit}, it must be at least {MAX_BODY_BYTES}: a body may be as long")
        self._limit, self.num_bytes = limit, 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived.

        Raises:
            OverloadedError: too many bytes wait.
        """
        if self.num_bytes + num_bytes > self._limit:
            raise OverloadedError(
                f"{self.num_bytes} bytes of requests wait, and the server lets at most {self._limit} wait: try "
                "again later, or start the server with a larger --max-queue-bytes",
                closes=True,
            )
        self.num_bytes += num_bytes
