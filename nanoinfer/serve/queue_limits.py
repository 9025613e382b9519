"""What may wait: sequences for a place in the engine, and bytes of requests from their arrival to the first token."""

from __future__ import annotations

from types import TracebackType

from nanoinfer.common.errors import RequestError
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.serve.errors import OverloadedError

MAX_BODY_BYTES = 32 * 2**20
DEFAULT_QUEUE_BYTES = 8 * MAX_BODY_BYTES


class QueueLimit:
    """How many sequences may wait for a place among the running ones.

    Args:
        max_queue: so many.

    Raises:
        ValueError: nothing would ever be taken.
    """

    def __init__(self, max_queue: int) -> None:
        if max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}, it must be at least 1: else nothing is ever taken")
        self._max_queue = max_queue
        self.num_places = 0
        """Sequences that run at once."""

    def check(self, num_queued: int, num_new: int) -> None:
        """Refuses sequences that would go beyond the limit.

        Args:
            num_queued: sequences that wait for a place; below 0: so many places are free.

        Raises:
            RequestError: so many are never taken at once.
            OverloadedError: too many wait.
        """
        if num_queued + num_new <= self._max_queue:
            return
        possible = self._max_queue + self.num_places
        if num_new > possible:
            raise RequestError(
                f"the request has {num_new} completions (prompts times n), the server runs {self.num_places} at once "
                f"and queues {self._max_queue}: send at most {possible} in one request, or start the server with "
                "a larger --max-queue",
                field="prompt",
            )
        raise OverloadedError(
            f"{max(0, num_queued)} sequences wait, the request has {num_new} and the server queues at most "
            f"{self._max_queue}: try again later"
        )


def num_queued(engine: LLMEngine) -> int:
    """Sequences that wait for a place, those not counted that the next step can take; below 0: free places."""
    waiting, running = len(engine.scheduler.waiting), len(engine.scheduler.running)
    return waiting - (engine.plan.max_num_seqs - running)


class WaitingBytes:
    """The sum over all requests, with a limit. Used on the event loop only.

    Args:
        limit: bytes.

    Raises:
        ValueError: the longest body could never be taken.
    """

    def __init__(self, limit: int) -> None:
        if limit < MAX_BODY_BYTES:
            raise ValueError(f"max_queue_bytes is {limit}, it must be at least {MAX_BODY_BYTES}: a body may be as long")
        self.limit, self.num_bytes = limit, 0

    def charge(self) -> Charge:
        """The account of one request, with nothing in it yet."""
        return Charge(self)


class Charge:
    """The bytes of one request; released at the end of the block unless somebody else was told to."""

    def __init__(self, waiting: WaitingBytes) -> None:
        self._waiting, self.num_bytes = waiting, 0
        self.is_handed_over = False

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived.

        Raises:
            OverloadedError: too many wait.
        """
        waiting = self._waiting
        if waiting.num_bytes + num_bytes > waiting.limit:
            raise OverloadedError(
                f"{waiting.num_bytes} bytes of requests wait, and the server lets at most {waiting.limit} wait: try "
                "again later, or start the server with a larger --max-queue-bytes",
                closes=True,
            )
        waiting.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self) -> None:
        """May be called again."""
        self._waiting.num_bytes -= self.num_bytes
        self.num_bytes = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or not self.is_handed_over:
            self.release()
