"""The attention kernels on a GPU: accuracy over shapes, poison, equality to the bit, CUDA graphs, flash-attn."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the compiled kernels need TRITON_INTERPRET unset", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from attention_cases import (
    POISON,
    dense_decode,
    dense_prefill,
    int32,
    list_items,
    make_paged,
    make_q,
    make_spec,
    make_work,
    per_block,
    relative_error,
    run_decode,
    run_prefill,
    run_prefill_after_history,
    run_prefill_through_ring,
)

from nanoinfer.attention.registry import make_backend
from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.kernels.kv.plain import Plain

needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
HEAD_DIMS = range(16, 257, 16)
GROUPS = [1, 2, 3, 4, 7, 8]
DEVICE = "cuda"


def bf16_spec(group=4, head_dim=128, block_size=256, softcap=None, windows=(None,), kv_heads=2):
    return make_spec(group * kv_heads, kv_heads, head_dim, block_size, torch.bfloat16, softcap, windows)


def check_decode(spec, lens, window=None, tolerance=1e-2):
    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, len(lens), DEVICE)
    out, _ = run_decode(TritonBackend(spec, DEVICE), q, paged.kv, paged.tables, lens, window)
    assert out.isfinite().all()
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < tolerance


def check_prefill(spec, query_pos, q_lens, window=None, tolerance=1e-2):
    paged = make_paged(spec, [p + n for p, n in zip(query_pos, q_lens, strict=True)], DEVICE)
    q = make_q(spec, sum(q_lens), DEVICE)
    out = run_prefill(TritonBackend(spec, DEVICE), q, paged, query_pos, q_lens, window)
    assert out.isfinite().all()
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < tolerance


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_equals_dense_attention(head_dim):
    spec = bf16_spec(head_dim=head_dim)
    check_decode(spec, [1, 255, 256, 257, 0, 700])
    check_prefill(spec, [0, 300, 256], [257, 1, 130])


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_size_equals_dense_attention(group):
    spec = bf16_spec(group=group)
    check_decode(spec, [31, 32, 33, 513])
    check_prefill(spec, [0, 100], [129, 64])


@pytest.mark.parametrize("block_size", [16, 48, 64, 512])
def test_every_block_size_equals_dense_attention(block_size):
    spec = bf16_spec(block_size=block_size)
    check_decode(spec, [1, block_size - 1, block_size, block_size + 1, 600])
    check_prefill(spec, [0, block_size, 5], [block_size + 1, 127, 128])


@pytest.mark.parametrize("window", [1, 31, 64, 127, 128, 129, 256, 257, 5000])
def test_every_window_edge_equals_dense_attention(window):
    spec = bf16_spec(windows=(window,))
    check_decode(spec, [1, 128, 256, 257, 640, 900], window)
    check_prefill(spec, [0, 255, 600], [300, 130, 1], window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_other_dtypes_equal_dense_attention(dtype, head_dim):
    spec = make_spec(6, 2, head_dim, 256, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    check_decode(spec, [1, 256, 300], tolerance=tolerance)
    check_prefill(spec, [0, 250], [260, 20], tolerance=tolerance)


@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap_equals_dense_attention(softcap):
    spec = bf16_spec(softcap=softcap)
    check_decode(spec, [1, 256, 600])
    check_prefill(spec, [0, 300], [300, 50])


def test_merge_of_512_splits_equals_dense_attention():
    check_decode(bf16_spec(block_size=16, kv_heads=1), [512 * 16, 511 * 16 + 1])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_bits_do_not_depend_on_where_blocks_lie(head_dim, window, splits):
    spec, lens = bf16_spec(head_dim=head_dim), [1025, 7, 256, 600]
    backend, paged, q = TritonBackend(spec, DEVICE), make_paged(spec, lens, DEVICE), make_q(spec, 4, DEVICE)
    want, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window, splits)
    assert relative_error(want, dense_decode(spec, q, paged, lens, window)) < 1e-2
    items, ranges = list_items(spec, paged.tables, lens, window, splits)
    moved_blocks = sorted({block for _, _, block, _ in items})[1::2][::-1]
    ring_slot = torch.full((len(moved_blocks) + 1, *paged.kv.shape[1:]), POISON, dtype=spec.dtype, device=DEVICE)
    for index, block in enumerate(moved_blocks, start=1):
        ring_slot[index] = paged.kv[block]
        paged.kv[block] = POISON
    moved = [(row, s, moved_blocks.index(block) + 1, p) for row, s, block, p in items if block in moved_blocks]
    kept = [item for item in items if item[2] not in moved_blocks]
    seq_lens = int32([0, *lens], DEVICE)[1:]  # an address that is not a multiple of 16 bytes
    partials = backend.partials(len(items))
    other = TritonBackend(spec, DEVICE)
    other.num_programs = 3
    other.decode_partial(q, ring_slot, make_work(moved, 5, DEVICE, splits), seq_lens, partials, window)
    backend.decode_partial(q, paged.kv, make_work(kept, 1, DEVICE, splits), seq_lens, partials, window)
    out = torch.empty_like(want)
    backend.merge(partials, int32(ranges, DEVICE), per_block(splits, DEVICE), out)
    assert torch.equal(out, want)


def test_decode_bits_of_a_row_do_not_depend_on_its_neighbours():
    spec, lens = bf16_spec(), [1, 900, 256, 31]
    backend, paged, q = TritonBackend(spec, DEVICE), make_paged(spec, lens, DEVICE), make_q(spec, 4, DEVICE)
    out, _ = run_decode(backend, q, paged.kv, paged.tables, lens)
    for row in range(4):
        alone, _ = run_decode(backend, q[row : row + 1], paged.kv, paged.tables[row : row + 1], lens[row : row + 1])
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (None, 20.0), (64, 20.0)])
def test_prefill_bits_do_not_depend_on_pieces(head_dim, window, softcap):
    spec = bf16_spec(head_dim=head_dim, softcap=softcap)
    query_pos, q_lens = [1000, 0, 511, 768], [400, 129, 2, 256]
    paged = make_paged(spec, [p + n for p, n in zip(query_pos, q_lens, strict=True)], DEVICE)
    q = make_q(spec, sum(q_lens), DEVICE)
    backend = TritonBackend(spec, DEVICE)
    whole = run_prefill(backend, q, paged, query_pos, q_lens, window)
    assert whole.isfinite().all()
    for cuts in (1, 2, 5):
        assert torch.equal(run_prefill(backend, q, paged, query_pos, q_lens, window, cuts), whole)
    if window is None:
        assert torch.equal(run_prefill_after_history(backend, q, paged, query_pos, q_lens), whole)
        for blocks_per_slot in (1, 3):
            assert torch.equal(run_prefill_through_ring(backend, q, paged, query_pos, q_lens, blocks_per_slot), whole)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks_count_once_wherever_keys_lie_and_whoever_is_in_the_batch(dtype, window):
    """In gpt-oss's shape. A batch of another size is merged in programs of another form."""
    spec, tolerance = (
        make_spec(64, 8, 64, 256, dtype, windows=(window,), sinks=True),
        1e-2 if dtype.itemsize == 2 else 1e-5,
    )
    lens = [1, 127, 128, 129, 256, 257, 600, 5000, *range(9000, 9012)]
    paged, q, backend = make_paged(spec, lens, DEVICE), make_q(spec, len(lens), DEVICE), TritonBackend(spec, DEVICE)
    out, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < tolerance
    for count in (1, 4, 9):
        some, _ = run_decode(backend, q[:count], paged.kv, paged.tables[:count], lens[:count], window)
        assert torch.equal(some, out[:count])
    cut, _ = run_decode(backend, q[:4], paged.kv, paged.tables[:4], lens[:4], window, backend.tiles_per_block)
    assert torch.equal(cut, out[:4])
    check_prefill(spec, [1000, 0, 511], [400, 129, 2], window, tolerance)
    query_pos, q_lens = [1000, 0, 511], [400, 129, 2]
    paged, q = make_paged(spec, [1400, 129, 513], DEVICE), make_q(spec, 531, DEVICE)
    whole = run_prefill(backend, q, paged, query_pos, q_lens, window)
    for cuts in (1, 2, 5):
        assert torch.equal(run_prefill(backend, q, paged, query_pos, q_lens, window, cuts), whole)


