"""Tiny engines on the CPU for the tests of the whole engine, and what must hold for each when it is idle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from simulated import SimulatedRuntime

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.engine.recovery import LiveRequests
from nanoinfer.memory.setup import Setup
from nanoinfer.step.plan import NO_BLOCK
from offload import Runtime

# The smallest model: float32, and blocks of 16 tokens with K and V of one head of 16.
SMALL = dict(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
LAYER_BLOCK_BYTES = 2 * 16 * 16 * 4
BLOCK_BYTES = 2 * LAYER_BLOCK_BYTES
# Every wait, by name, that offload mode needs.
RULES = [
    "gpu_block.reuse_after_write_through",
    "host.read_after_step",
    "host_block.reuse_after_copies",
    "ring.attention_after_fill",
    "ring.fill_after_attention",
    "ring.fill_after_write_through",
    "staging.fill_after_upload",
    "write_through.after_kv_is_written",
]
# "staging.fill_after_upload" cannot be missed in an engine: there are two buffers, each table is uploaded at most once
# in a step, and step n is read before step n + 2 is launched. (Generated tokens' counts and limits are uploaded row by
# row, but only three sequences that come back from preemption at once, or five with limits, would show it.)
# test_offload_streams.py shows that rule.
RULES_SEEN_BY_AN_ENGINE = [rule for rule in RULES if rule != "staging.fill_after_upload"]

# Those of whole blocks that move beside the steps, see tests/kv/test_transfers.py.
MOVE_RULES = {
    "load.fill_after_compute",
    "load.fill_after_store",
    "moved_blocks.read_after_load",
    "moved_blocks.reuse_after_store",
}

VOCAB = 160
COMMON = dict(
    block_size=16,
    dtype="float32",
    device="cpu",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=384,
    ring_slot_bytes=2**15,
    resident_kv_limit=0,  # everything streams, unless a test says otherwise
    num_ring_slots=3,
    progress_bar=False,
    skip_tokenizer_init=True,
    speculative_config=None,  # tests count steps; those of drafts ask for them
)


def make_engine(path: Path, runtime: Runtime | None = None, **arguments) -> LLMEngine:
    engine = LLMEngine(EngineConfig(model=path, **(COMMON | arguments)), runtime)
    if isinstance(runtime, SimulatedRuntime):
        engine.live.__class__ = SimulatedLiveRequests
    if engine.drafts:
        engine.drafts.balance.note_tried = lambda *_: None  # how long steps take decides about no draft
    return engine


def make_drawn_engine(path: Path, runtime: Runtime | None = None, **arguments) -> LLMEngine:
    """`make_engine`, with the fewest GPU blocks that the model takes if fewer were drawn."""
    try:
        return make_engine(path, runtime, **arguments)
    except ValueError as error:
        if (fewest := re.search(r": (\d+) KV blocks of .* are the fewest", str(error))) is None:
            raise
    return make_engine(path, runtime, **arguments | dict(num_gpu_blocks_override=int(fewest[1])))


def have_embeddings_on_host(monkeypatch) -> None:
    """Have plans put embeddings that no tied head reads, and tables of what layers read, into host memory, as they do
    for a GPU."""
    plan = Setup.plan

    def planned(self, config=None, may_pin=True):
        found = plan(self, config, may_pin)
        size, tables = self.spec.embedding_bytes * may_pin, self.spec.table_bytes * may_pin
        size *= not self.spec.tied_embeddings
        weight_bytes = found.weight_bytes - size - tables
        return replace(found, embedding_bytes=size, table_bytes=tables, weight_bytes=weight_bytes)

    monkeypatch.setattr(Setup, "plan", planned)


class SimulatedLiveRequests(LiveRequests):
    """Where work of a step in flight was lost, that step is no sounder than after a recovery that was interrupted."""

    def recover(self) -> None:
        runtime = self._built.executor.runner.runtime
        self._is_recovering |= runtime.has_lost_work
        super().recover()
        runtime.forget_lost_work()


def random_prompts(count: int, shortest: int = 1, longest: int = 120, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCAB) for _ in range(generator.randint(shortest, longest))] for _ in range(count)]


def some_params(count: int, max_tokens: int = 20, **arguments) -> list[SamplingParams]:
    """Greedy and seeded ones in turn, of unequal lengths, so that the batch shrinks and grows."""
    arguments = dict(ignore_eos=True, logprobs=2) | arguments
    return [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=max(1, max_tokens - 4 * (i % 4)), **arguments)
        for i in range(count)
    ]


def run(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    at_step: Callable[[LLMEngine, int], None] | None = None,
) -> list:
    """Token ids, log-probabilities and finish reason of each prompt's completions.

    `at_step(engine, n)` is called before step n.
    """
    requests = [
        engine.add_request(f"request-{engine.intake.num_sequences}-{i}", prompt, param)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    step = 0
    while not all(request.is_finished for request in requests):
        if at_step is not None:
            at_step(engine, step)
        engine.step()
        step += 1
    return [outcome(request) for request in requests]


def read_at_once(engine: LLMEngine) -> LLMEngine:
    """Has each step read before the next one is planned: the reference for a host that runs ahead."""
    step, schedule = engine.step, engine.scheduler.schedule

    def step_and_read() -> list:
        outputs = step()
        if engine.live.in_flight is not None:
            engine.scheduler.schedule = lambda: None
            outputs += step()
            engine.scheduler.schedule = schedule
        return outputs

    engine.step = step_and_read
    return engine


def outcome(request) -> list:
    """Of each completion token ids, log-probabilities and finish reason; these with the prompt's where it has any."""
    output = request.output()
    return [
        (one.token_ids, one.logprobs and (output.prompt_logprobs or []) + one.logprobs, one.finish_reason)
        for one in output.outputs
    ]


