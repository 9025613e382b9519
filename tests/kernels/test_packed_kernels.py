"""Packed weights: the layout, the kernel that expands them, and products with them, under the interpreter.

The interpreter cuts what it should round to bfloat16, so products are rounded to float16 or float32 here.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from packings import FULL, HALF, PACKINGS, Bare, filled

from nanoinfer.devices.target import Target
from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.linear import launches, packed
from nanoinfer.kernels.linear.counts import MAX_ROWS
from nanoinfer.kernels.linear.cuts import columns_cut
from nanoinfer.kernels.linear.expand import expand, form_of, tensors_of
from nanoinfer.kernels.linear.launches import tiles_of
from nanoinfer.kernels.linear.packed import packed_linear
from nanoinfer.kernels.linear.packed_weight import empty_packed
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.formats.parted import Parted


def can_have(packing: Packing, in_features: int) -> bool:
    """Whether weights of a packing may have so many columns."""
    columns = packing.factor_columns or packing.columns
    return columns is None or packing.rows > 1 or in_features % columns == 0


def matrix_of(weights: Packed, module: Bare) -> torch.Tensor:
    return weights.expand(module, slice(0, module.num_rows)).to(HALF)


# Blocks of 256, of 128 and of 64 columns; a last one with columns too many; two parts, of odd numbers of blocks.
SIZES = (96, 192, 200, 256, 2304)


def expanded_cases() -> list[str]:
    """Of each packing the smallest size that it may have; of some, and of all with words of scales, longer ones."""
    found = []
    for number, (name, settings) in enumerate(PACKINGS.items()):
        packing = Packing(**settings)
        is_long = packing.scale_words is not None or number % 3 == 0
        sizes = [size for size in SIZES if can_have(packing, size)]
        found += [f"{name}-{size}" for size in sizes[:1] + [192, 2304][: 2 * is_long] if size in sizes]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("in_features", SIZES)
@pytest.mark.parametrize("name", list(PACKINGS))
@pytest.mark.sampled(*expanded_cases())
def test_the_kernel_expands_to_the_references_matrix(name, in_features):
    packing = Packing(**PACKINGS[name])
    if not can_have(packing, in_features):
        pytest.skip("no such weight")
    num_rows = 24 if in_features == SIZES[-1] else 40  # of a program's 32
    weights, module = filled(packing, num_rows, in_features)
    out = torch.full((num_rows, in_features), torch.nan, dtype=HALF)
    expand(module.packed, out)
    assert torch.equal(out, matrix_of(weights, module))


@pytest.mark.parametrize("num_tokens", [1, 16, 40])
@pytest.mark.parametrize("name", list(PACKINGS))
@pytest.mark.sampled(*[f"{name}-{count}" for name, count in zip(PACKINGS, 11 * (1, 16, 40))])
def test_products_are_those_with_the_expanded_matrix(name, num_tokens):
    packing = Packing(**PACKINGS[name])
    size = 384 if can_have(packing, 384) else 512
    weights, module = filled(packing, 40, size)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, size, generator=generator).to(HALF)
    bias = torch.randn(40, generator=generator).to(HALF)
    wide = x.float() @ matrix_of(weights, module).float().t()
    unit = wide.abs().max().item() / 2**10
    torch.testing.assert_close(packed_linear(x, module.packed, bias).float(), wide + bias, atol=unit, rtol=2**-9)
    assert_gated(packed_linear(x, module.packed, activation="silu").float(), wide)


def assert_gated(got, wide):
    """wide: the products with the rows of gate, then of up."""
    gate, up = (half.to(HALF).float() for half in wide.chunk(2, 1))
    active = torch.nn.functional.silu(gate).to(HALF).float() * up
    if bool(active.abs().max() < torch.finfo(HALF).max):
        torch.testing.assert_close(got, active, atol=3 * active.abs().max().item() / 2**9, rtol=2**-7)
    else:
        assert got.shape == active.shape


def test_a_weight_of_many_rows_is_computed_in_larger_tiles(monkeypatch):
    weights, module = filled(Packing(**PACKINGS["int4 in pairs of groups"]), 72, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(HALF)
    wide = x.float() @ matrix_of(weights, module).float().t()
    assert_gated(packed_linear(x, module.packed, activation="silu").float(), wide)
    smaller, larger = (
        tiles_of("4 bits", x, torch.empty(3, num_rows, device="meta"), True, 1) for num_rows in (36, 2**13)
    )
    assert (smaller.block_n, larger.block_n) == (32, 64)
    monkeypatch.setattr(packed, "tiles_of", lambda *given, **step: larger)
    assert_gated(packed_linear(x, module.packed, activation="silu").float(), wide)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["int4 in pairs of groups", "int8 by row"])
def test_every_number_of_rows_has_tiles_on_every_gpu(monkeypatch, name, gated):
    form = form_of(empty_packed(Packing(**PACKINGS[name]), 64, 512, "cpu"), torch.device("cpu"), HALF)
    for kib, is_async in ((99, False), (163, False), (227, True)):
        target = Target(program_memory=kib * 1024, has_async_products=is_async)
        monkeypatch.setattr(launches, "target_of", lambda device, target=target: target)
        for num_tokens in range(1, MAX_ROWS + 1):
            x, out = (torch.empty(num_tokens, size, device="meta") for size in (512, 64))
            found = tiles_of(f"{form.bits} bits", x, out, gated, None)
            block_m, block_n, columns, num_warps, stages, *_ = found
            assert block_m in (8, 16, 32, 64, 128) and block_m < max(2 * num_tokens, 16), found
            assert block_n >= 16 * num_warps and stages > 0 and columns % form.block == 0, found


def test_infinite_weights_beyond_the_columns_of_a_sum_do_not_reach_it():
    packing = Packing(**PACKINGS["int4 by row"])  # 200 columns: the last block has 56 too many, with codes of 0
    _, module = filled(packing, 16, 200)
    module.packed.put_codes(0, torch.full((16, 200), 9, dtype=torch.uint8))
    module.packed.put_scales(0, 16, torch.full((16, 1), 10000.0, dtype=HALF))
    assert torch.equal(packed_linear(torch.full((1, 200), 2.0**-8, dtype=HALF), module.packed),
                       torch.full((1, 16), 200 * 10000 / 2**8, dtype=HALF))  # fmt: skip
    _, module = filled(Packing(**PACKINGS["int8 of 128"]), 16, 2304, cut=1152)
    codes = torch.full((16, 2304), 129, dtype=torch.uint8)
    codes[:, 1152:] = 255
    module.packed.put_codes(0, codes)
    module.packed.put_scales(0, 16, torch.where(torch.arange(18) < 9, 1.0, 60000.0).to(HALF)[None])
    parts = packed_linear(torch.full((1, 2304), 2.0**-8, dtype=HALF), module.packed, in_parts=True)
    assert bool((parts[0] == 1152 / 2**8).all()) and bool((parts[1] == torch.inf).all())


class Watched:
    """The interpreter's memory, which counts reads of what lies in none of the tensors."""

    def __init__(self, memory: object, tensors: list[torch.Tensor]) -> None:
        self._memory, self.beyond = memory, 0
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def __getattr__(self, name: str):
        return getattr(self._memory, name)

    def load(self, pointers, mask, other, dtype):
        read = pointers[mask].astype("int64")
        self.beyond += sum(not any(begin <= at < end for begin, end in self._ranges) for at in read.tolist())
        return self._memory.load(pointers, mask, other, dtype)


