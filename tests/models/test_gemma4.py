"""Gemma 4: what its configs say of single layers, in both forms, and the text part of its checkpoints."""

import json

import pytest
import torch
import transformers
from dense_model import dense_logits
from engines import make_engine, random_prompts, run
from loading import loaded
from quantised import CASES, ONE_CUT, write
from safetensors.torch import load_file, save_file
from tiny_models import logits_of, make_checkpoint, random_tokens, read_reference, tiny_config
from transformers_reference import reference_tokens

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.models.base import AttentionState
from nanoinfer.models.shapes import has_experts, write_shape
from nanoinfer.weights.load import read_checkpoint, read_spec

TYPES = (["sliding_attention"] * 2 + ["full_attention"]) * 2
ONE_PROJECTION = dict(layer_types=TYPES, num_layers=6, attention_k_eq_v=True, num_global_key_value_heads=1)
READS = dict(layer_types=TYPES, num_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True)


def changed(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def older(config):
    """As files were published first: what full layers have otherwise is said once."""
    (own,) = {tuple(sorted(one.items())) for one in config.pop("per_layer_config").values()}
    own = dict(own)
    config["global_head_dim"] = own["head_dim"]
    config["num_global_key_value_heads"] = own.get("num_key_value_heads")


def with_nulls(config):
    """As files say of a model without experts."""
    older(config)
    config.update(dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")), enable_moe_block=False)


def padded(config):
    config["per_layer_config"] = {layer.zfill(2): own for layer, own in config["per_layer_config"].items()}


@pytest.mark.parametrize("change", [older, padded, with_nulls])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_both_forms_of_configs_say_the_same(family, change, tmp_path):
    newer = make_checkpoint(family, tmp_path / "newer", **ONE_PROJECTION)
    other = changed(make_checkpoint(family, tmp_path / "other", **ONE_PROJECTION), change)
    specs = [read_spec(read_checkpoint(path), torch.float32) for path in (newer, other)]
    assert specs[0] == specs[1]
    heads = [(one.num_kv_heads, one.head_dim, one.has_one_projection) for one in specs[0].attentions]
    assert heads == [(2, 16, False), (1, 32, True)]
    assert [state.shape for state in specs[0].layers] == [0, 0, 1] * 2


def test_layers_that_read_another_have_its_window_and_wide_mlps(tmp_path):
    path = make_checkpoint("gemma4", tmp_path, **READS)
    spec = read_spec(read_checkpoint(path), torch.float32)
    sliding, full = (
        (AttentionState(8, source, 0) for source in (None, 1)),
        (AttentionState(None, at, 1) for at in (None, 2)),
    )
    (own, reads), (own_full, reads_full) = sliding, full
    assert spec.layers == (own, own, own_full, reads, reads, reads_full)
    assert spec.kv_layers == (0, 1, 2) and spec.mlp_sizes == (56, 56, 56, 112, 112, 112)


def test_what_makes_keys_in_layers_that_read_others_is_left_in_the_file(tmp_path):
    path, tokens = make_checkpoint("gemma4", tmp_path, **READS), random_tokens(30)
    tensors, want = load_file(path / "model.safetensors"), logits_of(read_reference(path), tokens)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = tensors[f"model.layers.1.self_attn.{name}.weight"] + 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(path, block_size=32)
    assert torch.allclose(dense_logits(engine.runner.model, tokens), want, rtol=1e-4, atol=1e-4 * want.abs().max())


@pytest.mark.parametrize(
    "own, message",
    [
        (
            {"6": {"head_dim": 32}},
            "per_layer_config is .*, it must be an object of objects .* below num_hidden_layers=6",
        ),
        ({"5": 32}, "per_layer_config is .*, it must be an object of objects"),
        ({"5": {"head_dim": "32"}}, "per_layer_config.5.head_dim is '32', it must be a whole number"),
        (
            {"5": {"sliding_window": 5}},
            "per_layer_config.5 has 'sliding_window', layers may have their own head_dim and",
        ),
    ],
    ids=str,
)
def test_what_layers_may_not_have_of_their_own_is_refused(own, message, tmp_path):
    path = changed(
        make_checkpoint("gemma4", tmp_path, **ONE_PROJECTION), lambda config: config.update(per_layer_config=own)
    )
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_other_families_have_no_layers_of_their_own_sizes(tmp_path):
    own = {"1": {"head_dim": 32}}
    path = changed(make_checkpoint("llama", tmp_path), lambda config: config.update(per_layer_config=own))
    with pytest.raises(ValueError, match="per_layer_config is .*, it must be left out: all layers have the same sizes"):
        read_checkpoint(path)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_inputs"])
def test_packed_weights_are_the_model_of_the_expanded_ones(family, tmp_path):
    """As Google's own are: 4 bits in groups of 32, embeddings and norms as they are."""
    own = dict(hidden_size_per_layer_input=32) if family == "gemma4_inputs" else {}
    packed, dense = write(tmp_path, CASES["ct-int4-group"](), family, **ONE_CUT | READS | own)
    ours, theirs = (loaded(path, torch.float32) for path in (packed, dense))
    assert hasattr(ours.layers[1].mlp.down_proj, "packed") and not hasattr(ours.embed_tokens, "packed")
    assert torch.equal(dense_logits(ours, random_tokens(30)), dense_logits(theirs, random_tokens(30)))


VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
PARTS = {
    "gemma4": (
        transformers.Gemma4ForConditionalGeneration,
        dict(
            vision_config=VISION | dict(model_type="gemma4_vision", head_dim=16, position_embedding_size=16),
            audio_config=None,
        ),
        "vision",
        "images",
    ),
    "gemma4_unified": (
        transformers.Gemma4UnifiedForConditionalGeneration,
        dict(
            vision_config=dict(model_type="gemma4_unified_vision", mm_embed_dim=48, output_proj_dims=48)
            | dict(mm_posemb_size=4, patch_size=2),
            audio_config=dict(model_type="gemma4_unified_audio", audio_embed_dim=16),
        ),
        "vision and audio",
        "images and sound",
    ),
}


@pytest.mark.parametrize("family", PARTS)
def test_the_text_part_runs_alone_and_one_notice_says_what_is_skipped(family, tmp_path):
    wrapper, others, whose, what = PARTS[family]
    config = wrapper.config_class(text_config=tiny_config(family, **ONE_PROJECTION), **others)
    model = wrapper(config)
    for weight in model.parameters():
        weight.data = 0.3 * torch.randn(weight.shape)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    prompts, params = random_prompts(2, 20, 40), [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 2
    with pytest.warns(UserWarning) as warned:
        engine = make_engine(tmp_path, block_size=32)
    (said,) = [str(one.message) for one in warned if "runs alone" in str(one.message)]
    assert f"its {whose} weights (" in said and f"are skipped, and {what} are refused" in said
    found = run(engine, prompts, params)
    assert [one[0][0] for one in found] == reference_tokens(tmp_path, prompts, 8, wrapper)


# Billions of weights, and of them in tables of what layers read; how many layers with windows and without keep KV, with
# KiB of a token in each and tokens of its blocks.
SIZES = {
    "gemma-4-e2b": (4.63, 2.35, (12, 1, 256), (3, 2, 128)),
    "gemma-4-e4b": (7.46, 2.82, (20, 2, 256), (4, 4, 128)),
    "gemma-4-12b": (11.91, 0, (40, 8, 64), (8, 1, 512)),
    "gemma-4-26b-a4b": (25.23, 0, (25, 8, 64), (5, 2, 256)),
    "gemma-4-31b": (30.70, 0, (50, 16, 64), (10, 4, 256)),
}


@pytest.mark.parametrize("shape", SIZES)
def test_shapes_have_the_sizes_of_the_models(shape, tmp_path):
    weights, tables, *kinds = SIZES[shape]
    spec = read_spec(read_checkpoint(write_shape(shape, tmp_path)), torch.bfloat16).with_kv(None, None)
    assert (round(spec.weight_bytes / 2e9, 2), round(spec.table_bytes / 2e9, 2)) == (weights, tables)
    assert has_experts(shape) == (spec.sparse is not None)
    own = [spec.layers[layer] for layer in spec.kv_layers]
    for is_windowed, (count, kib, tokens) in zip((True, False), kinds, strict=True):
        shapes = {state.shape for state in own if (state.window is not None) == is_windowed}
        assert sum((state.window is not None) == is_windowed for state in own) == count
        (attention,) = (spec.attentions[shape] for shape in shapes)
        assert (attention.part.num_bytes // attention.block_size, attention.block_size) == (kib * 1024, tokens)
        assert attention.head_dim == (256 if is_windowed else 512) and attention.scale == 1.0


@pytest.mark.parametrize("shape, quantization", [("gemma-4-e2b", None), ("gemma-4-e4b", "int4")])
def test_tables_lie_in_host_memory_in_every_plan_for_a_gpu(shape, quantization):
    limits = dict(gpu_memory_limit="24GiB", host_memory_limit="64GiB", max_model_len=8192)
    plan = nanoinfer.plan(shape, **limits, quantization=quantization).memory
    assert round(plan.table_bytes / 2e9, 2) == SIZES[shape][1] and plan.read_there_bytes == plan.host_weight_bytes
    assert plan.weight_bytes < 2e9 * (SIZES[shape][0] - SIZES[shape][1]) + 2**26
