"""What every attention backend owes its callers; the Triton kernels run in Triton's interpreter."""

import sys
from contextlib import suppress

import pytest
import torch
from attention_cases import (
    POISON,
    dense_decode,
    dense_prefill,
    int32,
    list_items,
    make_paged,
    make_q,
    make_sinks,
    make_spec,
    make_work,
    per_block,
    relative_error,
    run_decode,
    run_prefill,
    run_prefill_after_history,
    run_prefill_through_ring,
    run_prefill_through_shared_slot,
)

from nanoinfer.attention.base import KeyRange
from nanoinfer.attention.registry import make_backend

with suppress(ImportError):
    import triton  # noqa: F401  # before the tests begin, so that its interpreter is made quick in a run of this file too

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SHAPES = [  # q_heads, kv_heads, head_dim, block_size, dtype, softcap, sinks
    (2, 2, 16, 16, torch.float32, None, False),
    (6, 2, 48, 32, torch.float32, 30.0, False),
    (7, 1, 80, 48, torch.float32, None, True),
    (3, 1, 128, 32, torch.bfloat16, None, False),
    (2, 1, 512, 16, torch.bfloat16, 20.0, False),
    (8, 1, 64, 32, torch.bfloat16, None, True),
]


def build(name, spec):
    if name == "triton":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("triton was imported without TRITON_INTERPRET=1")
    return make_backend(name, spec, "cpu", offload=True)


def shaped(shape):
    *sizes, sinks = shape
    return make_spec(*sizes, sinks=sinks)


backends = pytest.mark.parametrize("name", ["torch", "triton"])


@backends
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_equals_dense_attention_at_block_edges(name, shape):
    spec = shaped(shape)
    bs = spec.block_size
    lens = [1, bs - 1, bs, bs + 1, 0, 3 * bs]
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    out, _ = run_decode(build(name, spec), q, paged.kv, paged.tables, lens)
    assert relative_error(out, dense_decode(spec, q, paged, lens)) < TOLERANCE[spec.dtype]
    assert not out[4].any()


@backends
@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 1000])
def test_decode_equals_dense_attention_at_window_edges(name, window):
    spec, lens = make_spec(windows=(window,)), [1, 16, 17, 33, 48]
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    out, _ = run_decode(build(name, spec), q, paged.kv, paged.tables, lens, window)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < 2e-6


@backends
@pytest.mark.parametrize("partials_per_block", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 37, 64])
@pytest.mark.sampled(
    "None-2-torch",
    "1-4-torch",
    "37-2-torch",
    "64-4-torch",
    "None-4-triton",
    "1-2-triton",
    "37-4-triton",
    "64-2-triton",
)
def test_decode_of_blocks_that_are_cut_equals_dense_attention(name, window, partials_per_block):
    # Tiles of 64 keys.
    spec, lens = make_spec(block_size=64 * partials_per_block, windows=(window,)), [1, 65, 128, 300]
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    out, _ = run_decode(build(name, spec), q, paged.kv, paged.tables, lens, window, partials_per_block)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < 2e-6
    if name == "triton":
        whole, _ = run_decode(build(name, spec), q, paged.kv, paged.tables, lens, window)
        assert relative_error(whole, dense_decode(spec, q, paged, lens, window)) < 2e-6


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("partials_per_block", [1, 2])
@pytest.mark.sampled(
    "1-None-torch.bfloat16-torch",
    "2-20-torch.float32-torch",
    "2-None-torch.float32-torch",
    "1-None-torch.float32-triton",
    "1-20-torch.bfloat16-triton",
    "2-20-torch.float32-triton",
    "2-None-torch.bfloat16-triton",
)
def test_decode_bits_do_not_depend_on_where_blocks_lie(name, dtype, window, partials_per_block):
    block_size, lens = (16, [40, 5, 64]) if partials_per_block == 1 else (128, [140, 5, 257])
    spec = make_spec(head_dim=32, block_size=block_size, dtype=dtype)
    backend, paged, q = build(name, spec), make_paged(spec, lens), make_q(spec, 3)
    want, want_partials = run_decode(backend, q, paged.kv, paged.tables, lens, window, partials_per_block)

    items, ranges = list_items(spec, paged.tables, lens, window, partials_per_block)
    moved_blocks = sorted({block for _, _, block, _ in items})[1::2][::-1]
    ring_slot = torch.full((len(moved_blocks) + 1, *paged.kv.shape[1:]), POISON, dtype=dtype)
    for index, block in enumerate(moved_blocks, start=1):
        ring_slot[index] = paged.kv[block]
        paged.kv[block] = POISON
    moved = [(row, s, moved_blocks.index(b) + 1, p) for row, s, b, p in items if b in moved_blocks]
    kept = [item for item in items if item[2] not in moved_blocks]
    assert moved and kept
    partials = backend.partials(len(items))
    work = dict(partials_per_block=partials_per_block)
    backend.decode_partial(q, ring_slot, make_work(moved, stale=5, **work), int32(lens), partials, window)
    for part in (kept[:2], kept[2:]):
        backend.decode_partial(q, paged.kv, make_work(part, stale=1, **work), int32(lens), partials, window)
    out = torch.empty_like(want)
    backend.merge(partials, int32(ranges), per_block(partials_per_block), out)
    assert torch.equal(partials.out, want_partials.out[: len(items)])
    assert torch.equal(partials.lse, want_partials.lse[: len(items)])
    assert torch.equal(out, want)


