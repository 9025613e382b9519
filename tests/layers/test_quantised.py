"""Quantised checkpoints: the model is the one with the matrices that the format's reference makes of them."""

import json
import shutil
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run, some_params
from live_bytes import LiveBytes
from loading import loaded
from packings import PACKINGS, filled
from quantised import CASES, ONE_CUT, gptq, write, written_by_the_package
from safetensors.torch import load_file, save_file
from simulated import SimulatedRuntime
from tiny_models import FAMILIES, make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams, plan
from nanoinfer.engine import start
from nanoinfer.kernels.kv.plain import Plain
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats import packed as packed_weights
from nanoinfer.layers.formats.bits import E2M1_VALUES, unpack
from nanoinfer.layers.linear import Linear
from nanoinfer.weights import fill
from nanoinfer.weights.load import read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint was made for quantised activations")
NAMES = list(CASES)
# KV of one layer of a block of 16 tokens in `quantised.SIZES`, float32.
LAYER_BLOCK_BYTES = 2 * 16 * 2 * 16 * 4
STREAMING = dict(enable_cpu_offload=True, resident_kv_limit=0, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
# A pool that two sequences fill.
SPILLING = STREAMING | dict(
    enable_cpu_offload="auto", resident_kv_limit=None, num_gpu_blocks_override=9, max_num_seqs=4, max_model_len=128,
    max_num_batched_tokens=32,
)  # fmt: skip


def load(path, dtype="float32"):
    return loaded(path, dtype)


def matrices(model) -> dict[str, torch.Tensor]:
    """The expanded weight of each projection, by its name in the checkpoint."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "embed_tokens":
            matrix = module.weights.matrix(module).clone()
            name = name if name == "lm_head" else f"model.{name}"
            parts = module.merged or {name.rpartition(".")[2]: module.num_rows}
            names = [".".join(filter(None, (name.rpartition(".")[0], part))) for part in parts]
            found |= dict(zip(names, matrix.split(list(parts.values())), strict=True))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Each case, packed and expanded. Nobody may change the files."""
    return cache(lambda name: write(tmp_path_factory.mktemp("model"), CASES[name]()))


@pytest.fixture
def copied(written, tmp_path):
    """A copy of a case, packed and expanded, whose files may be changed. within: the folder that it gets."""

    def copy(name, within="."):
        return [shutil.copytree(path, tmp_path / within / path.name) for path in written(name)]

    return copy


@pytest.mark.parametrize("name", NAMES)
def test_expanded_weights_are_the_references(written, name, fuzz):
    """In a run without --fuzz each case has one dtype, in turn."""
    packed, dense = written(name)
    wanted = load_file(dense / "model.safetensors")
    dtypes = ("float32", "bfloat16", "float16")
    for dtype in dtypes if fuzz else dtypes[NAMES.index(name) % 3 :][:1]:
        found = matrices(load(packed, dtype))
        assert len(found) == 15
        for module, matrix in found.items():
            assert torch.equal(matrix, wanted[f"{module}.weight"].to(matrix.dtype)), (module, dtype)


@pytest.mark.parametrize("name", ["ct-fp8-block", "ct-mixed", "gptq-int4-act-order", "awq", "modelopt-nvfp4"])
def test_a_matrix_that_is_expanded_in_pieces_is_the_same(tmp_path, name, monkeypatch):
    packed, _ = write(tmp_path, CASES[name](), hidden_size=160, intermediate_size=320)
    wanted = matrices(load(packed))
    monkeypatch.setattr(packed_weights, "EXPANDED_AT_ONCE", 2400)  # 15 or 7 rows; GPTQ and AWQ repack by 8
    found = matrices(load(packed))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in found)


def test_exponents_of_two_are_exact():
    wanted = 2.0 ** (torch.arange(255, dtype=torch.float64) - 127)
    assert torch.equal(torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).double(), wanted)


def test_a_scale_is_divided_by_the_global_one_in_float32(copied):
    """Rounded to bfloat16, a weight seldom shows whether it was divided, or multiplied by a reciprocal."""
    packed, _ = copied("ct-nvfp4")
    module, tensors = load(packed).layers[0].mlp.down_proj, load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scales = tensors[f"{name}_scale"].float() / tensors[f"{name}_global_scale"]
    unrounded = replace(module.weights, packing=replace(module.weights.packing, result_dtype=None))
    codes = unpack(tensors[f"{name}_packed"], 4, module.in_features).long()
    matrix = torch.tensor(E2M1_VALUES)[codes] * scales.repeat_interleave(16, 1)
    assert torch.equal(unrounded.expand(module, slice(0, 64)), matrix)
    assert torch.equal(unrounded.expand(module, slice(8, 24)), matrix[8:24])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled("ct-mixed", "gptq-int4-act-order")
