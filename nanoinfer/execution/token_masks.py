"""Masks that the host makes for a step while its layers run: which tokens its rows may take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from nanoinfer.devices.registry import device_of
from nanoinfer.execution.graphs import Graphs, GraphWork
from nanoinfer.kernels.operations import operations_of
from offload import Runtime, Staging, Stream


class TokenMasks:
    """Applies masks in front of the sampling, from graphs of their own: one for each host buffer and number of lines.

    The kernel reads them where the host has written them, if the device can: a mask has a bit for a logit, and what a
    copy between logits and sampling may cost `ModelRunner.execute` says. Launched by itself, between two graphs, it
    would make every kernel of the graph behind it longer (90 us in a step of a 4B on an H200).
    Without any mask nothing is launched. Where the device reads no host memory there is a copy, which no plan counts.

    Args:
        logits: [rows, vocab_size], what is masked, of all steps.
    """

    def __init__(self, runtime: Runtime, compute: Stream, graphs: Graphs, logits: torch.Tensor) -> None:
        self._compute, self._graphs, self._logits = compute, graphs, logits
        target, device = runtime.device, device_of(runtime.device)
        max_lines, self._width = len(logits), 1 + -(-logits.shape[1] // 32)
        self._counts = [*(1 << power for power in range((max_lines - 1).bit_length())), max_lines]
        reads_host_memory = device.reads_host_memory or device.is_host
        shape = max_lines, self._width
        self._copy = None if reads_host_memory else torch.full(shape, -1, dtype=torch.int32, device=target)
        self._apply_masks = operations_of(target).apply_masks
        self._staging = Staging(runtime, max_lines * self._width, torch.int32)

    def works(self) -> Iterator[GraphWork]:
        """Yield the work to capture, which masks nothing in its warm-up runs."""
        for count in self._counts:
            launches = [partial(self._launch, number, count) for number in range(len(self._staging.buffers))]
            yield GraphWork(("masks", count), f"mask graphs, {count} lines", self._reset, launches)

    def apply(self, masks: np.ndarray) -> None:
        """Put -infinity into the logits of tokens that may not come, for work enqueued on the compute stream from here.

        Logits of NaN or infinity stay, so that the sampling notices them.

        masks: [n, 1 + ceil(vocab_size / 32)] int32: a row of the logits, each at most once, then a bit for each token
        that may come, the lowest of the first word first.
        """
        count = next(count for count in self._counts if count >= len(masks))
        lines, number = self._staging.acquire().view(-1, self._width)[:count], self._staging.number
        lines.numpy()[: len(masks)] = masks
        lines.numpy()[len(masks) :, 0] = -1
        if self._copy is not None:
            self._compute.copy(self._copy[:count], lines)
        self._graphs.run(("masks", count), partial(self._launch, number, count), number)
        self._staging.release(self._compute)

    def _reset(self) -> None:
        for buffer in self._staging.buffers:
            buffer.fill_(-1)

    def _launch(self, number: int, count: int) -> None:
        """Apply the first `count` lines of a host buffer, or of the copy."""
        lines = self._staging.buffers[number].view(-1, self._width) if self._copy is None else self._copy
        self._apply_masks(self._logits, lines[:count])
