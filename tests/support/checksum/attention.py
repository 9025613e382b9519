"""Attention as a sum of checksums over the bytes of the blocks that the lists name: of no order, so of no form either.

Partials and the state of a prefill hold the sum so far in their first two words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from checksum import mixing
from checksum.mixing import sums, tagged, values, words
from checksum.words import shares
from nanoinfer.attention.base import AttentionBackend, AttentionSpec, DecodeWork, KeyRange, Partials, PrefillState


class ChecksumAttention(AttentionBackend):
    name = "checksum"
    graph_safe = False
    exact_splits = True
    tiles_per_block = 2

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        assert spec.dtype == torch.float32, "checksums are made of float32"

    def decode_partial(
        self, q: Tensor, kv: Tensor, work: DecodeWork, seq_lens: Tensor, partials: Partials, window: int | None, own=()
    ) -> None:
        if mixing.note is not None:
            mixing.note("read", work.items[: int(work.num_items)])
        row, item, block, place = work.items[: int(work.num_items)].numpy().astype(np.int64).T
        cut = work.partials_per_block.numpy()[row]
        span = self.spec.block_size // cut
        offset = np.arange(self.spec.block_size)
        # Where an item is a tile, the block's other keys are another's.
        is_own = (offset // span[:, None]) == (item % cut)[:, None]
        at = (item // cut * self.spec.block_size)[:, None] + offset
        visible = is_own & _seen(at, seq_lens.numpy()[row][:, None] - 1, window)
        found = shares(_bits(kv, block, visible), words(q.flatten(1))[row], visible, at)
        _sums(partials.out)[place] = found

    def merge(
        self, partials: Partials, ranges: Tensor, partials_per_block: Tensor, out: Tensor, *, is_cut: bool = True,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        begins = ranges.numpy().astype(np.int64)
        before = np.zeros(int(begins[-1]) + 1, np.uint64)
        np.cumsum(_sums(partials.out)[: begins[-1]], out=before[1:])
        self._write(out, before[begins[1:]] - before[begins[:-1]], sinks)

    def prefill(
        self, q: Tensor, kv: Tensor, key_range: KeyRange, state: PrefillState | None, out: Tensor, window: int | None,
        sinks: Tensor | None = None, own=(),
    ) -> None:  # fmt: skip
        names = ("cu_seqlens_q", "query_pos", "first_block", "kv_end", "load_state")
        bounds, begins, first, ends, loads = (getattr(key_range, name).tolist() for name in names)
        for i, table in enumerate(key_range.block_table.numpy()):
            rows = slice(bounds[i], bounds[i + 1])
            positions = begins[i] + np.arange(bounds[i + 1] - bounds[i])
            table = table[: max(0, -(-ends[i] // self.spec.block_size) - first[i])]
            at = (first[i] * self.spec.block_size + np.arange(len(table) * self.spec.block_size))[None]
            visible = _seen(at, positions[:, None], window) & (at < ends[i])
            seen = visible.any(0).reshape(len(table), -1)
            bits = _bits(kv, table, seen).reshape(1, at.shape[1], -1)
            found = shares(bits, words(q[rows].flatten(1)), visible, at)
            if loads[i]:
                found = found + _sums(state.acc)[rows]
            if key_range.store_state:
                _sums(state.acc)[rows] = found
            else:
                self._write(out[rows], found, sinks)

    def _write(self, out: Tensor, found: np.ndarray, sinks: Tensor | None) -> None:
        found = tagged(found if sinks is None else found ^ sums(sinks[None]), "attend")
        out.copy_(torch.from_numpy(values(found, out[0].numel())).view(out.shape))


def _seen(at: np.ndarray, position: np.ndarray, window: int | None) -> np.ndarray:
    """Whether a query at this position sees the key at another."""
    seen = at <= position
    return seen if window is None else seen & (at > position - window)


def _bits(kv: Tensor, blocks: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the words of keys and values that lie in blocks: [n, block_size, 2 * size] uint32; those unseen are 0."""
    if mixing.note is not None:
        for number, offset in np.argwhere(seen):
            for part in kv[blocks[number], :, offset]:
                mixing.note("read", part)
    own = kv.numpy()[blocks].swapaxes(1, 2)
    own = own.reshape(*own.shape[:2], -1)
    return words(np.where(seen[..., None], own, np.float32(0)))


def _sums(memory: Tensor) -> np.ndarray:
    """Return the sums that a buffer of partials or states holds: [n] uint64."""
    return memory.numpy().reshape(len(memory), -1).view(np.uint64)[:, 0]