def test_tokens_and_logits_are_those_of_the_expanded_checkpoint_in_every_mode(tmp_path, name, fuzz):
    packed, dense = write(tmp_path, CASES[name](), **ONE_CUT)
    for seed in range(3 if fuzz else 1):
        prompts, params = random_prompts(4, 20, 90, seed=seed), some_params(4, 12 if fuzz else 5, logprobs=3)
        wanted = run(make_engine(dense), prompts, params)
        for arguments in ({}, STREAMING, SPILLING, dict(max_num_batched_tokens=17)):
            engine = make_engine(packed, SimulatedRuntime(seed), **arguments)
            assert run(engine, prompts, params) == wanted
            if arguments is STREAMING or (arguments is SPILLING and seed == 0):  # others may rather wait for room
                assert engine.stats()["streamed_bytes"] > 0
            assert_pools_as_before(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_on_the_expanded_checkpoint(tmp_path, family):
    names = ("ct-int4-group-zeros", "awq", "ct-nvfp4", "gptq-int8-rows", "ct-mixed")
    packed, dense = write(tmp_path, CASES[names[FAMILIES.index(family)]](), family, tied=family == "gemma3")
    prompts = random_prompts(2, 10, 40)
    greedy = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)] * 2
    found = run(make_engine(packed), prompts, greedy)
    assert [list(one[0][0]) for one in found] == reference_tokens(dense, prompts, 5)


def test_a_checkpoint_that_the_reference_package_wrote_as_a_whole(tmp_path):
    case, scheme = written_by_the_package(tmp_path, "llama")
    prompts, params = random_prompts(2, 10, 40), some_params(2, 5)
    assert scheme["format"] == "mixed-precision" and "lm_head" in scheme["ignore"]
    assert run(make_engine(case[0]), prompts, params) == run(make_engine(case[1]), prompts, params)


def test_a_sharded_checkpoint_is_the_whole_one(tmp_path):
    case = CASES["awq"]()
    (whole, _), (sharded, _) = write(tmp_path / "whole", case), write(tmp_path / "sharded", case, shards=3)
    found = matrices(load(sharded))
    assert all(torch.equal(matrix, found[name]) for name, matrix in matrices(load(whole)).items())


def test_the_older_config_file_of_modelopt_is_read(copied):
    packed, dense = copied("modelopt-nvfp4-left-out")
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    older = dict(quant_algo="NVFP4", group_size=16, kv_cache_quant_algo=None, exclude_modules=settings["ignore"])
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "hf_quant_config.json").write_text(json.dumps(dict(quantization=older)))
    wanted = load_file(dense / "model.safetensors")
    assert all(torch.equal(matrix, wanted[f"{name}.weight"]) for name, matrix in matrices(load(packed)).items())
    (packed / "hf_quant_config.json").write_text(json.dumps(dict(quantization=8)))
    with pytest.raises(ValueError, match="hf_quant_config.json is not valid: quantization is 8, it must be an object"):
        load(packed)


