"""Turns the block tables of a batch into lists of splits: which lie on the GPU, and which stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from nanoinfer.execution.resources import Resources
from nanoinfer.kernels.attention.spec import MAX_TILES_APART, SHORT_BLOCKS
from nanoinfer.step.plan import NO_BLOCK
from offload import Chunk, pack


@dataclass(frozen=True)
class SplitLists:
    """The splits that one decode step attends to, for the layers of one group.

    Attributes:
        on_gpu: [n, 4] int32, items: (batch row, number in the row, GPU block, partial index). Items with most keys
            come first, so that the programs of a kernel that deals them out in this order end together.
        on_host: [m, 5] int32, (batch row, first item, host block, first partial index, number of items) for each
            block of each row, in the order of the host pool.
        ranges: [batch + 1] int32: row b's partials are ranges[b] to ranges[b + 1] - 1, in ascending order.
        partials_per_block: [batch], how many items, and so partials, a whole block of the row has.
    """

    on_gpu: np.ndarray
    on_host: np.ndarray
    ranges: np.ndarray
    partials_per_block: np.ndarray

    @property
    def host_blocks(self) -> np.ndarray:
        """The host blocks that stream, each once, in the order of the host pool: neighbours pass in one copy."""
        blocks = self.on_host[:, 2]
        return blocks[np.diff(blocks, prepend=-1) > 0]


def _empty(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.int32)


NO_SPLITS = SplitLists(_empty(0, 4), _empty(0, 5), _empty(1), _empty(0))


def first_visible_block(query_position: int | np.ndarray, window: int | None, block_size: int) -> int | np.ndarray:
    """Return the first block with a key that a query sees. It sees the keys j with query_position - window < j."""
    if window is None:
        return query_position * 0
    return np.maximum(query_position - window + 1, 0) // block_size


def visible_blocks(lengths: np.ndarray, window: int | None, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first block that each row's last query sees, and the number of blocks from there on.

    lengths: [batch] tokens of each row.
    """
    first = first_visible_block(lengths - 1, window, block_size)
    return first, -(-lengths // block_size) - first


def split_lists(
    gpu_rows: np.ndarray,
    host_rows: np.ndarray,
    lengths: np.ndarray,
    window: int | None,
    block_size: int,
    partials_per_block: Callable[[np.ndarray], np.ndarray],
) -> SplitLists:
    """List the splits of a decode batch.

    Args:
        gpu_rows, host_rows: [batch, max_blocks] int32, the rows' block tables; -1 where there is no block.
        lengths: [batch] tokens of each row, the current one included.
        window: the layers' sliding window in tokens, None for full attention.
        partials_per_block: a function from the number of blocks that each row reads, [batch], to the attribute.
    """
    first, counts = visible_blocks(lengths, window, block_size)
    block_ranges = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(lengths)), counts)
    index = np.arange(block_ranges[-1]) - np.repeat(block_ranges[:-1] - first, counts)
    row_partials = partials_per_block(counts)
    per_block = row_partials[row]
    # A sequence's last block has items only as far as it has tokens.
    splits = np.minimum(-(-(lengths[row] - index * block_size) // (block_size // per_block)), per_block)
    split_ends = np.concatenate([[0], np.cumsum(splits)])
    gpu_block, host_block = gpu_rows[row, index], host_rows[row, index]
    is_on_gpu = gpu_block != NO_BLOCK
    assert np.all(is_on_gpu | (host_block != NO_BLOCK)), "a block lies neither on the GPU nor on the host"
    blocks = np.stack([row, index * per_block, gpu_block, split_ends[:-1], splits], axis=1).astype(np.int32)
    on_gpu, on_host = blocks[is_on_gpu], blocks[~is_on_gpu]
    on_host[:, 2] = host_block[~is_on_gpu]
    on_host = on_host[np.argsort(on_host[:, 2], kind="stable")]
    items = _items(on_gpu)
    row, span = items[:, 0], block_size // row_partials[items[:, 0]]
    begin = items[:, 1] * span
    hidden = 0 if window is None else np.maximum(lengths[row] - window - begin, 0)
    num_keys = np.maximum(np.minimum(lengths[row] - begin, span) - hidden, 0)
    items = items[np.argsort(-num_keys, kind="stable")]
    return SplitLists(items, on_host, split_ends[block_ranges].astype(np.int32), row_partials)


def _items(blocks: np.ndarray) -> np.ndarray:
    """Return each item of `blocks`, [n, 4] int32. blocks: [m, 5] as in `SplitLists.on_host`."""
    items, splits = blocks[:, :4], blocks[:, 4]
    if np.all(splits == 1):
        return items
    items = np.repeat(items, splits, axis=0)
    number = np.arange(len(items), dtype=np.int32) - np.repeat(np.cumsum(splits) - splits, splits)
    items[:, 1] += number
    items[:, 3] += number
    return items


def work_table(items: np.ndarray) -> np.ndarray:
    """[1 + n, 4] int32: (number of items, 0, 0, 0), then the items."""
    head = np.array([[len(items), 0, 0, 0]], dtype=np.int32)
    return np.concatenate([head, items])


def slot_records(on_host: np.ndarray, chunks: list[Chunk]) -> list[np.ndarray]:
    """List what decode attends to in each chunk once it lies in a ring slot. Rows that share a block have an item each.

    Args:
        on_host: as in `SplitLists`. Each block must lie in a chunk; if it lies in several, the first one counts.

    Returns:
        For each chunk a `work_table` in which the place in the ring slot replaces the block number.
    """
    if not chunks:
        return []
    sizes = [len(chunk.blocks) for chunk in chunks]
    blocks = np.concatenate([chunk.blocks for chunk in chunks])
    order = np.argsort(blocks, kind="stable")
    at = order[np.searchsorted(blocks[order], on_host[:, 2])]
    assert np.array_equal(blocks[at], on_host[:, 2]), "a block that streams lies in no chunk"
    number = np.repeat(np.arange(len(chunks)), sizes)[at]
    placed = on_host.copy()
    placed[:, 2] = at - (np.cumsum(sizes) - sizes)[number]
    items = _items(placed[np.argsort(number, kind="stable")])
    ends = np.cumsum(np.bincount(number, weights=on_host[:, 4], minlength=len(chunks)).astype(np.int64))
    return [work_table(items[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


class SplitPlanner:
    """Makes the lists of splits of decode steps."""

    def __init__(self, resources: Resources) -> None:
        self._groups = resources.groups
        self._tiles = [backend.tiles_per_block for backend in resources.backend_of_group]
        self._blocks_per_slot = resources.ring.blocks_per_slot

    def splits(
        self, size: int, gpu_blocks: np.ndarray, host_blocks: np.ndarray, lengths: np.ndarray
    ) -> list[SplitLists]:
        """Return for each group where the splits of the rows lie.

        Args:
            size: rows of the padded batch.
            gpu_blocks, host_blocks: the rows' block tables, [groups, rows, any number of blocks].
            lengths: [rows] tokens of each.
        """
        return [
            split_lists(
                on_gpu, on_host, lengths, group.window, group.block_size, partial(self.partials_per_block, size, number)
            )
            for number, (group, on_gpu, on_host) in enumerate(zip(self._groups, gpu_blocks, host_blocks, strict=True))
        ]

    def valid_up_to(self, size: int, lengths: np.ndarray) -> np.ndarray:
        """Return the length, [rows], up to which a row of the same blocks has the splits that it has at `lengths`."""
        ends = []
        for number, group in enumerate(self._groups):
            first, counts = visible_blocks(lengths, group.window, group.block_size)
            span = group.block_size // self.partials_per_block(size, number, counts)
            ends.append(-(-lengths // span) * span)
            if group.window is not None:
                ends.append((first + 1) * group.block_size + group.window - 1)
        return np.min(ends, axis=0)

    def partials_per_block(self, size: int, number: int, num_blocks: np.ndarray) -> np.ndarray:
        """Return the partials per block of each row in a group, given the number of blocks that it reads; both [rows].

        Short rows are cut into tiles so that more programs have work.
        """
        tiles, is_short = self._tiles[number], num_blocks <= SHORT_BLOCKS
        cuts = self.may_cut(size, number) and np.sum(num_blocks[is_short]) * tiles <= MAX_TILES_APART
        return np.where(is_short & cuts, tiles, 1)

    def may_cut(self, size: int, number: int) -> bool:
        """Whether a group's blocks may be cut in a padded batch. The merge of larger ones is compiled without tiles."""
        return 1 < self._tiles[number] <= MAX_TILES_APART // size

    def chunks(self, lists: list[SplitLists], beside: Sequence[list[Chunk]] | None = None) -> list[list[Chunk]]:
        """Return for each group what streams for these splits, besides what passes for the same step's prompts."""
        chunks = []
        for index, of_group in enumerate(lists):
            blocks = of_group.host_blocks
            if beside is not None and beside[index]:
                blocks = np.setdiff1d(blocks, [block for chunk in beside[index] for block in chunk.blocks])
            chunks.append(pack(blocks, self._blocks_per_slot))
        return chunks