@backends
def test_stale_items_are_never_read_and_no_other_partial_is_written(name):
    spec, lens = make_spec(), [20]
    backend, paged, q = build(name, spec), make_paged(spec, lens), make_q(spec, 1)
    partials = backend.partials(4)
    partials.out.fill_(7)
    partials.lse.fill_(7)
    work = make_work([(0, 1, paged.tables[0][1], 2)], stale=3)
    backend.decode_partial(q, paged.kv, work, int32(lens), partials, None)
    for kept in (0, 1, 3):
        assert (partials.out[kept] == 7).all() and (partials.lse[kept] == 7).all()
    assert partials.out[2].isfinite().all() and (partials.lse[2] != 7).all()

    before = partials.out.clone()
    work.num_items.zero_()
    backend.decode_partial(q, paged.kv, work, int32(lens), partials, None)
    assert torch.equal(partials.out, before)


@backends
@pytest.mark.parametrize(("seq_len", "window"), [(16, None), (0, None), (60, 8)])
def test_split_without_a_visible_key_is_zero_and_adds_nothing_to_the_merge(name, seq_len, window):
    spec = make_spec()
    backend, q = build(name, spec), make_q(spec, 1)
    kv = torch.full((1, 2, 16, 2, 16), POISON)
    partials = backend.partials(2)
    backend.decode_partial(q, kv, make_work([(0, 1, 0, 0)]), int32([seq_len]), partials, window)
    assert not partials.out[0].any()
    assert (partials.lse[0] == float("-inf")).all()

    partials.out[1], partials.lse[1] = 3.0, -50.0
    out = torch.full((3, 6, 16), POISON)
    backend.merge(partials, int32([0, 1, 1, 2]), per_block(), out)
    assert not out[:2].any()
    assert (out[2] == 3).all()
    both = torch.empty(1, 6, 16)
    backend.merge(partials, int32([0, 2]), per_block(), both)
    assert (both == 3).all()


@backends
@pytest.mark.parametrize("count", [1, 31, 33, 130, 300])
def test_merge_equals_one_softmax_over_all_splits(name, count):
    spec = make_spec(q_heads=2, kv_heads=1, head_dim=48)
    backend = build(name, spec)
    partials = backend.partials(count + 5)
    partials.out.normal_(generator=torch.Generator().manual_seed(count))
    partials.lse.normal_(generator=torch.Generator().manual_seed(count)).mul_(20)
    want = torch.einsum("sh,shd->hd", partials.lse[3 : 3 + count].double().softmax(0), partials.out[3:-2].double())
    for outside in (slice(0, 3), slice(3 + count, None)):
        partials.out[outside], partials.lse[outside] = POISON, POISON
    out = torch.empty(1, 2, 48)
    backend.merge(partials, int32([3, 3 + count]), per_block(), out)
    assert relative_error(out[0], want) < 1e-6