def test_the_older_name_of_the_settings_is_read(copied):
    packed, dense = copied("ct-int4-group")
    config = json.loads((packed / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    (packed / "config.json").write_text(json.dumps(config))
    wanted = load_file(dense / "model.safetensors")
    assert all(torch.equal(matrix, wanted[f"{name}.weight"]) for name, matrix in matrices(load(packed)).items())
    (packed / "config.json").write_text(json.dumps(config | dict(compression_config=[4])))
    with pytest.raises(ValueError, match=r"config.json is no valid config: compression_config is \[4\]"):
        load(packed)


def test_auto_rounds_own_settings_may_be_given_by_expressions(copied):
    packed, dense = copied("auto-round")
    wide, wanted = dict(bits=16, data_type="float"), load_file(dense / "model.safetensors")
    for key in (r"layers\.0\.mlp\.down_proj", r".*\.0\..*down_proj$"):
        settle(packed, extra_config={r"q_proj\.": wide, key: wide})
        assert all(torch.equal(matrix, wanted[f"{name}.weight"]) for name, matrix in matrices(load(packed)).items())


def test_a_head_may_be_quantised(tmp_path):
    case = gptq(4, 32, lm_head=True)
    packed, dense = write(tmp_path, case, head=True, **ONE_CUT)
    assert (dense / "model.safetensors").stat().st_size > (packed / "model.safetensors").stat().st_size
    prompts, params = random_prompts(2, 5, 30), some_params(2, 4)
    assert run(make_engine(packed), prompts, params) == run(make_engine(dense), prompts, params)


def test_a_head_that_dynamic_settings_leave_out_is_wide(tmp_path):
    packed, dense = write(tmp_path, CASES["gptq-int4"](), **ONE_CUT)
    settle(packed, lm_head=True, dynamic={"-:lm_head": {}})
    prompts, params = random_prompts(2, 5, 30), some_params(2, 4)
    assert run(make_engine(packed), prompts, params) == run(make_engine(dense), prompts, params)


def test_scales_may_be_of_another_dtype_than_the_model(copied):
    packed, dense = copied("ct-int4-group")
    edit(packed, lambda tensors: {key: value.float() if key.endswith("_scale") else value
                                  for key, value in tensors.items()})  # fmt: skip
    model, wanted = load(packed, "bfloat16"), load_file(dense / "model.safetensors")
    scales = load_file(packed / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"]
    matrix = matrices(model)["model.layers.0.mlp.down_proj"]
    # float32 products are rounded once, to the model's dtype; bfloat16 ones were rounded before.
    codes = torch.round(wanted["model.layers.0.mlp.down_proj.weight"] / scales.repeat_interleave(32, 1))
    assert torch.equal(matrix, (codes * scales.repeat_interleave(32, 1)).bfloat16())
    assert model.layers[0].mlp.down_proj.scales.dtype == torch.float32


def test_random_weights_of_every_format_have_the_deviation_of_wide_ones(written):
    for name in NAMES:
        packed, _ = written(name)
        model = loaded(packed, "float32", seed=0)
        for module, matrix in matrices(model).items():
            assert 0.008 < matrix.std() < 0.04, (name, module)


# The plan


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled("ct-left-out", "ct-nvfp4", "awq", "fp8-blocks-left-out")
def test_the_plan_counts_the_bytes_that_are_held_and_the_buffer(written, name):
    packed, dense = written(name)
    engine, wide = make_engine(packed), make_engine(dense)
    model = engine.runner.model
    assert model.spec.weight_bytes == sum(weight.nbytes for weight in model.parameters()) < wide.plan.weight_bytes
    largest = max(module.num_rows * module.in_features for module in model.modules() if isinstance(module, Linear)
                  and module.scratch is not None and module.weights.scratch_size(module, False))  # fmt: skip
    assert model.spec.scratch_bytes == 4 * largest
    assert engine.plan.weight_bytes - wide.plan.weight_bytes == (
        model.spec.weight_bytes + model.spec.scratch_bytes - wide.runner.spec.weight_bytes
    )
    assert engine.plan.activation_bytes == wide.plan.activation_bytes + model.spec.product_bytes
    buffers = {module.scratch.data_ptr() for module in model.modules() if isinstance(module, Linear)}
    assert len(buffers) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(*NAMES[1::3])
def test_a_product_takes_no_more_than_the_plan_says(written, name):
    packed, _ = written(name)
    model = load(packed, "bfloat16")
    for module in model.modules():
        if isinstance(module, Linear) and module.weights.scratch_size(module, False):
            with LiveBytes() as live:
                module.weights.matrix(module)
            most = packed_weights.temporary_bytes(module.num_rows * module.in_features)
            assert live.peak <= most <= model.spec.product_bytes, module.merged
            assert live.now == 0


def test_a_forecast_counts_what_the_engine_holds(copied):
    packed, dense = copied("ct-int4-group")
    arguments = dict(max_model_len=384, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, dtype="float32")
    memory = plan(packed, gpu_memory="1GiB", host_memory="1GiB", **arguments).memory
    assert memory.weight_bytes == make_engine(packed, **arguments).plan.weight_bytes
    wide = plan(dense, gpu_memory="1GiB", host_memory="1GiB", **arguments).memory
    assert memory.graph_bytes == wide.graph_bytes
    with pytest.raises(ValueError, match="quantization='awq' does not fit"):
        plan(packed, gpu_memory="1GiB", host_memory="1GiB", quantization="awq", **arguments)


def test_weights_that_are_not_there_yet_have_scales_of_the_models_dtype(copied):
    packed, _ = copied("ct-int4-group")
    there = read_checkpoint(packed)
    wanted = {torch.bfloat16, torch.int32, torch.int64, torch.float32}
    assert {tensor.dtype for tensor in there.tensors.values()} == wanted
    (packed / "model.safetensors").unlink()
    missing = read_checkpoint(packed)
    assert missing.tensors is None
    assert read_spec(missing, "auto").weight_bytes == read_spec(there, "auto").weight_bytes


def test_the_plan_is_made_again_when_the_weights_have_come(copied, tmp_path, monkeypatch):
    packed, _ = copied("ct-int4-group")
    edit(packed, lambda tensors: {key: value.float() if key.endswith("_scale") else value
                                  for key, value in tensors.items()})  # fmt: skip
    wanted, elsewhere = make_engine(packed).plan, tmp_path / "not_yet_here"
    (packed / "model.safetensors").rename(elsewhere)

    def download(model, weights=True):
        elsewhere.rename(packed / "model.safetensors")
        return packed

    monkeypatch.setattr(start, "find_model", download)
    engine = make_engine(packed)
    assert engine.plan.weight_bytes == wanted.weight_bytes
    assert engine.runner.model.layers[0].mlp.down_proj.scales.dtype == torch.float32


def test_four_bits_are_held_in_four_bits(tmp_path):
    packed, dense = write(tmp_path, CASES["ct-int4-group"](), intermediate_size=192)  # whole blocks of columns
    spec, wide = (load(path, "bfloat16").spec for path in (packed, dense))
    tensors = load_file(dense / "model.safetensors")
    projections = sum(weight.numel() for name, weight in tensors.items() if "_proj." in name)
    # Half a byte, and two of scale for each 32; two bytes.
    assert wide.weight_bytes - spec.weight_bytes == projections * (2 - 1 / 2 - 2 / 32)


def test_what_is_repacked_lies_twice_on_the_device_for_one_tensor_at_a_time(copied, monkeypatch):
    packed, _ = copied("awq")
    staged, read_tensors = [], fill.read_tensors

    def read(targets, **arguments):
        staged.append(sum(entry.num_bytes for entry, _ in targets))
        read_tensors(targets, **arguments)

    monkeypatch.setattr(fill, "read_tensors", read)
    monkeypatch.setattr(fill, "_BATCH_BYTES", 0)
    load(packed)
    assert len(staged) > 2 and max(staged[1:]) == 64 * 160 // 2


# What is refused


def edit(path, change) -> None:
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def settle(path, **settings) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))


def spoilt(name, value):
    """Sets the first value of a tensor."""

    def change(tensors):
        whole = tensors[name].float().flatten()
        whole[0] = value
        return tensors | {name: whole.view(tensors[name].shape).to(tensors[name].dtype)}

    return change


def without(ending):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("ct-int4-group", spoilt(f"{DOWN}.weight_scale", float("nan")), "holds NaN or infinite scales"),
        ("ct-fp8-tensor", spoilt(f"{DOWN}.weight_scale", float("inf")), "holds NaN or infinite scales"),
        ("ct-nvfp4", spoilt(f"{DOWN}.weight_scale", float("nan")), "holds NaN or infinite scales"),
        ("ct-nvfp4", spoilt(f"{DOWN}.weight_global_scale", 0), "is 0, it must be above 0"),
        ("modelopt-nvfp4", spoilt(f"{DOWN}.weight_scale_2", -1), "is -1, it must be above 0"),
        ("ct-mxfp4", spoilt(f"{DOWN}.weight_scale", 255), "holds NaN scales"),
        ("gptq-int4", spoilt(f"{DOWN}.scales", float("nan")), "holds NaN or infinite scales"),
        ("awq", spoilt(f"{DOWN}.scales", float("nan")), "holds NaN or infinite scales"),
        ("fp8-blocks", spoilt(f"{DOWN}.weight_scale_inv", float("nan")), "holds NaN or infinite scales"),
        ("ct-int4-group", spoilt(f"{DOWN}.weight_scale", -0.01), "holds negative scales"),
        ("ct-fp8-tensor", spoilt(f"{DOWN}.weight_scale", -0.01), "holds negative scales"),
        ("ct-nvfp4", spoilt(f"{DOWN}.weight_scale", -1), "holds negative scales"),
        ("gptq-int4", spoilt(f"{DOWN}.scales", -60000), "holds negative scales"),  # in a row of small ones
        ("awq", spoilt(f"{DOWN}.scales", -0.01), "holds negative scales"),
        ("fp8-blocks", spoilt(f"{DOWN}.weight_scale_inv", -0.01), "holds negative scales"),
        ("gptq-int4-act-order", spoilt(f"{DOWN}.g_idx", 5), "names groups that are not there: .* from 0 to 4"),
        ("gptq-int4", spoilt(f"{DOWN}.g_idx", 1), "is not ascending, although desc_act is false"),
        ("ct-int4-group", spoilt(f"{DOWN}.weight_shape", 63), r"is \[63, 160\], expected \[64, 160\]"),
        ("ct-int4-group-zeros", without(f"{DOWN}.weight_zero_point"), "lacks tensors .*weight_zero_point"),
        ("ct-int8-group", without(f"{DOWN}.weight_zero_point"), "lacks tensors .*weight_zero_point"),
        ("gptq-int4", without(f"{DOWN}.qzeros"), "lacks tensors .*qzeros"),
        ("gptq-int4", lambda t: t | {f"{DOWN}.qzeros": t[f"{DOWN}.qzeros"].long()}, "qzeros is int64, expected int32"),
        ("gptq-int4", lambda t: t | {f"{DOWN}.scales": t[f"{DOWN}.scales"].int()}, "scales has dtype int32: supported"),
        ("gptq-int4", lambda t: t | {f"{DOWN}.bias": torch.ones(64).half()}, "bias in .* is not zero, .* has no bias"),
        ("gptq-int4-act-order", without(f"{DOWN}.g_idx"), "lacks tensors .*g_idx"),
        ("ct-int4-act-order", spoilt(f"{DOWN}.weight_g_idx", 5), "names groups that are not there: .* from 0 to 4"),
        ("ct-int4-tensor-zeros", spoilt(f"{DOWN}.weight_zero_point", 8), "zero points that are no numbers of 4 bits"),
        ("fp8-blocks", without(f"{DOWN}.weight_scale_inv"), "lacks tensors .*weight_scale_inv"),
    ],
)
def test_values_and_tensors_that_cannot_be_are_refused_by_name(copied, name, change, message):
    packed, _ = copied(name)
    edit(packed, change)
    with pytest.raises(ValueError, match=message) as refusal:
        load(packed)
    assert DOWN in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(*NAMES[::3], "ct-mixed")
