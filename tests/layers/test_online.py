"""Weights that are quantised while they are read: the bits of the checkpoint that `nanoinfer quantize` writes."""

import json

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run, some_params
from live_bytes import LiveBytes
from loading import loaded
from online import QUIET, equal, load, make, matrices, packed, quantise
from quantised import CASES, write
from safetensors.torch import load_file, save_file
from simulated import SimulatedRuntime
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers_reference import greedy_tokens

from nanoinfer import EngineConfig, SamplingParams, plan
from nanoinfer.config import METHODS, QUANTISED
from nanoinfer.layers.formats.bits import as_bytes
from nanoinfer.layers.formats.registry import FORMATS
from nanoinfer.layers.formats.scaled import PackedScaled
from nanoinfer.layers.formats.schemes import stored_tensors
from nanoinfer.layers.linear import Linear
from nanoinfer.weights import fill
from nanoinfer.weights.load import read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read
from nanoinfer.weights.write import quantise_checkpoint

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTH = [(name, head) for name in QUANTISED for head in (None, "int8")]
IN_TURN = [(name, None if number % 2 else "int8") for number, name in enumerate(QUANTISED)]


def format_of(name: str, columns: int, dtype: torch.dtype) -> PackedScaled:
    size = next((size for size in (128, 64, 32) if columns % size == 0), None) if name.startswith("int4") else None
    kind, bits = "fp8" if name == "fp8" else "int", 4 if name.startswith("int4") else 8
    return packed(kind, bits, size, dtype, has_zeros=name == "int4")


