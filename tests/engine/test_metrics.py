"""What the engine says of its own steps: timelines, bounds, advice, notes, traces."""

import json
from types import SimpleNamespace

import pytest
from engines import COMMON, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.meter import DecodeTimes, StepMeter
from nanoinfer.engine.trace import write_trace
from nanoinfer.layers.expert_pools import share_pools
from nanoinfer.models import streamed
from offload import Timeline
from offload.runtime.timeline import COMPUTE, COPY, WAIT, WRITE

BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, heads, head size, float32


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(
        "qwen3", tmp_path_factory.mktemp("model"), num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
    )


def test_spans_of_a_lane_follow_each_other():
    runtime = SimulatedRuntime()
    stream, timeline = runtime.stream("compute"), Timeline(runtime)
    timeline.begin(stream, COMPUTE)
    for name in ("layer", WAIT, "attention"):
        stream.run(lambda: sum(range(20_000)))
        timeline.lap(stream, COMPUTE, name, num_bytes=3, cut=1)
    assert timeline.is_complete and [span.name for span in timeline.spans] == ["layer", WAIT, "attention"]
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert after.begin is before.end
    assert timeline.seconds(COPY) == 0
    assert timeline.seconds(COMPUTE, waiting=True) == timeline.spans[1].seconds > 0
    assert timeline.seconds(COMPUTE) == pytest.approx(timeline.spans[0].seconds + timeline.spans[2].seconds)


def test_a_timeline_is_complete_only_when_its_work_has_run():
    runtime = SimulatedRuntime(seed=1)
    stream, timeline = runtime.stream("compute"), Timeline(runtime)
    timeline.begin(stream, COMPUTE)
    timeline.lap(stream, COMPUTE, "layer")
    assert not timeline.is_complete
    stream.synchronize()
    assert timeline.is_complete


@pytest.mark.parametrize(
    "copy, wait, host, bound",
    [
        (0.95, 0.8, 0.1, "link"),
        (0.95, 0.8, 0.97, "link"),  # a host far ahead waits in the launch queue
        (0.30, 0.1, 0.2, "device memory"),
        (0.30, 0.1, 0.95, "CPU"),
        (0.0, 0.0, 0.95, "CPU"),
        (0.0, 0.0, 0.1, "device memory"),
    ],
)
def test_the_bound_follows_from_the_shares(copy, wait, host, bound):
    meter = StepMeter(None)
    assert meter.times.bound == "unknown"
    times = DecodeTimes(
        num_steps=16,
        seconds=10.0,
        host_seconds=10 * host,
        sampled_seconds=2.0,
        copy_seconds=2 * copy,
        wait_seconds=2 * wait,
    )
    assert times.bound == bound
    assert times.link_busy_fraction == copy and times.wait_fraction == wait


def test_a_streaming_run_of_which_no_step_was_timed_is_not_judged():
    times = DecodeTimes(num_steps=3, seconds=2.0, host_seconds=1.9)
    assert times.bound == "CPU"
    times.streamed_bytes = 7
    assert times.bound == "unknown"


def test_the_second_step_of_every_run_is_timed():
    meter = StepMeter(SimpleNamespace(timeline=lambda: Timeline(SimulatedRuntime())))
    for _ in range(3):
        meter.snapshot()
        timed = [meter.timeline(is_decode=True) is not None for _ in range(20)]
        assert [i for i, is_timed in enumerate(timed) if is_timed] == [1, 17]
        assert meter.timeline(is_decode=False) is None


def test_a_run_is_what_came_after_the_one_before():
    before = DecodeTimes(num_steps=3, seconds=2.0, host_seconds=2.0)
    after = DecodeTimes(num_steps=10, seconds=12.0, host_seconds=3.0, num_streaming_steps=7)
    assert after.since(before) == DecodeTimes(num_steps=7, seconds=10.0, host_seconds=1.0, num_streaming_steps=7)
    assert before.bound == "CPU" and after.since(before).bound == "device memory"


def test_streaming_steps_are_sampled_and_counted(path):
    engine = make_engine(path, enable_cpu_offload=True, enable_prefix_caching=False)
    run(engine, random_prompts(2, 60, 60), some_params(2, max_tokens=40, logprobs=None))
    stats = engine.stats()
    assert stats["link_busy_fraction"] > 0 and stats["copy_wait_seconds"] >= 0
    assert 0 < engine.meter.times.sampled_seconds < engine.meter.times.seconds, "every step was timed, or none"
    assert stats["bound"] in ("link", "CPU", "device memory") and stats["advice"]
    assert stats["kv_resident_share"] == 0.0 and stats["notes"] == []


@pytest.mark.parametrize("runtime", [None, SimulatedRuntime(seed=2)], ids=["at once", "simulated"])
def test_experts_that_steps_read_are_counted(runtime, tmp_path, monkeypatch):
    """Each once a layer and step, of tokens alone; what ran before the engine was ready does not count."""

    def pools_of_experts_that_were_read(model, *, device, **others):
        pools = share_pools(model, device=device, **others)
        model.layers[1].mlp.experts.experts_read.add_(100)
        return pools

    monkeypatch.setattr(streamed, "share_pools", pools_of_experts_that_were_read)
    engine = make_engine(make_checkpoint("glm4_moe", tmp_path), runtime)
    chosen = []
    for layer in engine.runner.model.layers[1:]:  # the first is dense

        def record(x, ids, *rest, forward=layer.mlp.experts.forward):
            chosen.append((len(ids), len(ids[ids >= 0].unique())))
            return forward(x, ids, *rest)

        layer.mlp.experts.forward = record
    assert engine.stats()["experts_read_per_layer"] == engine.stats()["prefill_experts_read"] == 0
    run(engine, random_prompts(3, 30, 40), some_params(3, max_tokens=9))
    stats = engine.stats()
    prefill, decode = ([count for rows, count in chosen if (rows > 4) == is_prefill] for is_prefill in (True, False))
    assert stats["prefill_experts_read"] == sum(prefill) and len(decode) == 2 * stats["num_decode_steps"] == 16
    assert stats["experts_read_per_layer"] == sum(decode) / len(decode) > 3
    assert stats["expert_bytes_per_step"] == sum(decode) / 8 * (3 * 48 * 24 * 4), "of three matrices in float32"