def test_scales_with_which_weights_become_infinite_are_refused_by_name(copied, name):
    packed = copied(name)[0]
    module = "model.layers.0.mlp.gate_proj" if name == "ct-mixed" else DOWN  # beside an up_proj of another format
    tensors = load_file(packed / "model.safetensors")
    endings = {full.rpartition(".")[2] for full in tensors if full.startswith(f"{module}.")}
    (scales,) = endings & {"weight_scale", "scales", "weight_scale_inv"}
    of_scales = 200 if tensors[f"{module}.{scales}"].dtype == torch.uint8 else 6e4
    values = {"weight_global_scale": 1e-30, "weight_scale_2": 1e30, scales: of_scales}  # all are finite
    changed = next(ending for ending in values if ending in endings)
    edit(packed, spoilt(f"{module}.{changed}", values[changed]))
    is_refused = f"{module}.{scales} in .* makes weights NaN or infinite in float"
    with pytest.raises(ValueError, match=f"{is_refused}16, the model's dtype"):
        load(packed, "float16")
    if tensors[f"{module}.{changed}"].dtype == torch.float16:  # so the reference's matrix is infinite
        with pytest.raises(ValueError, match=f"{is_refused}32, the model's dtype"):
            load(packed)
    elif changed == scales:
        assert all(matrix.isfinite().all() for matrix in matrices(load(packed)).values())


