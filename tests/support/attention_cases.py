"""Paged inputs and a dense float64 reference for the attention tests, and the tests of that reference."""

import os
import random
import sys
from dataclasses import dataclass

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from nanoinfer.attention.base import AttentionSpec, DecodeWork, KeyRange
from offload.runtime.base import poison_of

POISON = float("nan")


def make_spec(
    q_heads=6, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, softcap=None, windows=(None,), sinks=False
):
    return AttentionSpec(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        block_size=block_size,
        softcap=softcap,
        windows=windows,
        sinks=sinks,
        dtype=dtype,
    )


@dataclass
class Paged:
    """Sequences' keys and values, dense and in a poisoned pool at shuffled blocks."""

    keys: list
    values: list
    kv: torch.Tensor
    tables: list


def make_paged(spec, lens, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    bs = spec.block_size
    counts = [-(-n // bs) for n in lens]
    free = list(range(sum(counts) + 2))
    random.Random(seed).shuffle(free)
    kv = torch.full((len(free), 2, bs, spec.num_kv_heads, spec.head_dim), POISON, dtype=spec.dtype)
    keys, values, tables = [], [], []
    for n, count in zip(lens, counts, strict=True):
        k, v = (torch.randn(n, *kv.shape[3:], generator=generator).to(spec.dtype) for _ in range(2))
        table = [free.pop() for _ in range(count)]
        for s, block in enumerate(table):
            part = slice(s * bs, min((s + 1) * bs, n))
            kv[block, 0, : part.stop - part.start] = k[part]
            kv[block, 1, : part.stop - part.start] = v[part]
        keys.append(k.to(device))
        values.append(v.to(device))
        tables.append(table)
    return Paged(keys, values, kv.to(device), tables)


def make_q(spec, num_tokens, device="cpu", seed=1):
    """Queries whose rows are strided, as a slice of a fused QKV is."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.num_q_heads + 2 * spec.num_kv_heads
    fused = torch.randn(num_tokens, width, spec.head_dim, generator=generator).to(spec.dtype)
    return fused.to(device)[:, : spec.num_q_heads]


def make_sinks(spec, device="cpu"):
    """[num_q_heads], about as large as logits are; None: the spec has none."""
    if not spec.sinks:
        return None
    return (2 * torch.randn(spec.num_q_heads, generator=torch.Generator().manual_seed(2))).to(device, spec.dtype)


def dense(spec, q, k, v, pos, window):
    """Causal attention of q [n, Hq, D] at positions pos.. to k, v [L, Hkv, D], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    i = torch.arange(pos, pos + len(q), device=q.device)[:, None]
    j = torch.arange(len(k), device=q.device)[None, :]
    hidden = j > i
    if window is not None:
        hidden |= j <= i - window
    logits = logits.masked_fill(hidden, float("-inf"))
    if spec.sinks:
        sinks = make_sinks(spec, q.device).double()[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat((logits, sinks), -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v).float()


def relative_error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def visible_splits(spec, seq_len, window):
    first = 0 if window is None else max(0, seq_len - window) // spec.block_size
    return range(first, -(-seq_len // spec.block_size))


def list_items(spec, tables, lens, window, partials_per_block=1):
    """All (row, split, block, partial), and the ranges for the merge."""
    items, ranges = [], [0]
    for row, n in enumerate(lens):
        for block in visible_splits(spec, n, window):
            numbers = range(block * partials_per_block, (block + 1) * partials_per_block)
            items += [(row, i, tables[row][block], 0) for i in numbers if i * spec.block_size < n * partials_per_block]
        ranges.append(len(items))
    return [(*item[:3], p) for p, item in enumerate(items)], ranges


def per_block(count=1, device="cpu"):
    """Partials of a block, the same for all rows."""
    return torch.full((400,), count, dtype=torch.int32, device=device)


def make_work(items, stale=2, device="cpu", partials_per_block=1):
    """A work list with stale rows behind it that would fault if they were read."""
    rows = [list(item) for item in items] + [[2**30] * 4] * stale
    return DecodeWork(
        items=int32(rows, device).view(-1, 4),
        num_items=int32([len(items)], device),
        partials_per_block=per_block(partials_per_block, device),
    )


def run_decode(backend, q, kv, tables, lens, window=None, partials_per_block=1):
    spec = backend.spec
    items, ranges = list_items(spec, tables, lens, window, partials_per_block)
    partials = backend.partials(len(items) + 1)
    partials.out.fill_(POISON)
    partials.lse.fill_(POISON)
    work = make_work(items, device=q.device, partials_per_block=partials_per_block)
    backend.decode_partial(q, kv, work, int32(lens, q.device), partials, window)
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=q.device)
    sinks = make_sinks(spec, q.device)
    backend.merge(partials, int32(ranges, q.device), work.partials_per_block, out, sinks=sinks)
    return out, partials


def dense_decode(spec, q, paged, lens, window=None):
    rows = []
    for b, n in enumerate(lens):
        if n == 0:
            rows.append(torch.zeros(1, *q.shape[1:], device=q.device))
        else:
            rows.append(dense(spec, q[b : b + 1], paged.keys[b][:n], paged.values[b][:n], n - 1, window))
    return torch.cat(rows)


def run_prefill(backend, q, paged, query_pos, q_lens, window=None, cuts=None):
    """Prefill with the KV in one range (cuts None), or in ranges that lie in buffers of their own.

    cuts: blocks per range. A range's buffer holds its blocks alone, in reversed order, the rest is poison.
    """
    spec, device = backend.spec, q.device
    kv_lens = [pos + n for pos, n in zip(query_pos, q_lens, strict=True)]
    cu = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=device)
    widest = max(len(table) for table in paged.tables)
    step = widest if cuts is None else cuts
    state = None
    if cuts is not None or backend.cuts_ranges:
        state = backend.prefill_state(len(q))
        for part in (state.acc, state.m, state.l):
            part.fill_(POISON)
    for first in range(0, widest, step):
        buffer, tables = (paged.kv, paged.tables) if cuts is None else _move(paged, first, step)
        table = [blocks + [2**30] * (step - len(blocks)) for blocks in tables]
        key_range = KeyRange(
            cu_seqlens_q=int32(cu, device),
            query_pos=int32(query_pos, device),
            first_block=int32([first] * len(q_lens), device),
            kv_end=int32([min(n, (first + step) * spec.block_size) for n in kv_lens], device),
            load_state=int32([int(first > 0)] * len(q_lens), device),
            block_table=int32(table, device),
            max_query_len=max(q_lens),
            num_blocks=[len(blocks) for blocks in tables],
            query_rows=(0, len(q)),
            store_state=first + step < widest,
        )
        backend.prefill(q, buffer, key_range, state, out, window, make_sinks(spec, device))
    return out


def run_prefill_after_history(backend, q, paged, query_pos, q_lens):
    """Prefill in two ranges that each sequence cuts for itself: its full history blocks, then the rest.

    A sequence without a full history block has nothing in the first range.
    """
    spec, device = backend.spec, q.device
    history = [pos // spec.block_size for pos in query_pos]
    state = backend.prefill_state(len(q))
    for part in (state.acc, state.m, state.l):
        part.fill_(POISON)
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=device)
    widest = max(len(table) for table in paged.tables)
    for last in (False, True):
        tables = [table[cut:] if last else table[:cut] for table, cut in zip(paged.tables, history, strict=True)]
        ends = [pos + n for pos, n in zip(query_pos, q_lens, strict=True)]
        key_range = KeyRange(
            cu_seqlens_q=int32([sum(q_lens[:i]) for i in range(len(q_lens) + 1)], device),
            query_pos=int32(query_pos, device),
            first_block=int32(history if last else [0] * len(history), device),
            kv_end=int32(ends if last else [cut * spec.block_size for cut in history], device),
            load_state=int32([int(last)] * len(history), device),
            block_table=int32([blocks + [2**30] * (widest - len(blocks)) for blocks in tables], device),
            max_query_len=max(q_lens),
            num_blocks=[len(blocks) for blocks in tables],
            query_rows=(0, len(q)),
            store_state=not last,
        )
        backend.prefill(q, paged.kv, key_range, state, out, None, make_sinks(spec, device))
    return out


def run_prefill_through_ring(backend, q, paged, query_pos, q_lens, blocks_per_slot):
    """As the ring does it: each sequence's full history blocks in chunks of its own, then the rest of all at once."""
    spec, device = backend.spec, q.device
    history = [pos // spec.block_size for pos in query_pos]
    state = backend.prefill_state(len(q))
    for part in (state.acc, state.m, state.l):
        part.fill_(POISON)
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=device)
    cu = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    cu_seqlens = int32(cu, device)
    for i, table in enumerate(paged.tables):
        for first in range(0, history[i], blocks_per_slot):
            end = min(first + blocks_per_slot, history[i])
            slot = torch.full(
                (blocks_per_slot, *paged.kv.shape[1:]), poison_of(paged.kv.dtype), dtype=paged.kv.dtype, device=device
            )
            slot[: end - first] = paged.kv[table[first:end]]
            key_range = KeyRange(
                cu_seqlens_q=cu_seqlens[i : i + 2],
                query_pos=int32(query_pos[i : i + 1], device),
                first_block=int32([first], device),
                kv_end=int32([end * spec.block_size], device),
                load_state=int32([int(first > 0)], device),
                block_table=int32([list(range(blocks_per_slot))], device),
                max_query_len=q_lens[i],
                num_blocks=[end - first],
                query_rows=(cu[i], cu[i + 1]),
                store_state=True,
            )
            backend.prefill(q, slot, key_range, state, out, None, make_sinks(spec, device))
    widest = max(len(table) for table in paged.tables)
    rest = [table[cut:] for table, cut in zip(paged.tables, history, strict=True)]
    key_range = KeyRange(
        cu_seqlens_q=cu_seqlens,
        query_pos=int32(query_pos, device),
        first_block=int32(history, device),
        kv_end=int32([pos + n for pos, n in zip(query_pos, q_lens, strict=True)], device),
        load_state=int32([int(cut > 0) for cut in history], device),
        block_table=int32([blocks + [2**30] * (widest - len(blocks)) for blocks in rest], device),
        max_query_len=max(q_lens),
        num_blocks=[len(blocks) for blocks in rest],
        query_rows=(0, len(q)),
        store_state=False,
    )
    backend.prefill(q, paged.kv, key_range, state, out, None, make_sinks(spec, device))
    return out


def run_prefill_through_shared_slot(backend, q, paged, query_pos, q_lens, num_shared):
    """All sequences begin with the same blocks, which lie in one ring slot; then the rest of each."""
    spec, device, count = backend.spec, q.device, len(q_lens)
    state = backend.prefill_state(len(q))
    for part in (state.acc, state.m, state.l):
        part.fill_(POISON)
    out = torch.full(q.shape, POISON, dtype=q.dtype, device=device)
    slot = paged.kv[paged.tables[0][:num_shared]].contiguous()
    widest = max(len(table) for table in paged.tables) - num_shared
    rest = [table[num_shared:] + [2**30] * (num_shared + widest - len(table)) for table in paged.tables]
    whole = [pos + n for pos, n in zip(query_pos, q_lens, strict=True)]
    for kv, first, ends, blocks in (
        (slot, 0, [num_shared * spec.block_size] * count, int32([list(range(num_shared))], device).expand(count, -1)),
        (paged.kv, num_shared, whole, int32(rest, device)),
    ):
        key_range = KeyRange(
            cu_seqlens_q=int32([sum(q_lens[:i]) for i in range(count + 1)], device),
            query_pos=int32(query_pos, device),
            first_block=int32([first] * count, device),
            kv_end=int32(ends, device),
            load_state=int32([int(first > 0)] * count, device),
            block_table=blocks,
            max_query_len=max(q_lens),
            num_blocks=[blocks.shape[1]] * count,
            query_rows=(0, len(q)),
            store_state=first == 0,
        )
        backend.prefill(q, kv, key_range, state, out, None, make_sinks(spec, device))
    return out


def _move(paged, first, step):
    moved = [table[first : first + step] for table in paged.tables]
    blocks = [block for table in moved for block in table][::-1]
    shape, poison = (len(blocks) + 1, *paged.kv.shape[1:]), poison_of(paged.kv.dtype)
    buffer = torch.full(shape, poison, dtype=paged.kv.dtype, device=paged.kv.device)
    buffer[1:] = paged.kv[blocks]
    return buffer, [[1 + blocks.index(block) for block in table] for table in moved]


def dense_prefill(spec, q, paged, query_pos, q_lens, window=None):
    rows, begin = [], 0
    for i, (pos, n) in enumerate(zip(query_pos, q_lens, strict=True)):
        rows.append(dense(spec, q[begin : begin + n], paged.keys[i], paged.values[i], pos, window))
        begin += n
    return torch.cat(rows)