@pytest.mark.parametrize(
    "name, size",
    [("int4 of 32", 96), ("nvfp4", 80), ("mxfp4", 96), ("Q4_1", 96), ("Q5_0", 96), ("Q8_0", 160), ("Q2_K", 256)],
)
def test_blocks_with_columns_too_many_read_no_scales_beyond_the_last(name, size, monkeypatch):
    from triton.runtime import interpreter

    _, module = filled(Packing(**PACKINGS[name]), 4, size)
    out = torch.empty(4, size, dtype=HALF)
    x = torch.zeros(1, size, dtype=HALF)
    tensors = [tensor for tensor in (*tensors_of(module.packed), x) if tensor is not None]
    watched = Watched(interpreter._interpreter, tensors)
    monkeypatch.setattr(interpreter, "_interpreter", watched)
    expand(module.packed, out)
    packed_linear(x, module.packed)
    assert watched.beyond == 0


def test_many_rows_float32_and_unknown_activations_go_another_way():
    _, module = filled(Packing(**PACKINGS["int8 by row"]), 16, 64)
    assert packed_linear(torch.zeros(513, 64, dtype=HALF), module.packed) is None
    assert packed_linear(torch.zeros(1, 64), module.packed) is None
    assert packed_linear(torch.zeros(1, 64, dtype=HALF), module.packed, activation="gelu") is None
    assert packed_linear(torch.zeros(0, 64, dtype=HALF), module.packed).shape == (0, 16)


