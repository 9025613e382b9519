"""What belongs to the Triton kernels alone, in Triton's interpreter."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import int32, make_paged, make_q, make_spec, make_work, run_decode, run_prefill

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.kernels import reference
from nanoinfer.kernels.attention import merge
from nanoinfer.kernels.attention.merge import store_partials
from nanoinfer.kernels.attention.shape import KernelShape, decode_programs, decode_tiles, prefill_tiles
from nanoinfer.kernels.attention.spec import SHORT_BLOCKS
from nanoinfer.kernels.launch.sizes import largest_tile
from nanoinfer.kernels.step.rows import step_inputs, update_rows

KIB = 1024


def kernel_shape(head_dim, dtype, block_size=256, num_q_heads=32):
    return KernelShape(
        num_q_heads=num_q_heads, num_kv_heads=8, head_dim=head_dim, block_size=block_size,
        scale=1.0, softcap=None, dtype=dtype, interpreted=True,
    )  # fmt: skip


@pytest.fixture
def operands_lie_alike(monkeypatch):
    """The interpreter's dot is numpy's, which picks its order of sums by strides: transposed tiles are packed first."""
    matmul, num_calls = np.matmul, []

    def packed(a, b, **arguments):
        num_calls.append(1)
        return matmul(np.ascontiguousarray(a), np.ascontiguousarray(b), **arguments)

    monkeypatch.setattr(np, "matmul", packed)
    yield
    assert num_calls, "the interpreter's dot is another one: its operands' layout is not under control"


@pytest.fixture
def tiles_alike(monkeypatch):
    """Decode takes the same tiles with the copy unit as without, as on GPUs of one kind."""
    monkeypatch.setattr(
        sys.modules["nanoinfer.kernels.attention.decode_partial"],
        "decode_tiles",
        lambda shape: decode_tiles(replace(shape, tma=False)),
    )


def test_decode_bits_do_not_depend_on_the_number_of_programs():
    spec, lens = make_spec(q_heads=2, kv_heads=1), [70, 33]
    paged, q = make_paged(spec, lens), make_q(spec, 2)
    backend, outs = TritonBackend(spec, "cpu"), []
    for backend.num_programs in (1, 3, 16):
        outs.append(run_decode(backend, q, paged.kv, paged.tables, lens)[0])
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.usefixtures("operands_lie_alike", "tiles_alike")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.sampled("torch.float16-None", "torch.float32-40")
def test_the_copy_unit_gives_the_bits_of_plain_loads(dtype, window):
    """Tiles that it brings are whole; the cut ones at both ends are masked, over poisoned memory."""
    spec, lens, q_lens = make_spec(4, 2, 64, 128, dtype), [200, 128, 1], [20, 3, 1]
    paged, q = make_paged(spec, lens), make_q(spec, sum(q_lens))
    plain, copying = TritonBackend(spec, "cpu"), TritonBackend(spec, "cpu")
    copying.shape = replace(copying.shape, tma=True)
    decoded = [run_decode(b, q[:3], paged.kv, paged.tables, lens, window)[0] for b in (plain, copying)]
    assert decoded[0].isfinite().all() and torch.equal(*decoded)
    begin = [length - count for length, count in zip(lens, q_lens, strict=True)]
    prefilled = [run_prefill(b, q, paged, begin, q_lens, window) for b in (plain, copying)]
    assert prefilled[0].isfinite().all() and torch.equal(*prefilled)


def test_a_split_beyond_the_sequence_counts_for_nothing():
    spec = make_spec(8, 2, 64, 128, torch.float16)
    paged, q = make_paged(spec, [300]), make_q(spec, 1)
    for tma in (False, True):
        backend = TritonBackend(spec, "cpu")
        backend.shape = replace(backend.shape, tma=tma)
        partials = backend.partials(2)
        partials.out.fill_(7), partials.lse.fill_(7)
        work = make_work([(0, 0, paged.tables[0][0], 0), (0, 2, paged.tables[0][1], 1)], 2)
        backend.decode_partial(q, paged.kv, work, int32([100]), partials, None)
        assert not partials.out[1].any() and (partials.lse[1] == float("-inf")).all()
        assert partials.lse[0].isfinite().all()


def test_store_partials_drops_stale_rows_and_marks_empty_splits():
    item_out, item_lse = torch.randn(3, 2, 16).bfloat16(), torch.tensor([[1.0, float("inf")], [2.0, 3.0], [9.0, 9.0]])
    out, lse = torch.full((4, 2, 16), 7.0), torch.full((4, 2), 7.0)
    items = int32([[0, 0, 0, 3], [0, 1, 0, 1], [0, 2, 0, 0]])
    store_partials(item_out, item_lse, items, int32([2]), out, lse)
    assert torch.equal(out[[3, 1]], item_out[:2].float())
    assert torch.equal(lse, torch.tensor([[7.0, 7.0], [2.0, 3.0], [7.0, 7.0], [1.0, float("-inf")]]))
    assert (out[[0, 2]] == 7).all()


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("shared_memory", [64 * KIB, 99 * KIB, 227 * KIB])
def test_tiles_divide_blocks_and_fit_shared_memory(head_dim, dtype, block_size, shared_memory):
    shape = replace(kernel_shape(head_dim, dtype, block_size), program_memory=shared_memory)
    row_bytes = shape.block_d * dtype.itemsize
    tiles = prefill_tiles(shape)
    for tile in (tiles, decode_tiles(shape)):
        assert block_size % tile.block_n == 0 and tile.block_n >= 16 and tile.block_m >= 16
    assert 2 * tiles.num_stages * tiles.block_n * row_bytes <= shared_memory


def test_decode_grid_fills_the_gpu_and_is_never_empty():
    shape = kernel_shape(128, torch.bfloat16)
    assert decode_programs(shape, 132, 228 * KIB) == 3 * 132 // 8
    assert decode_programs(shape, 128, 100 * KIB) == 128 // 8
    assert decode_programs(shape, 1, 16 * KIB) == 1


def test_a_tile_of_keys_never_crosses_a_block():
    assert [largest_tile(n, 64) for n in (16, 48, 64, 96, 256)] == [16, 16, 64, 32, 64]


@pytest.mark.parametrize(("num_q_heads", "rows"), [(8, 16), (56, 16), (136, 32)])
def test_query_group_is_padded_to_the_matrix_unit(num_q_heads, rows):
    assert decode_tiles(kernel_shape(64, torch.bfloat16, num_q_heads=num_q_heads)).block_m == rows


@pytest.mark.usefixtures("operands_lie_alike", "tiles_alike")
@pytest.mark.parametrize("window", [None, 40, 70])
@pytest.mark.sampled("70")
def test_cut_blocks_through_the_copy_unit_have_the_bits_of_plain_loads(window):
    spec, lens = make_spec(4, 2, 64, 256, torch.float16), [300, 65, 64]
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    plain, copying = TritonBackend(spec, "cpu"), TritonBackend(spec, "cpu")
    copying.shape = replace(copying.shape, tma=True)
    decoded = [run_decode(b, q, paged.kv, paged.tables, lens, window, 4)[0] for b in (plain, copying)]
    assert plain.tiles_per_block == 4 and decoded[0].isfinite().all() and torch.equal(*decoded)


@pytest.mark.parametrize("block_size", [16, 128, 256, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_block_is_cut_into_its_tiles_or_not_at_all(block_size, dtype):
    backend = TritonBackend(make_spec(32, 8, 128, block_size, dtype), "cpu")
    tiles = block_size // decode_tiles(backend.shape).block_n
    assert backend.tiles_per_block == (tiles if tiles <= 8 else 1)


def test_a_row_whose_tiles_lie_apart_has_no_more_blocks_than_the_merge_has_lanes():
    assert SHORT_BLOCKS <= merge.TILED_LANES


def test_update_rows_writes_what_the_torch_code_writes():
    generator = torch.Generator().manual_seed(0)
    num_rows, width, kept = 9, 2100, -1
    lines = torch.randint(0, 1000, (4, 3 + width), dtype=torch.int32, generator=generator)
    lines[:, 0] = torch.tensor([7, 0, 3, 8])
    lines[1, 1] = kept
    before = [
        torch.arange(num_rows) + 5,
        torch.arange(num_rows, dtype=torch.int32) + 50,
        torch.full((num_rows, width), 4, dtype=torch.int32),
    ]
    want, got = [tensor.clone() for tensor in before], [tensor.clone() for tensor in before]
    for line in lines.tolist():
        if line[1] != kept:
            want[0][line[0]] = line[1]
        want[1][line[0]], want[2][line[0]] = line[2], torch.tensor(line[3:])
    with_reference = [tensor.clone() for tensor in before]
    update_rows(lines, got, kept)
    reference.update_rows(lines, with_reference, kept)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert all(torch.equal(*pair) for pair in zip(with_reference, want, strict=True))
    assert got[0][0] == before[0][0] and got[0][7] == lines[0, 1]


@pytest.mark.parametrize("sizes", [[16], [256], [64, 16, 32]], ids=str)
def test_step_inputs_are_those_of_the_torch_code_at_block_edges(sizes):
    block_size, num_groups = sizes[0], len(sizes)
    lengths = int32(
        [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1, 3 * block_size]
    )
    num_rows, size = len(lengths), 11  # some rows not at all, some twice, as padding is
    generator = torch.Generator().manual_seed(0)
    columns = -(-3 * block_size // min(sizes))
    table = torch.randint(1, 2**31 // max(sizes), (num_rows, num_groups * columns), generator=generator).int()
    state = torch.arange(num_rows) + 2**40, lengths, table
    batch_rows = int32([7, 6, 0, 5, 4, 3, 2, 1, 0, 0, 7])

    def outputs():
        wide = [torch.full((size + 1,), -7) for _ in range(2)]
        return wide[0], int32([-7] * (size + 1)), wide[1], torch.full((num_groups, size + 1), -7)

    want, got = outputs(), outputs()
    reference.step_inputs(batch_rows, state, tuple(tensor[..., :size] for tensor in want), int32(sizes))
    step_inputs(batch_rows, state, got, int32(sizes))
    for row, slots in zip(batch_rows.tolist(), got[3][:, :size].T.tolist(), strict=True):
        position = int(lengths[row]) - 1
        blocks = [int(table[row, number * columns + position // of]) for number, of in enumerate(sizes)]
        assert slots == [block * of + position % of for block, of in zip(blocks, sizes, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
