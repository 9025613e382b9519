"""Masks that the host makes for a step while its layers run: which tokens its rows may take."""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.operations import operations_of
from offload import Runtime, Staging, Stream


class TokenMasks:
    """Applies masks in front of the sampling.

    The kernel reads them where the host has written them, if the device can: a mask has a bit for a logit, and what a
    copy between logits and sampling may cost `ModelRunner.execute` says.
    Without any mask nothing is launched, and no host memory is pinned before the first. Where the device reads no host
    memory there is a copy, which no plan counts.

    Args:
        max_rows: the most rows that sample in one step.
    """

    def __init__(self, runtime: Runtime, compute: Stream, max_rows: int, vocab_size: int) -> None:
        self._runtime, self._compute, self._num_words = runtime, compute, max_rows * (1 + -(-vocab_size // 32))
        place, device = runtime.device, device_of(runtime.device)
        reads_host_memory = device.reads_host_memory or device.is_host
        self._copy = None if reads_host_memory else torch.zeros(self._num_words, dtype=torch.int32, device=place)
        self._apply_masks = operations_of(place).apply_masks
        self._staging: Staging | None = None

    def apply(self, logits: torch.Tensor, masks: np.ndarray) -> None:
        """Put -infinity into the logits of tokens that may not come, for work enqueued on the compute stream from here.

        Logits of NaN or infinity stay, so that the sampling notices them.

        logits: [rows, vocab_size]; masks: [n, 1 + ceil(vocab_size / 32)] int32: a row of `logits`, each at most once,
        then a bit for each token that may come, the lowest of the first word first.
        """
        if self._staging is None:
            self._staging = Staging(self._runtime, self._num_words, torch.int32)
        lines = self._staging.acquire()[: masks.size]
        lines.numpy()[:] = masks.reshape(-1)
        if self._copy is not None:
            copied = self._copy[: masks.size]
            self._compute.copy(copied, lines)
            lines = copied
        self._compute.run(lambda: self._apply_masks(logits, lines.view(masks.shape)))
        self._staging.release(self._compute)