def test_a_request_counts_its_own_blocks(path):
    for limit, share in ((0, 0.0), (None, 1.0)):
        engine = make_engine(path, enable_cpu_offload=True, enable_prefix_caching=False, resident_kv_limit=limit)
        # 40 tokens: 2 full blocks; decode steps with 41 to 51 tokens, of which the one with 48 fills the third.
        request = engine.add_request("r", random_prompts(1, 40, 40)[0], SamplingParams(max_tokens=12, ignore_eos=True))
        while not request.is_finished:
            engine.step()
        found = request.output().metrics
        assert found.kv_resident_share == share
        assert found.streamed_bytes == (0 if share else (8 * 2 + 3 * 3) * BLOCK_BYTES)
        assert (found.copy_wait_time > 0) == (engine.meter.times.wait_fraction > 0)


@pytest.mark.parametrize("mode", ["resident", "offload"])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_time_per_token_is_that_of_a_step_though_steps_run_ahead(path, monkeypatch, mode, is_asynchronous):
    """A step takes a second, which passes at its launch (the CPU computes then) or beside the host."""
    engine = make_engine(path, enable_cpu_offload=mode == "offload")
    clock, ends = [0.0], [0.0]
    sample = engine.runner.sample

    class Done:
        def __init__(self) -> None:
            self.end = max(clock[0], ends[-1]) + 1.0
            ends.append(self.end)

        def query(self, rule):
            return clock[0] >= self.end

        def synchronize(self, rule):
            clock[0] = max(clock[0], self.end)

    def one_second(*arguments):
        tokens = sample(*arguments)
        tokens.done = Done()
        if not is_asynchronous:
            tokens.done.synchronize(None)
        return tokens

    monkeypatch.setattr("nanoinfer.engine.meter.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(engine.runner, "sample", one_second)
    for length in (1, 2, 3, 7):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        request = engine.add_request("r", [5, 6, 7], params)
        while not request.is_finished:
            engine.step()
        assert request.metrics().time_per_output_token == (None if length == 1 else 1.0)


def test_settings_without_effect_are_named(path, capsys):
    with LLM(path, **COMMON | dict(enable_cpu_offload=True, resident_kv_limit=None)) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert llm.stats()["notes"] == ["enable_cpu_offload=True has had no effect so far: all KV fits"]
    with LLM(path, **COMMON | dict(enable_cpu_offload="auto", resident_kv_limit=None)) as llm:
        assert 'enable_cpu_offload="auto" has no effect' in llm.stats()["notes"][0]
    with LLM(path, **COMMON | dict(ring_slot_bytes="3MiB", progress_bar=True)) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert any("ring_slot_bytes='3MiB' has no effect" in note for note in llm.stats()["notes"])
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("nanoinfer: bound by ") and "resident_kv_limit=0 has no effect" in line


def test_a_trace_has_every_fill_piece_and_write_and_no_overlap_on_a_lane(path, tmp_path):
    engine = make_engine(path, enable_cpu_offload=True, enable_prefix_caching=False)
    request = engine.add_request("r", random_prompts(1, 40, 40)[0], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.start_trace()
    while not request.is_finished:
        engine.step()
    counters, steps = engine.runner.offload.counters, engine.stats()
    write_trace(tmp_path / "trace.json", engine.stop_trace("offload"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(lanes.values()) == {"CPU", COMPUTE, COPY, WRITE}
    spans = {name: [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == name] for name in lanes.values()}
    assert len(spans[COPY]) == counters.num_fills
    assert sum(event["args"]["bytes"] for event in spans[COPY]) == counters.streamed_bytes
    assert sum(event["args"]["bytes"] for event in spans[WRITE]) == counters.written_bytes
    num_steps = steps["num_decode_steps"] + steps["num_prefill_steps"]
    num_sections = sum(event["name"] == "section" for event in spans[COMPUTE])
    assert num_sections == 4 * num_steps + 1  # pieces of 3 layers; the prompt's head
    assert sum(event["name"].startswith("launch") for event in spans["CPU"]) == num_steps
    for lane in (COMPUTE, COPY, WRITE):
        ordered = sorted(spans[lane], key=lambda event: event["ts"])
        for before, after in zip(ordered, ordered[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_it_is_told_how_far_prompts_are_read(path, monkeypatch):
    engine = make_engine(path, max_num_batched_tokens=64)
    assert engine.live.prompt_tokens() == (0, 0)
    engine.add_request("0", list(range(150)), SamplingParams(max_tokens=4, ignore_eos=True))
    found = [engine.live.prompt_tokens()]
    while engine.has_work:
        engine.step()
        found.append(engine.live.prompt_tokens())
        with monkeypatch.context() as patch:  # where launching a step is not computing it
            patch.setattr(engine.runner.device, "is_asynchronous", True, raising=False)
            found.append(engine.live.prompt_tokens())
    read = [(64, 150), (0, 150), (128, 150), (64, 150), (150, 150), (128, 150)]
    assert found[:8] == [(0, 150), *read, (150, 150)] and found[-1] == (0, 0)
    engine.close()
