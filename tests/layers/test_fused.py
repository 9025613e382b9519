"""Checkpoints that hold q, k and v as one tensor, and gate and up: the model is that of the parts."""

import shutil
from dataclasses import replace

import pytest
import torch
from engines import make_engine, random_prompts, run, some_params
from fused import PARTS, fuse
from online import QUIET, equal, load, make, matrices
from quantised import CASES, ONE_CUT, awq, compressed, compressed_groups, fp8_blocks, modelopt_nvfp4, write
from safetensors.torch import load_file, save_file
from simulated import SimulatedRuntime
from tiny_models import FAMILIES, make_checkpoint

from nanoinfer.config import QUANTISED
from nanoinfer.engine import start
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.weights import fill
from nanoinfer.weights.write import quantise_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint was made for quantised activations")
INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
# Configs that name what is merged: what is wide, and what has a scheme of its own.
NAMED = {
    "ct-ignored": lambda: compressed(
        "pack-quantized", **INT4, ignore=["model.layers.0.self_attn.qkv_proj", "re:.*1.mlp.gate_up_proj"]
    ),
    "ct-groups": lambda: compressed_groups("mixed-precision", {
        "group_0": dict(targets=["Linear"], weights=INT4, format="pack-quantized"),
        "group_1": dict(targets=["re:.*gate_up_proj", "model.layers.1.self_attn.qkv_proj"], format="int-quantized",
                        weights=dict(num_bits=8, type="int", strategy="tensor")),
    }),
    "awq-merged-left-out": lambda: awq(32, "qkv_proj"),
    "fp8-merged-left-out": lambda: fp8_blocks("layers.1.mlp.gate_up_proj"),
    "modelopt-merged-left-out": lambda: modelopt_nvfp4("qkv_proj"),
    # Configs that name the parts of what is merged in the file.
    "awq-parts-left-out": lambda: named(awq(32, "qkv_proj"), modules_to_not_convert=["q_proj", "k_proj", "v_proj"]),
    "fp8-parts-left-out": lambda: named(
        fp8_blocks("layers.1.mlp.gate_up_proj"),
        modules_to_not_convert=["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"],
    ),
    "modelopt-parts-left-out": lambda: named(
        modelopt_nvfp4("qkv_proj"), ignore=["lm_head", "*q_proj*", "*k_proj*", "*v_proj*"]
    ),
    "ct-parts-ignored": lambda: named(
        compressed("pack-quantized", **INT4, ignore=["model.layers.0.self_attn.qkv_proj"]),
        ignore=["lm_head", *(f"model.layers.0.self_attn.{one}_proj" for one in "qkv")],
    ),
}  # fmt: skip


def named(case, **settings):
    """The case with a config that says the same in other words."""
    return replace(case, settings=case.settings | settings)


def biases(model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if name.endswith("bias")}


def change(path, edit) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", [*CASES, *NAMED])
@pytest.mark.sampled(
    "ct-int4-group-zeros", "ct-int4-channel-zeros", "ct-int4-act-order", "ct-int4-block-zeros", "ct-int8-tensor-zeros",
    "ct-fp8-tensor", "ct-fp8-block", "ct-nvfp4", "ct-mxfp4", "gptq-int4", "gptq-int4-act-order", "awq", "fp8-blocks",
    "fp8-tensors", "modelopt-nvfp4", *NAMED,
)  # fmt: skip
def test_weights_are_those_that_the_reference_makes_of_the_whole(tmp_path, name):
    packed, dense = write(tmp_path, (CASES | NAMED)[name](), "qwen2", is_fused=True)
    names = load_file(packed / "model.safetensors").keys()
    assert any("qkv_proj.bias" in one for one in names) and not any("q_proj." in one for one in names)
    found, wanted = load(packed), load(dense, dtype="bfloat16")
    assert equal(matrices(found), matrices(wanted)) and equal(biases(found), biases(wanted))
    merged = [module for name, module in found.named_modules() if name.endswith(tuple(PARTS))]
    assert len(merged) == 4 and all(len(module.merged) == 1 for module in merged)


@pytest.mark.parametrize("name", ["ct-fp8-block", "gptq-int4-act-order", "ct-groups"])
def test_tokens_and_logits_are_those_of_the_parts(tmp_path, name):
    packed, dense = write(tmp_path, (CASES | NAMED)[name](), is_fused=True, shards=3, **ONE_CUT)
    prompts, params = random_prompts(3, 5, 40), some_params(3, 5, logprobs=3)
    wanted = run(make_engine(dense), prompts, params)
    assert run(make_engine(packed), prompts, params) == wanted
    streaming = dict(enable_cpu_offload=True, resident_kv_limit=0)
    assert run(make_engine(packed, SimulatedRuntime(1), **streaming), prompts, params) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_wide_weights_are_those_of_the_parts(tmp_path, family):
    biased = dict(attention_bias=True, mlp_bias=True) if family == "llama" else {}
    parts = make_checkpoint(family, tmp_path / "parts", num_heads=6, num_kv_heads=2, **biased)
    whole = fuse(shutil.copytree(parts, tmp_path / "whole"))
    found = load(whole)
    assert equal(found.state_dict(), load(parts).state_dict()) and found.spec == load(parts).spec
    saved, views = load_file(whole / "model.safetensors"), found.checkpoint_views()
    assert "model.layers.0.mlp.gate_up_proj.weight" in views and equal(views, saved)