@pytest.mark.parametrize("dtype, activation", [(FULL, "silu"), (HALF, "gelu")])
def test_an_activation_that_no_kernel_computes_follows_one_product(dtype, activation, monkeypatch):
    weights, module = filled(Packing(**PACKINGS["int8 by row"]), 16, 64)
    module.operations, module.bias, module.library_counts = fused, None, frozenset()
    products = []
    monkeypatch.setattr(Packed, "matrix", lambda *_: pytest.fail("expanded in vain"))

    def product(self, module, x, out=None, activation=None):
        return None if activation else products.append(x) or torch.cat((x, -x, x), 1)

    monkeypatch.setattr(Packed, "product", product)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(7)).to(dtype)
    wanted = reference.act_and_mul(torch.cat((x, -x, x), 1), activation)
    assert torch.equal(module(x, activation=activation), wanted) and len(products) == 1


def parted(names: dict[str, int], in_features: int) -> tuple[Parted, Bare]:
    """Parts of so many rows, filled at random; "dense" is one in 16 bits."""
    held = []
    for seed, (name, num_rows) in enumerate(names.items()):
        if name == "dense":
            rows = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(seed)).to(HALF) / 8
            held.append((DENSE, SimpleNamespace(num_rows=num_rows, in_features=in_features, weight=rows)))
        else:
            held.append(filled(Packing(**PACKINGS[name]), num_rows, in_features, seed=seed, largest=0.01))
    scratch = torch.empty(sum(names.values()) * in_features, dtype=HALF)
    weights = Parted([weight_format for weight_format, _ in held], list(names.values()))
    module = Bare(weights=weights, num_rows=sum(names.values()), in_features=in_features, held=held, scratch=scratch)
    module.operations, module.library_counts, module.bias = fused, frozenset(), None
    return weights, module


@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_are_multiplied_with_each_part_by_itself(has_bias, monkeypatch):
    weights, module = parted({"int4 of 32": 24, "dense": 16, "fp8 by row": 40}, 384)
    matrix = weights.matrix(module).float()
    if has_bias:
        module.bias = torch.randn(80, generator=torch.Generator().manual_seed(5)).to(HALF)
    monkeypatch.setattr(Parted, "matrix", lambda *_: pytest.fail("expanded in vain"))
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(7)).to(HALF)
    wanted = x.float() @ matrix.t() + (module.bias.float() if has_bias else 0)
    torch.testing.assert_close(module(x).float(), wanted, atol=1e-3, rtol=2e-3)
    out = torch.empty(3, 80, dtype=HALF)
    assert module(x, out) is out and torch.equal(out, module(x))
    monkeypatch.setattr(Parted, "matrix", lambda *_: matrix.to(HALF))
    wide = torch.zeros(513, 384, dtype=HALF)
    wide[:3] = x
    torch.testing.assert_close(module(wide)[:3], out, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_one_row_are_written_where_they_belong(has_bias, monkeypatch):
    weights, module = parted({"int4 of 32": 24, "dense": 20, "fp8 by row": 40}, 384)
    if has_bias:
        module.bias = torch.randn(84, generator=torch.Generator().manual_seed(5)).to(HALF)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(7)).to(HALF)
    wanted = module(x)
    monkeypatch.setattr(torch, "cat", lambda *_, **__: pytest.fail("copied in vain"))
    for row in range(3):
        out = torch.empty(1, 84, dtype=HALF)
        assert weights.product(module, x[row : row + 1], out) is out and torch.equal(out[0], wanted[row])
        assert torch.equal(weights.product(module, x[row : row + 1])[0], wanted[row])


