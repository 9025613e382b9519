"""The reference backend: plain torch, float32 inside, one item or one block at a time.

Each item is computed on its own, by operations whose shapes depend on that item alone and whose operands are fresh
copies, so neither its neighbours nor the place (or the alignment) of its block can change its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionSpec, DecodeWork, Partials, PrefillPiece, PrefillState

NEG_INF = float("-inf")


class TorchBackend(AttentionBackend):
    """Runs anywhere. It reads the work lists on the host, so a CUDA graph cannot capture it."""

    name = "torch"
    graph_safe = False
    exact_splits = True

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        if not spec.dtype.is_floating_point:
            raise ValueError(f"attention dtype is {spec.dtype}: give float32, bfloat16 or float16")

    def decode_partial(
        self, q: Tensor, kv: Tensor, work: DecodeWork, seq_lens: Tensor, partials: Partials, window: int | None
    ) -> None:
        lens = seq_lens.tolist()
        spans = (self.spec.block_size // work.splits_per_block).tolist()
        for row, split, block, p in work.items[: int(work.num_items)].tolist():
            span = spans[row]
            first = split * span
            begin = 0 if window is None else max(0, lens[row] - window - first)
            end = min(span, lens[row] - first)
            if begin >= end:
                partials.out[p].zero_()
                partials.lse[p].fill_(NEG_INF)
                continue
            offset = first % self.spec.block_size
            k, v = self._heads_first(kv, block, offset + begin, offset + end)
            logits = self._logits(self._grouped(q[row : row + 1])[:, :, 0], k)  # [Hkv, G, T]
            lse = torch.logsumexp(logits, dim=-1)
            partials.out[p] = ((logits - lse[..., None]).exp() @ v).flatten(0, 1)
            partials.lse[p] = lse.flatten()

    def merge(self, partials: Partials, ranges: Tensor, partials_per_block: Tensor, out: Tensor) -> None:
        bounds = ranges.tolist()
        for row, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            lse = partials.lse[first:last]  # [R, Hq]
            peak = lse.amax(0) if first < last else lse.new_full((self.spec.num_q_heads,), NEG_INF)
            peak = torch.where(peak == NEG_INF, 0.0, peak)
            weights = (lse - peak).exp()
            total = weights.sum(0)
            mixed = (weights[..., None] * partials.out[first:last]).sum(0)  # [Hq, D]
            out[row] = (mixed / torch.where(total == 0, 1.0, total)[:, None]).to(out.dtype)

    def prefill(
        self, q: Tensor, kv: Tensor, piece: PrefillPiece, state: PrefillState | None, out: Tensor, window: int | None
    ) -> None:
        assert state is not None or not piece.store_state, "store_state needs a PrefillState"
        bounds = piece.cu_seqlens_q.tolist()
        for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if begin == end:
                continue
            queries = self._grouped(q[begin:end])  # [Hkv, G, n, D]
            running = self._begin(state, begin, end, bool(piece.load_state[i]))
            first_block, kv_end = int(piece.first_block[i]), int(piece.kv_end[i])
            for column, block in enumerate(piece.block_table[i].tolist()):
                first_key = (first_block + column) * self.spec.block_size
                last_key = min(first_key + self.spec.block_size, kv_end)
                if first_key < last_key:
                    pos = int(piece.query_pos[i])
                    self._attend_block(queries, kv, block, (first_key, last_key), pos, running, window)
            acc, m, l = running
            if piece.store_state:
                state.acc[begin:end] = self._tokens_first(acc)
                state.m[begin:end] = self._tokens_first(m[..., None])[..., 0]
                state.l[begin:end] = self._tokens_first(l[..., None])[..., 0]
            else:
                normalised = acc / torch.where(l == 0, 1.0, l)[..., None]
                out[begin:end] = self._tokens_first(normalised).to(out.dtype)

    def _attend_block(
        self,
        queries: Tensor,  # [Hkv, G, n, D] float32
        kv: Tensor,
        block: int,
        keys: tuple[int, int],  # absolute positions [first, last)
        pos: int,  # absolute position of the first query
        running: tuple[Tensor, Tensor, Tensor],  # acc [Hkv, G, n, D], m and l [Hkv, G, n]; updated in place
        window: int | None,
    ) -> None:
        # The queries [first, last) that see a key of this block, and so get a finite maximum. All bounds are
        # absolute: a cut between pieces moves none of them.
        first_key, last_key = keys
        num_queries = queries.shape[2]
        first = max(0, first_key - pos)
        last = num_queries if window is None else min(num_queries, last_key - 1 + window - pos)
        if first >= last:
            return
        offset = first_key // self.spec.block_size * self.spec.block_size
        begin = first_key if window is None else max(first_key, pos + first - window + 1)
        k, v = self._heads_first(kv, block, begin - offset, last_key - offset)
        acc, m, l = (part[:, :, first:last] for part in running)
        group = queries.shape[1]
        seen_by = queries[:, :, first:last].flatten(1, 2)  # [Hkv, G * rows, D]
        logits = self._logits(seen_by, k).unflatten(1, (group, last - first))  # [Hkv, G, rows, T]
        at = torch.arange(pos + first, pos + last, device=queries.device)[:, None]
        key = torch.arange(begin, last_key, device=queries.device)[None, :]
        hidden = key > at if window is None else (key > at) | (key <= at - window)
        logits = logits.masked_fill(hidden, NEG_INF)
        m_new = torch.maximum(m, logits.amax(-1))
        p = (logits - m_new[..., None]).exp()
        alpha = (m - m_new).exp()
        mixed = (p.flatten(1, 2) @ v).unflatten(1, (group, last - first))
        acc.mul_(alpha[..., None]).add_(mixed)
        l.mul_(alpha).add_(p.sum(-1))
        m.copy_(m_new)

    def _begin(self, state: PrefillState | None, begin: int, end: int, resume: bool) -> tuple[Tensor, Tensor, Tensor]:
        spec, num_queries = self.spec, end - begin
        heads = (spec.num_kv_heads, spec.group_size, num_queries)
        if not resume:
            options = {"dtype": torch.float32, "device": self.device}
            return (
                torch.zeros(*heads, spec.head_dim, **options),
                torch.full(heads, NEG_INF, **options),
                torch.zeros(heads, **options),
            )
        assert state is not None, "load_state 1 needs a PrefillState"
        acc = _copy(state.acc[begin:end].permute(1, 0, 2)).reshape(*heads, spec.head_dim)
        m, l = (_copy(part[begin:end].t()).reshape(heads) for part in (state.m, state.l))
        return acc, m, l

    def _grouped(self, q: Tensor) -> Tensor:
        """[n, Hq, D] -> a float32 copy [Hkv, G, n, D]."""
        return _copy(q.permute(1, 0, 2)).unflatten(0, (self.spec.num_kv_heads, self.spec.group_size))

    def _tokens_first(self, x: Tensor) -> Tensor:
        """[Hkv, G, n, D] -> [n, Hq, D]."""
        return x.flatten(0, 1).permute(1, 0, 2)

    def _heads_first(self, kv: Tensor, block: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens [begin, end) of a block, sliced and not masked, as float32 copies: k [Hkv, D, T], v [Hkv, T, D]."""
        k, v = kv[block, 0, begin:end], kv[block, 1, begin:end]
        return _copy(k.permute(1, 2, 0)), _copy(v.permute(1, 0, 2))

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        logits = (q @ k) * self.spec.scale
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _copy(x: Tensor) -> Tensor:
    """A contiguous float32 copy, even of what is that already: a matrix library may round by alignment."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