@backends
@pytest.mark.parametrize("count", [65, 97, 130])
def test_merge_finds_the_largest_of_many_splits_wherever_it_is(name, count):
    """Weights are relative to the largest log-sum-exp. Where it was overlooked, exp(300) is infinite in float32."""
    spec = make_spec(q_heads=1, kv_heads=1, head_dim=16)
    backend, places = build(name, spec), [63, 64, (64 + count) // 2, min(count, 128) - 1]
    partials = backend.partials(len(places) * count)
    partials.out.normal_(generator=torch.Generator().manual_seed(count))
    lse = partials.lse.normal_(generator=torch.Generator().manual_seed(count)).view(len(places), count)
    for row, place in enumerate(places):
        lse[row, place : place + 2] += 300
    want = torch.einsum("rs,rsd->rd", lse.double().softmax(1), partials.out.view(*lse.shape, -1).double())
    out = torch.empty(len(places), 1, 16)
    backend.merge(partials, int32([count * i for i in range(len(places) + 1)]), per_block(), out)
    assert relative_error(out[:, 0], want) < 1e-6


@backends
@pytest.mark.parametrize("as_many", [1, 513, 1025], ids=["few", "many", "more"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.sampled(
    *(f"False-{programs}-{name}" for programs in ("few", "many", "more") for name in ("torch", "triton")),
    "True-few-torch",
    "True-few-triton",
    "True-more-triton",
)
def test_merge_of_rows_with_any_number_of_splits_equals_one_softmax_each(name, as_many, has_sinks, monkeypatch):
    """A program's share, and how it reads, depend on the number of programs: a row's largest may come early or late."""
    num_rows, q_heads = 12, 2
    spec = make_spec(q_heads=q_heads, kv_heads=1, head_dim=48, sinks=has_sinks)
    sinks = make_sinks(spec)
    backend = build(name, spec)
    if name == "triton":
        module = sys.modules["nanoinfer.kernels.attention.merge"]
        taken = module.merge_launch(as_many, q_heads, 64)
        monkeypatch.setattr(module, "merge_launch", lambda *sizes: taken)
    counts = [0, 1, 4, 5, 15, 16, 17, 32, 33, 64, 129, 140]
    ranges = torch.tensor([0, *counts]).cumsum(0)
    partials = backend.partials(int(ranges[-1]) + 1)
    partials.out.normal_(generator=torch.Generator().manual_seed(0))
    partials.lse.normal_(generator=torch.Generator().manual_seed(1)).mul_(5)
    partials.out[-1], partials.lse[-1] = POISON, POISON
    want = torch.zeros(num_rows, q_heads, 48)
    for row, (begin, end) in enumerate(ranges.unfold(0, 2, 1).tolist()):
        logits = partials.lse[begin:end] if sinks is None else torch.cat((partials.lse[begin:end], sinks[None]))
        weights = logits.double().softmax(0)[: end - begin]
        want[row] = torch.einsum("sh,shd->hd", weights, partials.out[begin:end].double())
    out = torch.full_like(want, POISON)
    backend.merge(partials, ranges.int(), per_block(), out, sinks=sinks)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5)


@backends
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_equals_dense_attention(name, shape):
    spec = shaped(shape)
    bs = spec.block_size
    query_pos, q_lens = [0, bs + 3, 2 * bs], [bs + 1, 1, 5]
    paged = make_paged(spec, [p + n for p, n in zip(query_pos, q_lens, strict=True)])
    q = make_q(spec, sum(q_lens))
    out = run_prefill(build(name, spec), q, paged, query_pos, q_lens)
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens)) < TOLERANCE[spec.dtype]