@pytest.mark.parametrize("name", [name for name, one in PACKINGS.items() if not one.get("scale_words")])
def test_large_scales_of_small_codes_are_not_refused(name):
    packing = Packing(**PACKINGS[name])
    weights, module = filled(packing, 48, 384)
    groups, is_byte = packing.num_groups(384), packing.scale_dtype == torch.uint8
    scale = 200 if is_byte else 300 if packing.has_global_scale else 5e4
    module.packed.put_scales(0, 48, torch.full((1, groups), scale).to(packing.scale_dtype))
    zero = 0 if packing.kind != "int" else 3 if packing.has_zeros else 2 ** (packing.bits - 1)
    if packing.has_zeros:
        module.packed.put_zeros(0, 48, torch.full((1, groups), zero))
    if packing.has_global_scale:
        module.packed.global_scale.fill_(1e-6 if packing.divides_global_scale else 1e6)
    codes = module.packed.codes_of(slice(0, 48))
    codes[::2] = zero
    module.packed.put_codes(0, codes)
    for row in range(0, 48, 2):
        weights.check_finite(module, row, row + 1)
        with pytest.raises(ValueError, match="makes weights NaN or infinite in float16"):
            weights.check_finite(module, row, row + 2)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(
    "name, module",
    [
        ("ct-fp8-channel", DOWN),
        ("ct-fp8-block", "model.layers.0.self_attn.k_proj"),
        ("ct-mixed", "model.layers.1.mlp.gate_proj"),  # beside an up_proj of 4 bits
        ("fp8-blocks", DOWN),
        ("modelopt-fp8", DOWN),
    ],
)
def test_fp8_weights_that_are_nan_are_refused_by_name(copied, name, module, code):
    """One such code would make a channel of every token NaN, and the logits with it."""
    packed, _ = copied(name)

    def change(tensors):
        codes = tensors[f"{module}.weight"]
        codes.view(torch.uint8)[-1, -1] = code
        assert codes.dtype == torch.float8_e4m3fn and codes.float().isnan().sum() == 1
        return tensors

    edit(packed, change)
    with pytest.raises(ValueError, match=f"{module}.weight in .*NaN"):
        load(packed)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("gptq-int4", dict(group_size=64), "down_proj has 160 input features, which groups of 64 do not divide"),
        ("gptq-int4", dict(group_size=16), r"q_proj.qzeros is \[2, 8\], expected \[4, 8\]"),
        ("gptq-int4", dict(bits=8), r"qweight is \[8, 64\], expected \[16, 64\]"),
        ("gptq-int4", dict(bits=3), "bits is 3 in the quantization_config of gptq: supported are 4, 8"),
        ("gptq-int4", dict(checkpoint_format="marlin"), "checkpoint_format is 'marlin' .* supported are gptq, gptq_v2"),
        ("gptq-int4", dict(group_size="32"), "group_size is '32'"),
        ("gptq-int4", dict(dynamic={"-:*": {}}), r"'\*' in the quantization_config is no regular expression"),
        ("gptq-int4", dict(dynamic={"+:.*down_proj": 4}), "dynamic has 4 in the quantization_config, not settings"),
        ("gptq-int4", dict(modules_in_block_to_quantize=[4]), r"modules_in_block_to_quantize is \[4\] .* not names"),
        ("awq", dict(version="gemv"), "version is 'gemv' in the quantization_config of awq: supported is gemm"),
        ("awq", dict(version=None, format="gemv_fast"), "format is 'gemv_fast' .* of awq: supported is gemm"),
        ("awq", dict(zero_point="yes"), "zero_point is 'yes' in the quantization_config of awq, not bool"),
        ("awq", dict(modules_to_not_convert=[4]), r"modules_to_not_convert is \[4\] .* of awq, not a list of names"),
        ("awq", dict(group_size=48), "has 64 input features, which groups of 48 do not divide"),
        ("auto-round", dict(packing_format="auto_round"), "packing_format is 'auto_round' .* supported are auto"),
        (
            "auto-round",
            dict(packing_format="auto_round:auto_awq", bits=8),
            "bits is 8 .* of auto-round: supported are 4",
        ),
        (
            "auto-round",
            dict(packing_format=None, backend="auto_round:exllamav2"),
            "backend is 'auto_round:exllamav2' .* no packing_format: supported are auto_round:auto_gptq, ",
        ),
        ("auto-round", dict(extra_config={r".*\.(": {}}), r"no regular expression"),
        ("auto-round", dict(act_bits="8"), "act_bits is '8' in the quantization_config of auto-round, not int"),
        ("auto-round", dict(extra_config={DOWN: 4}), f"extra_config has 4 for {DOWN} in the quantization_config"),
        ("fp8-blocks", dict(weight_block_size=[64, 128]), r"weight_scale_inv is \[2, 1\], expected \[3, 1\]"),
        ("fp8-blocks", dict(weight_block_size=[128]), r"weight_block_size is \[128\]"),
        ("modelopt-fp8", dict(quant_algo="W4A8_AWQ"), "quant_algo is 'W4A8_AWQ' .* supported are FP8, .*, NVFP4"),
        ("ct-int4-group", dict(format="marlin-24"), "format is 'marlin-24' .* supported are pack-quantized, "),
        ("ct-int4-group", dict(quantization_status="frozen"), "quantization_status is 'frozen'"),
        ("ct-int4-group", dict(transform_config={"config_groups": {"u": {}}}), "transform_config is not supported"),
        ("ct-int4-group", dict(transform_config={"hadamard": {}, "block": 64}), "transform_config is not supported"),
        ("ct-int4-group", dict(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
        ("fp8-blocks", dict(transform_config={"rotation": "R1"}), "transform_config is .* need rotated activations"),
        ("auto-round", dict(rotation_config={"algorithm": "spinquant"}), "rotation_config is not supported"),
        ("ct-int4-group", dict(config_groups={"group_0": 4}), "config_groups has 4 in the quantization_config"),
        ("ct-int4-group", dict(quant_method="compressed"), "or one of compressed-tensors, gptq, auto-round, awq, fp8"),
    ],
)
def test_settings_that_are_not_those_of_the_weights_are_refused(copied, name, settings, message):
    packed, _ = copied(name)
    settle(packed, **settings)
    with pytest.raises(ValueError, match=message):
        load(packed)


