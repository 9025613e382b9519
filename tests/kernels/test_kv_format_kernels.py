"""Formats of KV of the tests' own: what is stored is read, by the kernels and by plain torch, in any cut."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import (
    Paged,
    dense_decode,
    dense_prefill,
    make_q,
    make_spec,
    relative_error,
    run_decode,
    run_prefill,
)

pytest.importorskip("triton")

from kv_int8 import Int8Heads
from kv_one_vector import OneVector as AnyVector

from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.attention import spec as of_specs
from nanoinfer.kernels.attention.expand_kv import pieces
from nanoinfer.kernels.kv.one_vector import OneVector, OneVectorInt8
from nanoinfer.kernels.kv.plain import Plain, bfloat16, float16
from nanoinfer.kernels.kv.quantized import hadamard, int4, int8, k8v4
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.layers.rope import rope_table

FORMATS = [Int8Heads(), AnyVector(), bfloat16(), float16(), int8(), k8v4(), int4()]
LENS = [37, 16, 5, 50]


def table_of(head_dim):
    return rope_table(dict(rope_type="default", rope_theta=1e4), head_dim, 64, torch.float32, "cpu")


def paged_in(spec, own):
    """Sequences in blocks of a format; the rest of the pool is poison."""
    part, paged = spec.part, Paged([], [], None, [])
    paged.kv = torch.full((2 + sum(-(-n // 16) for n in LENS), part.num_bytes + 32), 255, dtype=torch.uint8)
    paged.kv = part.view(paged.kv)  # blocks lie further apart than they are long
    free = list(range(len(paged.kv)))[::-1]
    for n in LENS:
        table = torch.tensor([free.pop() for _ in range(-(-n // 16))])
        k, v = torch.randn(2, n, spec.num_kv_heads, spec.head_dim).unbind()
        slots = table.repeat_interleave(16)[:n] * 16 + torch.arange(n) % 16
        part.store(k, v, paged.kv, slots)
        positions = torch.arange(len(table) * 16).view(-1, 16)
        found = part.read(paged.kv, table, torch.zeros_like(table), 16, positions, own)
        paged.keys.append(found[0].flatten(0, 1)[:n])
        paged.values.append(found[1].flatten(0, 1)[:n])
        paged.tables.append(table.tolist())
    return paged


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [16, 48])
@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("backend_class", [TorchBackend, TritonBackend])
@pytest.mark.sampled(
    *(f"TorchBackend-{one.name}-{size}-{window}" for one in FORMATS for size in (16, 48) for window in (None, 20)),
    *(f"TritonBackend-{one.name}-{('48-None', '16-20')[place % 2]}" for place, one in enumerate(FORMATS)),
)
def test_attention_reads_what_was_stored(backend_class, kv_format, head_dim, window, monkeypatch):
    spec = replace(make_spec(head_dim=head_dim, windows=(window,)), kv_format=kv_format)
    own = kv_format.own(table_of(head_dim), None)
    paged, backend = paged_in(spec, own), backend_class(spec, "cpu")
    backend.decode_partial = partial(backend.decode_partial, own=own)
    backend.prefill = partial(backend.prefill, own=own)
    q = make_q(spec, len(LENS))
    got, _ = run_decode(backend, q, paged.kv, paged.tables, LENS, window)
    assert relative_error(got, dense_decode(spec, q, paged, LENS, window)) < 1e-5
    lens = [20, 16, 5, 33]
    begins, q = [n - count for n, count in zip(LENS, lens)], make_q(spec, sum(lens))
    whole = run_prefill(backend, q, paged, begins, lens, window)
    assert relative_error(whole, dense_prefill(spec, q, paged, begins, lens, window)) < 1e-5
    for cuts in (1, 2):
        assert torch.equal(run_prefill(backend, q, paged, begins, lens, window, cuts), whole)
    for room in (1, 3) if spec.is_expanded else ():  # blocks that are made plain numbers of at a time
        monkeypatch.setattr(of_specs, "EXPANDED_BYTES", room * spec.expanded_block_bytes)
        assert torch.equal(run_prefill(backend, q, paged, begins, lens, window), whole)


def test_pieces_have_every_block_once_in_order_and_fit():
    generator = random.Random(5)
    for _ in range(200):
        counts = [generator.choice([0, 1, 2, 3, 9, 40]) for _ in range(generator.randint(1, 9))]
        room = generator.randint(1, 20)
        found = list(pieces(counts, room))
        assert all((last - first) * (end - begin) <= room for first, last, begin, end in found)
        for number, count in enumerate(counts):
            of_one = [(begin, end) for first, last, begin, end in found if first <= number < last]
            assert of_one and all(one[1] == other[0] for one, other in zip(of_one, of_one[1:]))
            assert of_one[0][0] == 0 and of_one[-1][1] >= count


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("turned", [48, 32, 0])
@pytest.mark.parametrize("steps", [HeadSteps(), HeadSteps(interleaved=True), HeadSteps(distance=24)], ids=range(3))
@pytest.mark.sampled(  # every format with each of both, and every pair of these with some format
    *(f"{(of_turned + place) % 3}-{turned}-{one.name}" for place, one in enumerate(FORMATS)
      for of_turned, turned in enumerate((48, 32, 0)))
)  # fmt: skip
def test_the_store_writes_a_tokens_bytes_and_no_others(kv_format, turned, steps):
    spec = replace(make_spec(q_heads=4, head_dim=48), kv_format=kv_format)
    qkv, positions, slots = torch.randn(5, 8, 48), torch.tensor([0, 7, 63, 3, 40]), torch.tensor([47, 0, -1, 16, 33])
    rope, kept, found = table_of(turned) if turned else None, slots[slots >= 0], []

    def poison():
        return spec.part.view(torch.full((3, spec.part.num_bytes), 255, dtype=torch.uint8))

    def stored(operations, rows):
        kv, q = poison(), torch.empty(len(slots[rows]), 4, 48)
        where = positions[rows], kv, slots[rows], q
        operations.norm_rope_store(qkv[rows], None, steps, rope, *where, part=spec.part)
        return q, kv

    for operations in (fused, reference):
        q, kv = stored(operations, slice(0, 5))
        wanted = poison()
        for row, slot in enumerate(slots.tolist()):
            of_one, alone = stored(operations, slice(row, row + 1))
            assert torch.equal(of_one[0], q[row])
            for target, source in zip(spec.part.fields(wanted), spec.part.fields(alone)) if slot >= 0 else ():
                target[slot // 16, slot % 16] = source[slot // 16, slot % 16]
        assert torch.equal(kv.view(torch.uint8), wanted.view(torch.uint8)), (
            "a token's bytes depend on another one, or lie elsewhere"
        )
        blocks = torch.arange(3)
        where = blocks, blocks * 0, 16, torch.arange(48).view(3, 16)
        read = [one.flatten(0, 1) for one in spec.part.read(kv, *where, kv_format.own(table_of(48), None))]
        assert torch.isnan(read[1][1]).all(), "poison does not read as NaN"
        found.append((q, *(one[kept] for one in read)))
    for ours, of_torch in zip(*found):
        assert torch.allclose(ours.float(), of_torch.float(), atol=0.05) and torch.isfinite(of_torch).all()
    values = qkv[slots >= 0][:, 6:]
    largest_error = 0.05 if getattr(kv_format, "value_bits", 8) == 8 else 1.01 * values.abs().max() / 14
    assert (found[0][2].float() - values).abs().max() < largest_error, "values are stored as they are"


@pytest.mark.parametrize("turned", [1.0, 0.25])
@pytest.mark.parametrize("operations", [fused, reference], ids=lambda one: one.__name__.split(".")[-1])
def test_keys_made_of_values_are_the_layers_own_in_float32(operations, turned):
    rope = dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=turned)
    table, weight = rope_table(rope, 32, 64, torch.float32, "cpu"), torch.rand(32) + 0.5
    assert table.shape[1] == 32 * turned
    qkv, positions, slots = torch.randn(9, 6, 32), torch.randperm(64)[:9], torch.randperm(32)[:9]
    steps = HeadSteps(eps=1e-6, rounds_once=True, norms_values=True, distance=16)
    blocks, found = torch.arange(2), []
    of_tokens = torch.zeros(32, dtype=torch.int64).scatter_(0, slots, positions).view(2, 16)
    for kv_format in (Plain(torch.float32), OneVector(torch.float32)):
        part = replace(make_spec(q_heads=4, head_dim=32), kv_format=kv_format).part
        kv = part.view(torch.zeros(2, part.num_bytes, dtype=torch.uint8))
        where = positions, kv, slots, torch.empty(9, 4, 32)
        operations.norm_rope_store(qkv, (weight, weight), steps, table, *where, part=part)
        own = kv_format.own(table, weight)
        read = part.read(kv, blocks, blocks * 0, 16, of_tokens, own)
        found.append([one.flatten(0, 1)[slots] for one in read])
    for (ours, theirs), tolerance in zip(zip(*found), (0 if operations is reference else 1e-6, 0)):
        assert (ours - theirs).abs().max() <= tolerance and ours.abs().max() > 1


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("one", [OneVector, OneVectorInt8], ids=["plain", "int8"])
@pytest.mark.sampled(
    "plain-torch.float32-20", "plain-torch.bfloat16-None", "plain-torch.float16-None",
    "int8-torch.float32-None", "int8-torch.bfloat16-20", "int8-torch.float16-20",
)  # fmt: skip
def test_kernels_read_one_vector_as_plain_torch_does(one, dtype, window, monkeypatch):
    spec = replace(make_spec(head_dim=32, windows=(window,), dtype=dtype), kv_format=one(dtype))
    rope = dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5)
    own = spec.part.format.own(rope_table(rope, 32, 64, dtype, "cpu"), (torch.rand(32) + 0.5).to(dtype))
    paged, backend = paged_in(spec, own), TritonBackend(spec, "cpu")
    backend.decode_partial, backend.prefill = (
        partial(backend.decode_partial, own=own),
        partial(backend.prefill, own=own),
    )
    # The interpreter cuts numbers off to bfloat16 instead of rounding them.
    q, tolerance = make_q(spec, len(LENS)), {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}[dtype]
    assert (
        relative_error(
            run_decode(backend, q, paged.kv, paged.tables, LENS, window)[0], dense_decode(spec, q, paged, LENS, window)
        )
        < tolerance
    )
    lens = [20, 16, 5, 33]
    begins, q = [n - count for n, count in zip(LENS, lens)], make_q(spec, sum(lens))
    whole = run_prefill(backend, q, paged, begins, lens, window)
    assert relative_error(whole, dense_prefill(spec, q, paged, begins, lens, window)) < tolerance
    monkeypatch.setattr(of_specs, "EXPANDED_BYTES", spec.expanded_block_bytes)
    assert torch.equal(run_prefill(backend, q, paged, begins, lens, window), whole)


def test_one_vector_of_codes_is_stored_by_the_kernel_as_by_plain_torch():
    part = replace(make_spec(q_heads=4, head_dim=32), kv_format=OneVectorInt8(torch.float32)).part
    qkv, positions, slots, found = torch.randn(9, 6, 32), torch.arange(9), torch.randperm(32)[:9], []
    for operations in (fused, reference):
        kv = part.view(torch.full((2, part.num_bytes), 255, dtype=torch.uint8))
        steps, where = HeadSteps(eps=1e-6, norms_values=True), (positions, kv, slots, torch.empty(9, 4, 32))
        operations.norm_rope_store(qkv, (torch.ones(32), torch.ones(32)), steps, None, *where, part=part)
        found.append([field[slots // 16, slots % 16].float() for field in part.fields(kv)])
    (codes, scales), (their_codes, their_scales) = found
    assert (codes - their_codes).abs().max() <= 1 and torch.allclose(scales, their_scales, rtol=0.01)
    assert torch.equal(scales[..., 0], scales[..., 1]) and (codes.abs().amax(-1) >= 126).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_format", [int8(), k8v4(), int4()], ids=lambda one: one.name)
def test_what_is_no_number_is_read_as_none(kv_format, wrong):
    """Or an overflow would become a number, and nobody would be told."""
    spec, qkv = replace(make_spec(q_heads=2, kv_heads=1, head_dim=32), kv_format=kv_format), torch.randn(2, 4, 32)
    qkv[1, 2:, 5] = wrong
    for operations in (fused, reference):
        kv = spec.part.view(torch.zeros(1, spec.part.num_bytes, dtype=torch.uint8))
        where = torch.arange(2), kv, torch.arange(2), torch.empty(2, 2, 32)
        operations.norm_rope_store(qkv, None, HeadSteps(), None, *where, part=spec.part)
        block = torch.zeros(1, dtype=torch.int64)
        k, v = spec.part.read(kv, block, block, 16, torch.arange(16)[None], ())
        assert torch.isfinite(k[0, 0]).all() and torch.isfinite(v[0, 0]).all()
        assert not torch.isfinite(k[0, 1]).all() and not torch.isfinite(v[0, 1]).all()


@pytest.mark.parametrize(("head_dim", "size"), [(16, 16), (48, 16), (80, 16), (64, 64), (128, 128)])
def test_a_turned_head_has_the_products_of_the_head(head_dim, size):
    q, k = torch.randn(2, 7, head_dim, dtype=torch.float64).unbind()
    assert torch.allclose((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1))
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    assert torch.allclose(hadamard(q), (q.view(7, -1, size) @ matrix / size**0.5).flatten(1))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_channels_much_larger_than_others_cost_less_where_keys_are_turned(count):
    """The error of logits, with keys in 4 bits, of five placements of these channels."""
    errors = torch.zeros(2)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 64, 4, 128, generator=generator).unbind()
        k[..., torch.randperm(128, generator=generator)[:count]] *= 20
        for i, turn in enumerate((int4().turn, lambda x: x)):
            stored, _ = int4().decode(int4().encode(turn(k), k), None, ())
            found, wanted = (torch.einsum("qhd,khd->hqk", *pair) for pair in ((turn(q), stored), (q, k)))
            errors[i] += (found - wanted).square().mean()
    assert (errors[1] / errors[0]).sqrt() > 1.4


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
@pytest.mark.parametrize("kv_format", [int8(), k8v4(), int4()], ids=lambda one: one.name)
def test_numbers_of_every_size_keep_their_bits(kv_format, scale):
    k, v = (scale * torch.randn(2, 9, 2, 48)).unbind()
    k[0], v[1] = 0, 0
    for given, found, bits in zip((k, v), kv_format.decode(kv_format.encode(k, v), None, ()), kv_format.bits):
        largest = given.abs().amax(-1, keepdim=True)
        assert ((found - given).abs() <= 0.51 * 1.01 * largest / (127 if bits == 8 else 7)).all()
