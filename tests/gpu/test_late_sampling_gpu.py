"""What is uploaded between layers and sampling, and log-probabilities, on a CUDA device: see
tests/engine/test_late_sampling.py and test_running_ahead.py. How long the device pauses: tests/gpu/pauses.py."""

import json

import pytest
import torch
from engines import assert_pools_as_before, outcome, random_prompts, read_at_once, run
from gpu_models import COMMON, GEMMA3, QWEN3
from late_mask import LateMask

from nanoinfer import EngineConfig, LLMEngine, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ARGUMENTS = COMMON | dict(skip_tokenizer_init=True, capture_num_tokens=[32, 128], gpu_memory_limit="2GiB")
PROMPTS = random_prompts(3, 300, 900, seed=3) + random_prompts(5, 1, 40, seed=4)
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2), seed=i, max_tokens=20 + 3 * i, ignore_eos=True, logprobs=[None, 0, 5][i % 3]
    )
    for i in range(8)
]
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True, num_ring_slots=2),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True),
}


@pytest.fixture(params=[QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def model(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    return tmp_path


def make(model, **arguments) -> LLMEngine:
    return LLMEngine(EngineConfig(model=model, **ARGUMENTS | arguments))


def staggered(engine, pairs) -> list:
    """Outcomes of requests that come one after the other, so that some steps are mixed."""
    requests, step = [], 0
    while len(requests) < len(pairs) or engine.has_work:
        if step % 3 == 0 and len(requests) < len(pairs):
            requests.append(engine.add_request(str(len(requests)), *pairs[len(requests)]))
        engine.step()
        step += 1
    engine.runner.runtime.synchronize()
    assert engine.stats()["num_mixed_steps"] > 2
    assert_pools_as_before(engine)
    return [outcome(request) for request in requests]


def test_a_mask_that_depends_on_the_last_token_gives_what_a_request_gets_alone(model):
    engine, pairs, wanted = read_at_once(make(model, enforce_eager=True)), [], []
    LateMask(engine, is_late=False)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        if i in (1, 4, 6):  # these end with the token just read
            ((tokens, *_),) = run(engine, [prompt], [params])[0]
            params = SamplingParams(**vars(params) | dict(stop_token_ids=[tokens[9]]))
        pairs.append((prompt, params))
        wanted.append(run(engine, [prompt], [params])[0])
    engine.close()
    for name, arguments in VARIANTS.items():
        engine = make(model, **arguments)
        mask = LateMask(engine)
        assert staggered(engine, pairs) == wanted, name
        assert mask.num_banned["ended"] >= 3
        assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in name)
        engine.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_let_the_host_wait_for_nothing_but_the_step_before(model, variant):
    """Torch names each call in which it waits for the device. The event behind a step is none of them."""
    engine = make(model, **VARIANTS[variant])
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=80, ignore_eos=True, logprobs=[None, 20][i % 2]
        )
        engine.add_request(str(i), prompt, params)
    while not all(sequence.num_generated > 8 for sequence in engine.live.sequences):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
            assert engine.live.in_flight is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_work:
        engine.step()
    engine.close()
