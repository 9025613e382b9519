"""Hundreds of random requests over tight pools, with aborts, bad prompts, errors in steps and changes of the mode.

At the end both pools are as before, and what a request got does not depend on what ran beside it.
"""

import random
from dataclasses import dataclass, field

import pytest
from engines import COMMON, VOCAB, assert_pools_as_before, outcome
from request_helpers import shrink_gpu_pool
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.requests.request import Request
from offload import Runtime

BLOCK_BYTES = 2 * 16 * 16 * 4  # 1 layer, K and V, 16 tokens, one head of 16, float32
ARGUMENTS = COMMON | dict(
    max_model_len=64,
    max_num_batched_tokens=48,
    capture_num_tokens=[8, 32],
    host_memory_limit=26 * BLOCK_BYTES,
    num_ring_slots=2,
    ring_slot_bytes=BLOCK_BYTES,
    skip_tokenizer_init=False,
)
NUM_GPU_BLOCKS = 14  # for 8 rows of up to 4 blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = make_checkpoint(
        "qwen3", tmp_path_factory.mktemp("model"), num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    return path


def random_params(generator: random.Random) -> SamplingParams:
    max_tokens = generator.choice([1, 2, 3, 5, 8, 24])
    return SamplingParams(
        temperature=generator.choice([0, 0, 0.7, 1.2]),
        top_k=generator.choice([0, 0, 8]),
        top_p=generator.choice([1.0, 1.0, 0.9]),
        min_p=generator.choice([0.0, 0.0, 0.03]),
        repetition_penalty=generator.choice([1.0, 1.0, 1.3]),
        presence_penalty=generator.choice([0.0, 0.0, 0.8]),
        frequency_penalty=generator.choice([0.0, 0.0, 0.4, -0.4]),
        max_tokens=max_tokens,
        min_tokens=generator.choice([0, 0, max_tokens // 2]),
        stop=[f"w{token}" for token in generator.sample(range(VOCAB), generator.choice([0, 0, 3]))],
        stop_token_ids=generator.sample(range(VOCAB), generator.choice([0, 0, 6])),
        ignore_eos=generator.random() < 0.7,
        seed=generator.getrandbits(40),
        logprobs=generator.choice([None, None, 0, 3]),
        n=generator.choice([1, 1, 1, 1, 2, 3]),
    )


@dataclass
class Soak:
    """A run of random requests, and what it saw."""

    engine: LLMEngine
    generator: random.Random
    switches: bool
    requests: dict[str, Request] = field(default_factory=dict)
    streamed: dict[tuple[str, int], list] = field(default_factory=dict)
    num_errors: int = 0
    num_switches: int = 0
    num_refused_switches: int = 0
    num_refused_prompts: int = 0

    def run(self, num_requests: int) -> None:
        prefixes = [[self.generator.randrange(VOCAB) for _ in range(32)] for _ in range(3)]
        while len(self.requests) < num_requests or self.engine.has_work:
            while len(self.requests) < num_requests and len(self.engine.live.requests) < 12:
                self._add(prefixes)
            if self.generator.random() < 0.06 and self.engine.live.requests:
                assert self.engine.abort(self.generator.choice(sorted(self.engine.live.requests)))
            if self.switches and self.generator.random() < 0.12:
                self._switch()
            self._step()

    def _add(self, prefixes: list[list[int]]) -> None:
        generator = self.generator
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 30))]
        if generator.random() < 0.25:
            prompt = generator.choice(prefixes) + prompt[:7]
        request_id = str(len(self.requests))
        if generator.random() < 0.1:
            bad = generator.choice([[], [VOCAB], [5] * 64, [-1]])
            with pytest.raises(ValueError):
                self.engine.add_request(request_id, bad, SamplingParams())
            self.num_refused_prompts += 1
        self.requests[request_id] = self.engine.add_request(request_id, prompt, random_params(generator))

    def _switch(self) -> None:
        other = {"resident": "offload", "offload": "resident"}[self.engine.mode]
        try:
            self.engine.switch_mode(other)
            self.num_switches += 1
        except ValueError as error:
            assert f"switch to {other} refused" in str(error) and self.engine.mode != other
            self.num_refused_switches += 1

    def _step(self) -> None:
        breaks = self.generator.random() < 0.03
        execute = self.engine.runner.execute
        if breaks:
            self.engine.runner.execute = lambda *step: self._fail(execute(*step))
        try:
            outputs = self.engine.step()
        except RuntimeError as error:
            assert str(error) == "out of luck"
            self.num_errors += 1
            return
        finally:
            if breaks:
                del self.engine.runner.execute
        for output in outputs:
            self.streamed.setdefault((output.request_id, output.index), []).append(output)

    def _fail(self, *_: object) -> None:
        raise RuntimeError("out of luck")


