"""Position tables."""

import pytest
import torch
from tiny_models import tiny_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanoinfer.kernels.reference import apply_rope
from nanoinfer.layers import rope
from nanoinfer.layers.rope import rope_inv_freq, rope_table

DEFAULT = dict(rope_type="default", rope_theta=10000.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=512,
)


@pytest.mark.parametrize("parameters", [DEFAULT, LLAMA3, dict(DEFAULT, rope_type="linear", factor=4.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_bit_for_bit(parameters, dtype):
    config = tiny_config("llama", head_dim=64, rope_parameters=dict(parameters))
    positions = torch.tensor([0, 1, 511, 512, 4095])
    x = torch.randn(5, 3, 64).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected = apply_rotary_pos_emb(x, x, cos[0], sin[0])[0]
    table = rope_table(parameters, 64, 4096, dtype, "cpu")
    assert torch.equal(apply_rope(x, table, positions), expected)


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
        (dict(DEFAULT, partial_rotary_factor=0.48), "0.48 turns 15 of the 32 elements"),
        (dict(DEFAULT, partial_rotary_factor=0.01), "0.01 turns 0 of the 32 elements"),
    ],
)
def test_unsupported_rotations_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_inv_freq(parameters, 32, "cpu")