def test_resident_and_offload_launch_the_same_binaries():
    from nanoinfer.kernels.attention.decode_partial import decode_partial_kernel
    from nanoinfer.kernels.attention.prefill import prefill_kernel

    spec = bf16_spec(head_dim=112, block_size=128)  # a shape that no other test leaves compiled
    backend, lens = TritonBackend(spec, DEVICE), [1, 16, 513]
    kernels = (decode_partial_kernel, prefill_kernel)

    def count_binaries():
        caches = [next(iter(kernel.device_caches[torch.cuda.current_device()])) for kernel in kernels]
        return [len(cache) for cache in caches]

    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, 3, DEVICE)
    for window in (None, 5):  # a windowed layer has a binary of its own
        run_decode(backend, q, paged.kv, paged.tables, lens, window)
        run_prefill(backend, q, paged, [0, 15, 512], [1, 1, 1], window)
    before = count_binaries()
    for window in (None, 1, 16, 100):
        run_decode(backend, q[1:], paged.kv, paged.tables[1:], lens[1:], window)
        for cuts in (None, 1, 2):
            run_prefill(backend, q, paged, [0, 15, 512], [1, 1, 1], window, cuts)
    assert count_binaries() == before


def test_captured_decode_follows_the_number_of_items():
    spec, lens = bf16_spec(), [900, 300]
    backend, paged, q = TritonBackend(spec, DEVICE), make_paged(spec, lens, DEVICE), make_q(spec, 2, DEVICE)
    seq_lens, ranges = int32([0, 0], DEVICE), int32([0, 0, 0], DEVICE)
    work, partials = make_work([(0, 0, 0, 0)] * 8, 0, DEVICE), backend.partials(8)
    out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
    work.num_items.zero_()

    def step():
        backend.decode_partial(q, paged.kv, work, seq_lens, partials, None)
        backend.merge(partials, ranges, work.partials_per_block, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([900, 300], [1, 0], [256, 257], [0, 0]):
        items, bounds = list_items(spec, paged.tables, now, None)
        fresh = make_work(items, 8 - len(items), DEVICE)
        for target, source in ((work.items, fresh.items), (work.num_items, fresh.num_items)):
            target.copy_(source)
        seq_lens.copy_(int32(now, DEVICE))
        ranges.copy_(int32(bounds, DEVICE))
        partials.out.fill_(POISON)
        graph.replay()
        want, _ = run_decode(backend, q, paged.kv, paged.tables, now)
        assert torch.equal(out, want)
        assert not out[[n == 0 for n in now]].any()


def test_blocks_beyond_two_gib_values_are_addressed():
    spec = bf16_spec(group=1, kv_heads=8)
    num_blocks = 2**31 // (2 * 256 * 8 * 128) + 2
    needed = num_blocks * 2 * 256 * 8 * 128 * 2
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed / 2**30:.1f} GiB of free GPU memory")
    paged, q = make_paged(spec, [300], DEVICE), make_q(spec, 1, DEVICE)
    want, _ = run_decode(TritonBackend(spec, DEVICE), q, paged.kv, paged.tables, [300])
    kv = torch.empty(num_blocks, *paged.kv.shape[1:], dtype=spec.dtype, device=DEVICE)
    kv[-2:] = paged.kv[paged.tables[0]]
    far = [[num_blocks - 2, num_blocks - 1]]
    out, _ = run_decode(TritonBackend(spec, DEVICE), q, kv, far, [300])
    assert torch.equal(out, want)
    paged.tables, paged.kv = far, kv
    assert relative_error(run_prefill(TritonBackend(spec, DEVICE), q, paged, [299], [1]), want) < 1e-2


