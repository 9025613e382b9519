"""Position tables."""

from importlib import import_module

import pytest
import torch
from loading import loaded
from tiny_models import logits_of, make_checkpoint, random_tokens, read_reference, tiny_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanoinfer.kernels.reference import apply_rope
from nanoinfer.layers import rope
from nanoinfer.layers.rope import Context, longest_contexts, pair_distance, query_scales, rope_inv_freq, rope_table
from nanoinfer.recall.formats import prompt_logits

DEFAULT = dict(rope_type="default", rope_theta=10000.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=512,
)


YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=1024)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + i / 32 for i in range(32)],
    long_factor=[1.0 + i / 4 for i in range(32)],
    original_max_position_embeddings=512,
)
ROTATIONS = {
    "default": DEFAULT,
    "llama3": LLAMA3,
    "linear": dict(DEFAULT, rope_type="linear", factor=4.0),
    "dynamic": dict(DEFAULT, rope_type="dynamic", factor=4.0),
    "proportional": dict(DEFAULT, rope_type="proportional", partial_rotary_factor=0.25, factor=2.0),
    "yarn": YARN,
    "yarn with factors": dict(YARN, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    "yarn with a factor on attention": dict(YARN, attention_factor=0.7),
    "longrope": LONGROPE,
    "longrope with a factor": dict(LONGROPE, factor=8.0),
}


@pytest.mark.parametrize("length", [300, 4096])
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_bit_for_bit(name, dtype, length):
    """Of sequences that are as long as the context that was asked for, on either side of what switches."""
    config = tiny_config("llama", head_dim=64, rope_parameters=dict(ROTATIONS[name]), max_position_embeddings=2048)
    positions = torch.tensor([0, 1, 200, length - 1])
    x = torch.randn(4, 3, 64).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected = apply_rotary_pos_emb(x, x, cos[0], sin[0])[0]
    table = rope_table(config.rope_parameters, 64, length, dtype, "cpu", Context(2048, length))
    distance = pair_distance(config.rope_parameters, 64)
    assert torch.equal(apply_rope(x, table, positions, distance=distance), expected)
    assert table.shape[1] == (16 if name == "proportional" else 64)


@pytest.mark.parametrize("family, turned", [("phi3", 0.75), ("ernie4_5", 1.0), ("glm4", 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_heads_and_pairs_of_neighbours_turn_as_in_transformers(family, turned, dtype):
    own = import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"phi3": "Phi3", "ernie4_5": "Ernie4_5", "glm4": "Glm4"}[family]
    rope = dict(DEFAULT, partial_rotary_factor=turned)
    config = getattr(own, f"{name}Config")(
        head_dim=32, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters=dict(rope)
    )
    positions, x = torch.tensor([0, 1, 77, 4095]), torch.randn(4, 2, 32).to(dtype)
    cos, sin = getattr(own, f"{name}RotaryEmbedding")(config)(x, positions[None])
    expected = own.apply_rotary_pos_emb(x, x, cos[0], sin[0])[0]
    table = rope_table(rope, 32, 4096, torch.float32 if family == "ernie4_5" else dtype, "cpu")
    assert table.shape == (4096, turned * 32)
    assert torch.equal(apply_rope(x, table, positions, interleaved=family != "phi3"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_yarn_without_truncation_is_that_of_gpt_oss(dtype):
    """A rotation of whole pairs' numbers would begin at pair 8 and end at 18: here at 8.09 and 17.40."""
    own = import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    config = own.GptOssConfig()
    inv_freq, factor = rope_inv_freq(config.rope_parameters, 64, "cpu")
    known = {0: 1.0, 8: 0.0508132748, 9: 0.0317056962, 12: 0.00679495949, 17: 1.29318701e-4, 31: 3.02351143e-7}
    assert inv_freq[[*known]].tolist() == pytest.approx([*known.values()], rel=2e-7)
    assert factor == pytest.approx(1.3465736, rel=1e-8)
    positions, x = torch.tensor([0, 1, 127, 128, 70_000]), torch.randn(5, 3, 64).to(dtype)
    cos, sin = own.GptOssRotaryEmbedding(config)(x, positions[None])
    expected = own.apply_rotary_pos_emb(x, x, cos[0], sin[0])[0]
    table = rope_table(config.rope_parameters, 64, 70_001, dtype, "cpu")
    assert torch.equal(apply_rope(x, table, positions), expected)
    truncated = rope_inv_freq(dict(config.rope_parameters, truncate=True), 64, "cpu")[0]
    assert not torch.equal(truncated, inv_freq)


def test_the_context_that_is_asked_for_chooses_the_rotation():
    """transformers would turn the same positions otherwise as soon as one lies beyond."""
    for parameters, limit, beyond in ((LONGROPE, 512, 513), (ROTATIONS["dynamic"], 2048, 3000)):
        short, same, long = (
            rope_table(parameters, 64, 100, torch.float32, "cpu", Context(2048, length))
            for length in (100, limit, beyond)
        )
        assert torch.equal(short, same) and not torch.equal(short, long)


@pytest.mark.parametrize(
    "rope, limits",
    [(DEFAULT, (2048, 2048)), (YARN, (4096, 4096)), (ROTATIONS["dynamic"], (2048, 8192)), (LONGROPE, (2048, 2048))],
)
def test_how_long_contexts_may_be(rope, limits):
    assert longest_contexts(rope, 2048) == limits


def test_query_factors_are_those_of_transformers():
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    want = get_llama_4_attn_scale(torch.arange(200)[None], 0.1, 16)[0, 0, :, 0].bfloat16()
    assert torch.equal(query_scales(0.1, 16, 200, torch.bfloat16, "cpu"), want) and want[-1] > 1.2


def test_llama3_keeps_short_and_divides_long_wavelengths():
    (default, _), (scaled, _) = (rope_inv_freq(rope, 64, "cpu") for rope in (dict(LLAMA3, rope_type="default"), LLAMA3))
    wavelength = 2 * torch.pi / default
    short, long = wavelength < 512 / 4, wavelength > 512
    assert short.any() and long.any() and not (short | long).all()
    assert torch.equal(scaled[short], default[short])
    assert torch.equal(scaled[long], default[long] / 32)
    between = ~(short | long)
    assert (scaled[between] < default[between]).all() and (scaled[between] > default[between] / 32).all()


def test_table_does_not_depend_on_the_rows_made_at_a_time(monkeypatch):
    whole = rope_table(DEFAULT, 32, 100, torch.float32, "cpu")
    monkeypatch.setattr(rope, "_TABLE_ROWS", 33)
    assert torch.equal(rope_table(DEFAULT, 32, 100, torch.float32, "cpu"), whole)


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(DEFAULT, rope_type="axial"), "'axial' is not supported.*Supported: default, linear, dynamic, yarn"),
        (dict(DEFAULT, rope_type="llama"), "did you mean 'llama3'"),
        (dict(DEFAULT, rope_type="linear"), "'linear' needs factor"),
        (dict(rope_type="default"), "'default' needs rope_theta"),
        (dict(DEFAULT, rope_type="yarn", factor=4.0), "'yarn' needs original_max_position_embeddings"),
        (dict(LONGROPE), "short_factor has 32 entries, it must have one for each of a head's 16 pairs"),
        (dict(DEFAULT, partial_rotary_factor=0.48), "0.48 turns 15 of the 32 elements"),
        (dict(DEFAULT, partial_rotary_factor=0.01), "0.01 turns 0 of the 32 elements"),
    ],
)
def test_unsupported_rotations_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_inv_freq(parameters, 32, "cpu")


@pytest.mark.parametrize("family", ["ernie4_5", "glm4", "llama"])
def test_some_pairs_turn_by_an_angle_of_0_where_neighbours_are_pairs_too(family, tmp_path):
    own = dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5)
    path, ids = make_checkpoint(family, tmp_path, rope_parameters=own), random_tokens(30)
    wanted = logits_of(read_reference(path), ids)
    assert torch.allclose(prompt_logits(loaded(path), ids), wanted, atol=1e-4, rtol=0)
