"""Each family, drawn at random: its greedy tokens are transformers' own, and the same bits in every mode and batch."""

import random

import pytest
from engines import make_engine, random_prompts, run
from tiny_models import make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams

MAX_TOKENS = 12


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
    return _factors(draw) | dict(attention_bias=draw.random() < 0.3)


def _starcoder2(draw):
    return dict(
        sliding_window=draw.choice([None, 5, 30]),
        use_bias=draw.random() < 0.7,
        hidden_act=draw.choice(["gelu_pytorch_tanh", "gelu", "relu2", "silu"]),
    )


DRAWN = {"granite": _granite, "granite4": _granite4, "starcoder2": _starcoder2}


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


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", DRAWN)
@pytest.mark.sampled(*(f"{family}-{number % 10}" for number, family in enumerate(DRAWN)))
def test_greedy_tokens_are_those_of_transformers_in_every_mode_and_batch(family, seed, tmp_path):
    draw = random.Random(f"{family} {seed}")
    path = make_checkpoint(family, tmp_path, seed=seed, **draw_fields(family, draw))
    prompts = [*random_prompts(2, 1, 60, seed), *random_prompts(1, 1, 7, seed)]
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)] * len(prompts)
    resident = run(make_engine(path), prompts, params)
    assert [found[0][0] for found in resident] == reference_tokens(path, prompts, MAX_TOKENS)
    assert run(make_engine(path, enable_cpu_offload=True), prompts, params) == resident
    alone = make_engine(path, max_num_batched_tokens=16)
    assert [run(alone, [prompt], params[:1])[0] for prompt in prompts] == resident
