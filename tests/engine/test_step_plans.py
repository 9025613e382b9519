"""A step is data: planning makes it, and what carries it out needs nothing else."""

import copy
import pickle
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.engine.planner import StepPlanner

MODES = {
    "resident": dict(),
    "preempted": dict(num_gpu_blocks_override=19),
    "offload": dict(enable_cpu_offload=True, num_gpu_blocks_override=14, enable_prefix_caching=True),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=14),
    "mixed": dict(enable_cpu_offload=True, capture_num_tokens=[64], max_num_batched_tokens=80),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("gemma3", tmp_path_factory.mktemp("model"), **SMALL)


def assert_is_data(value: object, name: str = "plan") -> None:
    """Whole numbers, floats, and arrays, tuples, dicts and frozen dataclasses of them."""
    if is_dataclass(value):
        assert type(value).__dataclass_params__.frozen
        for field in fields(value):
            assert_is_data(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            assert_is_data(item, name)
    elif isinstance(value, dict):
        assert_is_data((*value.keys(), *value.values()), name)
    elif isinstance(value, np.ndarray):
        assert value.dtype in (np.int32, np.int64), name
    else:
        assert type(value) in (int, float, bool, type(None)), f"{name} is a {type(value).__name__}"


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_can_be_sent_to_another_process(path, mode, monkeypatch):
    """Its bytes are all that execution needs, also once the planner has changed whatever it made the plan from."""
    prompts = random_prompts(5, 20, 90)
    params = [replace(p, repetition_penalty=1.3 if i == 1 else 1.0) for i, p in enumerate(some_params(5))]
    wanted = run(make_engine(path), prompts, params)
    engine, plans = make_engine(path, SimulatedRuntime(1), **(dict(max_model_len=144) | MODES[mode])), []
    begin_step = engine.planner.begin_step

    def sent(batch):
        plan = begin_step(batch)
        assert_is_data(plan)
        plans.append(pickle.loads(pickle.dumps(plan)))
        return copy.deepcopy(plans[-1])

    monkeypatch.setattr(engine.planner, "begin_step", sent)
    assert run(engine, prompts, params) == wanted
    assert_pools_as_before(engine)
    assert [plan.number for plan in plans] == list(range(len(plans)))
    operations = [plan.operation for plan in plans if plan.operation]
    assert operations == sorted(set(operations)), "each has a number of its own"
    streams = any(np.any((plan.gpu_blocks < 0) & (plan.host_blocks >= 0)) for plan in plans)
    assert streams == (mode in ("offload", "auto", "mixed"))
    assert any(plan.chunks and len(plan.rows) for plan in plans) == (mode == "mixed")
    assert (engine.stats()["num_preemptions"] > 0) == (mode == "preempted")


@pytest.mark.parametrize("mode", ["resident", "offload"])
def test_rows_that_decode_in_turns_are_not_taken_for_each_other(path, mode, monkeypatch):
    """Two of four rows of one length: neither the lists of splits differ from step to step, nor has a row changed."""
    prompts, params = random_prompts(4, 40, 40), [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 4
    wanted = run(make_engine(path), prompts, params)
    one_prefill = dict(max_num_batched_tokens=160)
    engine = make_engine(path, SimulatedRuntime(1), enable_cpu_offload=mode == "offload", **one_prefill)
    schedule, steps = engine.scheduler.schedule, []

    def in_turns():
        batch = schedule()
        if batch is None or batch.chunks:
            return batch
        decoding = sorted(batch.decoding, key=lambda sequence: sequence.num_sampled)[:2]
        steps.append([sequence.row for sequence in decoding])
        return replace(batch, decoding=decoding, sequences=decoding, sampled=decoding)

    monkeypatch.setattr(engine.scheduler, "schedule", in_turns)
    assert run(engine, prompts, params) == wanted
    assert steps == [[0, 1], [2, 3]] * 7
    assert_pools_as_before(engine)


def test_a_plan_can_be_read(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, **SMALL)
    engine, plans = make_engine(path, enable_cpu_offload=True, capture_num_tokens=[64], num_gpu_blocks_override=8), []
    begin_step = engine.planner.begin_step
    engine.planner.begin_step = lambda batch: plans.append(begin_step(batch)) or plans[-1]
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add_request("a", list(range(5, 50)), greedy)
    engine.step()
    engine.add_request("b", [7, 8, 9], greedy)
    while engine.has_work:
        engine.step()
    assert [str(plan) for plan in plans[:3]] == TEXTS


TEXTS = [
    """\
step 0: prefill, may stream
  row 0: tokens 0 to 44, then samples; blocks g1 g2 g3
  sets the sampling of rows 0
  writes through GPU 1 to host 0, GPU 2 to host 1""",
    """\
step 1: decode, may stream
  row 0: tokens 45 to 45, then samples; blocks h0 h1 g3
  uploads rows 0""",
    """\
step 2: prefill and decode, may stream
  row 1: tokens 0 to 2, then samples; blocks g1
  row 0: tokens 46 to 46, then samples; blocks h0 h1 g3
  sets the sampling of rows 1""",
]


@torch.inference_mode()
def test_a_sequence_with_a_token_that_only_the_device_knows_cannot_move(path):
    engine = make_engine(path)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True, presence_penalty=1))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.num_pending == 1
    with pytest.raises(AssertionError, match="only the device knows"):
        StepPlanner(engine.kv_cache, ()).begin_step(engine.scheduler.schedule())
