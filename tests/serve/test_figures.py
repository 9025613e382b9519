"""Figures are declared once, and published between steps: at most so often, and only while somebody reads."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import make_engine
from serving import make_served_checkpoint, metrics_of, serving

from nanoinfer import SamplingParams
from nanoinfer.engine.figures import COUNTER, ENGINES, FIGURES, HISTOGRAM, PUBLISHED, Reading, values
from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.kv.gpu_copies import GPUCopies
from nanoinfer.memory.floors import bytes_read_per_step
from nanoinfer.serve import published
from nanoinfer.serve.metrics import PREFIX
from nanoinfer.serve.published import LEAST_SECONDS, Publisher
from nanoinfer.serve.served_requests import ServedRequests

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_names_are_declared_once_and_the_documents_table_is_made_of_them():
    for names in ([one.name for one in FIGURES], [one.metric for one in FIGURES if one.metric]):
        assert len(names) == len(set(names))
    assert all(one.meaning.endswith((".", "left), error (the engine failed).")) for one in FIGURES)
    spec = importlib.util.spec_from_file_location("figures_table", ROOT / "tools" / "figures_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.DOCUMENT.read_text()
    assert tool.fill_in(text) == text and text.count("| gauge |") > 10, "python tools/figures_table.py"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_floor_of_a_step_is_that_of_the_bytes_that_it_brings_or_reads(path_of, family, streams):
    """That of `bytes_read_per_step`, but for blocks that are not full, and experts as they were chosen."""
    engine = make_engine(path_of(family), max_num_seqs=2, enable_cpu_offload=streams)
    for name, last in dict(a=7, b=8).items():
        engine.add_request(name, [5, 6, last] * 16, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while min((len(one.output_token_ids) for one in engine.scheduler.running), default=0) < 16:
        engine.step()
    times = engine.meter.times
    assert values(ENGINES, Reading(engine))["step_floor_seconds"] == 0.0, "there is no GPU"
    engine.executor.is_host = False
    engine.executor.link, engine.executor.memory_rate = 1.0, 1e12
    copied, fetched = (one / times.num_steps for one in (times.streamed_bytes, times.fetched_bytes))
    assert fetched == 0 and (copied > 0) == streams
    if streams:
        assert values(ENGINES, Reading(engine))["step_floor_seconds"] == copied
    engine.executor.link, engine.executor.memory_rate = 1e12, 1.0
    spec = engine.executor.spec
    full = [one.num_tokens // 16 * 16 for one in engine.scheduler.running]
    assert len(full) == 2 and min(full) >= 64
    read, chosen, of_blocks = bytes_read_per_step(spec, full), 0, 2 * len(spec.kv_groups) * engine.plan.block_bytes
    if spec.sparse is not None:
        read -= int(spec.sparse.expert_bytes * spec.sparse.chosen_share(2))
        chosen = times.experts_read / times.num_steps * spec.sparse.bytes_per_expert
        assert chosen
    assert read + chosen - of_blocks - 2 <= values(ENGINES, Reading(engine))["step_floor_seconds"] <= read + chosen + 2


def test_stats_metrics_and_what_is_published_have_what_is_declared(path):
    async def ask():
        async with serving(path) as served:
            await served.complete([20, 21], max_tokens=3)
            return (
                await served.async_engine.stats(),
                (await served.async_engine.figures()).figures,
                await metrics_of(served),
            )

    stats, figures, metrics = asyncio.run(ask())
    ahead = {"computed_ahead_tokens", "computed_ahead_left_out"}
    assert set(stats) == {one.name for one in ENGINES} | {"advice", "notes"} | ahead
    assert list(figures) == [one.name for one in PUBLISHED] and json.loads(json.dumps(figures)) == figures
    assert all(figures[name] == stats[name] for name in figures.keys() & stats.keys() if "_gbps" not in name)
    names = {name.partition(" ")[0] for name in metrics}
    wanted = {one.metric + {COUNTER: "_total", HISTOGRAM: "_count"}.get(one.kind, "") for one in FIGURES if one.metric}
    # Those with labels come with their first sample.
    assert {PREFIX + name for name in wanted} <= names
    assert figures["state_slots_total"] == 0, "no layer of this model keeps states"
    assert metrics[PREFIX + "generation_tokens_total"] == 3 == figures["num_generated_tokens"]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def publisher(monkeypatch):
    clock, made = Clock(), []
    monkeypatch.setattr(published, "PUBLISHED", [])
    monkeypatch.setattr(published, "Reading", lambda engine, recent, server, is_quick: made.append((clock.now, recent)))
    engine = SimpleNamespace(meter=SimpleNamespace(times=DecodeTimes()), has_work=True)
    return Publisher(engine, None, clock), engine, clock, made


def test_figures_are_read_at_most_so_often_and_only_while_somebody_asks(publisher):
    publisher, _, clock, made = publisher
    for _ in range(5):
        publisher.is_stale = True
        publisher.publish()
    assert made == [] and publisher.seconds_left is None
    futures = [publisher.ask(None) for _ in range(10)]
    publisher.publish()
    assert len(made) == 1 and {one.result(0).number for one in futures} == {1}
    assert publisher.ask(None).done() is False  # what is true now is known
    publisher.publish()
    assert len(made) == 1
    for step in range(1, 129):  # steps of 8 ms, and a reader of each publication
        clock.now = 100 + step / 128
        publisher.is_stale = True
        if futures[-1].done():
            futures.append(publisher.ask(futures[-1].result().number))
        publisher.publish()
    times = [when for when, _ in made]
    assert len(times) == 5 and all(b - a >= LEAST_SECONDS - 1e-9 for a, b in zip(times, times[1:], strict=False))


def test_who_asks_while_nothing_happens_has_what_is_true_or_waits(publisher):
    publisher, _, clock, made = publisher
    first = publisher.ask(None)
    publisher.publish()
    clock.now += 5
    now, later = publisher.ask(None), publisher.ask(first.result(0).number)
    publisher.publish()
    assert now.result(0) is first.result(0) and not later.done() and publisher.seconds_left is None
    publisher.is_stale = True
    assert publisher.seconds_left == 0
    later.cancel()
    publisher.publish()
    assert len(made) == 1, "nobody waits any more"
    last = publisher.ask(1)
    publisher.fail(ValueError("dead"))
    with pytest.raises(ValueError, match="dead"):
        last.result(0)


def test_while_nothing_runs_blocks_are_given_back_until_all_are(publisher):
    publisher, engine, clock, made = publisher
    left = [True, False, False]  # whether all is given back, the last first
    engine.has_work, engine.give_back = False, lambda: left.pop()
    publisher.ask(None)
    publisher.publish()
    for number in (1, 2):
        assert publisher.is_stale and publisher.seconds_left is None
        later = publisher.ask(number)
        clock.now += 1
        publisher.publish()
        assert later.result(0).number == number + 1
    assert not publisher.is_stale and not left


def test_figures_that_cannot_be_read_are_the_readers_loss_alone(publisher):
    publisher, engine, _, _ = publisher
    engine.meter = None
    asked = publisher.ask(None)
    publisher.publish()
    with pytest.raises(AttributeError):
        asked.result(0)
    assert publisher.seconds_left is None


def test_shares_of_time_are_those_of_the_last_seconds(publisher):
    publisher, engine, clock, made = publisher
    for second in range(10):
        clock.now, publisher.is_stale, engine.meter.times.seconds = 100.0 + second, True, float(second)
        publisher.ask(None)
        publisher.publish()
    assert [recent.seconds for _, recent in made] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_readers_enter_no_lock_and_count_no_blocks(path, monkeypatch):
    async def ask():
        async with serving(path, enable_cpu_offload=True) as served:
            await served.complete([20, 21], max_tokens=3)

            def refused(*_):
                raise AssertionError("a reader did this")

            monkeypatch.setattr(served.engine, "changing", refused)
            monkeypatch.setattr(served.engine, "give_back", lambda: True)
            for name in ("num_resident", "num_streamed"):
                monkeypatch.setattr(GPUCopies, name, property(refused))
            try:
                return await metrics_of(served)
            finally:
                monkeypatch.undo()

    assert asyncio.run(ask())[PREFIX + "generation_tokens_total"] == 3


@pytest.mark.parametrize("mode", ["resident", "offload"])
def test_nothing_is_held_in_the_figures_of_an_idle_server(path, mode):
    async def ask():
        async with serving(path, enable_cpu_offload=mode == "offload", enable_prefix_caching=False) as served:
            await served.complete(list(range(20, 80)), max_tokens=40)
            await served.wait_until(lambda served: not served.engine.has_work)
            return (await served.async_engine.figures()).figures

    figures = asyncio.run(ask())
    names = ("gpu_blocks_used", "host_blocks_used", "kv_blocks_resident", "kv_blocks_streamed", "num_running")
    assert {name: figures[name] for name in names} == dict.fromkeys(names, 0)
    assert (figures["streamed_bytes"] > 0) == (mode == "offload")


def test_reading_takes_as_many_calls_whatever_runs_and_however_large_the_pools_are(path):
    def num_calls(num_rows, num_blocks):
        engine = make_engine(path, enable_cpu_offload=True, num_gpu_blocks_override=num_blocks)
        server = ServedRequests(engine, 100)
        for row in range(num_rows):
            engine.add_request(str(row), [5 + row] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
        while len(engine.scheduler.running) < num_rows or engine.scheduler.running[-1].num_tokens < 44:
            engine.step()
        values(PUBLISHED, Reading(engine, server=server, is_quick=True))
        calls = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            values(PUBLISHED, Reading(engine, server=server, is_quick=True))
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(1, 40) == num_calls(6, 400) > len(PUBLISHED)
