"""Each family, drawn at random: its greedy tokens are transformers' own, and the same bits in every mode and batch."""

import json
import random

import pytest
import torch
from dense_model import dense_logits
from engines import make_engine, random_prompts, run
from online import QUIET, equal, load, matrices
from tiny_models import DELTA, logits_of, make_checkpoint, random_tokens, read_reference
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams
from nanoinfer.models.registry import find_class
from nanoinfer.weights.load import read_checkpoint, read_spec
from nanoinfer.weights.write import quantise_checkpoint


def _factors(draw):
    return dict(
        embedding_multiplier=draw.choice([0.7, 6.0, 12]),
        residual_multiplier=draw.choice([0.22, 0.7, 1.0]),
        attention_multiplier=draw.choice([0.1, 0.015625, 0.4]),
        logits_scaling=draw.choice([1.0, 8, 13.3]),
    )


def _granite(draw):
    return _factors(draw) | dict(attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3)


def _granite4(draw):
    rope = draw.choice(["rope", "rope", None])
    return _factors(draw) | dict(attention_bias=draw.random() < 0.3, position_embedding_type=rope)


def _starcoder2(draw):
    return dict(
        sliding_window=draw.choice([None, 5, 30]),
        use_bias=draw.random() < 0.7,
        hidden_act=draw.choice(["gelu_pytorch_tanh", "gelu", "relu2", "silu"]),
    )


def _olmo(draw):
    return dict(attention_bias=draw.random() < 0.3)


def _olmo3(draw):
    scaled = dict(rope_type="yarn", rope_theta=5e5, factor=8.0, original_max_position_embeddings=64)
    full = draw.choice([dict(rope_type="default", rope_theta=5e5), scaled])
    sliding = dict(rope_type="default", rope_theta=draw.choice([1e4, 5e5]))
    rope = dict(full_attention=full, sliding_attention=sliding)
    return _olmo(draw) | dict(sliding_window=draw.choice([5, 30]), rope_parameters=rope)


def _exaone4(draw):
    window = draw.choice([0, 5, 30])
    return dict(sliding_window=window) | ({} if window else dict(layer_types=["full_attention"] * 2, num_layers=2))


def _glm(draw):
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=draw.choice([0.25, 0.5, 1.0]))
    return dict(attention_bias=draw.random() < 0.7, rope_parameters=rope)


def _nemotron(draw):
    biases = dict(mlp_bias=draw.random() < 0.3, hidden_act=draw.choice(["relu2", "relu2", "silu"]))
    return _glm(draw) | biases