@pytest.mark.parametrize(
    "name, group, weights, message",
    [
        ("ct-fp8-block", {}, dict(block_structure=[128]), r"block_structure is \[128\] .* not two sizes"),
        ("ct-fp8-channel", {}, dict(symmetric=False), "weights of type float have zero points"),
        ("ct-fp8-channel", dict(format="pack-quantized"), {}, "format is pack-quantized for 8 bits of type float"),
        ("ct-int4-group", dict(format="marlin-24"), {}, "format is 'marlin-24' .* supported are pack-quantized, "),
        ("ct-nvfp4", {}, dict(group_size=32), "group_size is 32 .* supported are 16"),
        ("ct-mxfp4", {}, dict(group_size=16), "group_size is 16 .* supported are 32"),
        ("ct-nvfp4", dict(format="float-quantized"), {}, "format is float-quantized for 4 bits of type float"),
    ],
)
def test_settings_of_a_group_that_do_not_go_together_are_refused(copied, name, group, weights, message):
    packed, _ = copied(name)
    (given,) = json.loads((packed / "config.json").read_text())["quantization_config"]["config_groups"].values()
    settle(packed, config_groups={"group_0": given | group | dict(weights=given["weights"] | weights)})
    with pytest.raises(ValueError, match=message):
        load(packed)


