"""Weights in the block types of GGUF: expanded to the bits of the package `gguf`, and multiplied as these."""

import math
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from blocks import TYPES, expanded, numbers_of, random_rows

from nanoinfer.kernels.linear.packed_weight import PackedWeight
from nanoinfer.layers.formats import packed
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors
from nanoinfer.layers.formats.gguf import GGUF
from nanoinfer.layers.formats.gguf_blocks import BLOCKS
from nanoinfer.layers.formats.parted import Parted
from nanoinfer.layers.linear import Embedding, Linear, share_scratch

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16


def linear_of(types: dict[str, str], sizes: dict[str, int], in_features: int, dtype=FULL, device="cpu") -> Linear:
    block_types = {f"{name}.weight": found for name, found in types.items()}
    formats = GGUF({}, CheckpointTensors(dtype, None, block_types))
    found = Linear(in_features, sizes, dtype=dtype, device=device, formats=formats)
    share_scratch(found, dtype=dtype, device=device)
    return found


def filled(name: str, rows: torch.Tensor, in_features: int, dtype: torch.dtype = FULL) -> Linear:
    found = linear_of({"w": name}, {"w": len(rows)}, in_features, dtype)
    filling = found.checkpoint_views()["w.weight"]
    assert filling.shapes == (tuple(rows.shape),) and filling.dtypes == (torch.uint8,)
    filling.take(rows.split(3))
    filling.check()
    return found


