"""Checkpoints with experts: how they hold them, and which are refused before anything is loaded."""

import json

import pytest
import torch
from dense_model import dense_logits
from loading import loaded
from online import load
from published_configs import write_published
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoinfer.layers.norm import RMSNorm
from nanoinfer.weights.load import read_checkpoint, read_spec

GROUPS = dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3)
APART = {
    "qwen3_moe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "olmoe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "glm4_moe": "model.layers.1.mlp.experts.7.up_proj.weight",
}


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def refuse_to_allocate(*_, **__):
    raise AssertionError("something is loaded")


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("family", APART)
@pytest.mark.sampled("qwen3_moe-None", "olmoe-None", "mixtral-int4", "glm4_moe-int8", "qwen3_moe-fp8")
def test_fused_and_apart_are_one_model(family, quantization, tmp_path, monkeypatch):
    """Also where a tensor of all experts is read in pieces of some experts each."""
    sizes = dict(num_layers=2, num_heads=4, head_dim=16, hidden_size=64, dtype=torch.bfloat16)
    sizes |= dict(intermediate_size=96) | ({} if family in ("mixtral", "olmoe") else dict(moe_intermediate_size=32))
    paths = [make_checkpoint(family, tmp_path / str(fused), fused=fused, **sizes) for fused in (False, True)]
    apart, fused = (load_file(path / "model.safetensors").keys() for path in paths)
    assert APART[family] in apart and "model.layers.1.mlp.experts.gate_up_proj" in fused
    monkeypatch.setattr("nanoinfer.weights.fill._BATCH_BYTES", 40_000)
    models = [load(path, quantization) for path in paths]
    assert models[0].spec == models[1].spec
    pools = [list(model.expert_pools) for model in models]
    assert all(torch.equal(one, other) for one, other in zip(*pools, strict=True))
    ours, theirs = (dense_logits(model, random_tokens(20)) for model in models)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("family", APART)
