"""Which state each token of a step belongs to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateRuns(NamedTuple):
    """Which state each token of a step belongs to, and where its neighbours are: [N] int32 each, on the device.

    The tokens that a step computes of a sequence are a *run* of neighbours, in ascending order.

    Attributes:
        slots: of the token's sequence. Padding names the last slot, whose content does not matter.
        begins, ends: index in the step of the run's first token, and of the one behind its last; of padding anything.
    """

    slots: Tensor
    begins: Tensor
    ends: Tensor