@needs_flash
@pytest.mark.parametrize(("head_dim", "group", "softcap"), [(64, 1, None), (128, 4, None), (256, 2, 30.0)])
def test_flash_attn_equals_dense_attention_in_both_modes(head_dim, group, softcap):
    spec, lens = bf16_spec(group=group, head_dim=head_dim, softcap=softcap), [1, 256, 257, 0, 900]
    backend = make_backend("flash_attn", spec, DEVICE, offload=True)
    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, len(lens), DEVICE)
    want = dense_decode(spec, q, paged, lens)
    out, partials = run_decode(backend, q, paged.kv, paged.tables, lens)
    assert relative_error(out, want) < 1e-2
    assert partials.lse[-1].isnan().all()  # the stale items wrote nowhere
    table = int32([blocks + [0] * (4 - len(blocks)) for blocks in paged.tables], DEVICE)
    rows = torch.empty_like(out)
    backend.decode_rows(q, paged.kv, table, int32(lens, DEVICE), rows, None)
    assert relative_error(rows, want) < 1e-2

    query_pos, q_lens = [1024, 1030], [130, 7]
    paged, q = make_paged(spec, [1154, 1037], DEVICE), make_q(spec, 137, DEVICE)
    want = dense_prefill(spec, q, paged, query_pos, q_lens)
    assert relative_error(run_prefill(backend, q, paged, query_pos, q_lens), want) < 1e-2
    assert relative_error(run_prefill(backend, q, paged, query_pos, q_lens, cuts=4), want) < 1e-2
    query_pos, q_lens = [1024, 0], [130, 7]
    paged = make_paged(spec, [1154, 7], DEVICE)
    want = dense_prefill(spec, q, paged, query_pos, q_lens)
    assert relative_error(run_prefill_after_history(backend, q, paged, query_pos, q_lens), want) < 1e-2
    assert relative_error(run_prefill_through_ring(backend, q, paged, query_pos, q_lens, 3), want) < 1e-2