def test_one_layer_may_hold_parts_and_another_the_whole(tmp_path):
    parts = make(tmp_path / "parts")
    whole = shutil.copytree(parts, tmp_path / "whole")
    first = "model.layers.0.self_attn."

    def merge(tensors):
        names = [f"{first}{part}.weight" for part in PARTS["qkv_proj"]]
        tensors[f"{first}qkv_proj.weight"] = torch.cat([tensors.pop(name) for name in names])

    change(whole, merge)
    assert equal(load(whole).state_dict(), load(parts).state_dict())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.sampled("int4", "fp8")
def test_what_is_quantised_while_it_is_read_or_written_is_that_of_the_parts(tmp_path, monkeypatch, name):
    # Where int4 has groups of 32 and of 128, each is asked for by name.
    parts = make(tmp_path / "parts", "qwen2", hidden_size=128, intermediate_size=160)
    whole = fuse(shutil.copytree(parts, tmp_path / "whole"))
    out = quantise_checkpoint(whole, tmp_path / "out", name, head_quantization="int8", **QUIET)
    wanted = load(parts, name, "int8")
    assert any("gate_up_proj.weight_scale" in tensor for tensor in load_file(out / "model.safetensors"))
    staged, read_tensors = [], fill.read_tensors

    def read(targets, **arguments):
        staged.append(sum(entry.num_bytes for entry, _ in targets))
        read_tensors(targets, **arguments)

    monkeypatch.setattr(fill, "read_tensors", read)
    monkeypatch.setattr(fill, "_BATCH_BYTES", 4000)
    found = load(whole, name, "int8")
    assert max(staged[1:]) <= 4000
    assert found.spec == wanted.spec == load(out).spec
    for model in (found, load(out)):
        assert equal(matrices(model), matrices(wanted)) and equal(biases(model), biases(wanted))


def test_weights_that_come_after_the_config_may_be_merged(tmp_path, monkeypatch):
    """Nothing says so before they are there."""
    parts = make(tmp_path / "parts")
    whole, elsewhere = fuse(shutil.copytree(parts, tmp_path / "whole")), tmp_path / "not_yet_here"
    (whole / "model.safetensors").rename(elsewhere)

    def download(model, weights=True):
        elsewhere.rename(whole / "model.safetensors")
        return whole

    monkeypatch.setattr(start, "find_model", download)
    engine = make_engine(whole, quantization="int8")
    with torch.inference_mode():
        assert equal(matrices(engine.runner.model), matrices(load(parts, "int8", dtype="float32")))


@pytest.mark.parametrize("scale", ["qkv_proj.k_scale", "k_proj.k_scale", "attn.v_scale"])
def test_scales_of_the_kv_cache_may_lie_beside(tmp_path, scale):
    packed, dense = write(tmp_path, CASES["ct-fp8-tensor"](), is_fused=True)
    change(packed, lambda tensors: tensors.update({f"model.layers.0.self_attn.{scale}": torch.ones(1)}))
    assert equal(matrices(load(packed)), matrices(load(dense, dtype="bfloat16")))
    make_engine(packed, kv_cache_dtype="fp8")
    change(packed, lambda tensors: tensors.update({f"model.layers.0.self_attn.{scale}": torch.full((1,), 0.5)}))
    with pytest.raises(ValueError, match=f"{scale} in .* is 0.5: the scale of an fp8 KV cache is 1"):
        make_engine(packed, kv_cache_dtype="fp8")


QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
K, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "name, edit, message",
    [
        ("ct-int4-group", lambda t: t.pop(f"{QKV}.weight_scale"), f"lacks tensors .*: {QKV}.weight_scale\\. A"),
        ("awq", lambda t: t.pop(f"{GATE_UP}.qzeros"), f"lacks tensors .*: {GATE_UP}.qzeros\\. A"),
        ("ct-left-out", lambda t: t.update({K: torch.ones(32, 64)}), f"has no place for: {K}. Give"),
        ("gptq-int4", lambda t: t.update({UP: torch.ones(160, 64)}), f"has no place for: {UP}. Give"),
        (
            "fp8-blocks",
            lambda t: t.update({K.replace("k_proj", "q_proj"): torch.ones(64, 64)}),
            "lacks tensors .*q_proj.weight_scale_inv, .*k_proj.weight, ",
        ),
        ("ct-int8-channel", lambda t: t.update({f"{QKV}.weight": t[f"{QKV}.weight"][:64]}), f"{QKV}.weight is .64, 64"),
        ("awq", lambda t: t[f"{QKV}.scales"].fill_(torch.nan), f"{QKV}.scales in .* holds NaN or infinite scales"),
        ("gptq-int4", lambda t: t[f"{GATE_UP}.scales"].fill_(6e4), f"{GATE_UP}.scales in .* makes weights NaN or inf"),
        ("ct-int4-group", lambda t: t[f"{QKV}.weight_shape"].fill_(64), f"{QKV}.weight_shape in .* is .64, 64., expec"),
    ],
)
def test_what_is_missing_or_there_twice_or_corrupt_is_refused_by_name(tmp_path, name, edit, message):
    packed, _ = write(tmp_path, CASES[name](), is_fused=True)
    change(packed, edit)
    with pytest.raises(ValueError, match=message):
        load(packed)


@pytest.mark.filterwarnings("ignore")
def test_transformers_which_would_leave_them_out_is_not_asked(tmp_path):
    path = fuse(make(tmp_path))
    with pytest.raises(ValueError, match="transformers does not read .* more tensors.: leave hf out of --mode"):
        load_in_transformers(path, torch.float32)