def test_a_gate_and_what_it_gates_may_lie_differently(monkeypatch):
    weights, module = parted({"int8 by row": 32, "dense": 32}, 384)
    gate, up = weights.matrix(module).float().split(32)
    monkeypatch.setattr(Parted, "matrix", lambda *_: pytest.fail("expanded in vain"))
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(7)).to(HALF)
    wanted = torch.nn.functional.silu((x.float() @ gate.t()).to(HALF).float()) * (x.float() @ up.t())
    torch.testing.assert_close(module(x, activation="silu").float(), wanted, atol=2e-3, rtol=4e-3)
    product = module(x)
    assert torch.equal(module(x, activation="gelu"), reference.act_and_mul(product, "gelu"))
    products = []
    monkeypatch.setattr(Parted, "matrix", lambda *_: products.append(0) or torch.cat((gate, up)).to(HALF))
    module.operations = reference
    wanted = reference.act_and_mul(module(x), "silu")
    assert torch.equal(module(x, activation="silu"), wanted) and len(products) == 2, "one for each"


def test_the_products_of_parts_are_gone_before_an_activation_follows():
    weights, module = parted({"int8 by row": 32, "dense": 32}, 384)
    made = []

    def product(*_, **__):
        made.append(weakref.ref(found := torch.ones(5, 32)))
        return found

    def act_and_mul(gate_up, activation):
        assert gate_up.shape == (5, 64) and len(made) == 2 and not any(one() is not None for one in made)
        return gate_up[:, :32]

    module.operations = SimpleNamespace(
        packed_linear=lambda *_, **__: product(), linear=product, act_and_mul=act_and_mul
    )
    assert weights.product(module, torch.ones(5, 384), activation="gelu").shape == (5, 32)


def test_scales_are_folded_where_every_product_is_exact():
    for kind, bits, limit in (("int", 4, 2.0**-1), ("int", 8, 2.0**-5), ("fp8", 8, 2.0**8)):
        packing = Packing(kind=kind, bits=bits, scale_dtype=torch.bfloat16, columns=None)
        power, of_zero = packing.folded
        assert torch.tensor(limit * (1 - 2**-8) * 2.0**power).bfloat16().isfinite() and 2**of_zero in (8, 128, 1)
        for scale, is_folded in ((limit / 2, True), (limit, False), (2.0**-126, True), (2.0**-127, False), (0, False),
                                 (-limit / 2, False), (torch.nan, False)):  # fmt: skip
            weight = empty_packed(packing, 4, 64, "cpu")
            weight.put_scales(0, 3, torch.full((3, 1), limit / 4).bfloat16())
            weight.put_scales(3, 4, torch.full((1, 1), scale).bfloat16())
            assert weight.folding.scales == is_folded, (kind, bits, scale)
    assert Packing(kind="int", bits=4, columns=64, scale_dtype=HALF).folded == (0, 0)
    for bits, power in ((4, 129), (8, 0)):  # zeros are no power of two, and those of 8 bits lie in a table
        packing = Packing(kind="int", bits=bits, columns=64, scale_dtype=torch.bfloat16, has_zeros=True)
        assert packing.folded == (power, 0)


@pytest.mark.parametrize("bad", range(3))
def test_what_one_part_of_a_merged_weight_has_counts_for_all(bad):
    """Whether scales are folded, and whether zeros are: which part it is, and what is put first, does not count."""
    for is_first, has_large_scale in ((False, True), (True, True), (False, False), (True, False)):
        settings = dict(kind="int", bits=4, columns=64, scale_dtype=torch.bfloat16, has_zeros=True)
        weight = empty_packed(Packing(**settings), 12, 128, "cpu")
        for part in range(3):
            rows, is_bad = (4 * part, 4 * part + 4), part == bad
            scale = 0.5 if is_bad and has_large_scale else 0.25 if has_large_scale or not is_bad else 0.25 + 2**-9
            steps = [
                lambda: weight.put_scales(*rows, torch.full((4, 2), scale).bfloat16()),  # noqa: B023
                lambda: weight.put_zeros(*rows, torch.full((4, 2), 7)),  # noqa: B023
            ]
            for step in steps if is_first else reversed(steps):
                step()
        assert weight.folding.scales == (not has_large_scale) and weight.folding.zeros == has_large_scale
        assert torch.equal(weight.zeros_of(slice(0, 12)), torch.full((12, 2), 7, dtype=torch.uint8))