@pytest.mark.parametrize(
    "name, message",
    [
        ("gptq-int4", "down_proj.qweight has 164 input features, which words of 8 do not divide"),
        ("awq", "down_proj.qweight has 164 input features, which words of 8 do not divide"),
        ("modelopt-nvfp4", "down_proj.weight has 164 columns, which 8 does not divide"),
    ],
)
def test_sizes_that_words_do_not_divide_are_refused(copied, name, message):
    packed, _ = copied(name)
    config = json.loads((packed / "config.json").read_text()) | dict(intermediate_size=164)
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(packed)


VALUES = (None, True, 0, -1, 7, 2**40, 0.5, "", "x", "re:(", [], [[]], ["re:("], [None], {}, {"x": None}, {"re:(": {}})


@pytest.mark.parametrize("name", ["ct-mixed", "gptq-int4", "auto-round", "awq", "fp8-blocks", "modelopt-nvfp4"])
def test_any_value_of_any_setting_is_refused_or_the_model_loads(copied, name, fuzz):
    packed, _ = copied(name)
    config, refused = json.loads((packed / "config.json").read_text()), 0
    settings = config["quantization_config"]
    places = [(settings, key) for key in [*settings, "dynamic", "lm_head", "extra_config", "kv_cache_scheme"]]
    for group in settings.get("config_groups", {}).values():
        places += [(group, key) for key in group] + [(group["weights"], key) for key in group["weights"]]
    apart = 9 if len(places) > 20 else 6
    for number, (place, key) in enumerate(places):
        kept, had = place.get(key), key in place
        for value in VALUES if fuzz else VALUES[number % apart :: apart]:
            place[key] = value
            (packed / "config.json").write_text(json.dumps(config))
            try:
                load(packed)
            except ValueError:
                refused += 1
        place[key] = kept
        if not had:
            del place[key]
    assert refused > 10


# Options


def test_the_argument_of_vllm_must_name_what_the_checkpoint_has(copied):
    packed, _ = copied("awq")
    for name in ("awq", "awq_marlin", None):
        make_engine(packed, quantization=name)
    with pytest.raises(ValueError, match="quantization='gptq' does not fit .* with awq: give quantization='awq'"):
        make_engine(packed, quantization="gptq")


def test_what_weights_are_quantised_to_may_be_named_and_is_told(copied):
    packed, _ = copied("ct-int4-channel")
    for name in ("int4", "int4-symmetric"):
        make_engine(packed, quantization=name)
    known = "'compressed-tensors' or 'int4' or 'int4-symmetric', or"
    with pytest.raises(ValueError, match=f"'awq' does not .*: give quantization={known}"):
        make_engine(packed, quantization="awq")


OWN_KV = "made for a quantised KV cache. Here it keeps the model's dtype"


