"""A step as data: whole numbers and arrays, no live objects. Planning makes it, execution carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from nanoinfer.sampling.settings import RowSampling

ON_DEVICE = -1
"""In place of a token id: the device sampled the token and has it in the row already."""
NO_BLOCK = -1
NUM_HEAD_COLUMNS = 3
"""Columns of a line of `StepPlan.changed_rows` before the block table."""


@dataclass(frozen=True)
class PromptChunk:
    """Tokens [begin, end) of one row, whose ids the host knows.

    Attributes:
        token_ids: [end - begin] int32.
        is_last: whether the row's next token is sampled after this chunk.
        next_token_ids: [m] int32, the tokens behind the first m of these, whose log-probabilities are wanted.
        num_logprobs: how many log-probabilities of the likeliest tokens are wanted with each of them.
        state_slot: where its layers keep states.
        passed: (end, state slot) of each end before its own, a multiple of `CHUNK`, behind which the states are left in
            that slot, too.
    """

    row: int
    begin: int
    end: int
    token_ids: np.ndarray
    is_last: bool
    next_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    num_logprobs: int = 0
    state_slot: int = 0
    passed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step computes, where its KV lies, and what changes on the device.

    A step has chunks of prompts, rows that decode, or both. Its *members* are the chunks, then the decoding rows.

    Attributes:
        number: counts up from 0, without gaps.
        chunks: prompts' tokens to compute.
        rows: [d] int32, the rows that decode; their tokens lie on the device.
        state_slots: [d] int32, where layers keep states behind the tokens of these.
        num_lines: [sequences] int32, how many neighbours in `rows` each sequence has: its own row comes first, then one
            for each drafted token, whose state follows from that of the row before.
        begins, ends: [d] int64; row i computes its tokens [begins[i], ends[i]), one token for now.
        gpu_blocks, host_blocks: [groups, members, width] int32, the members' block tables (or `NO_BLOCK`) when the step
            begins, for each group of layers.
        later_gpu_blocks: [groups, d, width] int32, the decoding rows' GPU blocks when the step ends; None: as at its
            beginning.
        changed_rows: [n, 3 + groups * table width] int32, a line for each decoding row whose state on the device is out
            of date: row, last token (or `ON_DEVICE`), length, and its GPU blocks in each group (0, the scratch block,
            for none).
        sampling: the settings of rows that sample and whose settings on the device are out of date.
        sampled_rows: [s] int32, the rows that get a token, in the order of the tokens: chunks that end their prompt,
            then the decoding rows.
        num_logprobs: place in `sampled_rows` -> how many log-probabilities are wanted there.
        write_through: for each group (GPU block, host block) of each block that this step makes full; empty: of none.
        promoted: host block -> GPU block that takes over its content as it passes through the ring.
        operation: number under which the step's copies are acknowledged; 0: no block of any row lies on the host, so
            the step has none, and none to wait for.
        gone_host_blocks: host blocks that nobody holds any more; what was prefetched of them is worthless.
    """

    number: int
    chunks: tuple[PromptChunk, ...]
    rows: np.ndarray
    state_slots: np.ndarray
    num_lines: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    gpu_blocks: np.ndarray
    host_blocks: np.ndarray
    later_gpu_blocks: np.ndarray | None
    changed_rows: np.ndarray
    sampling: tuple[tuple[int, RowSampling], ...]
    sampled_rows: np.ndarray
    num_logprobs: dict[int, int] = field(default_factory=dict)
    write_through: tuple[tuple[tuple[int, int], ...], ...] = ()
    promoted: dict[int, int] = field(default_factory=dict)
    operation: int = 0
    gone_host_blocks: tuple[int, ...] = ()

    @property
    def num_members(self) -> int:
        return len(self.chunks) + len(self.rows)

    def __str__(self) -> str:
        """Describe the step in a line for each member and each kind of change."""
        names = [name for name, there in (("prefill", self.chunks), ("decode", len(self.rows))) if there]
        lines = [f"step {self.number}: {' and '.join(names)}{', may stream' if self.operation else ''}"]
        sampled = self.sampled_rows.tolist()
        spans = [(chunk.row, chunk.begin, chunk.end) for chunk in self.chunks]
        spans += zip(self.rows.tolist(), self.begins.tolist(), self.ends.tolist(), strict=True)
        for member, (row, begin, end) in enumerate(spans):
            samples = ", then samples" if row in sampled else ""
            tables = zip(self.gpu_blocks[:, member], self.host_blocks[:, member], strict=True)
            blocks = " | ".join(_places(gpu, host) for gpu, host in tables)
            lines.append(f"  row {row}: tokens {begin} to {end - 1}{samples}; blocks {blocks}")
        changes = (
            ("uploads rows", self.changed_rows[:, 0].tolist()),
            ("sets the sampling of rows", [row for row, _ in self.sampling]),
            ("writes through", _pairs(chain(*self.write_through), "GPU {} to host {}")),
            ("keeps on the GPU", _pairs(self.promoted.items(), "host {} as GPU {}")),
        )
        lines += [f"  {what} {', '.join(map(str, values))}" for what, values in changes if values]
        return "\n".join(lines)


def _pairs(pairs, text: str) -> list[str]:
    return [text.format(*pair) for pair in pairs]


def _places(gpu: np.ndarray, host: np.ndarray) -> str:
    """Say where a row's blocks lie: `g3` in the GPU pool, `h7` in the host pool only."""
    pairs = zip(gpu.tolist(), host.tolist(), strict=True)
    return " ".join(f"h{h}" if g == NO_BLOCK else f"g{g}" for g, h in pairs if (g, h) != (NO_BLOCK, NO_BLOCK))