def test_blocks_have_the_sizes_of_the_package():
    for name, block in BLOCKS.items():
        assert (block.columns, block.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert set(TYPES) == set(BLOCKS)


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_have_the_bits_of_the_package(name, dtype):
    columns = 768
    rows = random_rows(name, 67, columns, largest=0.01 if dtype == HALF else None)
    found, wanted = filled(name, rows, columns, dtype), expanded(name, rows)
    assert bool(wanted.isfinite().all())
    got = found.weights.matrix(found)
    assert torch.equal(got, wanted.to(dtype)) and torch.equal(got.signbit(), wanted.signbit())


@pytest.mark.parametrize("name", TYPES)
def test_every_code_and_scale_is_reached(name):
    """What random bytes are worth: all codes, and all integers that are scales and minima."""
    found = BLOCKS[name].values(random_rows(name, 400, 768).unflatten(-1, (-1, BLOCKS[name].num_bytes)))
    packing = BLOCKS[name].packing
    assert len(found.codes.unique()) == 2**packing.bits - (name == "MXFP4")
    if found.factors:
        count = {"Q6_K": 256, "Q2_K": 16}.get(name, 64)
        assert all(len(one.unique()) == count for one in (found.scales, found.minima) if one is not None)


@pytest.mark.parametrize("name", TYPES)
def test_edge_values_have_the_bits_of_the_package(name):
    """Scales that are 0, subnormal, the least and the largest of float16, of both signs, with the last codes."""
    edges = torch.tensor([0.0, -0.0, 2.0**-24, 2.0**-14, 1.0, 65504.0, -65504.0, -(2.0**-24)], dtype=HALF)
    rows = random_rows(name, len(edges) ** 2, 256)
    blocks = rows.view(len(rows), -1, BLOCKS[name].num_bytes)
    blocks[::2, :, 4:16] = 255
    numbers = numbers_of(name)
    for begin, which in zip(numbers, (edges.repeat(len(edges)), edges.repeat_interleave(len(edges))), strict=False):
        blocks[..., begin : begin + 2] = which.view(torch.uint8).view(-1, 1, 2)
    if not numbers:  # MXFP4
        blocks[..., 0] = torch.tensor([0, 1, 2, 127, 250, 251] * 11)[: len(rows), None]
    found = filled(name, rows, 256)
    assert torch.equal(found.weights.matrix(found), expanded(name, rows))


@pytest.mark.parametrize("name", TYPES)
def test_scales_that_are_no_numbers_are_refused(name):
    for number in (math.nan, math.inf, -math.inf):
        for begin in numbers_of(name):
            rows = random_rows(name, 4, 256)
            rows[2, begin : begin + 2] = torch.tensor([number], dtype=HALF).view(torch.uint8)
            with pytest.raises(ValueError, match="holds NaN or infinite scales"):
                filled(name, rows, 256)
    if name == "MXFP4":
        rows = random_rows(name, 4, 256)
        rows[2, 17] = 255
        with pytest.raises(ValueError, match="holds NaN or infinite scales"):
            filled(name, rows, 256)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ4_XS", "Q6_K"])
def test_weights_too_large_for_the_models_dtype_are_refused(name):
    rows = random_rows(name, 4, 256)
    begin = numbers_of(name)[0]
    rows[:, begin : begin + 2] = torch.tensor([60000.0], dtype=HALF).view(torch.uint8)
    assert bool(filled(name, rows, 256, BF16).weights.matrix(filled(name, rows, 256, BF16)).isfinite().all())
    with pytest.raises(ValueError, match="makes weights NaN or infinite in float16"):
        filled(name, rows, 256, HALF)
    if name == "Q4_0":  # the code of 0 with the same scale
        rows.view(-1, 18)[:, 2:] = 0x88
        assert not filled(name, rows, 256, HALF).weights.matrix(filled(name, rows, 256, HALF)).any()


def test_a_weight_too_large_is_found_in_any_piece_of_the_rows(monkeypatch):
    """Scales of a large weight are looked at in pieces: in float32 all of a head's would take more than the head."""
    monkeypatch.setattr(packed, "EXPANDED_AT_ONCE", 64)
    at_once = []
    scales_of = PackedWeight.float_scales_of
    monkeypatch.setattr(
        PackedWeight, "float_scales_of", lambda self, rows: at_once.append(rows) or scales_of(self, rows)
    )
    for row in (0, 20, 39):
        rows = random_rows("Q6_K", 40, 256, largest=0.01)
        filled("Q6_K", rows, 256, HALF)
        assert len(at_once) == 10 and {one.stop - one.start for one in at_once} == {4}
        rows[row, 208:210] = torch.tensor([60000.0], dtype=HALF).view(torch.uint8)
        with pytest.raises(ValueError, match="makes weights NaN or infinite in float16"):
            filled("Q6_K", rows, 256, HALF)
        at_once.clear()


@pytest.mark.parametrize("dtype", [FULL, BF16, HALF])
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_expanded_model(name, dtype):
    rows = random_rows(name, 24, 512, largest=0.01)
    found = filled(name, rows, 512, dtype)
    dense = Linear(512, 24, dtype=dtype, device="cpu")
    dense.weight.copy_(expanded(name, rows).to(dtype))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(found(x), dense(x)) and bool(dense(x).isfinite().all())


@pytest.mark.parametrize("name", ["Q6_K", "Q5_0", "Q4_K"])
def test_rows_are_looked_up_by_token(name):
    rows = random_rows(name, 50, 256, largest=0.01)
    formats = GGUF({}, CheckpointTensors(HALF, None, {"embed_tokens.weight": name}))
    options = dict(is_tied=False, dtype=HALF, device="cpu", formats=formats.of_embeddings("embed_tokens"))
    found = Embedding(50, 256, **options)
    found.checkpoint_views()["weight"].take([rows])
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(found.lookup(ids), expanded(name, rows).to(HALF)[ids])


@pytest.mark.parametrize("types, num_parts", [("KKK", 0), ("KK6", 2), ("K66", 2), ("K6K", 3), ("KKW", 2)])
def test_neighbours_of_one_type_are_one_weight(types, num_parts):
    """Each projection is filled by itself; of several parts each has its own weight."""
    sizes, names = {"q_proj": 32, "k_proj": 16, "v_proj": 16}, {"K": "Q4_K", "6": "Q6_K", "W": "F32"}
    types = {name: names[letter] for name, letter in zip(sizes, types, strict=True)}
    found = linear_of(types, sizes, 256)
    assert isinstance(found.weights, Parted) == bool(num_parts)
    assert not num_parts or len(found.held) == num_parts
    wanted = []
    for seed, (name, view) in enumerate(found.checkpoint_views().items()):
        short = name.removesuffix(".weight")
        if types[short] == "F32":
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
            wanted.append(view.clone())
            continue
        rows = random_rows(types[short], sizes[short], 256, seed=seed, largest=1.0)
        view.take([rows])
        wanted.append(expanded(types[short], rows))
    assert torch.equal(found.weights.matrix(found), torch.cat(wanted))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(9))
    dense = Linear(256, 64, dtype=FULL, device="cpu")
    dense.weight.copy_(torch.cat(wanted))
    assert torch.equal(found(x), dense(x))


