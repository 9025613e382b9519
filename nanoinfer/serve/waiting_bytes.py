"""How many bytes of requests wait, with a limit."""

from __future__ import annotations

from nanoinfer.serve.errors import OverloadedError

MAX_BODY_BYTES = 32 * 2**20
DEFAULT_QUEUE_BYTES = 8 * MAX_BODY_BYTES


class WaitingBytes:
    """The bytes of all waiting requests together, with a limit. Used only on the event loop."""

    def __init__(self, limit: int) -> None:
        if limit < MAX_BODY_BYTES:
            raise ValueError(f"max_queue_bytes is {limit}, it must be at least {MAX_BODY_BYTES}: a body may be as long")
        self._limit, self.num_bytes = limit, 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived; raise OverloadedError if too many wait."""
        if self.num_bytes + num_bytes > self._limit:
            raise OverloadedError(
                f"{self.num_bytes} bytes of requests wait, and the server lets at most {self._limit} wait: try "
                "again later, or start the server with a larger --max-queue-bytes",
                closes=True,
            )
        self.num_bytes += num_bytes
