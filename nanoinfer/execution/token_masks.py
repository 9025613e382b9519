"""Masks that the host makes for a step while its layers run: which tokens its rows may take."""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer.kernels.operations import operations_of
from offload import Runtime, Staging, Stream


class TokenMasks:
    """Uploads masks beside the layers, on a stream of its own, and applies them in front of the sampling.

    Only rows that have a mask are uploaded. Without any nothing is launched, and no host memory is pinned before the
    first.

    Args:
        max_rows: the most rows that sample in one step.
    """

    def __init__(self, runtime: Runtime, compute: Stream, max_rows: int, vocab_size: int) -> None:
        self._runtime, self._compute, self._stream = runtime, compute, runtime.stream("masks")
        self._lines = torch.zeros(max_rows * (1 + -(-vocab_size // 32)), dtype=torch.int32, device=runtime.device)
        self._apply_masks = operations_of(runtime.device).apply_masks
        self._staging: Staging | None = None
        self._uploaded, self._applied = runtime.event(), runtime.event()

    def apply(self, logits: torch.Tensor, masks: np.ndarray) -> None:
        """Put -infinity into the logits of tokens that may not come, for work enqueued on the compute stream from here.

        Logits of NaN or infinity stay, so that the sampling notices them.

        logits: [rows, vocab_size]; masks: [n, 1 + ceil(vocab_size / 32)] int32: a row of `logits`, each at most once,
        then a bit for each token that may come, the lowest of the first word first.
        """
        if self._staging is None:
            self._staging = Staging(self._runtime, len(self._lines), torch.int32)
        lines = self._lines[: masks.size]
        self._staging.acquire().numpy()[: masks.size] = masks.reshape(-1)
        self._stream.wait(self._applied, "masks.upload_after_apply")
        self._staging.upload(self._stream, lines)
        self._stream.record(self._uploaded)
        self._compute.wait(self._uploaded, "masks.apply_after_upload")
        self._compute.run(lambda: self._apply_masks(logits, lines.view(masks.shape)))
        self._compute.record(self._applied)
