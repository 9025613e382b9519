"""Hand out GPU blocks; drop copies of full blocks for that where the host has them, too, and take copies back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

import numpy as np

from nanoinfer.kv.residency import MAX_PROMOTED, Residency, promotion_margin
from nanoinfer.kv.tables import BlockTables
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.plan import NO_BLOCK


class GPUCopies:
    """Hands out GPU blocks, and drops copies of full blocks for that. What only the GPU has is no copy.

    Args:
        max_resident_blocks: full blocks that the host has and that may stay on the GPU, too; None: as many as there is
            room for.

    Attributes:
        residency: which full blocks of each line the host has, and which of these lie on the GPU, too. Row r has line
            g * number of rows + r in group g.
    """

    def __init__(self, tables: BlockTables, max_resident_blocks: int | None) -> None:
        num_groups, num_rows, width = tables.gpu.shape
        lines = num_groups * num_rows, width
        self._gpu, self._host = tables.gpu.reshape(lines), tables.host.reshape(lines)
        self.residency = Residency(self._gpu, self._host, tables.begins.reshape(-1))
        self._tables, self._max_resident_blocks = tables, max_resident_blocks

    def line(self, number: int, row: int) -> int:
        return number * self._tables.num_rows + row

    def lines(self, rows: Iterable[int]) -> list[int]:
        """Return the lines of rows in all groups."""
        rows = list(rows)
        return [self.line(number, row) for number in range(len(self._tables.groups)) for row in rows]

    @property
    def gpu_room(self) -> int:
        """Number of GPU blocks that can be handed out with nothing dropped. Does not depend on how fast copies are."""
        tables = self._tables
        return tables.gpu_blocks.num_free + tables.lifetimes.num_deferred_gpu - int(tables.promised.sum())

    @property
    def num_obtainable(self) -> int:
        """Number of GPU blocks that can be handed out, including copies of full blocks, which can be dropped."""
        return self.gpu_room + self.num_resident

    @property
    def num_resident(self) -> int:
        """Number of GPU copies of full blocks, all of which can be dropped; 0 in resident mode."""
        # Where there are copies, rows share no other GPU blocks.
        return max(0, self.residency.num_resident - self._tables.gpu_blocks.num_shared)

    @property
    def num_streamed(self) -> int:
        """Number of host blocks that a step of all rows streams: those of which some row has no GPU copy."""
        num_streamed = self.residency.num_streamed
        if not num_streamed or not self._tables.lifetimes.host_blocks.num_shared:
            return num_streamed
        streams = self.residency.streams
        return int(np.count_nonzero(np.bincount(self._host[:, : streams.shape[1]][streams])))

    def take(self, count: int) -> list[int]:
        """Hand out GPU blocks; drop copies and wait for what still reads them, if need be."""
        self.drop(count - self.gpu_room)
        self._tables.lifetimes.reclaim()
        self._tables.lifetimes.wait_for_gpu(count)
        return self._tables.gpu_blocks.allocate(count)

    def drop(self, count: int) -> None:
        """Drop up to `count` GPU copies of full blocks, all of which the host has, too."""
        if count <= 0 or not (dropped := self.residency.drop(min(count, self.num_resident))):
            return
        lines, places = np.array(dropped, dtype=np.int64).reshape(-1, 2).T
        self._tables.lifetimes.release_gpu(self._gpu[lines, places].tolist())
        self._gpu[lines, places] = NO_BLOCK
        self._tables.gpu_versions[lines % self._tables.num_rows] += 1

    def drop_above_limit(self) -> None:
        """Drop what is above `max_resident_blocks`."""
        if self._max_resident_blocks is not None:
            self.drop(self.num_resident - self._max_resident_blocks)

    def promise_tails(self, sequence: Sequence, *, drops: bool = True) -> None:
        """Promise the row a GPU block in each group in which it lacks the one into which its next token goes.

        drops: whether copies are dropped now where there is no room for that.
        """
        tables, row = self._tables, sequence.row
        for number, group in enumerate(tables.groups):
            tail = sequence.num_computed // group.block_size
            tables.promised[number, row] = tables.gpu[number, row, tail] == NO_BLOCK
        if drops:
            self.drop(-self.gpu_room)

    def set_resident_from(self, sequence: Sequence, firsts: Several[int]) -> None:
        """Note for each group that the row's full blocks from this one on, and no others, lie on the GPU, too."""
        for number, (full, first) in enumerate(zip(self._tables.full(sequence), firsts, strict=True)):
            self.residency.set(self.line(number, sequence.row), max(first, full.start), full.stop)

    def clear(self, row: int) -> None:
        """Note that the row holds no full blocks."""
        for line in self.lines([row]):
            self.residency.clear(line)

    def promote(self, rows: list[int]) -> dict[int, int] | None:
        """Allocate GPU blocks for full blocks that stream in this step, where there is room, and note them as resident.

        The caller must copy their content from the ring to the GPU pool while this step runs.

        Args:
            rows: the rows of this step. Any other row would hold blocks without content if the step failed.

        Returns:
            Host block -> GPU block of what is to be copied; None where no row has gained a GPU block, not even one that
            another row had.
        """
        if not self.residency.num_streamed:
            return None
        lines, num_groups = self.lines(rows), len(self._tables.groups)
        joined = self.residency.join(lines)
        for line, block, gpu_block in joined:
            self._tables.gpu_blocks.hold(gpu_block)
            self._take_over(line, block, gpu_block)
        count = min(MAX_PROMOTED * num_groups, self.gpu_room - promotion_margin(len(rows)) * num_groups)
        if self._max_resident_blocks is not None:
            count = min(count, self._max_resident_blocks - self.num_resident)
        if count <= 0:
            return {} if joined else None
        promoted = self.residency.promote(count, lines)
        new = iter(self.take(len({int(self._host[place]) for place in promoted})))
        result: dict[int, int] = {}
        for line, block in promoted:
            host_block = int(self._host[line, block])
            if host_block in result:
                self._tables.gpu_blocks.hold(result[host_block])
            else:
                result[host_block] = next(new)
            self._take_over(line, block, result[host_block])
        return result if joined or promoted else None

    def _take_over(self, line: int, block: int, gpu_block: int) -> None:
        self._gpu[line, block] = gpu_block
        self._tables.gpu_versions[line % self._tables.num_rows] += 1

    def find(self, begin: int, host_blocks: list[int]) -> list[int]:
        """Take up the GPU copies of the last of these host blocks, held by running sequences or left by ended ones.

        begin: the place of the first of them.

        Stop at the first block, from the end, that has no copy: a row keeps its newest blocks.
        """
        tables, copies = self._tables, []
        for place, host_block in reversed(list(enumerate(host_blocks, begin))):
            copy = self.residency.copy(place, host_block)
            if copy is not None:
                tables.gpu_blocks.hold(copy)
            else:
                copy = tables.gpu_blocks.published(tables.lifetimes.host_blocks.key(host_block))
                if copy is None or not self._take_up(copy):
                    break
            copies.append(copy)
        return copies[::-1]

    def _take_up(self, copy: int) -> bool:
        """Hold a published block that no row holds; False if one does."""
        if self._tables.lifetimes.take_back_gpu(copy):
            return True
        if self._tables.gpu_blocks.references(copy):
            return False
        self._tables.gpu_blocks.hold(copy)
        return True

    def leave(self, row: int) -> None:
        """Publish the row's GPU blocks, each under the content of the host block that it is a copy of."""
        for line in self.lines([row]):
            for block in range(int(self.residency.first[line]), int(self.residency.full[line])):
                content = self._tables.lifetimes.host_blocks.key(int(self._host[line, block]))
                if content is not None:
                    self._tables.gpu_blocks.publish(int(self._gpu[line, block]), content)