def start(path, enable_cpu_offload: bool, runtime: Runtime | None = None) -> LLMEngine:
    return LLMEngine(EngineConfig(model=path, **ARGUMENTS, enable_cpu_offload=enable_cpu_offload), runtime)


def assert_streams_join_to_the_outputs(soak: Soak) -> None:
    for request in soak.requests.values():
        for completion in request.output().outputs:
            parts = soak.streamed.get((request.request_id, completion.index), [])
            tokens = [token for part in parts for token in part.token_ids_delta]
            text = "".join(part.text_delta for part in parts)
            assert tokens == completion.token_ids
            assert completion.text == text if completion.finish_reason != "abort" else completion.text.startswith(text)


def assert_nobody_saw_its_neighbours(soak: Soak, path, sample: int) -> None:
    """Runs some of the requests alone, one after the other, and compares all their completions."""
    alone = start(path, enable_cpu_offload=False)
    for request_id in soak.generator.sample(sorted(soak.requests), sample):
        request = soak.requests[request_id]
        again = alone.add_request(request_id, request.prompt_token_ids, request.params)
        while alone.has_work:
            alone.step()
        for (tokens, _, reason), (wanted, _, wanted_reason) in zip(outcome(request), outcome(again), strict=True):
            if reason == "abort":
                assert tokens == wanted[: len(tokens)], request.params
            else:
                assert (tokens, reason) == (wanted, wanted_reason), request.params
    assert_pools_as_before(alone)


@pytest.mark.parametrize(
    "enable_cpu_offload, switches", [(False, False), (True, False), (True, True)], ids=["resident", "offload", "both"]
)
@pytest.mark.sampled("both")
def test_hundreds_of_requests_leave_both_pools_as_before_and_do_not_see_each_other(
    path, enable_cpu_offload, switches, fuzz
):
    engine, num_requests = start(path, enable_cpu_offload), 500 if fuzz else 100
    give_back = shrink_gpu_pool(engine, NUM_GPU_BLOCKS)
    soak = Soak(engine, random.Random(18 if fuzz else 27), switches)
    soak.run(num_requests)
    give_back()
    assert_pools_as_before(engine)
    assert len(soak.requests) == num_requests and all(request.is_finished for request in soak.requests.values())
    reasons = [completion[2] for request in soak.requests.values() for completion in outcome(request)]
    assert set(reasons) == {"stop", "length", "abort"} and reasons.count("abort") < len(reasons) / 2
    assert soak.num_errors > 2 and soak.num_refused_prompts > num_requests // 25
    assert engine.stats()["num_mixed_steps"] > num_requests // 4
    assert (engine.scheduler.num_preemptions > 0) == (switches or not enable_cpu_offload)
    assert (soak.num_switches > num_requests // 20) == switches
    assert_streams_join_to_the_outputs(soak)
    assert_nobody_saw_its_neighbours(soak, path, 60 if fuzz else 15)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled("0")
def test_requests_do_not_see_each_other_in_any_order_of_the_streams(path, seed, fuzz):
    """Freed blocks are filled with NaN here, and copies run as early or as late as they may."""
    engine = start(path, True, SimulatedRuntime(seed))
    give_back = shrink_gpu_pool(engine, NUM_GPU_BLOCKS)
    soak = Soak(engine, random.Random(seed), switches=True)
    soak.run(80 if fuzz else 50)
    give_back()
    assert_pools_as_before(engine)
    assert soak.num_switches > 0
    assert_streams_join_to_the_outputs(soak)
    assert_nobody_saw_its_neighbours(soak, path, 40 if fuzz else 15)
