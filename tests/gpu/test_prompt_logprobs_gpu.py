"""Log-probabilities of prompts on the GPU: see tests/engine/test_prompt_logprobs.py."""

import json
from contextlib import closing

import pytest
import torch
from engines import random_prompts
from gpu_models import QWEN3

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.sampling.reference import logprobs_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMON = dict(load_format="dummy", max_num_seqs=8, progress_bar=False, max_model_len=4096, skip_tokenizer_init=True)
COMMON |= dict(max_num_batched_tokens=2048, capture_num_tokens=[64, 256], gpu_memory_limit="6GiB")
STREAMED = dict(enable_cpu_offload=True, host_memory_limit="2GiB", resident_kv_limit=0)
VARIANTS = {
    "odd chunks": dict(max_num_batched_tokens=333),
    "mixed steps from graphs": dict(max_num_batched_tokens=256),
    "mixed steps, eager": dict(max_num_batched_tokens=256, enforce_eager=True),
    "streamed": STREAMED,
    "streamed, odd chunks, eager": STREAMED | dict(max_num_batched_tokens=333, enforce_eager=True),
    "all weights streamed": dict(resident_weights_limit=0, host_memory_limit="4GiB"),
}
PROMPTS = random_prompts(3, 2000, 3000, seed=1) + random_prompts(4, 1, 300, seed=2)
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2), seed=i, max_tokens=40 - 4 * i, ignore_eos=True, logprobs=3, n=1 + (i == 4),
        prompt_logprobs=[20, None, 1, 0, 5, None, 2][i],
    )
    for i in range(len(PROMPTS))
]  # fmt: skip


def run(engine, prompts, params):
    """Requests that come one behind the other, so that their chunks share steps with tokens of others."""
    requests, step = [], 0
    while len(requests) < len(prompts) or engine.has_work:
        step += 1
        if len(requests) < len(prompts) and (step % 8 == 0 or not engine.has_work):
            number = len(requests)
            requests.append(engine.add_request(f"{engine.intake.num_sequences}", prompts[number], params[number]))
        engine.step()
    outputs = [request.output() for request in requests]
    return [
        (one.prompt_logprobs, [(each.token_ids, each.logprobs, each.finish_reason) for each in one.outputs])
        for one in outputs
    ]


@pytest.mark.parametrize(
    "fields, options",
    [
        ({}, {}),
        (dict(vocab_size=4003, tie_word_embeddings=False), dict(dtype="float32")),
        (dict(tie_word_embeddings=False), dict(quantization="int4", head_quantization="int8")),
    ],
    ids=["bfloat16", "float32, odd vocabulary", "int4"],
)
def test_they_have_the_same_bits_however_they_are_computed(fields, options, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | fields))
    with closing(LLMEngine(EngineConfig(model=tmp_path, **COMMON | options))) as engine:
        wanted = [run(engine, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        assert run(engine, PROMPTS, PARAMS) == wanted
        assert engine.runner.peak_bytes() <= engine.plan.budget_bytes
        # A token that is sampled behind the same beginning has the same ones.
        top = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        for end in (1, 255, 256, 257, len(PROMPTS[0]) - 1):
            ((_, [(_, [entry], _)]),) = run(engine, [PROMPTS[0][:end]], [top])
            assert list(entry.items())[:20] == list(wanted[0][0][end].items())[:20], end
    for name, more in VARIANTS.items():
        if "weights" in name and "head_quantization" in options:
            continue  # the same pieces as without packed weights
        with closing(LLMEngine(EngineConfig(model=tmp_path, **COMMON | options | more))) as engine:
            assert run(engine, PROMPTS, PARAMS) == wanted, name
            assert run(engine, PROMPTS, PARAMS) == wanted, f"{name}, with all prompts in the prefix cache"
            stats = engine.stats()
            assert stats["streamed_bytes"] or not name.startswith("streamed"), name
            assert stats["num_mixed_steps"] or not name.startswith("mixed"), name


@pytest.mark.parametrize("vocab_size", [1029, 5003, 32_000, 49_155, 151_936])
def test_a_row_has_the_log_probabilities_that_it_has_alone(vocab_size):
    """Wherever it lies in its slice: rows of an odd vocabulary begin at and between multiples of 16 bytes."""
    logits = 4 * torch.randn(64, vocab_size, device="cuda")
    tokens = torch.randint(vocab_size, (64,), device="cuda")
    together = logprobs_of(logits, tokens, 20)
    for row in (0, 1, 2, 3, 17, 63):
        alone = logprobs_of(logits[row : row + 1].clone(), tokens[row : row + 1], 20)
        assert all(torch.equal(one[row : row + 1], other) for one, other in zip(together, alone, strict=True)), row
