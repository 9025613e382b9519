"""Turns of a conversation on a GPU: what was computed ahead is found, and each turn has the bits of a cold start."""

import json

import pytest
import torch
from engines import random_prompts, run
from gpu_models import COMMON, GEMMA3, QWEN3

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.engine.ahead import Ahead

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MODES = {
    "resident": dict(enable_cpu_offload=False),
    "streamed": dict(enable_cpu_offload=True),
    "auto, a tight pool": dict(enable_cpu_offload="auto", resident_kv_limit=None, num_gpu_blocks_override=48),
}
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=70, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("model", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
@pytest.mark.parametrize("mode", MODES)
def test_a_turn_finds_what_was_computed_ahead_and_is_that_of_a_cold_start(model, mode, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model))

    def make(**more) -> LLMEngine:
        return LLMEngine(EngineConfig(model=tmp_path, skip_tokenizer_init=True, **COMMON | MODES[mode] | more))

    engine, cold = make(), make(enable_prefix_caching=False)
    ahead, prompt, expected = Ahead(engine), [], 0
    for message in random_prompts(4, 60, 200, seed=1):
        prompt = prompt + message
        before = engine.stats()["prefix_cache_hit_tokens"]
        outcome, wanted = (run(each, [prompt], [PARAMS]) for each in (engine, cold))
        assert outcome == wanted
        assert engine.stats()["prefix_cache_hit_tokens"] - before == expected
        prompt = prompt + list(outcome[0][0][0])
        ahead.offer(prompt)
        while ahead.begin():
            while engine.has_work:
                engine.step()
        assert not ahead.num_left_out
        expected = len(prompt) // 32 * 32
    assert ahead.num_tokens > 4 * 32
    engine.close()
    cold.close()
