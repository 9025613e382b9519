"""A request whose outputs somebody takes one by one, while others run the steps."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from nanoinfer.outputs import StreamOutput
from nanoinfer.requests.request import Request


class RequestStream:
    """A request of an open stream.

    Attributes:
        unread: outputs that the stream has not yielded yet; shared by all requests of the stream.
        open: indices of the completions whose last output has not arrived yet.
    """

    def __init__(self, request: Request, unread: deque[StreamOutput]) -> None:
        self.request, self.unread = request, unread
        self.open = {sequence.index for sequence in request.sequences}

    def put(self, output: StreamOutput) -> None:
        """Leave an output to whoever reads the stream; what comes behind a completion's last one is dropped."""
        if output.index in self.open:
            self.unread.append(output)
            if output.finished:
                self.open.remove(output.index)

    def end_aborted(self, error: BaseException | None = None) -> bool:
        """Put a last output for each aborted completion, with the error if one is given; return whether any was."""
        aborted = [s for s in self.request.sequences if s.index in self.open and s.finish_reason == "abort"]
        why = {} if error is None else dict(finish_reason="error", error=str(error) or type(error).__name__)
        for sequence in aborted:
            self.put(replace(self.request.stream_output(sequence), **why))
        return bool(aborted)
