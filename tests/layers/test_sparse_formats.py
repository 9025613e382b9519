"""Sparse checkpoints in every format: the model is the one with the experts' matrices that the reference makes."""

import json
import shutil
from collections import Counter
from functools import cache

import pytest
import torch
from engines import make_engine, random_prompts, run, some_params
from loading import loaded
from online import equal, expert_matrices, make, matrices
from online import load as load_online
from quantised import CASES, ONE_CUT, gptq, write
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers_reference import greedy_tokens

from nanoinfer import SamplingParams
from nanoinfer.kernels.experts import product
from nanoinfer.kernels.linear.packed_weight import PackedWeight
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.layers.formats.online import QuantisedWhileRead
from nanoinfer.layers.formats.scaled import PackedScaled
from nanoinfer.weights import fill
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.quantize import quantised_while_read
from nanoinfer.weights.write import quantise_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint was made for quantised activations")
# Blocks of 128 are ragged in gate, so that up begins within one.
SPARSE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=96, intermediate_size=96)
ORDINARY = ("ct-int4-group-zeros", "ct-nvfp4", "gptq-int4-act-order", "awq", "fp8-blocks")
QUIET = dict(progress=False)


def load(path, dtype="float32"):
    return loaded(path, dtype)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Each case, packed and expanded. Nobody may change the files."""
    return cache(lambda name: write(tmp_path_factory.mktemp("model"), CASES[name](), "qwen3_moe", **SPARSE))


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.sampled(*ORDINARY)
def test_experts_are_those_of_the_expanded_checkpoint(written, name, monkeypatch):
    packed, dense = written(name)
    tensors, wanted = load_file(packed / "model.safetensors"), load_file(dense / "model.safetensors")
    if name == "ct-left-out":
        tensors = {key: one for key, one in tensors.items() if "layers.1." not in key}
    assert not any(one.is_floating_point() and one.itemsize > 1 and "experts" in key and "proj.weight." in f"{key}."
                   and not key.endswith("scale") for key, one in tensors.items())  # fmt: skip
    model = load(packed)
    found = expert_matrices(model)
    assert len(found) == 2 * 5 * 3
    for key, matrix in found.items():
        assert torch.equal(matrix, wanted[key]), key
    for layer in model.layers:
        assert layer.mlp.gate.weight.dtype == torch.float32 and layer.mlp.gate.weight.shape == (5, 64)
    monkeypatch.setattr(fill, "_BATCH_BYTES", 5000)  # experts one by one, and two at a time
    again = expert_matrices(load(packed))
    assert all(torch.equal(again[key], matrix) for key, matrix in found.items())
    prompts, params = random_prompts(2, 5, 30), some_params(2, 4, logprobs=3)
    assert run(make_engine(packed), prompts, params) == run(make_engine(dense), prompts, params)


@pytest.mark.parametrize("name", ["ct-int4-group-zeros", "gptq-int4-act-order", "fp8-blocks", "modelopt-nvfp4"])
@pytest.mark.sampled("ct-int4-group-zeros", "gptq-int4-act-order")
def test_the_kernels_multiply_with_packed_experts_under_the_interpreter(tmp_path, name):
    """In float16: the interpreter cuts what it should round to bfloat16."""
    paths = write(tmp_path, CASES[name](), "qwen3_moe", dtype="float16", **SPARSE)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()
    ids, weights = torch.tensor([[0, 3], [3, 1], [-1, -1]], dtype=torch.int32), torch.linspace(0.1, 0.9, 6).view(3, 2)
    packed, dense = (load(path, "float16").layers[1].mlp.experts for path in paths)
    wanted = dense(x, ids, weights, 3, None)
    found = product.expert_mlp(x, ids, weights, packed.table, packed.operands, packed.activation, 3)
    torch.testing.assert_close(found, wanted, atol=wanted.abs().max().item() / 2**9, rtol=2**-7)


DELTA_HEADS = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_value_head_dim=64, linear_key_head_dim=32)
DELTA_HEADS |= dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
# The router's correction bias, a shared expert and a dense layer; other names.
OTHERS = {
    "glm4_moe": ONE_CUT | dict(moe_intermediate_size=32, first_k_dense_replace=1, num_layers=2),
    "mixtral": dict(intermediate_size=96, num_layers=1),
    "qwen3_5_moe": DELTA_HEADS | dict(num_layers=2),
    "qwen3_next": DELTA_HEADS | dict(num_layers=2),
}


@pytest.mark.parametrize(
    "family, name",
    [("glm4_moe", "gptq-int4"), ("glm4_moe", "ct-mxfp4"), ("mixtral", "ct-fp8-group")]
    + [("qwen3_5_moe", name) for name in ("gptq-int4", "ct-mixed", "fp8-blocks", "modelopt-nvfp4")]
    + [("qwen3_next", name) for name in ("gptq-int4-act-order", "ct-int4-group-zeros", "fp8-blocks", "ct-fp8-tensor")],
)
@pytest.mark.sampled(
    "glm4_moe-gptq-int4", "mixtral-ct-fp8-group", "qwen3_5_moe-fp8-blocks", "qwen3_next-ct-int4-group-zeros"
)
def test_other_families_have_the_tokens_of_the_expanded_checkpoint(tmp_path, family, name):
    packed, dense = write(tmp_path, CASES[name](), family, **OTHERS[family])
    prompts, params = random_prompts(2, 5, 30), some_params(2, 4, logprobs=3)
    assert run(make_engine(packed), prompts, params) == run(make_engine(dense), prompts, params)


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_routers_norms_and_the_correction_bias_stay_wide(tmp_path, name):
    source = make(tmp_path / "wide", "glm4_moe", **OTHERS["glm4_moe"])
    out, wide = quantise_checkpoint(source, tmp_path / "out", name, **QUIET), load_file(source / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert load_file(out / "model.safetensors")[bias].dtype == wide[bias].dtype
    for model in (load(out, "auto"), load_online(source, name)):
        mlp = model.layers[1].mlp
        assert mlp.choice_bias.dtype == torch.float32 and torch.equal(mlp.choice_bias, wide[bias].float())
        assert mlp.gate.weights is DENSE and torch.equal(mlp.gate.weight, wide["model.layers.1.mlp.gate.weight"])
        assert {one.dtype for key, one in model.named_parameters() if "norm" in key} == {torch.bfloat16}
        packed = [*mlp.experts.projections, *mlp.shared_experts.projections]
        assert all(isinstance(one.weights, PackedScaled) for one in packed)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_what_states_decay_by_and_gates_of_one_row_stay_wide(tmp_path, name):
    source = make(tmp_path / "wide", "qwen3_5_moe", **OTHERS["qwen3_5_moe"])
    out = quantise_checkpoint(source, tmp_path / "out", name, **QUIET)
    found = load_online(source, name)
    assert equal(matrices(found), matrices(load(out, "auto")))
    views, delta = load(out, "auto").checkpoint_views(), "model.layers.0.linear_attn"
    for wide in (f"{delta}.in_proj_a", f"{delta}.in_proj_b", "model.layers.0.mlp.shared_expert_gate"):
        assert f"{wide}.weight" in views
    for packed in (
        f"{delta}.in_proj_qkv",
        f"{delta}.in_proj_z",
        f"{delta}.out_proj",
        "model.layers.1.self_attn.q_proj",
    ):
        assert f"{packed}.weight" not in views and any(one.startswith(f"{packed}.weight") for one in views)


def test_gate_and_up_that_cannot_lie_in_one_weight_are_two(written):
    for name, count in (("gptq-int4-act-order", 2), ("fp8-blocks", 2), ("ct-mixed", 2), ("awq", 1), ("fp8-tensors", 1)):
        assert {len(layer.mlp.experts.gate_up) for layer in load(written(name)[0]).layers} == {count}, name


def test_experts_in_unlike_formats_are_refused_by_name(tmp_path):
    packed, _ = write(tmp_path, gptq(4, 32), "qwen3_moe", **SPARSE)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"-:.*layers\.1\.mlp\.experts\.3\.up_proj": {}}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="experts 3 and 0 of a layer have up_proj in unlike formats"):
        load(packed)


@pytest.mark.parametrize(
    "name, ending, value, message",
    [
        ("ct-int4-group-zeros", "weight_scale", float("nan"), "holds NaN or infinite scales"),
        ("ct-int4-group-zeros", "weight_scale", -1.0, "holds negative scales"),
        ("ct-int4-group-zeros", "weight_shape", 63, r"is \[63, 96\], expected \[64, 96\]"),
        ("ct-int4-group-zeros", "weight_scale", 3e38, "makes weights NaN or infinite in float32"),
        ("ct-nvfp4", "weight_global_scale", 0.0, "is 0, it must be above 0"),
        ("gptq-int4-act-order", "g_idx", 7, "names groups that are not there"),
    ],
)
def test_an_experts_values_that_cannot_be_are_refused_by_its_name(written, tmp_path, name, ending, value, message):
    packed = shutil.copytree(written(name)[0], tmp_path / "packed")
    tensors, tensor = load_file(packed / "model.safetensors"), f"model.layers.1.mlp.experts.3.down_proj.{ending}"
    tensors[tensor].view(-1)[0] = value
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"^{tensor} in .*{message}"):
        load(packed)


# Quantised while they are read, or before


@pytest.mark.parametrize("name", ["int4", "int4-symmetric", "int8", "fp8"])
@pytest.mark.sampled("int4", "fp8")
def test_sparse_checkpoints_are_quantised_alike_while_they_are_read_and_before(tmp_path, monkeypatch, name):
    source = make(tmp_path / "wide", "qwen3_moe", **SPARSE)
    out = quantise_checkpoint(source, tmp_path / "out", name, **QUIET)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", "re:.*\\.mlp\\.gate$"]
    wide, stored = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for key in [key for key in wide if "mlp.gate" in key or "norm" in key]:
        assert torch.equal(stored[key], wide[key])
    ours, wanted = load_online(source, name), load(out, "auto")
    found = expert_matrices(ours)
    assert isinstance(ours.layers[0].mlp.experts.down.weights, QuantisedWhileRead) and len(found) == 2 * 5 * 3
    assert all(torch.equal(matrix, found[key]) for key, matrix in expert_matrices(wanted).items())
    monkeypatch.setattr(fill, "_BATCH_BYTES", 5000)  # a third of a matrix
    apart = expert_matrices(load_online(source, name))
    assert all(torch.equal(matrix, found[key]) for key, matrix in apart.items())
    prompts, params = random_prompts(2, 5, 30), some_params(2, 4, logprobs=3)
    assert run(make_engine(source, quantization=name), prompts, params) == run(make_engine(out), prompts, params)


@pytest.mark.parametrize("name", ["int4-symmetric", "fp8"])
def test_transformers_has_the_same_tokens_on_what_was_written(tmp_path, name):
    """It drops the zeros of experts. Experts of fp8 it expands to bfloat16, whatever it is asked for."""
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints with it")
    sizes = SPARSE | dict(moe_intermediate_size=64)  # of groups: transformers reads all experts by one scheme
    out = quantise_checkpoint(make(tmp_path / "wide", "qwen3_moe", **sizes), tmp_path / "out", name, **QUIET)
    found = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert found.dtype == torch.bfloat16
    state, ours = found.state_dict(), expert_matrices(load(out, "bfloat16"))
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for expert in range(5):
            both = [ours[f"{prefix}.{expert}.{one}_proj.weight"] for one in ("gate", "up")]
            assert torch.equal(state[f"{prefix}.gate_up_proj"][expert], torch.cat(both))
            assert torch.equal(state[f"{prefix}.down_proj"][expert], ours[f"{prefix}.{expert}.down_proj.weight"])
    prompts = random_prompts(2, 5, 40)
    greedy = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)] * 2
    answers = run(make_engine(out, dtype="float32"), prompts, greedy)
    assert [answer[0][0] for answer in answers] == greedy_tokens(found.float(), prompts, 5)


# How it is read


def test_tensors_of_all_experts_of_a_layer_are_read_and_filled_together(written, monkeypatch):
    """Else 18,432 matrices take minutes: a call pins buffers, starts threads and asks the device for its values."""
    calls = Counter()

    def count(owner, name):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: calls.update([name]) or own(*given, **named))

    count(fill, "read_tensors"), count(fill, "host_buffers"), count(PackedWeight, "put_codes")
    count(CompressedTensors, "_format_of")
    load(written("ct-int4-group-zeros")[0])
    attention, experts = 2 * 4, 2 * 3
    assert calls["put_codes"] == attention + experts
    assert (calls["read_tensors"], calls["host_buffers"]) == (2, 1), "wide ones, and all others, which are small"
    assert calls["_format_of"] == 1, "all are of one group, and a model is built more than once"


def test_formats_that_know_no_number_of_an_expert_are_asked_once_a_layer(tmp_path, monkeypatch):
    """And those of which it is not known are asked for each."""
    path = make_checkpoint("qwen3_moe", tmp_path, **SPARSE)
    asked, of = [], CompressedTensors.of

    def noting(self, name):
        asked.append(name)
        return of(self, name)

    monkeypatch.setattr(CompressedTensors, "of", noting)
    checkpoint = quantised_while_read(read_checkpoint(path), "int8", None)
    assert checkpoint.formats.has_like_experts and {name.split(".")[-2] for name in asked if ".experts." in name} == {
        "0"
    }
    assert not CompressedTensors.has_like_experts
