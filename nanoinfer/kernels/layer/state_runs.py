"""Which state each token of a step belongs to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHUNK = 64
"""Tokens of a prompt that a layer may compute at a time: those between two multiples of this, counted from the prompt's
begin. Every run of a prompt begins at one."""


class StateRuns(NamedTuple):
    """Which state each token of a step belongs to, where its neighbours are, and what is computed in chunks.

    The tokens that a step computes of a sequence are a *run* of neighbours, in ascending order. Runs of prompts, even
    of one token, are cut into chunks of `CHUNK`, of which a run's last one may be shorter. A decoding row has a run of
    one token, which is in no chunk, or of several, where tokens are drafted behind it. All are int32 on the device.

    Attributes:
        slots: [N], where the state behind the token is kept, if no later one of its run names the same slot: of
            prompts that of the sequence, but for some tokens that end a chunk, not the run, which have slots of their
            own; of decoding rows a slot for each. The state before a run lies in the slot of its first token. Padding
            names the last slot, whose content does not matter.
        begins, ends: [N], index in the step of the run's first token, and of the one behind its last; of padding
            anything.
        chunks: [n] first tokens of chunks, those of a run in ascending order, and -1, which is none, behind them.
        rows: [m] tokens of rows that decode, and -1, or rows from `num_live` on, which are none, behind them. Of a run
            of several some may be named, too, that are not its first: these are none.
    """

    slots: Tensor
    begins: Tensor
    ends: Tensor
    chunks: Tensor
    rows: Tensor
