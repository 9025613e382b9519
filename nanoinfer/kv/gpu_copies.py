"""Hand out GPU blocks; drop copies of full blocks for that where the host has them, too, and take copies back."""

from __future__ import annotations

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
        window: the widest sliding window of the layers that have one, in tokens.

    Attributes:
        residency: which full blocks of each row the host has, and which of these lie on the GPU, too.
    """

    def __init__(self, tables: BlockTables, max_resident_blocks: int | None, window: int | None) -> None:
        self.residency = Residency(tables.gpu, tables.host, joins=window is None)
        self.window = window
        self._tables, self._max_resident_blocks = tables, max_resident_blocks

    @property
    def gpu_room(self) -> int:
        """Number of GPU blocks that can be handed out with nothing dropped. Does not depend on how fast copies are."""
        tables = self._tables
        return tables.gpu_blocks.num_free + tables.lifetimes.num_deferred_gpu - len(tables.rows_without_tail)

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
        num_streamed, first = self.residency.num_streamed, self.residency.first
        if not num_streamed or not self._tables.lifetimes.host_blocks.num_shared:
            return num_streamed
        streams = np.arange(first.max()) < first[:, None]
        return int(np.count_nonzero(np.bincount(self._tables.host[:, : first.max()][streams])))

    @property
    def resident_share(self) -> float:
        """The share of the full KV blocks of all rows that lies on the GPU."""
        num_resident, num_streamed = self.num_resident, self.num_streamed
        return num_resident / (num_resident + num_streamed) if num_resident or num_streamed else 1.0

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
        rows, places = np.array(dropped, dtype=np.int64).reshape(-1, 2).T
        self._tables.lifetimes.release_gpu(self._tables.gpu[rows, places].tolist())
        self._tables.gpu[rows, places] = NO_BLOCK
        self._tables.versions[rows] += 1

    def limit(self) -> None:
        """Drop what is above `max_resident_blocks`."""
        if self._max_resident_blocks is not None:
            self.drop(self.num_resident - self._max_resident_blocks)

    def promise_tail(self, row: int) -> None:
        """Promise the row, which has no partly filled block, a GPU block for when it grows."""
        self._tables.rows_without_tail.add(row)
        self.drop(-self.gpu_room)

    def lacks_tail(self, sequence: Sequence) -> bool:
        """Whether the sequence lacks the block behind its last full one, into which the next token goes."""
        tail = sequence.num_computed // self._tables.block_size
        return tail == self._tables.gpu.shape[1] or self._tables.gpu[sequence.row, tail] == NO_BLOCK

    def note(self, row: int, first: int, num_computed: int) -> None:
        """Note that the row's full blocks from `first` on lie on the GPU; those that a window reads stay longest."""
        full = window = num_computed // self._tables.block_size
        if self.window is not None:
            window = max(0, num_computed - self.window + 1) // self._tables.block_size
        self.residency.set(row, first, full, window)

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
        joined = self.residency.join(rows)
        for row, block, gpu_block in joined:
            self._tables.gpu_blocks.hold(gpu_block)
            self._tables.gpu[row, block] = gpu_block
            self._tables.versions[row] += 1
        count = min(MAX_PROMOTED, self.gpu_room - promotion_margin(len(rows)))
        if self._max_resident_blocks is not None:
            count = min(count, self._max_resident_blocks - self.num_resident)
        if count <= 0:
            return {} if joined else None
        promoted = self.residency.promote(count, rows)
        new = iter(self.take(len({int(self._tables.host[place]) for place in promoted})))
        result: dict[int, int] = {}
        for row, block in promoted:
            host_block = int(self._tables.host[row, block])
            if host_block in result:
                self._tables.gpu_blocks.hold(result[host_block])
            else:
                result[host_block] = next(new)
            self._tables.gpu[row, block] = result[host_block]
            self._tables.versions[row] += 1
        return result if joined or promoted else None

    def find(self, host_blocks: list[int]) -> list[int]:
        """Take up the GPU copies of the last of these host blocks, held by running sequences or left by ended ones.

        Stop at the first block, from the end, that has no copy: a row keeps its newest blocks.
        """
        tables, copies = self._tables, []
        for place, host_block in reversed(list(enumerate(host_blocks))):
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
        if self.window is not None:
            return  # blocks that came back through the ring lack layers whose window had moved on
        for block in range(int(self.residency.first[row]), int(self.residency.full[row])):
            content = self._tables.lifetimes.host_blocks.key(int(self._tables.host[row, block]))
            if content is not None:
                self._tables.gpu_blocks.publish(int(self._tables.gpu[row, block]), content)