def _longrope(draw, dim):
    """Prompts of this test are all longer, or all shorter, than what decides."""
    original = draw.choice([2, 4096])
    factors = [[round(draw.uniform(1, 8), 3) for _ in range(dim // 2)] for _ in range(2)]
    rope = dict(rope_type="longrope", short_factor=factors[0], long_factor=factors[1])
    rope |= draw.choice([{}, dict(factor=4.0), dict(attention_factor=1.3)])
    return rope | dict(original_max_position_embeddings=original)


def _phi3(draw):
    head_dim, part = draw.choice([(32, 0.75), (64, 0.75), (48, 1.0), (96, 0.5), (16, 1.0)])
    fields = dict(head_dim=head_dim, sliding_window=draw.choice([None, 5, 30]), partial_rotary_factor=part)
    if draw.random() < 0.6:
        rope = _longrope(draw, int(head_dim * part))
        original = rope["original_max_position_embeddings"]
        fields |= dict(rope_parameters=rope | dict(rope_theta=1e4), original_max_position_embeddings=original)
    return fields


def _smollm3(draw):
    biases = dict(attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3)
    return biases | dict(no_rope_layer_interval=draw.choice([1, 2, 3]), sliding_window=draw.choice([None, 5, 30]))


def _hunyuan(draw):
    rope = draw.choice([dict(rope_type="default"), dict(rope_type="dynamic", factor=1.0, alpha=1000.0)])
    return dict(attention_bias=draw.random() < 0.3, rope_parameters=rope | dict(rope_theta=1e4))


def _ernie4_5(draw):
    return dict(use_bias=draw.random() < 0.5)


def _seed_oss(draw):
    return {name: draw.random() < 0.5 for name in ("attention_bias", "attention_out_bias", "mlp_bias")}


def _ministral(draw):
    layer_types = draw.choice([None, ["full_attention", "sliding_attention", "full_attention"]])
    return dict(sliding_window=draw.choice([5, 30]), layer_types=layer_types, num_layers=3)


def _yarn(draw):
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=draw.choice([2.0, 4.0, 16.0]))
    rope |= draw.choice([{}, dict(beta_fast=8.0, beta_slow=2.0), dict(attention_factor=0.8), dict(truncate=False)])
    return rope | dict(original_max_position_embeddings=draw.choice([64, 512]))


def _ministral3(draw):
    rope = _yarn(draw) | dict(mscale=1.0, mscale_all_dim=draw.choice([0.0, 1.0]), llama_4_scaling_beta=0.3)
    return dict(rope_parameters=rope | dict(original_max_position_embeddings=16))


def _gpt_oss(draw):
    rope = _yarn(draw) if draw.random() < 0.7 else dict(rope_type="default", rope_theta=1e4)
    num_experts = draw.choice([1, 2, 5, 8])
    return dict(
        sliding_window=draw.choice([5, 30, 128]),
        rope_parameters=rope,
        attention_bias=draw.random() < 0.8,
        num_local_experts=num_experts,
        num_experts_per_tok=draw.randint(1, num_experts),
        layer_types=draw.choice([None, ["full_attention", "sliding_attention"] * 2]),
        num_layers=4,
    )


def _experts(draw, num_experts, **own):
    count = draw.choice([1, 2, 3, 8, 13])
    chosen = dict(num_experts_per_tok=draw.randint(1, min(count, 6)))
    return {num_experts: count, "fused": draw.random() < 0.5} | chosen | own


def _qwen3_moe(draw):
    return _experts(
        draw,
        "num_experts",
        norm_topk_prob=draw.random() < 0.5,
        moe_intermediate_size=draw.choice([24, 40]),
        decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([[], [0], [0, 2]]),
        attention_bias=draw.random() < 0.3,
        sliding_window=draw.choice([None, None, 5, 30]),
    )


def _mixtral(draw):
    return _experts(draw, "num_local_experts", sliding_window=draw.choice([None, None, 5, 30]))


def _olmoe(draw):
    return _experts(
        draw,
        "num_experts",
        norm_topk_prob=draw.random() < 0.5,
        attention_bias=draw.random() < 0.3,
        clip_qkv=draw.choice([None, 0.7]),
        hidden_act=draw.choice(["silu", "gelu"]),
    )


def _glm4_moe(draw):
    groups, size = draw.choice([(1, 2), (1, 13), (2, 2), (2, 4), (4, 3), (8, 2)])
    num_chosen_groups = draw.randint(1, groups)
    return dict(
        n_routed_experts=groups * size,
        n_group=groups,
        topk_group=num_chosen_groups,
        num_experts_per_tok=draw.randint(1, min(6, num_chosen_groups * size)),
        moe_intermediate_size=draw.choice([24, 160]),
        n_shared_experts=draw.choice([1, 1, 2]),
        norm_topk_prob=draw.random() < 0.7,
        routed_scaling_factor=draw.choice([1.0, 1.8, 2.5]),
        first_k_dense_replace=draw.choice([0, 1, 2]),
        use_qk_norm=draw.random() < 0.5,
        fused=draw.random() < 0.5,
        **_glm(draw),
    )


def _gemma4(draw):
    cycle = ["sliding_attention"] * draw.choice([0, 1, 1, 2, 3]) + ["full_attention"]
    layer_types = cycle * draw.randint(1, 3) if len(cycle) < 4 else cycle
    return dict(
        layer_types=layer_types,
        num_layers=len(layer_types),
        sliding_window=draw.choice([5, 30]),
        global_head_dim=draw.choice([16, 32, 48, 64]),
        num_global_key_value_heads=draw.choice([None, 1]),
        attention_k_eq_v=draw.random() < 0.6,
        num_kv_shared_layers=draw.randint(0, len(layer_types) - len(cycle)) if draw.random() < 0.5 else 0,
        use_double_wide_mlp=draw.random() < 0.5,
        final_logit_softcapping=draw.choice([None, 5.0, 30.0]),
    )


def _gemma4_inputs(draw):
    return _gemma4(draw) | dict(hidden_size_per_layer_input=draw.choice([4, 8, 16]))


def _gemma4_moe(draw):
    count = draw.choice([1, 2, 5, 8, 13])
    experts = dict(num_experts=count, top_k_experts=draw.randint(1, min(count, 6)))
    return _gemma4(draw) | experts | dict(moe_intermediate_size=draw.choice([24, 160]), fused=draw.random() < 0.5)


def _lfm2(draw):
    layer_types = ["full_attention", *draw.choices(["conv", "conv", "full_attention"], k=draw.randint(1, 4))]
    draw.shuffle(layer_types)
    return dict(
        layer_types=layer_types,
        num_layers=len(layer_types),
        conv_L_cache=draw.choice([3, 3, 2, 4, 6]),
        conv_bias=draw.random() < 0.3,
    )


def _lfm2_dense(draw):
    adjusted = dict(block_multiple_of=draw.choice([8, 56]), block_ffn_dim_multiplier=draw.choice([1.0, 1.3]))
    return _lfm2(draw) | dict(block_auto_adjust_ff_dim=draw.random() < 0.7) | adjusted


def _lfm2_moe(draw):
    own = dict(
        moe_intermediate_size=draw.choice([24, 40]),
        num_dense_layers=draw.choice([0, 1, 1, 2]),
        norm_topk_prob=draw.random() < 0.7,
        routed_scaling_factor=draw.choice([1.0, 1.0, 2.5]),
        use_expert_bias=draw.random() < 0.7,
    )
    return _experts(draw, "num_experts", **own) | _lfm2(draw)


def _qwen3_5(draw):
    layer_types = ["full_attention", *draw.choices([LINEAR, LINEAR, "full_attention"], k=draw.randint(1, 4))]
    draw.shuffle(layer_types)
    num_key_heads = draw.choice([1, 2, 3])
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=draw.choice([0.25, 0.5, 1.0]))
    if draw.random() < 0.3:
        rope |= _yarn(draw)
    return dict(
        layer_types=layer_types,
        num_layers=len(layer_types),
        head_dim=draw.choice([16, 32, 64]),
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=num_key_heads * draw.choice([1, 2, 3]),
        linear_key_head_dim=draw.choice([16, 32]),
        linear_value_head_dim=draw.choice([16, 32, 48]),
        linear_conv_kernel_dim=draw.choice([4, 4, 2, 3]),
        attention_bias=draw.random() < 0.2,
        rope_parameters=rope | dict(mrope_section=[11, 11, 10], mrope_interleaved=True),
    )


def _qwen3_5_moe(draw, **own):
    own |= dict(moe_intermediate_size=draw.choice([24, 40]), shared_expert_intermediate_size=draw.choice([24, 160]))
    return _experts(draw, "num_experts", **own) | _qwen3_5(draw)


def _qwen3_next(draw):
    return _qwen3_5_moe(
        draw,
        norm_topk_prob=draw.random() < 0.7,
        decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([[], [0], [0, 2]]),
    )


def _rotations(draw):
    """Those that any family may have."""
    rope = draw.choice([
        _yarn(draw),
        dict(rope_type="linear", factor=3.0),
        dict(rope_type="dynamic", factor=3.0),
        dict(rope_type="proportional", partial_rotary_factor=0.5, factor=2.0),
        _longrope(draw, 32),
    ])  # fmt: skip
    return dict(head_dim=32, rope_parameters=dict(rope_theta=1e4) | rope)


DRAWN = {
    "granite": _granite,
    "granite4": _granite4,
    "starcoder2": _starcoder2,
    "olmo2": _olmo,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "glm": _glm,
    "glm4": _glm,
    "nemotron": _nemotron,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "hunyuan": _hunyuan,
    "ernie4_5": _ernie4_5,
    "seed_oss": _seed_oss,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "gemma4": _gemma4,
    "gemma4_inputs": _gemma4_inputs,
    "gemma4_moe": _gemma4_moe,
    "gemma4_unified": _gemma4,
    "lfm2": _lfm2_dense,
    "lfm2_moe": _lfm2_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "llama": _rotations,
    "qwen3": _rotations,
}


def draw_fields(family, draw):
    num_kv_heads = draw.choice([1, 2, 3])
    sizes = dict(
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw.choice([1, 2, 3]),
        head_dim=draw.choice([16, 32, 48, 80]),
        num_layers=draw.randint(1, 4),
        tied=draw.random() < 0.5,
    )
    return sizes | DRAWN[family](draw)


SPARSE = ("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "glm4_moe")
DRAW_MORE = {"qwen3_moe": 22, "glm4_moe": 4}  # the seeds that draw more than others
LINEAR, IN_FLOAT32 = "linear_attention", ("A_log", "dt_bias")
MORE_SEEDS = (*SPARSE, *DELTA, "lfm2", "lfm2_moe", "gemma4", "gemma4_inputs", "gemma4_moe", "gemma4_unified")
CASES = {f"{family}-{seed}": (family, seed) for family in DRAWN for seed in range(40 if family in MORE_SEEDS else 10)}


@pytest.mark.parametrize("family, seed", CASES.values(), ids=CASES)
@pytest.mark.sampled(*(f"{family}-{DRAW_MORE.get(family, number % 10)}" for number, family in enumerate(DRAWN)))
def test_greedy_tokens_are_those_of_transformers_in_every_mode_and_batch(family, seed, tmp_path, fuzz):
    draw = random.Random(f"{family} {seed}")
    path = make_checkpoint(family, tmp_path, seed=seed, **draw_fields(family, draw))
    # One is longer than any window of those drawn, and than what a step takes of one that is alone.
    prompts = [*random_prompts(1, 31, 60 if fuzz else 40, seed), *random_prompts(1, 3, 7, seed)]
    prompts += random_prompts(fuzz, 3, 60, seed + 1)
    prompts += random_prompts(fuzz and family.startswith("lfm2"), 65, 200, seed + 2)  # in several steps of 64
    max_tokens = 8 if fuzz else 4
    params = [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)] * len(prompts)
    spec = read_spec(read_checkpoint(path), torch.float32)
    block_size = 16 * max(spec.block_shares)
    least = spec.with_kv(block_size, None).layout.part_bytes
    blocks = dict(block_size=block_size, ring_slot_bytes=max(2**15, least))
    resident = run(make_engine(path, **blocks), prompts, params)
    assert [found[0][0] for found in resident] == reference_tokens(path, prompts, max_tokens)
    assert run(make_engine(path, enable_cpu_offload=True, **blocks), prompts, params) == resident
    alone = make_engine(path, max_num_batched_tokens=max(16, spec.step_unit), **blocks)
    assert [run(alone, [prompt], params[:1])[0] for prompt in prompts] == resident
    if spec.sparse and (fuzz or spec.state_bytes):
        slotted = make_engine(path, expert_slots=spec.sparse.num_chosen, capture_num_tokens=[8], **blocks)
        assert run(slotted, prompts, params) == resident


@pytest.mark.parametrize("family", DRAWN)
def test_bfloat16_logits_are_close_to_transformers_and_weights_are_counted(family, tmp_path):
    path, tokens = make_checkpoint(family, tmp_path, dtype=torch.bfloat16), random_tokens(40)
    model = load(path)
    reference = read_reference(path, torch.bfloat16)
    # Experts' tensors begin at multiples of 128 bytes.
    others = [one for name, one in reference.named_buffers() if name.endswith("layer_scalar")]
    # What states decay by is float32 in any dtype.
    others += [one for name, weight in reference.named_parameters() for one in weight if name.endswith(IN_FLOAT32)]
    assert model.spec.sparse or model.spec.weight_bytes == 2 * (reference.num_parameters() + len(others))
    actual, theirs = dense_logits(model, tokens), logits_of(reference, tokens)
    exact = logits_of(reference.float(), tokens)
    # Where logits of a router nearly tie, a row may take another expert.
    of_rows = torch.median if model.spec.sparse else torch.linalg.vector_norm
    ours, theirs = (of_rows((found - exact).norm(dim=1)) for found in (actual.float(), theirs))
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("family, factor", [("granite", 5.3), ("gemma3", torch.tensor(48**0.5, dtype=torch.bfloat16))])
def test_the_factor_of_embeddings_is_rounded_where_transformers_rounds_it(family, factor, tmp_path):
    own = dict(embedding_multiplier=factor) if family == "granite" else {}
    model = load(make_checkpoint(family, tmp_path, dtype=torch.bfloat16, **own))
    ids = torch.arange(100)
    assert torch.equal(model.embed(ids)[0], model.embed_tokens.lookup(ids) * factor)


@pytest.mark.parametrize(
    "family, name",
    [
        ("granite4", "input_linear"),
        ("starcoder2", "c_fc"),
        ("glm4", "gate_up_proj"),
        ("gemma4_moe", "experts.3.up_proj"),
    ],
)
def test_modules_that_are_named_otherwise_are_quantised_alike_while_read_and_written(family, name, tmp_path):
    source = make_checkpoint(family, tmp_path / "wide", hidden_size=64, intermediate_size=96, dtype=torch.bfloat16)
    out = quantise_checkpoint(source, tmp_path / "out", "int8", **QUIET)
    found = load(out)
    assert equal(matrices(found), matrices(load(source, "int8"))) and found.spec == load(source, "int8").spec
    assert any(name in one and one.endswith("weight_packed") for one in found.checkpoint_views())


def test_layers_that_are_not_attention_are_refused_by_name(tmp_path):
    path = make_checkpoint("granite4", tmp_path)
    config = json.loads((path / "config.json").read_text()) | dict(layer_types=["mamba", "attention", "attention"])
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="runs, but not this model: it needs Mamba layers, which is not here yet"):
        read_checkpoint(path)


