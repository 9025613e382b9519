"""Every family computes what transformers computes, with plain attention in place of the paged one."""

from dataclasses import replace

import pytest
import torch
from dense_model import dense_logits, empty_slots
from loading import loaded
from tiny_models import FAMILIES, logits_of, make_checkpoint, random_tokens, read_reference, reference_logits
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3

from nanoinfer.models.decoder import Decoder

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)


def load(directory, dtype=torch.float32) -> Decoder:
    return loaded(directory, dtype)


def assert_same_logits(directory, num_tokens=40, first_position=0):
    tokens, reference, model = random_tokens(num_tokens), read_reference(directory), load(directory)
    assert model.spec.weight_bytes == 4 * reference.num_parameters()
    expected = logits_of(reference, tokens, first_position)
    actual = dense_logits(model, tokens, first_position)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


SHAPES = [(16, 4, 2), (32, 3, 1), (64, 2, 2), (48, 7, 1)]  # the second and the last are of tied embeddings
IN_TURN = [
    f"{family}-{shape}" for number, family in enumerate(FAMILIES) for shape in (SHAPES[:2], SHAPES[2:])[number % 2]
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(*IN_TURN)
def test_logits_and_weight_bytes_equal_transformers(family, shape, tmp_path):
    head_dim, num_heads, num_kv_heads = shape
    fields = dict(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, tied=num_heads % 2 == 1)
    assert_same_logits(make_checkpoint(family, tmp_path, **fields))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_prompts_longer_than_the_window_equal_transformers(family, tmp_path):
    directory = make_checkpoint(family, tmp_path, sliding_window=7)
    assert 7 in load(directory).spec.windows
    assert_same_logits(directory)


def test_largest_head_size_equals_transformers(tmp_path):
    assert_same_logits(make_checkpoint("gemma3", tmp_path, head_dim=256, num_heads=2, num_kv_heads=1, num_layers=2))


@pytest.mark.parametrize(
    "family, biases",
    [
        ("llama", dict(attention_bias=True)),
        ("llama", dict(mlp_bias=True)),
        ("qwen3", dict(attention_bias=True)),
        ("gemma3", dict(attention_bias=True)),
    ],
    ids=str,
)
def test_configured_biases_equal_transformers(family, biases, tmp_path):
    assert_same_logits(make_checkpoint(family, tmp_path, **biases))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", [LLAMA3_ROPE, dict(rope_type="linear", rope_theta=500.0, factor=4.0)])
def test_scaled_rope_equals_transformers_at_late_positions(family, rope, tmp_path):
    directory = make_checkpoint(family, tmp_path, head_dim=32, rope_parameters=rope)
    assert_same_logits(directory, first_position=4000)


def test_gemma3_scales_the_full_layers_alone(tmp_path):
    rope = dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    )
    directory = make_checkpoint("gemma3", tmp_path, rope_parameters=rope)
    assert len(load(directory).rope_tables) == 2
    assert_same_logits(directory, first_position=3000)


def test_gemma3_caps_the_final_logits(tmp_path):
    directory = make_checkpoint("gemma3", tmp_path, final_logit_softcapping=3.0)
    assert dense_logits(load(directory), random_tokens(8)).abs().max() <= 3.0
    assert_same_logits(directory)


def test_gemma3_caps_the_attention_logits(tmp_path, monkeypatch):
    """transformers reads attn_logit_softcapping for Gemma 3 but does not pass it on: the reference here does."""

    def capped(module, *args, **kwargs):
        return modeling_gemma3.eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)

    directory = make_checkpoint("gemma3", tmp_path, attn_logit_softcapping=1.5)
    tokens = random_tokens(30)
    uncapped = reference_logits(directory, tokens)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *args: capped)
    expected = reference_logits(directory, tokens)
    assert (expected - uncapped).abs().max() > 0.1
    torch.testing.assert_close(dense_logits(load(directory), tokens), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_close_to_transformers(family, tmp_path):
    directory = make_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(40)
    model = load(directory, "auto")
    assert model.spec.dtype == torch.bfloat16
    actual = dense_logits(model, tokens)
    expected = reference_logits(directory, tokens, dtype=torch.bfloat16)
    exact = reference_logits(directory, tokens)
    # No further from the exact logits than transformers' own bfloat16 ones, with a margin for the order of sums.
    assert (actual - exact).norm() <= 1.2 * (expected - exact).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_packed_and_only_the_sum_changes(family, tmp_path):
    model = load(make_checkpoint(family, tmp_path))
    x, normed = model.embed(torch.tensor(random_tokens(5)))
    before, target = (x.clone(), normed.clone()), empty_slots(model.spec, 5)
    q = model.before_attention(0, normed, torch.arange(5), target)
    assert q.shape == (5, 4, 16) and q.is_contiguous() and target.kv[0, :, :5].any()
    given = torch.zeros_like(q)
    again = model.before_attention(0, normed, torch.arange(5), replace(target, q=given))
    assert again is given and torch.equal(given, q)
    attn, weights = q.clone(), [weight.clone() for weight in model.parameters()]
    assert torch.equal(x, before[0]) and torch.equal(normed, before[1])
    model.after_attention(0, x, attn, torch.tensor([len(x)], dtype=torch.int32))
    assert not torch.equal(x, before[0]), "the sum is kept in place"
    assert torch.equal(attn, q) and all(map(torch.equal, model.parameters(), weights))


def test_no_weight_takes_a_gradient(tmp_path):
    model = load(make_checkpoint("qwen3", tmp_path))
    assert not dense_logits(model, random_tokens(4)).requires_grad
    assert not any(weight.requires_grad for weight in model.parameters())


def test_spec_reports_the_rope_tables_it_allocates(tmp_path):
    directory = make_checkpoint("gemma3", tmp_path)
    model = loaded(directory, "float32", max_position=100)
    tables = model.rope_tables
    assert [tuple(table.shape) for table in tables] == [(100, 16), (100, 16)]
    assert model.spec.rope_bytes(100) == sum(table.numel() * table.element_size() for table in tables)
