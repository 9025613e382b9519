"""Experts that kernels bring one by one pass over the link like all else: whatever counts its bytes counts theirs."""

from functools import partial
from types import SimpleNamespace

import pytest
from engines import SMALL, make_engine, random_prompts, some_params

from nanoinfer.engine.meter import LaunchedStep, StepMeter
from nanoinfer.execution.link_speed import link_speed
from nanoinfer.models.expert_slots import SlotSet


def step(num_sequences: int, streamed_bytes: int = 0, chunks: tuple = ()) -> LaunchedStep:
    sequences = [SimpleNamespace(fetched_bytes=0, copy_wait_seconds=0.0) for _ in range(num_sequences)]
    batch = SimpleNamespace(sequences=sequences, decoding=sequences, chunks=chunks)
    return LaunchedStep(batch, 0, 0.0, streamed_bytes, None)


def test_a_step_waits_for_the_experts_that_it_brings():
    meter = StepMeter(SimpleNamespace(expert_link=100.0))
    read = partial(meter.count, num_experts=0)
    read(step(1, chunks=(SimpleNamespace(begin=0, end=3),)), now=10.0, wait_seconds=0.0, fetched_bytes=500)
    assert meter.fetched_bytes == 500 and not meter.times.num_steps, "of a prompt's step"
    one = step(3)
    read(one, now=12.0, wait_seconds=2.0, fetched_bytes=600)  # 100 bytes in one of two seconds
    times = meter.times
    assert (times.streamed_bytes, times.fetched_bytes, times.fetch_seconds) == (100, 100, 1.0)
    assert (times.num_streaming_steps, times.streaming_seconds) == (1, 2.0)
    assert times.link_busy_fraction == times.wait_fraction == times.fetch_fraction == 0.5 and times.bound == "link"
    assert [sequence.fetched_bytes for sequence in one.batch.sequences] == [33, 33, 34], "shared out, none is lost"
    assert all(sequence.copy_wait_seconds == 1.0 for sequence in one.batch.sequences)
    read(step(1, streamed_bytes=7), now=16.0, wait_seconds=4.0, fetched_bytes=650)
    assert (times.streamed_bytes, times.fetched_bytes) == (157, 150)
    assert times.bound == "unknown", "no step was timed in which the copy engine brought something"
    times.sampled_seconds = 1.0
    assert times.fetch_fraction == 0.25 and times.bound == "device memory"


@pytest.mark.parametrize("options", [{}, dict(enable_cpu_offload=True)], ids=["resident", "offload"])
def test_counters_and_requests_have_the_bytes_of_experts(path_of, options):
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3, max_num_seqs=4, **options)
    requests = [
        engine.add_request(str(number), prompt, params)
        for number, (prompt, params) in enumerate(zip(random_prompts(4, 2, 40, 5), some_params(4, 9), strict=True))
    ]
    while engine.has_work:
        engine.step()
    stats, copied = engine.stats(), engine.runner.offload.counters.streamed_bytes
    assert stats["streamed_bytes"] - copied == stats["expert_fetched_bytes"] > 0
    assert 0 < engine.meter.times.fetched_bytes <= stats["decode_streamed_bytes"] and stats["link_gbps"] > 0
    of_requests = sum(request.output().metrics.streamed_bytes for request in requests)
    # A step may be read that gives none of its tokens to anybody; what it brought is nobody's.
    assert 0.8 * stats["streamed_bytes"] < of_requests <= stats["streamed_bytes"]


def test_what_ran_before_the_engine_was_ready_is_not_counted(path_of, monkeypatch):
    """As on a GPU, where steps that compile kernels and measure memory bring experts."""
    give = SlotSet.give

    def used(self, most_rows):
        self.counts.fill_(7)
        give(self, most_rows)

    monkeypatch.setattr(SlotSet, "give", used)
    stats = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3).stats()
    assert stats["expert_hits"] == stats["expert_fetches"] == stats["streamed_bytes"] == 0


def test_the_link_is_measured_where_experts_come_over_it(path_of):
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3)
    runner, streamed = engine.runner, engine.runner.model.streamed
    assert runner.expert_link is None, "there is no link to the CPU"
    assert link_speed(runner.runtime, runner.compute, streamed) > 0
    wide = make_engine(path_of("qwen3_moe", **SMALL)).runner
    assert link_speed(wide.runtime, wide.compute, wide.model.streamed) is None
