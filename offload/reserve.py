"""Blocks that a pool keeps for prefill steps, beside what each row was promised: counted alike by plans and admission.

In a group with a window a row is promised what its window can touch. A chunk takes more: blocks that lie behind the
window when the step has run. These come from one reserve of all rows, since the tokens of a step are bounded together.
Models without windows have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from offload.groups import UNBOUNDED, KVGroup, KVGroups

RESERVE_SHARE = 8
"""The most of a pool that is kept: one block in so many. Where that is too few, steps may be shorter."""


class Prompt(NamedTuple):
    """What a row still has to compute: the tokens from `begin` to `end`. It has `longest` tokens at most."""

    begin: int
    end: int
    longest: int


@dataclass(frozen=True)
class StepReserve:
    """How many blocks steps may want at once beside the promises, or the share of a pool that is kept for them.

    Args:
        groups: of the layers.
        num_tokens: of a prefill step at most.
    """

    groups: KVGroups
    num_tokens: int

    def resident(self, prompts: Sequence[Prompt], num_blocks: int, num_growing: int = 0) -> int:
        """Return the blocks of a GPU pool that are kept in resident mode.

        num_growing: rows that may want a block meanwhile in each group without a window, which is not promised there.
        """

        def excess(group: KVGroup, one: Prompt) -> int:
            held = -(-one.end // group.block_size) - group.first_needed(one.begin)
            return held - group.most_blocks(one.longest)

        wanted = self._wanted(prompts, excess)
        growing = num_growing * sum(group.window is None for group in self.groups)
        return min(wanted + growing, num_blocks // RESERVE_SHARE) if wanted else 0

    def on_host(self, prompts: Sequence[Prompt], num_blocks: int) -> int:
        """Return the blocks of the host's pool that are kept in offload mode: of what a chunk fills, it gets what the
        row's window sees behind it.

        Twice: what a step gives back is free when its copies have run, and the next one is planned before.
        """

        def excess(group: KVGroup, one: Prompt) -> int:
            held = one.end // group.block_size - group.first_needed(one.begin)
            return min(held - group.most_full(one.longest), group.most_full(UNBOUNDED))

        return min(2 * self._wanted(prompts, excess), num_blocks // RESERVE_SHARE)

    def on_gpu(self, prompts: Sequence[Prompt], num_blocks: int) -> int:
        """Return the blocks of a GPU pool that are kept in offload mode: for chunks in all groups, beside one for each
        row's next token. Twice, as on the host."""

        def excess(group: KVGroup, one: Prompt) -> int:
            return -(-one.end // group.block_size) - one.begin // group.block_size - 1

        if not self._has_windows:
            return 0
        return min(2 * self._wanted(prompts, excess, of_all=True), num_blocks // RESERVE_SHARE)

    def on_host_beside(self, num_tokens: int, num_rows: int, num_blocks: int) -> int:
        """Return `on_host` where so many rows of so many tokens run at once."""
        return self.on_host(self.longest(num_tokens, num_rows), num_blocks)

    def resident_beside(self, num_tokens: int, num_rows: int, num_blocks: int) -> int:
        """Return `resident` where so many rows of so many tokens run at once."""
        return self.resident(self.longest(num_tokens, num_rows), num_blocks)

    def longest(self, num_tokens: int, num_rows: int) -> list[Prompt]:
        """Return prompts of so many tokens for which as much is kept as for those of so many rows; none for one row."""
        count = min(num_rows, self.num_tokens // max(1, num_tokens) + 2) if num_rows > 1 else 0
        return [Prompt(0, num_tokens, num_tokens)] * count

    @property
    def _has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    def _wanted(self, prompts: Sequence[Prompt], excess: Callable[[KVGroup, Prompt], int], of_all: bool = False) -> int:
        """Return what chunks take: no more than a step has tokens, nor than each prompt wants beside its promise."""
        count, num_rows = 0, self._most_rows(prompts)
        for group in self.groups:
            if of_all or group.window is not None:
                wanted = [most for one in prompts if (most := excess(group, one)) > 0]
                count += min(group.chunk_blocks(self.num_tokens, min(num_rows, len(wanted))), sum(wanted))
        return count

    def _most_rows(self, prompts: Sequence[Prompt]) -> int:
        """Return how many prompts share a step at most: those with least left, all of it, and two some of theirs."""
        ends = accumulate(sorted(one.end - one.begin for one in prompts))
        return 2 + sum(end <= self.num_tokens for end in ends)
