"""Structured outputs on a CUDA device: see tests/engine/test_structured.py. What they cost: tools/gpu_structured.py."""

import json
import random

import numpy as np
import pytest
import torch
from engines import assert_pools_as_before, outcome, random_prompts, read_at_once, run
from gpu_models import COMMON, QWEN3
from structured import is_answer, make_structured_tokenizer, random_schema

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.kernels import fused, reference
from nanoinfer.structured.matcher import mask_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("llguidance")

ARGUMENTS = COMMON | dict(skip_tokenizer_init=False, capture_num_tokens=[32, 128], gpu_memory_limit="2GiB")
PROMPTS = random_prompts(3, 300, 900, seed=3) + random_prompts(9, 1, 40, seed=4)
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True, num_ring_slots=2),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True),
}


@pytest.fixture
def model(tmp_path):
    tokenizer = make_structured_tokenizer()
    ends = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | ends))
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def make(model, **arguments) -> LLMEngine:
    return LLMEngine(EngineConfig(model=model, **ARGUMENTS | arguments))


@pytest.mark.parametrize("seed", range(3))
def test_finished_answers_have_their_form_and_every_mode_gives_the_bits_of_a_request_alone(model, seed):
    generator = random.Random(seed)
    schemas = [None if i % 4 == 1 else random_schema(generator) for i in range(len(PROMPTS))]
    pairs = []
    for i, (prompt, schema) in enumerate(zip(PROMPTS, schemas, strict=True)):
        form = None if schema is None else dict(json=schema, disable_any_whitespace=True)
        how = dict(temperature=1, seed=i, max_tokens=40, logprobs=[None, 3][i % 2], top_p=[1, 0.9][i % 2])
        pairs.append((prompt, SamplingParams(**how, structured_outputs=form)))
    engine = read_at_once(make(model, enforce_eager=True))
    wanted = [run(engine, [prompt], [params])[0] for prompt, params in pairs]
    num_valid = 0
    for schema, ((tokens, _, reason),) in zip(schemas, wanted, strict=True):
        if schema is not None and reason == "stop":
            num_valid += is_answer(engine.tokenizer.decode(tokens, skip_special_tokens=True), schema)
    assert num_valid == sum(s is not None and w[0][2] == "stop" for s, w in zip(schemas, wanted, strict=True)) > 4
    engine.close()
    for name, arguments in VARIANTS.items():
        engine = make(model, **arguments)
        requests, step = [], 0
        while len(requests) < len(pairs) or engine.has_work:
            if step % 2 == 0 and len(requests) < len(pairs):
                requests.append(engine.add_request(str(len(requests)), *pairs[len(requests)]))
            engine.step()
            step += 1
        engine.runner.runtime.synchronize()
        assert [outcome(request) for request in requests] == wanted, name
        assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in name)
        assert_pools_as_before(engine)
        engine.close()


@pytest.mark.parametrize("vocab_size", [300, 32_001, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_writes_what_the_reference_writes(vocab_size, dtype):
    generator = np.random.default_rng(vocab_size)
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3, vocab_size // 2], logits[4, 0], logits[1, -1] = torch.nan, torch.inf, -torch.inf
    lines = []
    for row in generator.permutation(64)[:40].tolist():
        allowed = generator.choice(vocab_size, vocab_size // 3, replace=False).tolist()
        lines.append(np.concatenate([np.int32([row]), mask_of(allowed, -(-vocab_size // 32))]))
    lines, wanted = torch.from_numpy(np.stack(lines)), logits.clone()
    reference.apply_masks(wanted, lines)
    for given in (lines.cuda(), lines.pin_memory()):  # an engine's lie in host memory
        on_device = logits.cuda()
        fused.apply_masks(on_device, given)
        assert torch.equal(on_device.cpu().view(torch.uint8), wanted.view(torch.uint8))