@backends
@pytest.mark.parametrize("window", [1, 16, 33])
def test_prefill_equals_dense_attention_at_window_edges(name, window):
    spec, query_pos, q_lens = make_spec(q_heads=3, kv_heads=1, windows=(window,)), [0, 30], [50, 20]
    paged, q = make_paged(spec, [50, 50]), make_q(spec, 70)
    out = run_prefill(build(name, spec), q, paged, query_pos, q_lens, window)
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < 2e-6


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 15.0)])
@pytest.mark.sampled(
    "None-None-torch.float32-torch",
    "20-None-torch.bfloat16-torch",
    "None-15.0-torch.float32-torch",
    "None-None-torch.bfloat16-triton",
    "20-None-torch.float32-triton",
    "None-15.0-torch.bfloat16-triton",
)
def test_prefill_bits_do_not_depend_on_pieces(name, dtype, window, softcap, fuzz):
    spec = make_spec(q_heads=3, kv_heads=1, head_dim=32, dtype=dtype, softcap=softcap)
    query_pos, q_lens = [37, 0, 60], [40, 9, 7]
    paged, q = make_paged(spec, [77, 9, 67]), make_q(spec, 56)
    backend = build(name, spec)
    whole = run_prefill(backend, q, paged, query_pos, q_lens, window)
    assert relative_error(whole, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < TOLERANCE[dtype]
    for cuts in (1, 3) if fuzz else (2,):  # three ranges: the first, one between, the last
        assert torch.equal(run_prefill(backend, q, paged, query_pos, q_lens, window, cuts), whole)


@backends
def test_prefill_piece_without_keys_leaves_an_empty_state(name):
    spec, query_pos, q_lens = make_spec(q_heads=2, kv_heads=1), [37, 0, 5], [20, 18, 3]
    paged, q = make_paged(spec, [57, 18, 8]), make_q(spec, 41)
    backend = build(name, spec)
    out = run_prefill_after_history(backend, q, paged, query_pos, q_lens)
    assert torch.equal(out, run_prefill(backend, q, paged, query_pos, q_lens))


@backends
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_prefill_through_ring_slots_equals_resident_bit_for_bit(name, blocks_per_slot):
    heads = (4, 2) if blocks_per_slot == 2 else (2, 1)
    spec, query_pos, q_lens = make_spec(*heads), [37, 0, 64], [20, 18, 3]
    paged, q = make_paged(spec, [57, 18, 67]), make_q(spec, 41)
    backend = build(name, spec)
    out = run_prefill_through_ring(backend, q, paged, query_pos, q_lens, blocks_per_slot)
    assert torch.equal(out, run_prefill(backend, q, paged, query_pos, q_lens))


@backends
def test_sequences_that_share_a_ring_slot_equal_resident_bit_for_bit(name):
    spec, query_pos, q_lens = make_spec(q_heads=2, kv_heads=1), [37, 32, 64], [20, 18, 3]
    paged, q = make_paged(spec, [57, 50, 67]), make_q(spec, 41)
    for table in paged.tables[1:]:
        table[:2] = paged.tables[0][:2]
    backend = build(name, spec)
    out = run_prefill_through_shared_slot(backend, q, paged, query_pos, q_lens, 2)
    assert torch.equal(out, run_prefill(backend, q, paged, query_pos, q_lens))


@backends
def test_prefill_reads_no_block_before_the_window(name):
    spec, window = make_spec(), 10
    paged, q = make_paged(spec, [53]), make_q(spec, 5)
    want = run_prefill(build(name, spec), q, paged, [48], [5], window)
    paged.kv[paged.tables[0][:2]] = POISON  # the first query, at 48, sees 39 and up: block 2
    assert torch.equal(run_prefill(build(name, spec), q, paged, [48], [5], window), want)


@backends
@pytest.mark.parametrize(("window", "partials_per_block"), [(None, 1), (None, 2), (20, 1)])
@pytest.mark.sampled("20-1-torch", "None-2-triton")
def test_a_sink_counts_once_however_a_row_is_cut(name, window, partials_per_block):
    """As in dense attention, alone and with others, with tiles as items of their own and without."""
    spec, lens = make_spec(block_size=16 if partials_per_block == 1 else 128, sinks=True), [1, 16, 150]
    paged, q, backend = make_paged(spec, lens), make_q(spec, len(lens)), build(name, spec)
    out, partials = run_decode(backend, q, paged.kv, paged.tables, lens, window, partials_per_block)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < 2e-6
    # The partials are those of a model without sinks: whatever buffer they come from, they know of none.
    plain = build(name, make_spec(block_size=spec.block_size))
    without, same = run_decode(plain, q, paged.kv, paged.tables, lens, window, partials_per_block)
    assert not torch.equal(out, without)
    assert torch.equal(partials.out[:-1], same.out[:-1]) and torch.equal(partials.lse[:-1], same.lse[:-1])
    for row in range(len(lens)):
        one = run_decode(backend, q[row:][:1], paged.kv, paged.tables[row:][:1], lens[row:][:1], window)[0]
        assert name == "torch" or torch.equal(one[0], out[row]), "alone, and not cut into tiles"
        assert relative_error(one[0], out[row]) < 1e-6


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.sampled("None-torch.float32-torch", "20-torch.bfloat16-triton")
def test_a_sink_counts_once_however_a_prompts_keys_are_cut(name, dtype, window, fuzz):
    spec = make_spec(q_heads=3, kv_heads=1, head_dim=32, dtype=dtype, sinks=True)
    query_pos, q_lens = [37, 0, 60], [40, 9, 7]
    paged, q, backend = make_paged(spec, [77, 9, 67]), make_q(spec, 56), build(name, spec)
    whole = run_prefill(backend, q, paged, query_pos, q_lens, window)
    assert relative_error(whole, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < TOLERANCE[dtype]
    for cuts in (1, 3) if fuzz else (2,):  # three ranges: the first, one between, the last
        assert torch.equal(run_prefill(backend, q, paged, query_pos, q_lens, window, cuts), whole)


@backends
@pytest.mark.parametrize(("sink", "as_without"), [(-200.0, True), (300.0, False)])
def test_a_sink_far_from_all_logits_changes_nothing_or_leaves_nothing(name, sink, as_without):
    spec, lens = make_spec(sinks=True), [20]
    paged, backend, sinks = make_paged(spec, lens), build(name, spec), torch.full((6,), sink)
    partials, q, cu = backend.partials(60), make_q(spec, 3), [0, 1, 7, 51]
    partials.out.normal_(generator=torch.Generator().manual_seed(0))
    partials.lse.normal_(generator=torch.Generator().manual_seed(1))
    merged, prefilled = torch.full((3, 6, 16), POISON), torch.full((3, 6, 16), POISON)
    backend.merge(partials, int32(cu), per_block(), merged, sinks=sinks)
    key_range = KeyRange.of_one(3, int32(paged.tables), begin=17)
    backend.prefill(q, paged.kv, key_range, None, prefilled, None, sinks)
    plain, plain_merged = build(name, make_spec()), torch.empty(3, 6, 16)
    plain.merge(partials, int32(cu), per_block(), plain_merged)
    plain_prefilled = torch.empty(3, 6, 16)
    plain.prefill(q, paged.kv, key_range, None, plain_prefilled, None)
    for found, without in ((merged, plain_merged), (prefilled, plain_prefilled)):
        assert torch.equal(found, without if as_without else torch.zeros_like(without))


def test_sinks_that_are_forgotten_are_noticed():
    backend, out = build("torch", make_spec(sinks=True)), torch.empty(1, 6, 16)
    with pytest.raises(AssertionError, match="sinks"):
        backend.merge(backend.partials(1), int32([0, 1]), per_block(), out)
