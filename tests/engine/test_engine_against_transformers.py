"""Greedy tokens equal transformers' own, for every family, in both modes."""

import pytest
from engines import assert_pools_as_before, make_engine, random_prompts, run
from tiny_models import make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams

LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
CASES = {
    "llama": dict(family="llama"),
    "llama, llama3 scaling, one KV head": dict(family="llama", num_heads=7, num_kv_heads=1, rope_parameters=LLAMA3),
    "llama, tied, group of 1": dict(family="llama", num_heads=2, num_kv_heads=2, tied=True, head_dim=48),
    "mistral": dict(family="mistral"),
    "mistral, window": dict(family="mistral", sliding_window=24),
    "qwen2": dict(family="qwen2", num_heads=6, num_kv_heads=2),
    "qwen2, window": dict(family="qwen2", sliding_window=40),
    "qwen3": dict(family="qwen3", head_dim=32),
    "gemma3": dict(family="gemma3"),
    "gemma3, head of 256": dict(family="gemma3", head_dim=256, num_heads=2, num_kv_heads=1, sliding_window=33),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled("llama, llama3 scaling, one KV head", "qwen2, window", "gemma3, head of 256")
def test_greedy_tokens_equal_transformers(case, tmp_path):
    arguments = dict(CASES[case])
    make_checkpoint(arguments.pop("family"), tmp_path, **arguments)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 130, 300]
    prompts = [prompt[:length] for prompt, length in zip(random_prompts(10, 300, 300), lengths, strict=True)]
    wanted = reference_tokens(tmp_path, prompts, 6)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for enable_cpu_offload in (False, True):
        engine = make_engine(tmp_path, enable_cpu_offload=enable_cpu_offload)
        for first, count in ((0, 1), (1, 2), (3, 7)):  # batches of 1, 2 and 7
            batch = slice(first, first + count)
            outcomes = run(engine, prompts[batch], [params] * count)
            assert [completions[0][0] for completions in outcomes] == wanted[batch]
        assert_pools_as_before(engine)
        engine.close()
