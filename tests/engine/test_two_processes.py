"""A process that plans, without a tensor, and one that executes, without a sequence, run together."""

import gc
from dataclasses import replace

import pytest
import torch
from engines import COMMON, SMALL, make_engine, random_prompts, run, some_params
from remote import executing_process, make_parted_engine
from structured import make_structured_checkpoint
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, SamplingParams

MODES = {
    "offload": dict(enable_cpu_offload=True, num_gpu_blocks_override=14, enable_prefix_caching=True),
    "preempted": dict(num_gpu_blocks_override=16),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=14),
}


@pytest.fixture(scope="module")
def connection():
    with executing_process() as connection:
        yield connection


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("offload", "preempted")
def test_two_processes_give_the_tokens_of_one(connection, tmp_path, mode, monkeypatch):
    path = make_checkpoint("qwen3", tmp_path, **SMALL)
    prompts, params = random_prompts(5, 20, 90), some_params(5)
    params[1] = replace(params[1], prompt_logprobs=2)
    wanted = run(make_engine(path), prompts, params)
    num_tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
    config = EngineConfig(model=path, **(COMMON | dict(max_model_len=144) | MODES[mode]))
    engine, plans = make_parted_engine(connection, config, monkeypatch), []
    begin_step, lifetimes = engine.planner.begin_step, engine.kv_cache.tables.lifetimes
    engine.planner.begin_step = lambda batch: plans.append(begin_step(batch)) or plans[-1]
    try:
        assert run(engine, prompts, params) == wanted
        assert engine.executor.ask("num_sequences") == 0
        assert sum(isinstance(one, torch.Tensor) for one in gc.get_objects()) <= num_tensors
        assert (engine.scheduler.num_preemptions > 0) == (mode == "preempted")
        assert any(plan.write_through for plan in plans) == (engine.mode == "offload") == (mode != "preempted")
        assert lifetimes.gpu_blocks.num_used == 0 or lifetimes.num_deferred_gpu
        lifetimes.acknowledgements = SilentRunner()
        run(engine, prompts[:1], params[:1])  # blocks come back by acknowledgement only
        assert bool(lifetimes.num_deferred_host) == (mode != "preempted")
    finally:
        engine.close()


def test_masks_pass_from_one_process_to_the_other(connection, tmp_path, monkeypatch):
    path = make_structured_checkpoint(tmp_path)
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=12, structured_outputs=dict(regex="[a-f]{3,9}"))
        for seed in range(3)
    ]
    engine, prompts = make_engine(path, skip_tokenizer_init=False), random_prompts(3, 5, 40)
    wanted = run(engine, prompts, params)
    parted = make_parted_engine(connection, EngineConfig(model=path, **COMMON), monkeypatch)
    parted.intake = engine.intake  # the side that plans has no tokenizer of its own here
    try:
        assert run(parted, prompts, params) == wanted
    finally:
        parted.close()


class SilentRunner:
    """Acknowledges nothing, and lets nobody wait."""

    def has_run(self, kind, operation, rule):
        return False

    def wait(self, kind, operation, rule):
        raise AssertionError("nothing is acknowledged")