def test_a_block_is_a_part_of_a_group_and_of_a_part_of_a_sum():
    for bits in (4, 8):
        for columns in (None, 16, 32, 64, 128, 256):
            for size in (64, 128, 192, 896, 1152, 2304, 2560, 4096, 4864, 9728):
                packing = Packing(kind="int", bits=bits, scale_dtype=HALF, columns=columns)
                for cut in (None, columns_cut(size)):
                    plane = packing.plane(size, cut)
                    assert columns is None or columns % plane == 0
                    assert size % packing.block(plane) == 0
                    assert (cut or 0) % packing.block(plane) == 0 or size < 512
                    if packing.table(size) == "pairs":
                        assert size // columns % 2 == 0
                    weight = empty_packed(packing, 3, size, "meta", cut)
                    assert weight.codes.nbytes == 3 * size * bits // 8


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.sampled("4-16", "4-48", "4-80", "4-96", "4-128", "4-256", "8-64", "8-96")
def test_groups_of_any_size_are_found_in_every_step(bits, columns):
    """Steps of kernels begin in the middle of a group, or of a pair of them."""
    size = 6 * columns if columns != 256 else 1024
    for kind in ("int", "fp8") if bits == 8 else ("int",):
        weights, module = filled(Packing(kind=kind, bits=bits, scale_dtype=HALF, columns=columns), 16, size)
        matrix = torch.empty(16, size, dtype=HALF)
        expand(module.packed, matrix)
        assert torch.equal(matrix, matrix_of(weights, module))
        x = torch.randn(2, size, generator=torch.Generator().manual_seed(1)).to(HALF)
        wanted = x.float() @ matrix.float().t()
        unit = wanted.abs().max().item() / 2**10
        torch.testing.assert_close(packed_linear(x, module.packed).float(), wanted, atol=unit, rtol=2**-9)


@pytest.mark.parametrize("name", ["int8 by row", "int4 with zeros", "fp8 in blocks", "nvfp4"])
def test_rows_that_are_looked_up_are_those_of_the_matrix(name):
    weights, module = filled(Packing(**PACKINGS[name]), 100, 256)
    ids = torch.tensor([99, 0, 5, 5, *range(40, 80)])
    out = torch.full((len(ids), 256), torch.nan, dtype=HALF)
    assert torch.equal(expand(module.packed, out, ids), matrix_of(weights, module)[ids])
    assert expand(module.packed, out[:0], ids[:0]).shape == (0, 256)


@pytest.mark.parametrize("rows, parts, gated, bits, tile", [
    (6144, 1, False, 4, (16, 1, 128, 6)), (2560, 2, False, 4, (16, 1, 128, 6)), (2560, 2, False, 6, (16, 1, 256, 4)),
    (19456, 1, True, 4, (32, 2, None, None)), (151_936, 1, False, 6, (32, 2, None, None)),
])  # fmt: skip
def test_few_tiles_of_float32_products_have_half_of_the_rows(rows, parts, gated, bits, tile):
    """Where all run at a time, more of them keep more bytes in flight; others share what they compute."""
    form, given = SimpleNamespace(bits=bits), launches.Tiles(8, 64, 200, 4, 3)
    found, most_planes = packed.tiles_of_scale_words(given, form, rows, parts, gated)
    assert (found.block_n, found.num_warps) == tile[:2]
    assert (found.columns, found.stages) == tuple(
        b if a is None else a for a, b in zip(tile[2:], (200, 3), strict=True)
    )
    assert most_planes == (2 * packed.MAX_PLANES if bits == 6 and found.block_n == 16 else packed.MAX_PLANES)