@needs_flash
@pytest.mark.parametrize("window", [1, 256, 300])
def test_flash_attn_windows_equal_dense_attention_with_resident_kv(window):
    spec, lens = bf16_spec(windows=(window,)), [1, 257, 700]
    backend = make_backend("flash_attn", spec, DEVICE, offload=False)
    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, 3, DEVICE)
    table = int32([blocks + [0] * (3 - len(blocks)) for blocks in paged.tables], DEVICE)
    out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
    backend.decode_rows(q, paged.kv, table, int32(lens, DEVICE), out, window)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < 1e-2
    query_pos, q_lens = [0, 200], [1, 57]
    paged, q = make_paged(spec, [1, 257], DEVICE), make_q(spec, 58, DEVICE)
    out = run_prefill(backend, q, paged, query_pos, q_lens, window)
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < 1e-2
    with pytest.raises(ValueError, match="sliding-window layers.*offload"):
        make_backend("flash_attn", spec, DEVICE, offload=True)


@needs_flash
def test_captured_flash_attn_decode_follows_the_number_of_items():
    spec, lens = bf16_spec(), [900]
    backend = make_backend("flash_attn", spec, DEVICE, offload=True)
    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, 1, DEVICE)
    items, _ = list_items(spec, paged.tables, lens, None)
    work, partials = make_work(items, 2, DEVICE), backend.partials(8)
    seq_lens, ranges = int32(lens, DEVICE), int32([0, 4], DEVICE)
    out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)

    def step():
        backend.decode_partial(q, paged.kv, work, seq_lens, partials, None)
        backend.merge(partials, ranges, work.partials_per_block, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for n, splits in ((900, 4), (256, 1)):
        seq_lens.fill_(n)
        work.num_items.fill_(splits)
        ranges.copy_(int32([0, splits], DEVICE))
        partials.out.fill_(POISON)
        graph.replay()
        assert relative_error(out, dense_decode(spec, q, paged, [n])) < 1e-2


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_float8_cache_gives_the_bits_of_a_wide_one_with_the_same_values(head_dim):
    """Decode and prefill widen what they read, so the type of the cache changes its bytes only."""
    spec = bf16_spec(group=4, kv_heads=2, head_dim=head_dim)
    narrow_spec = replace(spec, kv_format=Plain(torch.float8_e4m3fn))
    lens = [700, 256, 3]
    paged, q = make_paged(spec, lens, DEVICE), make_q(spec, len(lens), DEVICE)
    used = torch.isfinite(paged.kv)
    narrow = torch.where(used, paged.kv, 0).to(torch.float8_e4m3fn)
    wide = torch.where(used, narrow.to(spec.dtype), paged.kv)
    want, _ = run_decode(TritonBackend(spec, DEVICE), q, wide, paged.tables, lens)
    got, _ = run_decode(TritonBackend(narrow_spec, DEVICE), q, narrow, paged.tables, lens)
    assert torch.equal(got, want)
    many = make_q(spec, sum(lens), DEVICE)
    begin = [0] * len(lens)
    want = run_prefill(TritonBackend(spec, DEVICE), many, replace(paged, kv=wide), begin, lens)
    assert torch.equal(
        run_prefill(TritonBackend(narrow_spec, DEVICE), many, replace(paged, kv=narrow), begin, lens), want
    )


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("num_others", [0, 24, 240])
@pytest.mark.parametrize("q_heads, head_dim", [(32, 128), (7, 64), (16, 80)])
def test_the_bits_of_a_merged_row_do_not_depend_on_other_rows(q_heads, head_dim, num_others, tiles):
    """Few rows are merged by programs of few columns that read ahead, many by programs of whole heads."""
    from nanoinfer.kernels.attention.merge import merge

    generator = torch.Generator("cuda").manual_seed(0)
    counts = [0, 1, 2, 7, 8, 9, 16, 20, 31, 32, 33, 64, 100, 128, 129, 300, 512] + [5, 20, 40] * (num_others // 3)
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    out = torch.randn(int(starts[-1]), q_heads, head_dim, device="cuda", generator=generator)
    lse = 5 * torch.randn(int(starts[-1]), q_heads, device="cuda", generator=generator)
    lse[3] = float("-inf")
    together = torch.empty(len(counts), q_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    merge(out, lse, lse, starts, per_block(1, "cuda"), together, tiles=tiles)
    for row in range(min(20, len(counts))):
        alone = torch.empty(1, q_heads, head_dim, dtype=torch.bfloat16, device="cuda")
        merge(out, lse, lse, starts[row : row + 2].contiguous(), per_block(1, "cuda"), alone, tiles=tiles)
        assert torch.equal(alone[0], together[row]), f"{counts[row]} splits"
        weights = lse[starts[row] : starts[row + 1]].double().softmax(0)
        want = (weights[..., None] * out[starts[row] : starts[row + 1]].double()).sum(0)
        assert torch.allclose(alone[0].double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("head_dim, q_heads, kv_heads", [(128, 32, 8), (64, 4, 2), (80, 6, 2), (256, 8, 2)])
@pytest.mark.parametrize("window", [None, 1, 70, 300])
def test_whole_blocks_have_the_bits_of_their_tiles_apart(window, head_dim, q_heads, kv_heads):
    """One program takes a block, and folds its tiles; or each tile has its own, and the merge folds them."""
    lens = [1, 63, 64, 65, 128, 200, 256, 257, 700, 1279, 1500]
    spec = bf16_spec(q_heads // kv_heads, head_dim, windows=(window,), kv_heads=kv_heads)
    backend, paged = TritonBackend(spec, DEVICE), make_paged(spec, lens, DEVICE)
    q, tiles = make_q(spec, len(lens), DEVICE), backend.tiles_per_block
    assert tiles in (4, 8)
    apart, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window, tiles)
    whole, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window)
    assert torch.equal(apart, whole)
    assert relative_error(whole.float(), dense_decode(spec, q, paged, lens, window)) < 2e-2
    for row, length in enumerate(lens):
        alone, _ = run_decode(backend, q[row : row + 1], paged.kv, paged.tables[row : row + 1], [length], window, tiles)
        assert torch.equal(alone[0], whole[row])
