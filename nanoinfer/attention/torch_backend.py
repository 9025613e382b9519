"""The reference backend: plain torch, float32 inside.

The bits of an item do not depend on what is computed beside it:

- Products have a fixed shape: a whole split in decode; a whole block and the queries of `TILE_QUERIES` positions in
  prefill, whether all of these queries exist or not. Keys that an item does not see are masked, not sliced off.
- A query's index in its tile follows from its position.
- Operands are fresh, contiguous copies. They are aligned alike if head_dim is a multiple of 16, as every model's is.
- Everything else is computed for many items at once, by functions that are exact for each value (see
  `nanoinfer.common.exact`) and by sums over rows of a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionSpec, DecodeWork, KeyRange, Partials, PrefillState
from nanoinfer.common.exact import elementwise

NEG_INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
TILE_QUERIES = 32
MERGED_SPLITS = 32
"""Splits that one sum of the merge adds up. If there are more splits, the sums are added in ascending order."""
MAX_ELEMENTS = 2**18
"""Elements of the largest temporary (1 MiB), unless a single item has more. So temporaries stay in a cache. Larger
ones go back to the system each time, and come back page by page."""


@dataclass(frozen=True)
class Tile:
    """Queries of one sequence of a `KeyRange`, at neighbouring positions.

    Attributes:
        sequence: number of the sequence in the `KeyRange`.
        rows: the queries' rows of q, first and last + 1.
        position: position of the first query.
        origin: the position of the tile's first query, or where one would be, a multiple of `TILE_QUERIES`.
    """

    sequence: int
    rows: tuple[int, int]
    position: int
    origin: int

    @property
    def last_position(self) -> int:
        return self.position + self.rows[1] - self.rows[0] - 1

    @property
    def indices(self) -> range:
        """Indices of the queries within the tile."""
        return range(self.position - self.origin, self.last_position + 1 - self.origin)


class TorchBackend(AttentionBackend):
    """Runs anywhere. It reads the work lists on the host, so a CUDA graph cannot capture it."""

    name = "torch"
    graph_safe = False
    exact_splits = True
    reads_every_format = True

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        if not spec.dtype.is_floating_point:
            raise ValueError(f"attention dtype is {spec.dtype}: give float32, bfloat16 or float16")

    def decode_partial(
        self,
        q: Tensor,
        kv: Tensor,
        work: DecodeWork,
        seq_lens: Tensor,
        partials: Partials,
        window: int | None,
        own: tuple[Tensor, ...] = (),
    ) -> None:
        spec = self.spec
        items = work.items[: int(work.num_items)].long()
        cuts = work.partials_per_block[items[:, 0]]
        distinct = sorted(set(cuts.tolist()))
        for cut in distinct:
            of_cut = items if len(distinct) == 1 else items[cuts == cut]
            count = _at_once(spec.block_size // cut * max(spec.num_q_heads, spec.num_kv_heads * spec.head_dim))
            for part in of_cut.split(count):
                self._attend_splits(q, kv, part, cut, seq_lens, partials, window, own)

    def _attend_splits(
        self,
        q: Tensor,
        kv: Tensor,
        items: Tensor,  # [n, 4] int64
        cut: int,  # splits in a block
        seq_lens: Tensor,
        partials: Partials,
        window: int | None,
        own: tuple[Tensor, ...],
    ) -> None:
        row, split, block, partial = items.unbind(1)
        span = self.spec.block_size // cut
        key = torch.arange(span, device=kv.device)
        end = (seq_lens[row] - split * span).unsqueeze(1)  # the row's, counted from the split's first key
        hidden = key >= end if window is None else (key >= end) | (key < end - window)  # [n, span]
        positions = split[:, None] * span + key
        k, v = self._heads_first(self.spec.part.read(kv, block, split % cut, span, positions, own), hidden)
        queries = q.index_select(0, row).float().unflatten(1, (self.spec.num_kv_heads, -1))  # [n, Hkv, G, D]
        # A library chooses the order of sums by the number of rows: that of the whole model, also of some of its heads.
        others = max(0, self.spec.whole_group - self.spec.group_size)
        if others:
            queries = F.pad(queries, (0, 0, 0, others))
        logits = self._logits(_products(queries, k.unbind())).masked_fill_(hidden[:, None, None], NEG_INF)
        peak = _finite(logits.amax(-1, keepdim=True))
        p = elementwise(torch.exp, logits.sub_(peak))
        total = p.sum(-1, keepdim=True)
        mixed = _products(p, v.unbind())  # [n, Hkv, G, D]
        if others:
            mixed, total, peak = (one[:, :, :-others] for one in (mixed, total, peak))
        partials.out[partial] = mixed.div_(_not_zero(total)).flatten(1, 2)
        partials.lse[partial] = (peak + elementwise(torch.log, total)).flatten(1)

    def merge(
        self,
        partials: Partials,
        ranges: Tensor,
        partials_per_block: Tensor,
        out: Tensor,
        *,
        is_cut: bool = True,
        sinks: Tensor | None = None,
    ) -> None:
        self.check_sinks(sinks)
        bounds = ranges.long().unsqueeze(1)
        widest = int(bounds.diff(dim=0).max()) if len(out) else 0
        width = max(1, -(-widest // MERGED_SPLITS)) * MERGED_SPLITS
        numbers, capacity = torch.arange(width, device=out.device), len(partials.lse)
        count = _at_once(width * self.spec.num_q_heads * self.spec.head_dim)
        for begin in range(0, len(out), count):
            rows = slice(begin, begin + count)
            index = bounds[:-1][rows] + numbers  # [b, width]
            is_beyond = (index >= bounds[1:][rows]).unsqueeze(-1)
            index.clamp_(max=capacity - 1)
            lse = partials.lse[index].masked_fill_(is_beyond, NEG_INF)  # [b, width, Hq]
            peak = _finite(lse.amax(1, keepdim=True))
            weights = elementwise(torch.exp, lse - peak).unsqueeze(-1)
            values = partials.out[index].masked_fill_(is_beyond.unsqueeze(-1), 0.0)  # [b, width, Hq, D]
            total, mixed = _sum_of_splits(weights), _sum_of_splits(values.mul_(weights))
            total = _not_zero(total)
            if sinks is not None:
                total += elementwise(torch.exp, sinks.float() - peak[:, 0]).unsqueeze(-1)
            out[rows] = mixed.div_(total)

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        key_range: KeyRange,
        state: PrefillState | None,
        out: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        own: tuple[Tensor, ...] = (),
    ) -> None:
        self.check_sinks(sinks)
        assert state is not None or not key_range.store_state, "store_state needs a PrefillState"
        tiles = _tiles(key_range.cu_seqlens_q.tolist(), key_range.query_pos.tolist())
        row_elements = TILE_QUERIES * self.spec.num_q_heads
        count = _at_once(row_elements * max(self.spec.block_size, self.spec.head_dim))
        for begin in range(0, len(tiles), count):
            self._attend_tiles(tiles[begin : begin + count], q, kv, key_range, state, out, window, sinks, own)

    def _attend_tiles(
        self,
        tiles: list[Tile],
        q: Tensor,
        kv: Tensor,
        key_range: KeyRange,
        state: PrefillState | None,
        out: Tensor,
        window: int | None,
        sinks: Tensor | None,
        own: tuple[Tensor, ...],
    ) -> None:
        spec, count = self.spec, len(tiles)
        rows = slice(tiles[0].rows[0], tiles[-1].rows[1])
        indices = torch.tensor(
            [i * TILE_QUERIES + index for i, tile in enumerate(tiles) for index in tile.indices], device=q.device
        )
        heads = (spec.num_kv_heads, spec.group_size * TILE_QUERIES)
        queries = self._in_tiles(q[rows].float(), indices, count, 0.0)  # [tiles, Hkv, G * TILE_QUERIES, D]
        acc = queries.new_zeros(queries.shape)
        m, l = queries.new_full((count, *heads), NEG_INF), queries.new_zeros(count, *heads)
        load_state = key_range.load_state.tolist()
        if any(load_state[tile.sequence] for tile in tiles):
            assert state is not None, "load_state 1 needs a PrefillState"
            resumed = (
                torch.tensor([load_state[tile.sequence] for tile in tiles for _ in tile.indices], device=q.device) > 0
            )
            acc, m, l = (
                self._in_tiles(part[rows][resumed], indices[resumed], count, otherwise)
                for part, otherwise in ((state.acc, 0.0), (state.m, NEG_INF), (state.l, 0.0))
            )
        first_block, kv_end = key_range.first_block.tolist(), key_range.kv_end.tolist()
        owners = torch.tensor([tile.sequence for tile in tiles], device=q.device)
        at = torch.tensor([tile.origin for tile in tiles], device=q.device)[:, None, None]
        at = at + torch.arange(TILE_QUERIES, device=q.device)[:, None]  # [tiles, TILE_QUERIES, 1]
        keys = torch.arange(spec.block_size, device=q.device) + key_range.first_block.long()[:, None] * spec.block_size
        for column in range(key_range.block_table.shape[1]):
            first_key = [(first + column) * spec.block_size for first in first_block]
            seeing = [
                i
                for i, tile in enumerate(tiles)
                if first_key[tile.sequence] < kv_end[tile.sequence]
                and first_key[tile.sequence] <= tile.last_position
                and (window is None or first_key[tile.sequence] + spec.block_size + window > tile.position + 1)
            ]
            if not seeing:
                continue
            sequences = sorted({tiles[i].sequence for i in seeing})
            owner = [sequences.index(tiles[i].sequence) for i in seeing]
            every = len(seeing) == count
            chosen = slice(None) if every else torch.tensor(seeing, device=q.device)
            key = keys + column * spec.block_size  # [S, block_size]
            is_beyond = key >= key_range.kv_end[:, None]
            blocks = key_range.block_table[sequences, column].long()
            found = spec.part.read(kv, blocks, torch.zeros_like(blocks), spec.block_size, key[sequences], own)
            k, v = self._heads_first(found, is_beyond[sequences])
            own_of = owners[chosen]
            key, is_beyond = key[own_of][:, None], is_beyond[own_of][:, None]  # [seeing, 1, block_size]
            hidden = (key > at[chosen]) | is_beyond
            if window is not None:
                hidden |= key <= at[chosen] - window
            running = acc[chosen], m[chosen], l[chosen]
            running = self._attend_block(queries[chosen], k, v, owner, hidden, running)
            if every:
                acc, m, l = running
            else:
                acc[chosen], m[chosen], l[chosen] = running
        if key_range.store_state:
            state.acc[rows], state.m[rows], state.l[rows] = (self._in_rows(part, indices) for part in (acc, m, l))
        else:
            total = _not_zero(l)
            if sinks is not None:
                each = sinks.float().repeat_interleave(TILE_QUERIES).view(heads)
                total += elementwise(torch.exp, each - _finite(m))
            out[rows] = self._in_rows(acc / total.unsqueeze(-1), indices).to(out.dtype)

    def _attend_block(
        self,
        queries: Tensor,  # [tiles, Hkv, G * TILE_QUERIES, D]
        k: Tensor,  # [sequences, Hkv, D, block_size]
        v: Tensor,  # [sequences, Hkv, block_size, D]
        owner: list[int],  # of each tile
        hidden: Tensor,  # [tiles, TILE_QUERIES, block_size]
        running: tuple[Tensor, Tensor, Tensor],  # acc, m and l of each query
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `running` with one more block attended to; unchanged for a query that sees none of its keys."""
        acc, m, l = running
        keys, values = k.unbind(), v.unbind()
        logits = self._logits(_products(queries, [keys[i] for i in owner]))
        shape = (len(owner), -1, self.spec.group_size, TILE_QUERIES, self.spec.block_size)
        logits.view(shape).masked_fill_(hidden[:, None, None], NEG_INF)
        m_new = torch.maximum(m, logits.amax(-1))
        peak = _finite(m_new)
        p = elementwise(torch.exp, logits.sub_(peak.unsqueeze(-1)))
        alpha = elementwise(torch.exp, m - peak)
        acc = acc * alpha.unsqueeze(-1) + _products(p, [values[i] for i in owner])
        return acc, m_new, l * alpha + p.sum(-1)

    def _in_tiles(self, x: Tensor, indices: Tensor, count: int, otherwise: float) -> Tensor:
        """Put n queries into tiles: [n, Hq, ...] -> [count, Hkv, G * TILE_QUERIES, ...] in new memory.

        Rows of a tile without a query hold `otherwise`.
        """
        tiles = x.new_full((count * TILE_QUERIES, *x.shape[1:]), otherwise)
        tiles[indices] = x
        tiles = tiles.unflatten(0, (count, TILE_QUERIES)).transpose(1, 2).contiguous()  # [count, Hq, TILE_QUERIES, ...]
        return tiles.view(count, self.spec.num_kv_heads, -1, *x.shape[2:])

    def _in_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """Undo `_in_tiles`: [count, Hkv, G * TILE_QUERIES, ...] -> [n, Hq, ...]."""
        heads = x.reshape(len(x), self.spec.num_q_heads, TILE_QUERIES, *x.shape[3:])
        return heads.transpose(1, 2).flatten(0, 1)[indices]

    def _heads_first(self, tiles: tuple[Tensor, Tensor], is_beyond: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values, [n, T, Hkv, D], to new float32 memory, k: [n, Hkv, D, T] and v: [n, Hkv, T, D].

        is_beyond: [n, T], tokens whose memory may hold anything. Their values become 0, since 0 * NaN is NaN; the
        logits of their keys are masked later.
        """
        k, v = tiles
        k, v = _copy(k.permute(0, 2, 3, 1)), _copy(v.permute(0, 2, 1, 3))
        return k, v.masked_fill_(is_beyond[:, None, :, None], 0.0)

    def _logits(self, products: Tensor) -> Tensor:
        logits = products.mul_(self.spec.scale)
        cap = self.spec.softcap
        return logits if cap is None else elementwise(torch.tanh, logits.div_(cap)).mul_(cap)


def _tiles(bounds: list[int], query_pos: list[int]) -> list[Tile]:
    """Cut the queries of each sequence at positions that are multiples of `TILE_QUERIES`."""
    tiles = []
    for sequence, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        shift = query_pos[sequence] - begin  # from rows to positions
        while begin < end:
            origin = (begin + shift) // TILE_QUERIES * TILE_QUERIES
            tile_end = min(end, origin + TILE_QUERIES - shift)
            tiles.append(Tile(sequence, (begin, tile_end), begin + shift, origin))
            begin = tile_end
    return tiles


def _products(left: Tensor, right: Sequence[Tensor]) -> Tensor:
    """left[i] @ right[i] for each item, one at a time: [n, Hkv, R, C] and n of [Hkv, C, T] -> [n, Hkv, R, T]."""
    out = left.new_empty(*left.shape[:-1], right[0].shape[-1])
    for a, b, product in zip(left.unbind(), right, out.unbind(), strict=True):
        torch.bmm(a, b, out=product)
    return out


def _finite(peak: Tensor) -> Tensor:
    """The largest logits of some sets, or, for an empty one's -inf, a number: exp(-inf - it) is 0 and not NaN."""
    return peak.clamp(min=LOWEST)


def _not_zero(total: Tensor) -> Tensor:
    """Sums of exp(logit - peak), or 1 for that of an empty set: others have the peak's exp(0) = 1 in them."""
    return total.clamp(min=1.0)


def _sum_of_splits(x: Tensor) -> Tensor:
    """Sum over the splits: [b, width, ...] -> [b, ...].

    Every `MERGED_SPLITS` splits are summed as one row of memory. These sums are added in ascending order.
    """
    parts = x.movedim(1, -1).contiguous().unflatten(-1, (-1, MERGED_SPLITS)).sum(-1)  # [b, ..., width / MERGED_SPLITS]
    return reduce(torch.add, parts.unbind(-1))


def _at_once(item_elements: int) -> int:
    """Return how many items to compute at once."""
    return max(1, MAX_ELEMENTS // item_elements)


def _copy(x: Tensor) -> Tensor:
    """Copy x to contiguous float32, even if it is that already: how a matrix library rounds may depend on alignment."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
