"""The instructions that make weights of packed codes, carried out here: for every code, in every plane and half."""

import re

import pytest
import torch

from nanoinfer.kernels.linear.instructions import EXPANSIONS, PAIR_OF_BYTES, number_of
from nanoinfer.kernels.linear.packed_weight import empty_packed
from nanoinfer.kernels.linear.packing import IQ4_VALUES, Packing
from nanoinfer.kernels.linear.wide_instructions import WIDE_EXPANSIONS, largest_scale, positions_of, wide_number_of
from nanoinfer.layers.formats.bits import E2M1_VALUES
from nanoinfer.layers.formats.gguf_blocks import BLOCKS

BF16, HALF = torch.bfloat16, torch.float16
LOGIC = {"0xEA": lambda a, b, c: a & b | c, "0x6A": lambda a, b, c: a & b ^ c, "0xF8": lambda a, b, c: a | b & c}
# Normal, subnormal, negative, so large that products overflow, zero; below 1/32 those that can be folded.
SCALES = [1.0, 0.3, 0.031, 0.007, 2.0**-20, 2.0**-126, 2.0**-131, 0.0, -0.02, -1.5, 3e4, 3e38]


def halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n] int64 words -> [n, 2] float64. Every value is exact in it, and so is a product and the sum with another."""
    return torch.stack((words & 0xFFFF, words >> 16), 1).to(torch.uint16).view(dtype).double()


def words_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = values.to(dtype).view(torch.uint16).long()
    return bits[:, 0] | bits[:, 1] << 16


def carry_out(text: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Words [n] in the registers $1, $2, ... -> those in $0."""
    held = {f"${number}": words for number, words in enumerate(inputs, 1)}
    kinds = {".bf16x2": BF16, ".f16x2": HALF}

    def value(name: str) -> torch.Tensor:
        return torch.full_like(inputs[0], int(name, 0)) if name[0].isdigit() else held[name]

    for line in text.splitlines()[1:-1]:  # without the braces
        operation, rest = line.removesuffix(";").split(" ", 1)
        names = re.findall(r"[$\w]+", rest)
        if operation.startswith(".reg"):
            continue
        if operation == "mov.b32" and target_of(rest) in ("x", "y"):  # the bits of a float32 number
            held[names[0]] = held[names[1]].to(torch.int32).view(torch.float32).double()
            continue
        if operation == "fma.rn.f32":
            a, b, c = (held[name] for name in names[1:])
            held[names[0]] = (a * b + c).float().double()
            continue
        target, sources = names[0], names[1:]
        if operation == "mov.b32" and len(names) == 3:  # {h, i} = t
            held[names[0]], held[names[1]] = held[names[2]] & 0xFFFF, held[names[2]] >> 16
        elif operation == "mov.b32":
            held[target] = value(sources[0])
        elif operation == "and.b32":
            held[target] = value(sources[0]) & value(sources[1])
        elif operation == "or.b32":
            held[target] = value(sources[0]) | value(sources[1])
        elif operation == "shr.u32":
            held[target] = value(sources[0]) >> int(sources[1])
        elif operation == "shl.b32":
            held[target] = value(sources[0]) << int(sources[1]) & 0xFFFFFFFF
        elif operation == "prmt.b32":
            a, b, selected = map(value, sources)
            parts = [(a | b << 32) >> 8 * (selected >> 4 * i & 7) & 255 for i in range(4)]
            held[target] = parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24
        elif operation == "lop3.b32":
            held[target] = LOGIC[sources[3]](*map(value, sources[:3]))
        elif operation == "cvt.f32.f16":
            held[target] = value(sources[0]).to(torch.uint16).view(HALF).double()
        elif operation in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            dtype = BF16 if "bf16" in operation else HALF
            held[target] = words_of(torch.stack((held[sources[1]], held[sources[0]]), 1), dtype)
        else:
            assert operation.startswith("fma.rn"), line
            dtype = kinds[operation.removeprefix("fma.rn")]
            a, b, c = (halves(value(name), dtype) for name in sources)
            held[target] = words_of(a * b + c, dtype)
    return held["$0"]


def target_of(rest: str) -> str:
    return rest.split(",")[0]


