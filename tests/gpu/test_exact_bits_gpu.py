"""One set of bits: whatever runs beside a request, and wherever, its tokens and log-probabilities are those it has alone.

NANOINFER_EXACT_SHAPES=qwen3-4b,llama3.1-8b takes other shapes (see `nanoinfer.bench.shapes`), with random weights.
"""

import gc
import json
import os
import random

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench.shapes import SHAPES, write_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Sizes that are no multiples of 8, 16 or 64, a bias, and sliding windows beside.
ODD = SHAPES["tiny"] | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1000, intermediate_size=1333,
    num_hidden_layers=6, num_attention_heads=5, num_key_value_heads=1, head_dim=80, vocab_size=5003, dtype="bfloat16",
    use_sliding_window=True, sliding_window=300, max_window_layers=3,
)  # fmt: skip
COMMON = dict(load_format="dummy", skip_tokenizer_init=True, progress_bar=False, max_model_len=4096, max_num_seqs=64)
NUM_WORKLOADS = 64
LONGEST = 3000


def make(shape: str, directory, **arguments) -> LLM:
    if shape == "odd":
        (directory / "config.json").write_text(json.dumps(ODD))
    else:
        write_shape(shape, directory)
    return LLM(directory, **(COMMON | arguments))


def draw_requests(vocab_size: int, count: int, generator: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts from a tree that branches at and between edges of blocks, of one token to `LONGEST`."""
    prompts: list[list[int]] = []
    for number in range(count):
        beginning = []
        if prompts and generator.random() < 0.6:
            other = generator.choice(prompts)
            cut = generator.choice([generator.randint(0, len(other)), len(other) // 256 * 256, len(other)])
            beginning = other[:cut]
        length = int(LONGEST ** generator.random())
        prompt = (beginning + [generator.randrange(vocab_size) for _ in range(length)])[:LONGEST]
        if generator.random() < 0.5:  # it needs another block while it is generated: a full pool preempts somebody
            missing = -len(prompt) % 256 - generator.randint(1, 4)
            prompt += [generator.randrange(vocab_size) for _ in range(missing)]
        prompts.append(prompt)
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=generator.choice([1, 5, 12, 24]), temperature=0.9 * (i % 2), seed=i, ignore_eos=True,
                logprobs=4, n=2 if i % 7 == 3 else 1, repetition_penalty=1.2 if i % 5 == 2 else 1.0,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def run(llm: LLM, requests: dict[int, tuple], generator: random.Random | None = None) -> dict[int, list]:
    """The completions of each; with a generator they come one after the other, and others come and are aborted."""
    engine, waiting, running = llm.engine, list(requests), {}
    if generator is not None:
        generator.shuffle(waiting)
    while waiting or engine.has_work:
        while waiting and (generator is None or not engine.has_work or generator.random() < 0.7):
            number = waiting.pop()
            running[number] = engine.add_request(f"r{number}", *requests[number])
            if generator is not None and generator.random() < 0.15:
                engine.add_request(f"x{number}", *requests[generator.choice(list(requests))])
        engine.step()
        if generator is not None and generator.random() < 0.1:
            for number in requests:
                engine.abort(f"x{number}")
    return {
        number: [(c.token_ids, c.logprobs, c.finish_reason) for c in request.output().outputs]
        for number, request in running.items()
    }


def variants(llm: LLM) -> list[dict]:
    """Arguments of engines; sizes that depend on the model come from one that runs."""
    block, fits = llm.engine.runner.layout.block_bytes, 3 * -(-LONGEST // 256)
    streamed = dict(enable_cpu_offload=True, host_memory_limit=200 * fits * block // 4)
    return [
        dict(enable_prefix_caching=True),
        dict(enable_prefix_caching=True, max_num_batched_tokens=333, capture_num_tokens=[64]),
        dict(enable_prefix_caching=True, num_gpu_blocks_override=fits, enable_cpu_offload=False, max_num_batched_tokens=600),
        streamed | dict(resident_kv_limit=0, max_num_batched_tokens=1024),
        streamed | dict(resident_kv_limit=fits // 2 * block, enable_prefix_caching=True, enforce_eager=True),
        dict(enable_cpu_offload="auto", num_gpu_blocks_override=fits + 16, max_num_batched_tokens=2048,
             host_memory_limit=200 * fits * block // 4, enable_prefix_caching=True),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", os.environ.get("NANOINFER_EXACT_SHAPES", "qwen3-0.6b,odd").split(","))
def test_a_request_has_the_bits_that_it_has_alone(shape, tmp_path):
    generator = random.Random(0)
    with make(shape, tmp_path, enable_prefix_caching=False) as llm:
        drawn = draw_requests(llm.engine.runner.model.spec.vocab_size, 30, generator)
        requests = dict(enumerate(drawn))
        alone = {}
        for number, request in requests.items():
            alone |= run(llm, {number: request})
        settings = variants(llm)
        assert run(llm, requests) == alone, "one batch"
        checks = llm.engine.runner.product_checks
        print(shape, "products in own tiles:", llm.stats()["products_in_own_tiles"], len(checks))
    num_preempted = num_hits = num_streamed = 0
    for index, arguments in enumerate(settings):
        gc.collect()
        torch.cuda.empty_cache()
        with make(shape, tmp_path, **arguments) as llm:
            for _ in range(NUM_WORKLOADS // len(settings) + (index < NUM_WORKLOADS % len(settings))):
                chosen = generator.sample(sorted(requests), generator.randint(1, len(requests)))
                found = run(llm, {number: requests[number] for number in chosen}, generator)
                differing = [number for number in chosen if found[number] != alone[number]]
                assert not differing, f"{arguments}: requests {differing} of {chosen}"
            stats = llm.stats()
            num_preempted += stats["num_preemptions"]
            num_hits += stats["prefix_cache_hit_tokens"]
            num_streamed += stats["streamed_bytes"]
    assert num_preempted and num_hits and num_streamed, "a workload was not what it was meant to be"
