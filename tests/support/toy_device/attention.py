"""The toy's attention, which takes lengths on the host, as Ascend's does: it reads them back, in no graph."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionSpec, DecodeWork, KeyRange, Partials, PrefillState
from toy_device.tensors import on_host

MASKED = float("-inf")


class ToyAttention(AttentionBackend):
    """A split is computed by itself, over the keys that it has, and a query of a prompt by itself, block by block."""

    name = "by length"
    graph_safe = False
    exact_splits = True

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        if spec.sinks or spec.softcap is not None:
            raise ValueError("attention backend 'by length' has neither sinks nor soft caps")

    def decode_partial(
        self, q: Tensor, kv: Tensor, work: DecodeWork, seq_lens: Tensor, partials: Partials, window: int | None, own=()
    ) -> None:
        lengths = seq_lens.tolist()
        q, kv, out, lse = map(on_host, (q, kv, partials.out, partials.lse))
        for row, number, block, place in work.items[: int(work.num_items)].tolist():
            end = lengths[row] - number * self.spec.block_size  # the row's, counted from the split's first key
            begin = 0 if window is None else max(0, end - window)
            out[place], lse[place] = self._attend(q[row], kv[block], begin, min(end, self.spec.block_size))

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
        bounds = ranges.tolist()
        values, lse, out = map(on_host, (partials.out, partials.lse, out))
        for row in range(len(out)):
            state = self._nothing()
            for place in range(bounds[row], bounds[row + 1]):
                state = _added(state, values[place], lse[place])
            out[row] = state[0]

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        key_range: KeyRange,
        state: PrefillState | None,
        out: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        own=(),
    ) -> None:
        names = ("cu_seqlens_q", "query_pos", "first_block", "kv_end", "load_state", "block_table")
        bounds, positions, first, ends, loads, tables = (getattr(key_range, name).tolist() for name in names)
        q, kv, out = map(on_host, (q, kv, out))
        held = None if state is None else [on_host(part) for part in (state.acc, state.m)]
        size = self.spec.block_size
        for i, table in enumerate(tables):
            for row in range(bounds[i], bounds[i + 1]):
                position = positions[i] + row - bounds[i]
                running = (held[0][row], held[1][row]) if loads[i] else self._nothing()
                for number, block in enumerate(table, first[i]):
                    end = min(position + 1, ends[i]) - number * size
                    begin = 0 if window is None else max(0, position + 1 - window - number * size)
                    if begin < min(end, size):
                        running = _added(running, *self._attend(q[row], kv[block], begin, min(end, size)))
                if key_range.store_state:
                    held[0][row], held[1][row] = running
                else:
                    out[row] = running[0]

    def _nothing(self) -> tuple[Tensor, Tensor]:
        heads = self.spec.num_q_heads
        return torch.zeros(heads, self.spec.head_dim), torch.full((heads,), MASKED)

    def _attend(self, q: Tensor, block: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the normalised output of one query over keys begin to end - 1 of a block, and its log-sum-exp."""
        if begin >= end:
            return self._nothing()
        k, v = (part[begin:end].to(torch.float32, copy=True).transpose(0, 1) for part in block)  # [Hkv, n, D]
        grouped = q.float().unflatten(0, (self.spec.num_kv_heads, -1))  # [Hkv, G, D]
        logits = (grouped.unsqueeze(2) * k.unsqueeze(1)).sum(-1) * self.spec.scale  # [Hkv, G, n]
        lse = logits.logsumexp(-1)
        weights = (logits - lse.unsqueeze(-1)).exp()
        return (weights.unsqueeze(-1) * v.unsqueeze(1)).sum(-2).flatten(0, 1), lse.flatten()


def _added(state: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge one more partial, in ascending order of position."""
    total = torch.logaddexp(state[1], lse)
    shares = ((part - total).nan_to_num(nan=MASKED).exp().unsqueeze(-1) for part in (state[1], lse))
    return sum(share * part for share, part in zip(shares, (state[0], out), strict=True)), total
