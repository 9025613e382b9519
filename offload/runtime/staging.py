"""Host buffers for uploads: rotated, so that a buffer which the device still reads is never overwritten."""

from __future__ import annotations

import torch

from offload.runtime.base import Runtime, Stream


class Staging:
    """A few equal host buffers (pinned on CUDA) through which the host sends small tables to the device.

    Args:
        num_elements: size of one buffer.
        depth: number of buffers. With 2, filling one never waits for the upload of the step before.

    Attributes:
        buffers: all of them.
        number: which of them is acquired next, or is acquired.
    """

    def __init__(self, runtime: Runtime, num_elements: int, dtype: torch.dtype, depth: int = 2) -> None:
        self.buffers = [runtime.staging(num_elements, dtype) for _ in range(depth)]
        self._uploaded = [runtime.event() for _ in range(depth)]
        self.number = 0

    def acquire(self) -> torch.Tensor:
        """Return the next buffer, once its last upload has been read. Fill it, then call `upload` or `release`."""
        self._uploaded[self.number].synchronize("staging.fill_after_upload")
        return self.buffers[self.number]

    def upload(self, stream: Stream, destination: torch.Tensor) -> None:
        """Enqueue the copy of the acquired buffer's first elements into the flat `destination`."""
        stream.copy(destination, self.buffers[self.number][: destination.numel()])
        self.release(stream)

    def release(self, stream: Stream) -> None:
        """Say that what was enqueued on `stream` so far reads the acquired buffer, and nothing behind it does."""
        stream.record(self._uploaded[self.number])
        self.number = (self.number + 1) % len(self.buffers)