def wanted(kind: str, bits: int, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As the references compute: the difference is exact, the product is rounded to the scale's dtype."""
    if kind == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(scales.dtype) * scales
    if kind == "fp4":
        return torch.tensor(E2M1_VALUES, dtype=scales.dtype)[codes] * scales
    return (codes - zeros).to(scales.dtype) * scales


def word_of_codes(codes: torch.Tensor, kind: str, bits: int, plane: int) -> torch.Tensor:
    """[n, 2] codes -> [n] words that hold them in one plane, and anything in the others."""
    per_word, blocks = 16 // bits, -(-len(codes) // 64) * 2
    planes = torch.randint(2**bits, (blocks * 32, per_word, 2), generator=torch.Generator().manual_seed(0))
    planes[: len(codes), plane] = codes
    # Neighbouring columns of a plane, two in a register.
    columns = planes.unflatten(0, (blocks, 32)).transpose(1, 2).flatten()
    packing = Packing(kind=kind, bits=bits, scale_dtype=BF16, columns=None)
    assert packing.plane(len(columns)) == 64
    packed = empty_packed(packing, 1, len(columns), "cpu")
    packed.put_codes(0, columns.to(torch.uint8)[None])
    return packed.codes.view(torch.int32).flatten()[: len(codes)].long() & 0xFFFFFFFF


def cases():
    for kind, bits in (("int", 4), ("int", 8), ("fp8", 8), ("fp4", 4)):
        for scale_dtype, dtype in ((BF16, BF16), (HALF, HALF), (HALF, BF16)):
            for has_zeros in (False, True) if bits == 4 and kind == "int" else (False,):
                yield Packing(kind=kind, bits=bits, scale_dtype=scale_dtype, columns=None, has_zeros=has_zeros), dtype


@pytest.mark.parametrize("folds, fold_products", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("packing, dtype", list(cases()))
def test_every_code_becomes_the_references_weight(packing, dtype, folds, fold_products):
    if folds and not packing.folded[0] or fold_products and not packing.has_zeros:
        pytest.skip("scales or zeros are never folded")
    kind, bits, scale_dtype = packing.kind, packing.bits, packing.scale_dtype
    codes = torch.arange(2**bits)
    if kind == "fp8":
        codes = codes[(codes & 127) != 127]
    scales = torch.tensor(SCALES).to(scale_dtype)
    scales = scales[scales.isfinite()]
    if folds:
        scales = torch.stack([one for one in scales if packing.can_fold(one)])
        assert len(scales) >= 4
    zeros = torch.arange(16) if packing.has_zeros else torch.tensor([2 ** (bits - 1)])
    grid = torch.cartesian_prod(codes, zeros, torch.arange(len(scales)))
    codes, zeros, scales = grid[:, 0], grid[:, 1], scales[grid[:, 2]]
    if fold_products:  # only where they are exact
        products = zeros * scales.float()
        is_exact = products == products.bfloat16()
        assert 0.5 < is_exact.float().mean() < 1
        codes, zeros, scales = codes[is_exact], zeros[is_exact], scales[is_exact]
    pairs = torch.stack((codes, codes.flip(0)), 1), torch.stack((scales, scales.flip(0)), 1)
    of_zeros = torch.stack((zeros, zeros.flip(0)), 1)
    result = wanted(kind, bits, pairs[0], of_zeros, pairs[1]).to(dtype)
    scale_words, power = words_of(pairs[1], scale_dtype), packing.folded
    zero_words = words_of(-(of_zeros + (128 if scale_dtype == BF16 else 1024)).double(), scale_dtype)
    if folds:  # as the kernel, with integers: to the exponents of both halves
        zero_words = (scale_words + (power[1] << 7) * 65537) ^ 0x80008000
        if packing.has_zeros:
            weight = empty_packed(packing, len(zeros), 64, "cpu")
            weight.put_zeros(0, len(zeros), zeros[:, None])
            minus_zeros = weight.scales.flatten().long() >> 16 & 0xFFFF  # as they lie
            zero_words = minus_zeros | minus_zeros.flip(0) << 16
        if fold_products:
            zero_words = words_of(-(of_zeros * pairs[1].double()), BF16)
        scale_words = scale_words + (power[0] << 7) * 65537
    for plane, text in enumerate(EXPANSIONS[number_of(packing, dtype, folds, fold_products)]):
        words = word_of_codes(pairs[0], kind, bits, plane)
        found = carry_out(text, [words, scale_words, zero_words])
        got = torch.stack((found & 0xFFFF, found >> 16), 1).to(torch.uint16).view(dtype)
        assert torch.equal(got.view(torch.int16), result.view(torch.int16)), (plane, got[got != result][:4])


@pytest.mark.parametrize("is_second", [0, 1])
def test_bytes_become_exponents_of_two_bfloat16(is_second):
    exponents = torch.randint(255, (500, 4), generator=torch.Generator().manual_seed(0))
    exponents[:5] = torch.tensor([254, 254, 254, 254])
    words = (exponents << torch.tensor([0, 8, 16, 24])).sum(1)
    found = carry_out(PAIR_OF_BYTES, [words, torch.full_like(words, 0x1404 + is_second * 0x2020)])
    wanted = exponents[:, 2 * is_second : 2 * is_second + 2] << 7
    assert torch.equal(torch.stack((found & 0xFFFF, found >> 16), 1), wanted)


WIDE = {name: block.packing for name, block in BLOCKS.items() if positions_of(block.packing)}


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("name", WIDE)
def test_every_code_becomes_the_weight_whose_product_is_in_float32(name, dtype):
    """In each plane, with scales and minima of the largest numbers of bits, as large as they may be, 0 and negative."""
    packing, generator = WIDE[name], torch.Generator().manual_seed(0)
    has_minima, limit = packing.scale_words.has_minima, largest_scale(packing)
    scales = 0.0078125 * torch.randn(64, generator=generator).half().float()
    scales[:4] = torch.tensor([0.0, limit * (1 - 2**-11), -limit * (1 - 2**-11), 2.0**-24])
    if packing.scale_words.has_factors:
        scales[4:] *= torch.randint(64, (60,), generator=generator) / 64
    minima = scales.flip(0) * torch.randint(64, (64,), generator=generator) / 8 if has_minima else torch.zeros(64)
    grid = torch.cartesian_prod(torch.arange(2**packing.bits), torch.arange(64))
    codes, scales, minima = grid[:, 0], scales[grid[:, 1]], minima[grid[:, 1]]
    codes, scales, minima = (torch.stack((one, one.flip(0)), 1) for one in (codes, scales, minima))
    values = torch.tensor(IQ4_VALUES)[codes] if packing.kind == "iq4" else codes - packing.zero
    weights = (values.float() * scales - minima).to(dtype)
    assert len(weights.unique()) > 2**packing.bits * 10
    for plane, (text, position) in enumerate(
        zip(WIDE_EXPANSIONS[wide_number_of(packing, dtype)], positions_of(packing), strict=True)
    ):
        others = torch.randint(2**31, codes.shape, generator=generator)  # what lies around the codes
        field = (2**packing.bits - 1) << packing.bits * plane
        columns = others & ~field | codes << packing.bits * plane
        words = [columns[:, 0], columns[:, 1]]
        if not packing.high_bits:
            words = [columns[:, 0] & 0xFFFF | (columns[:, 1] & 0xFFFF) << 16]
        raised = scales.double() * 2.0 ** (149 - position)
        assert bool((raised.float() == raised).all() and raised.float().isfinite().all())
        added = -minima.double() if has_minima else -packing.zero * scales.double()
        found = carry_out(text, [*words, *raised.unbind(1), *added.unbind(1)])
        got = torch.stack((found & 0xFFFF, found >> 16), 1).to(torch.uint16).view(dtype)
        assert torch.equal(got, weights), (plane, got[got != weights][:4])


def test_scales_that_may_become_infinite_are_left_to_the_compiler():
    for name, packing in WIDE.items():
        limit = largest_scale(packing)
        assert max(positions_of(packing)) + packing.bits <= 24 or packing.kind == "iq4", name
        assert limit >= 2**-5 and limit * 2.0 ** (149 - min(positions_of(packing))) == 2.0**128, name
        for scale, is_taken in ((limit * (1 - 2**-11), True), (limit, False), (-limit, False), (0.0, True)):
            weight = empty_packed(packing, 2, 256, "cpu")
            groups, words = packing.num_groups(256), packing.scale_words
            for row, one in ((0, 0.0), (1, scale)):
                of_row = torch.full((1, groups), one).half()
                minima, factors = torch.ones(1, groups).half(), []
                if words.has_factors:
                    factors = [of_row[:, :1], minima[:, :1]][: 1 + words.has_minima]
                    of_row = torch.full((1, groups), row, dtype=torch.uint8 if words.has_minima else torch.int8)
                    minima = torch.full((1, groups), 3, dtype=torch.uint8)
                weight.put_scale_words(row, row + 1, of_row, minima if words.has_minima else None, *factors)
            assert weight.folding.scales == is_taken, (name, scale)
            if words.has_factors and not is_taken:  # nor may the factor alone, although all scales are 0
                weight = empty_packed(packing, 2, 256, "cpu")
                none = torch.zeros_like(of_row)
                weight.put_scale_words(0, 1, none, none if words.has_minima else None, *factors)
                assert not weight.folding.scales
