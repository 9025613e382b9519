"""Small tables that the host keeps and the device reads: uploaded only when they changed."""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer.execution.splits import SplitLists, slot_records, work_table
from nanoinfer.kernels.operations import operations_of
from nanoinfer.step.plan import NUM_HEAD_COLUMNS, ON_DEVICE
from offload import Chunk, Runtime, Staging, Stream


class DeviceTable:
    """A flat int32 table at a fixed device address, written by the host through rotating staging buffers.

    uploaded: what was uploaded last; empty if the table may hold anything else.
    """

    def __init__(self, runtime: Runtime, num_elements: int) -> None:
        self.tensor = torch.zeros(num_elements, dtype=torch.int32, device=runtime.device)
        self.staging = Staging(runtime, num_elements, torch.int32)
        self.uploaded = np.zeros(0, dtype=np.int32)

    def set(self, stream: Stream, values: np.ndarray) -> None:
        """Make the table begin with `values` (any shape, int32) for all work enqueued on `stream` from here on."""
        values = values.reshape(-1)
        if len(values) == 0 or np.array_equal(values, self.uploaded[: len(values)]):
            return
        self.forget()  # first: an upload that fails half-way may have changed the table
        self.staging.acquire().numpy()[: len(values)] = values
        self.staging.upload(stream, self.tensor[: len(values)])
        self.uploaded = values.astype(np.int32, copy=True)

    def forget(self) -> None:
        """Have the next `set` upload its values in any case: the table may not hold what was uploaded last."""
        self.uploaded = np.zeros(0, dtype=np.int32)


class SplitTables:
    """Which splits a decode step attends to in the GPU pool, for the layers of one group: one upload for all of it.

    Attributes:
        table: what is uploaded; the tensors below are views of it.
        ranges: [max_batch + 1] int32, each row's partials.
        partials_per_block: [max_batch] int32.
        items: a flat `work_table` of up to `max_splits` items.
    """

    def __init__(self, runtime: Runtime, max_batch: int, max_splits: int) -> None:
        self.max_batch = max_batch
        self.begin_of_items = -(-(2 * max_batch + 1) // 4) * 4
        self.table = DeviceTable(runtime, self.begin_of_items + 4 + 4 * max_splits)
        tensor = self.table.tensor
        self.ranges, self.partials_per_block = tensor[: max_batch + 1], tensor[max_batch + 1 : 2 * max_batch + 1]
        self.items = tensor[self.begin_of_items :]
        self.partials_per_block.fill_(1)

    def set(self, stream: Stream, lists: SplitLists) -> None:
        """Upload the lists for all work enqueued on `stream` from here on. Rows beyond the lists have no splits."""
        head = np.ones(self.begin_of_items, dtype=np.int32)
        head[: self.max_batch + 1] = lists.ranges[-1]
        head[: len(lists.ranges)] = lists.ranges
        head[self.max_batch + 1 :][: len(lists.partials_per_block)] = lists.partials_per_block
        self.table.set(stream, np.concatenate([head, work_table(lists.on_gpu).reshape(-1)]))


class ChunkRecords:
    """What a decode step attends to in each of its ring chunks, for the layers of one group: one upload for all of it.

    A record lists items, not places: rows that share a block have an item each. So one record may hold all splits.
    """

    def __init__(self, runtime: Runtime, max_splits: int) -> None:
        # The items of all chunks, and a head for each chunk, which has at least one item.
        self.table = DeviceTable(runtime, 2 * 4 * max_splits)
        self._records: dict[Chunk, torch.Tensor] = {}

    def set(self, stream: Stream, lists: SplitLists, chunks: list[Chunk]) -> None:
        """Upload the records for all work enqueued on `stream` from here on. Chunks may hold other blocks, too."""
        self._records, stored, end = {}, [], 0
        for chunk, record in zip(chunks, slot_records(lists.on_host, chunks), strict=True):
            if len(record) > 1:
                self._records[chunk] = self.table.tensor[end : end + record.size]
                stored.append(record)
                end += record.size
        if stored:
            self.table.set(stream, np.concatenate(stored))

    def copy(self, stream: Stream, chunk: Chunk, target: torch.Tensor) -> bool:
        """Copy the chunk's record to the start of `target`. Return False if no row attends to the chunk."""
        record = self._records.get(chunk)
        if record is None:
            return False
        stream.copy(target[: record.numel()], record)
        return True


class RowState:
    """What decode needs to know of each row, on the device for the row's whole life.

    The last row is for padding: it has one token, in the scratch block.

    Attributes:
        token: [max_num_seqs + 1] int64, the token whose KV is computed next.
        length: [max_num_seqs + 1] int32, tokens of the sequence, `token` included.
        block_table: [max_num_seqs + 1, groups * table width] int32, GPU blocks of each group; 0 (scratch) for none.
        operations: what the device computes on them.
    """

    def __init__(self, runtime: Runtime, max_num_seqs: int, num_columns: int) -> None:
        device = runtime.device
        self.operations = operations_of(device)
        self.padding_row = max_num_seqs
        self.token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.length = torch.ones(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(max_num_seqs + 1, num_columns, dtype=torch.int32, device=device)
        self.tensors = self.token, self.length, self.block_table
        self._width = NUM_HEAD_COLUMNS + num_columns
        self._updates = torch.zeros(max_num_seqs * self._width, dtype=torch.int32, device=device)
        self.staging = Staging(runtime, max_num_seqs * self._width, torch.int32)

    def update(self, stream: Stream, lines: np.ndarray) -> None:
        """Upload rows for all work enqueued on `stream` from here on. lines: as `StepPlan.changed_rows`."""
        if not len(lines):
            return
        self.staging.acquire().numpy()[: lines.size] = lines.reshape(-1)
        updates = self._updates[: lines.size]
        self.staging.upload(stream, updates)
        stream.run(lambda: self.operations.update_rows(updates.view(lines.shape), self.tensors, ON_DEVICE))


class Packer:
    """Collects int32 arrays for one upload of a table. Each begins at a multiple of 4 elements."""

    def __init__(self, table: DeviceTable) -> None:
        self._table, self._size = table, 0
        self._arrays: list[np.ndarray] = []

    def add(self, values: np.ndarray | list[int]) -> torch.Tensor:
        """Add `values` (any shape, whole numbers) and return where they will lie, in their shape."""
        array = np.asarray(values, dtype=np.int32)
        target = self._table.tensor[self._size : self._size + array.size].view(array.shape)
        padding = np.zeros(-array.size % 4, dtype=np.int32)
        self._arrays += [array.reshape(-1), padding]
        self._size += array.size + len(padding)
        return target

    def upload(self, stream: Stream) -> None:
        """Put all arrays into the table for work enqueued on `stream` from here on."""
        self._table.set(stream, np.concatenate(self._arrays))