def random_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """With outliers, rows of other sizes, a row of zeros and one of numbers that hardly any dtype has."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    weight = weight * torch.where(torch.rand(rows, columns, generator=generator) < 0.01, 20.0, 1.0)
    weight[0], weight[-1] = 0.0, 1e-30 * weight[-1]
    return weight


def codes_of(found: dict, name: str, group_size: int, columns: int) -> torch.Tensor:
    """Less their zeros."""
    if name == "fp8":
        return found["weight"].double()
    packed = found["weight_packed"].view(torch.uint8)
    if name == "int8":
        return packed[:, :columns].double() - 128
    codes = fields_of_rows(packed)[:, :columns].double()
    return codes - (zeros_of(found, len(packed)).repeat_interleave(group_size, 1) if name == "int4" else 8)


def fields_of_rows(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def zeros_of(found: dict, rows: int) -> torch.Tensor:
    """[rows, groups], which the file has by columns."""
    return fields_of_rows(as_bytes(found["weight_zero_point"].t()))[:, :rows].t()


# One weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUANTISED)
def test_a_weight_is_what_the_reference_package_expands(name, dtype):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="the reference is not installed")
    from compressed_tensors.quantization import QuantizationScheme

    for seed, (rows, columns) in enumerate([(11, 32), (33, 192), (16, 384), (17, 160), (9, 4096)]):
        weight = random_weight(rows, columns, seed).to(dtype)
        own = format_of(name, columns, dtype)
        found = quantise(weight, own)
        group_size = own.packing.columns
        args = dict(num_bits=own.packing.bits, type="float" if name == "fp8" else "int", symmetric=name != "int4")
        args |= dict(strategy="group", group_size=group_size) if group_size else dict(strategy="channel")
        stored_as = "float-quantized" if name == "fp8" else "pack-quantized"
        reference = QuantizationScheme(targets=["Linear"], weights=args, format=stored_as)
        compressor = compressors.BaseCompressor.get_value_from_registry(stored_as)
        matrix = compressor.decompress(dict(found), reference)["weight"]
        scales = found["weight_scale"].repeat_interleave(group_size or columns, 1)
        wanted = (codes_of(found, name, group_size or columns, columns).to(dtype) * scales).to(dtype)
        assert torch.equal(matrix, wanted) and torch.isfinite(matrix).all()
        error = (matrix.double() - weight.double()).abs()
        # Of a scale, which rounding to few bits adds to.
        steps = {"int8": 0.51, "int4": 1.1, "int4-symmetric": 5.0, "fp8": 17.0}[name]
        assert bool((error <= steps * scales.double() + matrix.double().abs() / 100).all())
        assert {ending: (tuple(one.shape), one.dtype) for ending, one in found.items()} == stored_tensors(
            own, (rows, columns)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [7.0, 7.5])
def test_the_squared_error_of_four_bits_is_never_above_that_of_plain_scales(dtype, divisor):
    for seed, (rows, columns) in enumerate([(1, 32), (9, 64), (40, 256), (64, 1024)]):
        for weight in (random_weight(rows, columns, seed), torch.full((rows, columns), 0.3), torch.rand(rows, columns)):
            weight = weight.to(dtype)
            own = format_of("int4-symmetric", columns, dtype)
            found = quantise(weight, own)
            groups = weight.double().unflatten(1, (-1, own.packing.columns))
            plain = (
                (groups.abs().amax(-1, keepdim=True).float() / divisor)
                .to(dtype)
                .clamp(min=2.0**-24 if dtype == torch.float16 else 2.0**-126)
            )
            nearest = (groups.float() / plain.float()).round().clamp(-8, 7).to(dtype)
            wanted = ((nearest * plain).double() - groups).square().sum((1, 2))
            scales = found["weight_scale"].repeat_interleave(own.packing.columns, 1)
            matrix = codes_of(found, "int4-symmetric", own.packing.columns, columns).to(dtype) * scales
            error = (matrix.double() - weight.double()).square().sum(1)
            assert error.sum() <= wanted.sum()
            if divisor == 7.0 and rows > 32:
                normal = torch.randn(rows, columns).to(dtype)
                assert quantise(normal, own)["weight_scale"].float().mean() < 0.97 * normal.abs().amax() / 7


def test_rows_and_pieces_of_them_are_quantised_alike(monkeypatch):
    weight = random_weight(37, 192, 1)
    for name in QUANTISED:
        own = format_of(name, 192, torch.bfloat16)
        whole = quantise(weight, own)
        monkeypatch.setattr("nanoinfer.layers.formats.schemes._AT_ONCE_ON_HOST", 500)
        pieces = [quantise(weight[begin : begin + 10], own) for begin in range(0, 37, 10)]
        monkeypatch.undo()
        for ending in whole.keys() - {"weight_shape", "weight_zero_point"}:
            joined = torch.cat([piece[ending].view(torch.uint8) for piece in pieces])
            assert torch.equal(joined, whole[ending].view(torch.uint8))
        if name == "int4":
            zeros = [zeros_of(piece, len(piece["weight_scale"])) for piece in pieces]
            assert torch.equal(torch.cat(zeros), zeros_of(whole, 37))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_make_the_codes_of_a_group_span_its_range(dtype):
    own, weight, seen = format_of("int4", 256, dtype), random_weight(64, 256, 3), set()
    for shift in (-3.0, -1.0, 0.0, 0.4, 3.0):  # groups on one side of 0 span the rest of the way to it, too
        wide = (weight + shift * weight.std()).to(dtype)
        found = quantise(wide, own)
        zeros, scales = zeros_of(found, 64), found["weight_scale"]
        seen |= set(zeros.unique().tolist())
        products = zeros * scales.double()
        if dtype == torch.bfloat16:  # kernels may round them: nothing is lost
            assert torch.equal(products, products.to(dtype).double())
        symmetric, errors = quantise(wide, format_of("int4-symmetric", 256, dtype)), []
        for name, one in (("int4", found), ("int4-symmetric", symmetric)):
            matrix = codes_of(one, name, 128, 256) * one["weight_scale"].double().repeat_interleave(128, 1)
            errors.append((matrix - wide.double()).square().sum().item())
        assert shift == 0 or errors[0] < errors[1]
    assert seen == set(range(16))


# A checkpoint


@pytest.mark.parametrize("name, head", BOTH)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled("False-int4-None", "True-int8-int8", "False-fp8-None")
def test_loading_what_was_written_is_loading_the_source_with_the_option(tmp_path, monkeypatch, name, head, tied, fuzz):
    monkeypatch.setattr("nanoinfer.weights.write._SHARD_BYTES", 60_000)
    sizes = dict(tied=tied, hidden_size=96, intermediate_size=224) if head else dict(tied=tied)
    source = make(tmp_path / "wide", shards=3 if tied else 1, **sizes)
    out = quantise_checkpoint(source, tmp_path / "out", name, head_quantization=head, **QUIET)
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / "generation_config.json").is_file()
    for dtype in ("auto", "float32", "float16") if fuzz else ("auto", "float16" if tied else "float32"):
        found, wanted = load(out, dtype=dtype), load(source, name, head, dtype)
        assert equal(matrices(found), matrices(wanted)) and found.spec == wanted.spec
        wide = read_spec(read_checkpoint(source), dtype)
        assert found.spec.weight_bytes < wide.weight_bytes
    prompts, params = random_prompts(3, 5, 60), some_params(3, 5, logprobs=3)
    wanted = run(make_engine(out, quantization=name), prompts, params)  # which names what the checkpoint has
    assert run(make_engine(source, quantization=name, head_quantization=head), prompts, params) == wanted
    streaming = dict(enable_cpu_offload=True, resident_kv_limit=0)
    engine = make_engine(source, SimulatedRuntime(1), quantization=name, head_quantization=head, **streaming)
    assert run(engine, prompts, params) == wanted
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled("1")
def test_random_sizes_and_files_are_read_alike(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("nanoinfer.weights.write._SHARD_BYTES", 50_000)
    draw = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=draw))]

    sizes = dict(
        num_heads=pick(2, 4, 6), num_kv_heads=pick(1, 2), head_dim=pick(16, 32), hidden_size=32 * pick(1, 2, 7)
    )
    sizes |= dict(intermediate_size=32 * pick(1, 3, 8), vocab_size=pick(97, 131, 157), tied=pick(False, True))
    name, head, dtype = pick(*QUANTISED), pick(None, "int8"), pick(*DTYPES)
    source = make(tmp_path / "wide", pick(*FAMILIES), dtype, seed=seed, shards=pick(1, 2), **sizes)
    out = quantise_checkpoint(source, tmp_path / "out", name, head_quantization=head, **QUIET)
    assert equal(matrices(load(out)), matrices(load(source, name, head)))
    assert load(out).spec == load(source, name, head).spec


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_expands_what_was_written_to_the_same_bits_and_has_the_same_tokens_on_them(tmp_path, family):
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints with it")
    name = QUANTISED[FAMILIES.index(family) % 4]
    source = make(tmp_path / "wide", family, tied=family == "gemma3")
    out = quantise_checkpoint(source, tmp_path / "out", name, **QUIET)
    found = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    state = found.state_dict()
    model = load(out)
    assert found.dtype == torch.bfloat16
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.multiplies and "layers" in path:
            matrix, begin = module.weights.matrix(module), 0
            for part, count in (module.merged or {path.rpartition(".")[2]: module.num_rows}).items():
                theirs = state[f"model.{path.rpartition('.')[0]}.{part}.weight"]
                assert torch.equal(theirs, matrix[begin : begin + count]), (path, part)
                begin += count
    # In bfloat16 it rounds activations at other places, and read in float32 it leaves W unrounded.
    prompts = random_prompts(2, 5, 40)
    wanted = greedy_tokens(found.float(), prompts, 6)
    engine = make_engine(out, dtype="float32")
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert [answer[0][0] for answer in run(engine, prompts, [greedy] * 2)] == wanted


def test_transformers_read_in_float32_leaves_the_product_with_scales_unrounded(tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints with it")
    for name in ("int4", "fp8"):
        out = quantise_checkpoint(make(tmp_path / f"{name}-wide"), tmp_path / name, name, **QUIET)
        settings = CompressedTensorsConfig(dequantize=True)
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=settings)
        theirs, ours = found.state_dict(), matrices(load(out, dtype="float32"))
        for layer in range(found.config.num_hidden_layers):
            matrix = theirs[f"model.layers.{layer}.mlp.down_proj.weight"]
            wanted = ours[f"layers.{layer}.mlp.down_proj"]
            assert not torch.equal(matrix, wanted) and torch.equal(matrix.bfloat16().float(), wanted)


def test_transformers_reads_a_quantised_head_that_is_not_tied(tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints with it")
    out = quantise_checkpoint(
        make(tmp_path / "wide", "llama"), tmp_path / "out", "int4", head_quantization="int8", **QUIET
    )
    found = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    wanted, state = matrices(load(out)), found.state_dict()
    assert torch.equal(state["lm_head.weight"], wanted["lm_head"])
    assert torch.equal(state["model.embed_tokens.weight"], wanted["embed_tokens"])


def test_the_head_alone_may_be_quantised_also_of_a_quantised_checkpoint(tmp_path):
    source = make(tmp_path / "wide")
    wide, found = matrices(load(source)), matrices(load(source, None, "int8"))
    assert all(torch.equal(found[name], wide[name]) for name in wide if "layers" in name)
    assert not torch.equal(found["lm_head"], wide["lm_head"])
    packed, _ = write(tmp_path, CASES["awq"]())
    found, before = matrices(load(packed, None, "int8")), matrices(load(packed))
    assert all(torch.equal(found[name], before[name]) for name in before if "layers" in name)
    assert load(packed, None, "int8").spec.embedding_bytes < load(packed).spec.embedding_bytes / 1.8


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_are_looked_up_are_those_of_the_expanded_table(tmp_path, tied):
    model = load(make(tmp_path, tied=tied), None, "int8")
    table, ids = model.embed_tokens, torch.tensor([5, 159, 0, 5, 77])
    codes, scales = table.weights.expand(table, slice(0, table.num_rows)), table.lookup(ids)
    assert torch.equal(scales, codes.to(scales.dtype)[ids]) and scales.dtype == torch.bfloat16
    with LiveBytes() as live:
        table.lookup(ids)
    assert live.peak < 5 * table.in_features * 20  # not a table
    names = [name for name, _ in model.named_parameters() if name.startswith("lm_head")]
    assert bool(names) != tied


def test_tables_that_are_only_looked_up_need_no_buffer(tmp_path):
    untied, tied = (
        load(make(tmp_path / str(tied), vocab_size=2000, tied=tied), None, "int8") for tied in (False, True)
    )
    assert tied.spec.scratch_bytes == untied.spec.scratch_bytes == 2 * 2000 * 64  # of the head
    assert tied.spec.weight_bytes < untied.spec.weight_bytes


def test_a_wide_tensor_lies_on_the_device_in_pieces(tmp_path, monkeypatch):
    source = make(tmp_path, num_layers=1)
    wanted, staged, read_tensors = matrices(load(source, "int4", "int8")), [], fill.read_tensors

    def read(targets, **arguments):
        staged.append(sum(entry.num_bytes for entry, _ in targets))
        read_tensors(targets, **arguments)

    monkeypatch.setattr(fill, "read_tensors", read)
    monkeypatch.setattr(fill, "_BATCH_BYTES", 1000)  # 7 rows of 64, 3 of 160
    model = load(source, "int4", "int8")
    assert max(staged[1:]) <= 1000 and len(staged) > 100
    assert equal(matrices(model), wanted)


def test_what_lies_on_the_device_while_loading_is_at_most_a_tensor_more(tmp_path):
    source = make(tmp_path, intermediate_size=1024, hidden_size=256)
    with LiveBytes() as live:
        model = load(source, "int4")
    held = model.spec.weight_bytes + model.spec.scratch_bytes + model.spec.rope_bytes(model.spec.max_position)
    wide = 1024 * 256 * 2
    at_once = 8 * 2**18 * 4  # of the steps of `quantise`, in float32
    assert live.peak < held + wide + at_once


def test_random_weights_are_packed_noise(tmp_path, fuzz):
    source = make(tmp_path)
    for name, head in BOTH if fuzz else IN_TURN:
        checkpoint = quantised_while_read(read_checkpoint(source), name, head)
        model = loaded(checkpoint, seed=0)
        assert model.spec == load(source, name, head).spec
        found = matrices(model)
        assert all(0.008 < matrix.float().std() < 0.04 for matrix in found.values())
        wide = torch.cat([matrix.float().flatten() for matrix in found.values()])
        # Codes have no opposite of the least one: with it the mean would be -0.002, of int8 -0.0001.
        assert abs(wide.mean()) < 5 * 0.02 / wide.numel() ** 0.5, "the mean does not grow from layer to layer"


def test_a_forecast_counts_packed_bytes(tmp_path, fuzz):
    source = make(tmp_path)
    arguments = dict(max_model_len=384, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
    for name, head in BOTH if fuzz else IN_TURN:
        options = dict(quantization=name, head_quantization=head)
        memory = plan(source, gpu_memory="1GiB", host_memory="1GiB", **arguments, **options).memory
        assert memory.weight_bytes == make_engine(source, **arguments, **options, dtype="auto").plan.weight_bytes


def test_a_known_shape_in_four_bits_by_hand():
    memory = plan("qwen3-8b", gpu_memory="12GiB", host_memory="64GiB", context=40_960, quantization="int4").memory
    weights = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    tables, buffer, rope = 2 * 151_936 * 4096, 2 * 24_576 * 4096, 40_960 * 128
    # A scale and a zero for each group, 2 bytes each.
    assert memory.weight_bytes == weights // 2 + weights // 128 * 4 + 2 * (norms + tables + rope) + buffer
    fewer = plan("qwen3-8b", gpu_memory="12GiB", host_memory="64GiB", context=40_960, quantization="int4-symmetric")
    assert memory.weight_bytes - fewer.memory.weight_bytes == weights // 128 * 2


# What is refused


def test_the_methods_that_a_config_may_name_are_those_that_are_read():
    readers = FORMATS.values()
    known = [*(reader.name for reader in readers), *(name for reader in readers for name in reader.other_names)]
    assert sorted(METHODS) == sorted(known)


@pytest.mark.parametrize(
    "name, meant",
    [("q4", "int4"), ("Q4_K_M", "int4"), ("4bit", "int4"), ("q8", "int8"), ("int5", "int8"), ("f8", "fp8")],
)
def test_what_others_call_a_format_is_told_what_it_is_here(name, meant):
    with pytest.raises(ValueError, match=f"quantization='{name}' is not known .did you mean '{meant}'"):
        EngineConfig(model="m", quantization=name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(quantization="int44"),
            r"is not known \(did you mean 'int4'\?\): give one of int4, int4-symmetric, int8, fp8",
        ),
        (dict(quantization="awq"), "quantization='awq' does not fit this checkpoint, which is not quantised"),
        (dict(quantization=4), "quantization=4 must be None or text"),
        (dict(head_quantization="int9"), r"head_quantization='int9' is not one of int8 \(did you mean 'int8'\?\)"),
    ],
)
def test_options_that_do_not_fit_a_wide_checkpoint_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_engine(make(tmp_path), **arguments)


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    packed, _ = write(tmp_path, CASES["awq"]())
    with pytest.raises(ValueError, match="'int4' does not fit .* with awq: .*only weights in 16 or 32 bits are quant"):
        make_engine(packed, quantization="int4")
    with pytest.raises(ValueError, match="is quantised already: quantise the checkpoint in 16 bits"):
        quantise_checkpoint(packed, tmp_path / "out", "int4", **QUIET)
    out = quantise_checkpoint(make(tmp_path / "wide"), tmp_path / "out", "int8", head_quantization="int8", **QUIET)
    with pytest.raises(ValueError, match="quantised with compressed-tensors: give quantization='compressed-tensors'"):
        make_engine(out, quantization="int4")
    with pytest.raises(ValueError, match="embed_tokens is quantised in the checkpoint already.* leave out head_quanti"):
        make_engine(out, head_quantization="int8")


def test_columns_that_no_group_divides_are_refused_by_name(tmp_path):
    source = make(tmp_path, intermediate_size=176)
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.down_proj.weight has 176 columns, .* 128, 64, 32 .* int8 or fp8"
    ):
        make_engine(source, quantization="int4")
    assert equal(matrices(load(source, "int8")), matrices(load(source, "int8")))


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    source, name = make(tmp_path / "wide"), "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[name][3, 7] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for attempt in (
        lambda: make_engine(source, quantization="int4"),
        lambda: quantise_checkpoint(source, tmp_path / "out", "fp8", **QUIET),
    ):
        with pytest.raises(ValueError, match=f"{name} in .* holds NaN or infinite weights, which cannot be quantised"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_beyond_the_dtype_of_scales_are_refused_by_name(tmp_path, name):
    """A float32 file under a config of float16: `quantize` wrote infinite scales, which nobody reads."""
    source, tensor = make(tmp_path / "wide", dtype=torch.float32), "model.layers.1.mlp.down_proj.weight"
    config = json.loads((source / "config.json").read_text()) | dict(dtype="float16")
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for value in (1e9, 65504.0):  # of the second int8's scale is a number, and the weight is not; that without zeros is
        tensors[tensor][3, 7] = value
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        if (name, value) == ("int4-symmetric", 65504.0):
            assert all(matrix.isfinite().all() for matrix in matrices(load(source, name)).values())
            continue
        for attempt in (
            lambda: load(source, name),
            lambda: quantise_checkpoint(source, tmp_path / "out", name, **QUIET),
        ):
            with pytest.raises(ValueError, match=f"{tensor} in .* holds weights too large for scales in float16"):
                attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_that_are_numbers_in_the_dtype_of_scales_alone_are_refused_by_name(tmp_path, name):
    source, tensor = make(tmp_path / "wide"), "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(source / "model.safetensors")
    for value, is_refused in ((6e4, False), (-1e5, True)):
        tensors[tensor][3, 7] = value
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        load(source, name)
        if not is_refused:
            assert matrices(load(source, name, dtype="float16"))["layers.1.self_attn.qkv_proj"].abs().max() > 5e4
            continue
        with pytest.raises(ValueError, match=f"{tensor} in .* makes weights NaN or infinite in float16, the model's"):
            load(source, name, dtype="float16")
        out = quantise_checkpoint(source, tmp_path / "out", name, **QUIET)
        with pytest.raises(ValueError, match=f"{tensor}_scale in .* makes weights NaN or infinite in float16"):
            load(out, dtype="float16")


def test_scales_for_several_rows_of_embeddings_are_refused(tmp_path):
    out = quantise_checkpoint(make(tmp_path / "wide"), tmp_path / "out", "int8", head_quantization="int8", **QUIET)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_1"]["weights"]["strategy"] = "tensor"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model.embed_tokens has scales for several rows"):
        load(out)


def test_embeddings_may_be_ignored_or_wide(tmp_path):
    source = make(tmp_path / "wide")
    out = quantise_checkpoint(source, tmp_path / "out", "int8", **QUIET)
    wanted = matrices(load(out))
    config = json.loads((out / "config.json").read_text())
    # Older versions of the reference left embeddings wide although an expression matched their name.
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*"]
    for ignored in (["lm_head"], ["lm_head", "re:.*embed_tokens"], ["lm_head", "Embedding"]):
        config["quantization_config"]["ignore"] = ignored
        (out / "config.json").write_text(json.dumps(config))
        assert equal(matrices(load(out)), wanted)