def test_stacked_weights_are_filled_together():
    for name in TYPES:
        rows = torch.stack([random_rows(name, 12, 256, seed=seed) for seed in range(3)])
        weights = GGUF({}, CheckpointTensors(FULL, None, {"w.weight": name})).of("w")
        one = SimpleNamespace(num_rows=12, in_features=256)
        weights.allocate(one, 12, 256, dtype=FULL, device="cpu")
        tensors = {key: value for key, value in vars(one).items() if isinstance(value, torch.Tensor)}
        stacked = {key: torch.zeros(3, *value.shape, dtype=value.dtype) for key, value in tensors.items()}
        for key, value in stacked.items():
            setattr(one.packed, key, value)
        filling = weights.views(one, 0, 12)["weight"]
        filling.take(rows.split(5, 1))
        filling.check()
        for number in range(3):
            module = SimpleNamespace(packed=one.packed.of(number), dtype=FULL, num_rows=12, in_features=256)
            assert torch.equal(weights.expand(module, slice(0, 12)), expanded(name, rows[number])), name


def test_what_a_weight_takes_is_near_the_bytes_of_its_file():
    """Bits of a weight, and those in the file: of a mix of types as llama.cpp makes it the bounds hold."""
    wanted = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625,
              "Q3_K": 3.625, "Q2_K": 2.625, "IQ4_NL": 4.5, "IQ4_XS": 4.375, "MXFP4": 4.25}  # fmt: skip
    for name, bits in wanted.items():
        for size in (1024, 2560, 4096):
            for device in ("cpu", "meta"):
                found = linear_of({"w": name}, {"w": 64}, size, device=device)
                assert sum(one.nbytes for one in found.parameters()) * 8 == bits * 64 * size, (name, size)
            assert bits * BLOCKS[name].columns / 8 <= 1.06 * BLOCKS[name].num_bytes, name


def test_random_weights_have_about_the_wanted_size():
    for name in TYPES:
        found = linear_of({"w": name}, {"w": 64}, 512)
        found.fill_with_noise(torch.Generator().manual_seed(0))
        matrix = found.weights.matrix(found)
        assert 0.01 < matrix.std().item() < 0.04 and abs(matrix.mean().item()) < 0.005, name


def test_other_tensors_are_dense_and_unknown_types_are_refused_by_name():
    formats = GGUF({}, CheckpointTensors(BF16, None, {"a.weight": "F32", "b.weight": "BF16", "c.weight": "Q4_L"}))
    assert formats.of("a") is formats.of("b") is formats.of("d") is formats.of_embeddings("d") is DENSE
    with pytest.raises(ValueError, match="c has blocks of type Q4_L, which is not supported. Supported: F32"):
        formats.of("c")
    with pytest.raises(ValueError, match=r"w has 96 input features, which blocks of 256 \(Q4_K\) do not divide"):
        linear_of({"w": "Q4_K"}, {"w": 4}, 96)
    formats.check_quantization("gguf")
    with pytest.raises(ValueError, match="quantised with gguf"):
        formats.check_quantization("int4")


def test_the_reference_is_what_it_was():
    """One block by hand: Q4_1 with scale 0.5 and minimum -1 has the codes 0 and 15 at -1 and 6.5."""
    block = np.array([0, 0x38, 0, 0xBC, 0xF0, *[0] * 15], dtype=np.uint8)
    found = expanded("Q4_1", torch.from_numpy(block)[None])
    assert found[0, 0] == -1 and found[0, 16] == 6.5