def switching(modes: dict[int, str]) -> Callable[[LLMEngine, int], None]:
    """For `run`: enters a mode before the given steps."""

    def at_step(engine: LLMEngine, step: int) -> None:
        if step in modes:
            engine.switch_mode(modes[step])

    return at_step


def assert_pools_as_before(engine: LLMEngine) -> None:
    """Nobody holds anything: rows, blocks of both pools and promises are all back."""
    kv_cache, offload = engine.kv_cache, engine.runner.offload
    tables, lifetimes = kv_cache.tables, kv_cache.tables.lifetimes
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.live.requests
    engine.mover.transfers.finish()
    if offload.host.num_bytes:
        offload.drain()
        lifetimes.reclaim()
        lifetimes.host_blocks.wait_for(0)
        assert offload.host.wait_for(0)[0] == lifetimes.host_blocks.num_blocks
        for on_gpu, key in tables.gpu_blocks.key_of.items():
            if isinstance(key, int):  # a number of a host block, of which it is a copy; others are digests of tokens
                pairs = [(layer[on_gpu], offload.host.block(i, key)) for i, layer in enumerate(engine.runner.gpu_kv)]
                assert all(torch.equal(copy.cpu(), block) for copy, block in pairs), f"host block {key} is another one"
    assert lifetimes.num_deferred_gpu == lifetimes.num_deferred_host == 0
    for pool in (tables.gpu_blocks, lifetimes.host_blocks):
        assert pool.num_used == 0 and pool.num_free == pool.num_blocks
    assert len(kv_cache.free_rows) == tables.num_rows
    assert kv_cache.slots.num_used == 0 and kv_cache.slots.num_free == engine.plan.num_slots
    assert not engine.mover.away and not lifetimes.host_blocks.borrowed, "somebody's KV is kept"
    assert offload.host.borrowed_bytes == 0
    assert kv_cache.num_promised_host == kv_cache.num_reserved_splits == 0 and not tables.promised.any()
    assert kv_cache.copies.residency.num_resident == kv_cache.copies.residency.num_streamed == 0
    assert np.all(tables.gpu == NO_BLOCK) and np.all(tables.host == NO_BLOCK) and not tables.begins.any()