def test_a_config_that_leaves_a_module_out_calls_it_as_the_checkpoint_does(tmp_path):
    source = make_checkpoint("starcoder2", tmp_path / "wide", hidden_size=64, intermediate_size=96)
    checkpoint = read_checkpoint(quantise_checkpoint(source, tmp_path / "out", "int8", **QUIET))
    checkpoint.settings["ignore"].append("model.layers.0.mlp.c_fc")
    family = find_class(checkpoint.hf_config.architectures)
    model = family(checkpoint, read_spec(checkpoint, torch.float32), device="meta", max_position=1)
    views = model.checkpoint_views()
    assert "model.layers.0.mlp.c_fc.weight" in views and "model.layers.1.mlp.c_fc.weight_packed" in views


def test_tables_of_positions_are_those_of_the_family(tmp_path):
    olmo = load(make_checkpoint("olmo2", tmp_path / "olmo2", dtype=torch.bfloat16))
    assert [table.dtype for table in olmo.rope_tables] == [torch.float32]
    assert not load(make_checkpoint("granite4", tmp_path / "granite4", position_embedding_type=None)).rope_tables


def test_hunyuans_alpha_counts_where_the_config_has_no_head_dim(tmp_path):
    """The size of a head follows from the hidden size then."""
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=1000.0)
    path = make_checkpoint("hunyuan", tmp_path, hidden_size=64, rope_parameters=rope)
    given = load(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict(head_dim=None)))
    derived = load(path)
    assert derived.spec == given.spec and torch.equal(derived.rope_tables[0], given.rope_tables[0])