@pytest.mark.sampled("qwen3_moe-fused", "mixtral-apart", "glm4_moe-apart")
def test_an_expert_that_is_missing_or_of_another_shape_is_refused_by_its_name(family, fused, tmp_path, monkeypatch):
    path = make_checkpoint(family, tmp_path, fused=fused)
    name = "model.layers.1.mlp.experts.gate_up_proj" if fused else APART[family]

    def cut(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    monkeypatch.setattr("nanoinfer.weights.load.fill_from_files", refuse_to_allocate)
    with pytest.raises(ValueError, match=rf"{name} is \[\d+, .*, expected \["):
        load(rewrite(path, cut))
    with pytest.raises(ValueError, match=f"lacks tensors that .* needs: {name}"):
        load(rewrite(path, lambda tensors: tensors.pop(name)))


def test_an_expert_that_is_too_many_is_refused_by_its_name(tmp_path):
    path, name = make_checkpoint("qwen3_moe", tmp_path), "model.layers.0.mlp.experts.8.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(24, 48)}))
    with pytest.raises(ValueError, match=f"has no place for: {name}"):
        load(path)


def test_weights_that_are_not_finite_in_a_tensor_of_all_experts_are_refused(tmp_path):
    path, name = make_checkpoint("olmoe", tmp_path, fused=True), "model.layers.2.mlp.experts.down_proj"
    rewrite(path, lambda tensors: tensors[name][3, 1].fill_(torch.nan))
    with pytest.raises(ValueError, match=f"{name} in .* holds weights that are NaN or infinite"):
        load(path)


@pytest.mark.parametrize(
    "family, config, message",
    [
        ("qwen3_moe", dict(num_experts_per_tok=9), "num_experts_per_tok=9 is more than num_experts=8"),
        ("mixtral", dict(num_experts_per_tok=7), "num_experts_per_tok=7 is more than num_local_experts=6"),
        ("gpt_oss", dict(num_experts_per_tok=7), "num_experts_per_tok=7 is more than num_local_experts=6"),
        ("glm4_moe", dict(num_experts_per_tok=9, n_group=1), "num_experts_per_tok=9 is more than n_routed_experts=8"),
        (
            "glm4_moe",
            GROUPS | dict(num_experts_per_tok=5),
            "topk_group=2 leaves 4 experts of n_routed_experts=8, fewer",
        ),
        ("glm4_moe", GROUPS | dict(topk_group=5), "topk_group=5 is more than n_group=4"),
        ("glm4_moe", GROUPS | dict(n_group=3), "n_group=3 does not cut n_routed_experts=8 into equal groups"),
        ("glm4_moe", GROUPS | dict(n_group=8), "n_group=8 does not cut n_routed_experts=8 into equal groups of two"),
        ("glm4_moe", dict(n_group=0), "n_group is 0, it must be a whole number from 1"),
        ("glm4_moe", dict(scoring_func="softmax"), "scoring_func='softmax' is not supported, only 'sigmoid'"),
        ("glm4_moe", dict(topk_method="greedy"), "topk_method='greedy' is not supported, only 'noaux_tc'"),
        ("glm4_moe", dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported, only 1"),
        ("qwen3_moe", dict(scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported, only 'softmax'"),
        ("qwen3_moe", dict(n_group=2), "n_group=2 is not supported, only 1"),
        ("qwen3_moe", dict(shared_expert_intermediate_size=32), "shared_expert_intermediate_size=32 is not supported"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step is 0, it must be a whole number from 1"),
        ("qwen3_moe", dict(mlp_only_layers=["0"]), "mlp_only_layers is .*must be a list of whole numbers"),
        ("mixtral", dict(norm_topk_prob=False), "norm_topk_prob=False is not supported, only True"),
        ("olmoe", dict(n_shared_experts=1), "n_shared_experts=1 is not supported, only 0"),
        ("olmoe", dict(clip_qkv=-1.0), "clip_qkv is -1.0, it must be a number from"),
        ("gpt_oss", dict(scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported, only None"),
        ("mixtral", dict(hidden_act="swish9"), "'swish9' is not supported.*Supported: silu"),
    ],
)
def test_routers_that_cannot_be_are_refused_by_the_options_name(family, config, message, tmp_path):
    """Of the config alone."""
    tiny_config(family, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ValueError, match=message):
        read_spec(read_checkpoint(tmp_path), "auto")


def test_layers_that_guess_ahead_are_skipped_with_one_notice(tmp_path):
    path = make_checkpoint("glm4_moe", tmp_path)
    tokens, wanted = random_tokens(20), load(path)
    names = [f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "mlp.experts.0.up_proj")]
    rewrite(path, lambda tensors: tensors.update({f"model.layers.3.{name}": torch.ones(8, 8) for name in names}))
    with pytest.warns(
        UserWarning, match="has layers that guess tokens ahead .5 tensors, 0 MiB.: they are skipped"
    ) as said:
        found = load(path)
    assert len([one for one in said if "guess" in str(one.message)]) == 1
    assert torch.equal(dense_logits(found, tokens), dense_logits(wanted, tokens))
    rewrite(path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(8, 8)}))
    with pytest.raises(ValueError, match="has no place for: model.layers.4.eh_proj.weight"):
        load(path)


def test_a_layer_that_the_config_does_not_count_is_refused(tmp_path):
    """It does not guess ahead: nothing of it is skipped."""
    path = make_checkpoint("glm4_moe", tmp_path, num_layers=3)
    rewrite(path, lambda tensors: tensors.update({"model.layers.2.shared_head.norm.weight": torch.ones(8)}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=2)))
    with pytest.raises(
        ValueError, match="holds tensors that .* has no place for: model.layers.2.input_layernorm.weight"
    ):
        load(path)


def test_the_choice_bias_and_the_router_stay_as_they_are_in_every_format(tmp_path):
    sizes = dict(num_heads=4, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, dtype=torch.bfloat16)
    path = make_checkpoint("glm4_moe", tmp_path, **sizes)
    tensors = load_file(path / "model.safetensors")
    mlp = loaded(path, "float16").layers[2].mlp
    assert mlp.choice_bias.dtype == torch.float32
    assert torch.equal(mlp.choice_bias, tensors["model.layers.2.mlp.gate.e_score_correction_bias"].float())
    mlp = load(path, "int4").layers[2].mlp
    assert torch.equal(mlp.gate.weight, tensors["model.layers.2.mlp.gate.weight"])


@pytest.mark.parametrize(
    "name, layers, chosen, sizes, billions",
    [
        ("Qwen/Qwen3-30B-A3B", 48, (128, 8), (768, 0), 30.5),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32, (8, 2), (14_336, 0), 46.7),
        ("allenai/OLMoE-1B-7B-0924-Instruct", 16, (64, 8), (1024, 0), 6.92),
        ("zai-org/GLM-4.5-Air", 45, (128, 8), (1408, 1408), 106.9),
    ],
)
def test_published_models_have_their_numbers(name, layers, chosen, sizes, billions, tmp_path):
    spec = read_spec(read_checkpoint(write_published(name, tmp_path)), "auto")
    sparse = spec.sparse
    assert (sparse.num_layers, sparse.num_experts, sparse.num_chosen) == (layers, *chosen)
    assert (sparse.intermediate_size, sparse.shared_size, spec.dtype) == (*sizes, torch.bfloat16)
    assert spec.weight_bytes == pytest.approx(2e9 * billions, rel=2e-3)


@torch.inference_mode()
def test_the_router_of_glm_is_not_rounded(tmp_path):
    """The product of rows and weights of 16 bits, summed in float32, as in transformers."""
    path = make_checkpoint("glm4_moe", tmp_path, dtype=torch.bfloat16)
    mlp, x = load(path).layers[2].mlp, torch.randn(50, 48, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).model.layers[2].mlp.gate(x)
    taken = []
    mlp.experts.forward = lambda normed, ids, weights, *_: taken.extend((ids, weights)) or torch.zeros(2, 50, 48)
    mlp.add(x.clone(), x, RMSNorm(48, 1e-5, dtype=torch.bfloat16, device="cpu"), torch.tensor([50], dtype=torch.int32))
    scores, wanted = (torch.zeros(50, 8).scatter(1, ids.long(), of) for ids, of in (taken, (theirs[2], theirs[1])))
    assert (scores - wanted).abs().max() < 1e-5
