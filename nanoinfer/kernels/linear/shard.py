"""What one of several devices holds of a model: its heads, columns, experts and rows of the vocabulary.

A rank is such a device. Where a weight is cut follows from the whole weight alone (`kernels.linear.cuts`), so two ranks
compute just the parts of sums that one device computes one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.kernels.linear.cuts import LEAST, columns_cut

SIZES = (1, 2, 4, 8)
"""How many ranks a model can be divided among."""


@dataclass(frozen=True)
class Held:
    """Which rows or columns of a checkpoint's weight a rank holds.

    Attributes:
        along: "rows" or "columns".
        total: how many there are.
        ranges: those that are held, each [begin, end), in the order in which they lie in the rank's weight.
    """

    along: str
    total: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many are held."""
        return sum(end - begin for begin, end in self.ranges)

    def times(self, size: int) -> Held:
        """Return the same of what has `size` rows or columns for each."""
        return Held(self.along, self.total * size, tuple((begin * size, end * size) for begin, end in self.ranges))


def held_rows(total: int, begin: int, end: int, size: int = 1) -> Held:
    """Return [begin, end) of so many, each of which is `size` rows."""
    return Held("rows", total * size, ((begin * size, end * size),))


def held_columns(total: int, begin: int, end: int, size: int = 1) -> Held:
    """Return [begin, end) of so many, each of which is `size` columns."""
    return Held("columns", total * size, ((begin * size, end * size),))


def joined_rows(several: Sequence[Held]) -> Held:
    """Return what is held of weights that lie one below the other as one."""
    ranges, first = [], 0
    for held in several:
        ranges += [(first + begin, first + end) for begin, end in held.ranges]
        first += held.total
    return Held("rows", first, tuple(ranges))


def ranges_of(shape: tuple[int, ...], own: tuple[int, ...], held: Held) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return along which dimension a rank has less of a tensor, and which parts of it: of the weight, its scales and
    whatever else has a number for some of its rows or columns.

    shape, own: of the whole tensor and of what the rank has.

    Raises:
        ValueError: they differ in more than one dimension, or a part begins between two numbers.
    """
    less = [dim for dim, (whole, some) in enumerate(zip(shape, own, strict=True)) if whole != some]
    if len(less) == 1:
        bounds = [number * shape[less[0]] for one in held.ranges for number in one]
        if not any(number % held.total for number in bounds):
            bounds = [number // held.total for number in bounds]
            ranges = tuple(zip(bounds[::2], bounds[1::2], strict=True))
            if sum(end - begin for begin, end in ranges) == own[less[0]]:
                return less[0], ranges
    raise ValueError(
        f"is {list(shape)}, and {held.count} of {held.total} {held.along} cannot be taken of it: what belongs together "
        "in its format would lie on two GPUs. Give tensor_parallel_size=1"
    )


@dataclass(frozen=True)
class Shard:
    """One rank of several.

    Attributes:
        rank: its number.
        size: how many there are, one of `SIZES`.
    """

    rank: int = 0
    size: int = 1

    @property
    def all(self) -> list[Shard]:
        """All ranks."""
        return [Shard(rank, self.size) for rank in range(self.size)]

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    def columns(self, total: int, block: int = LEAST) -> tuple[int, int]:
        """Return the columns, [begin, end), of a sum whose columns may be divided anywhere. block: as in
        `columns_cut`."""
        return self._part(total, lambda size: columns_cut(size, block))

    def even(self, total: int) -> tuple[int, int]:
        """Return what this rank has of so many things of which each may lie anywhere: half, rounded up, and so on."""
        return self._part(total, lambda size: -(-size // 2))

    def heads(self, num_q_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the query and the KV heads. Fewer KV heads than ranks are repeated: a rank has one.

        Raises:
            ValueError: they cannot be divided; the message says among how many ranks they can be.
        """
        if not divides(self.size, num_q_heads, num_kv_heads):
            working = [str(size) for size in SIZES if divides(size, num_q_heads, num_kv_heads)]
            raise ValueError(
                f"tensor_parallel_size={self.size}: {num_q_heads} query heads and {num_kv_heads} KV heads cannot be "
                f"divided among so many GPUs: give {' or '.join(working)}"
            )
        q_heads = num_q_heads // self.size
        kv_heads = max(1, num_kv_heads // self.size)
        first = self.rank * num_kv_heads // self.size
        return (self.rank * q_heads, (self.rank + 1) * q_heads), (first, first + kv_heads)

    def _part(self, total: int, cut: Callable[[int], int]) -> tuple[int, int]:
        begin, end, rank, size = 0, total, self.rank, self.size
        while size > 1:
            size //= 2
            middle = begin + cut(end - begin)
            begin, end = (begin, middle) if rank < size else (middle, end)
            rank %= size
        return begin, end


WHOLE = Shard()


def divides(size: int, num_q_heads: int, num_kv_heads: int) -> bool:
    """Whether so many ranks can share these heads evenly: each has whole KV heads, or all of them have one."""
    if num_kv_heads % size and size % num_kv_heads:
        return False
    return num_q_heads % size == 0
