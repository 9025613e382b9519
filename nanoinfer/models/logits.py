"""What makes logits of what the last layer returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.layers.linear import Head
from nanoinfer.layers.norm import Exchange


class Logits:
    """Head, divisor and cap of a model.

    Args:
        slices: heads that have rows of the vocabulary one after the other: all in one, or as they are streamed.
        divisor, softcap: what is done to each logit; None: nothing.
        bring: copies a slice of a head that is streamed, by its number, to its landing buffer, on the current stream.
        of_ranks: the rows, [begin, end), that each of several devices has; None: there is one. rank: of this one.

    Attributes:
        exchange: as of `Linear`; None: there is one device.
    """

    exchange: Exchange | None = None

    def __init__(
        self,
        slices: Sequence[Head],
        divisor: float | None,
        softcap: float | None,
        bring: Callable[[int], None] | None = None,
        of_ranks: Sequence[tuple[int, int]] | None = None,
        rank: int = 0,
    ) -> None:
        of_ranks = of_ranks or [(0, sum(one.num_rows for one in slices))]
        self.slices, self._divisor, self._softcap, self._bring = slices, divisor, softcap, bring
        self._of_ranks, (begin, self._end) = of_ranks, of_ranks[rank]
        self._ends = [begin + sum(one.num_rows for one in slices[: number + 1]) for number in range(len(slices))]
        self._begin, self._vocab_size = begin, of_ranks[-1][1]

    def __call__(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] in the model's dtype, in `out` if that is given.

        The slices of a streamed head are copied here, so nothing else may use the landing buffers now: the caller has
        called `OffloadEngine.fence_landing_buffers`, behind a step that fetches nothing ahead.
        """
        out = normed.new_empty(len(normed), self._vocab_size) if out is None else out
        for number in range(len(self.slices)):
            if self._bring is not None:
                self._bring(number)
            self.of_slice(number, normed, out)
        return out

    def of_slice(self, number: int, normed: Tensor, out: Tensor) -> None:
        """Write the logits of the tokens of a slice to their columns of `out`, [N, vocab_size]; with the last slice of
        one of several devices, those of the others, too."""
        head = self.slices[number]
        columns = out[:, self._ends[number] - head.num_rows : self._ends[number]]
        logits = head(normed, columns if columns.is_contiguous() else None)
        if self._divisor is not None:
            logits.div_(self._divisor)
        if self._softcap is not None:
            logits.copy_(exact.elementwise(torch.tanh, logits.div_(self._softcap))).mul_(self._softcap)
        if not columns.is_contiguous():
            columns.copy_(logits)
        if self.exchange is not None and number == len(self.slices) - 1:
            self._take_others(out)

    def _take_others(self, out: Tensor) -> None:
        own = out[:, self._begin : self._end]
        width = max(end - begin for begin, end in self._of_ranks)
        width += width % 2  # whole words
        if own.shape[1] < width:
            own = torch.nn.functional.pad(own, (0, width - own.shape[1]))
        for (begin, end), values in zip(self._of_ranks, self.exchange.gather(own.contiguous()), strict=True):
            if begin != self._begin:
                out[:, begin:end] = values[:, : end - begin]