def test_a_checkpoint_made_for_a_quantised_kv_cache_runs_with_a_wide_one(copied):
    """With calibrated scales nothing else runs; and no message sends from one to the other and back."""
    packed, _ = copied("ct-int4-channel")
    settle(packed, kv_cache_scheme=dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False))
    with pytest.warns(UserWarning, match=OWN_KV):
        make_engine(packed)
    scale = "model.layers.1.self_attn.k_scale"
    edit(packed, lambda tensors: tensors | {scale: torch.ones(1)})
    make_engine(packed, kv_cache_dtype="fp8")
    edit(packed, lambda tensors: tensors | {scale: torch.full((1,), 0.5)})
    with pytest.raises(ValueError, match=f'{scale} in .* is 0.5: .* is 1 here. Give kv_cache_dtype="auto"'):
        make_engine(packed, kv_cache_dtype="fp8")
    with pytest.warns(UserWarning, match=OWN_KV):
        assert make_engine(packed).runner.spec.attention.part.format == Plain(torch.float32)
    edit(packed, lambda tensors: tensors | {scale: torch.tensor([1.0, 2.0])})
    with pytest.raises(ValueError, match=f"{scale} in .* is 2: the scale of an fp8 KV cache is 1"):
        make_engine(packed, kv_cache_dtype="fp8")
    settle(packed, kv_cache_scheme=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*quantised KV cache")
        make_engine(packed)  # which quantises no keys, so that their scale does not matter


@pytest.mark.parametrize("name", ["fp8-tensors", "gptq-int4", "awq", "auto-round", "modelopt-fp8"])
def test_every_method_may_have_a_scheme_of_the_kv_cache(copied, name):
    """AutoFP8 and what is made like its checkpoints say "static", and ModelOpt has a setting of its own."""
    packed, _ = copied(name)
    for scheme in ("static", dict(num_bits=8, type="int", dynamic=True)):
        settle(packed, kv_cache_scheme=scheme)
        with pytest.warns(UserWarning, match=OWN_KV):
            make_engine(packed)
        make_engine(packed, kv_cache_dtype="fp8")
    if name == "modelopt-fp8":
        settle(packed, kv_cache_scheme=None, kv_cache_quant_algo="FP8")
        with pytest.warns(UserWarning, match=OWN_KV):
            make_engine(packed)


@pytest.mark.filterwarnings("default:the checkpoint was made for quantised activations")
def test_schemes_of_activations_are_ignored_with_one_notice(copied):
    named = (("ct-fp8-channel", 1), ("fp8-blocks", 1), ("ct-fp8-tensor", 0), ("auto-round", 0), ("auto-round", 1))
    for place, (name, count) in enumerate(named):
        packed, _ = copied(name, str(place))
        if name == "auto-round":
            settle(packed, act_bits=8 if count else 16)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            make_engine(packed)
        assert sum("its weights stay quantised" in str(one.message) for one in said) == count


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_matrices_that_are_kept_change_no_bit(quantization, tmp_path):
    """On a CPU, where there is room for all of them; and they are counted."""
    path = make_checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=256)
    prompts, params = random_prompts(3, 5, 30), some_params(3, 5, logprobs=2)
    keeping = make_engine(path, quantization=quantization)
    wanted, plan = run(keeping, prompts, params), keeping.plan
    spec = keeping.runner.spec
    kept = [module.kept_matrix for module in keeping.runner.model.modules() if isinstance(module, Linear)]
    assert sum(one.nbytes for one in kept if one is not None) == plan.matrix_bytes == spec.matrix_bytes > 0
    other = make_engine(path, quantization=quantization, gpu_memory_limit=plan.total_bytes - 1)
    assert other.plan.matrix_bytes == 0 and other.plan.weight_bytes == plan.weight_bytes
    assert run(other, prompts, params) == wanted
    assert not make_engine(path, quantization=quantization, resident_weights_limit=0).plan.matrix_bytes


def test_matrices_of_one_name_may_have_groups_of_unlike_sizes(tmp_path):
    """A dense layer's and the experts' `down_proj`: each target names modules of one size alone."""
    sizes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=32, num_heads=8)
    path = make_checkpoint("glm4_moe", tmp_path, first_k_dense_replace=1, n_shared_experts=1, **sizes)
    checkpoint = quantised_while_read(read_checkpoint(path), "int4", None)
    groups = checkpoint.quantised_to[0]["config_groups"].values()
    targets = [target for group in groups for target in group["targets"]]
    assert len(targets) == len(set(targets)) and {group["weights"]["group_size"] for group in groups} == {128, 32}
    model = loaded(checkpoint, torch.float32, max_position=64)
    dense, sparse = model.layers[0].mlp, model.layers[1].mlp
    assert dense.down_proj.packed.packing.columns == 128
    assert sparse.experts.operands.down.packed.packing.columns == 32
