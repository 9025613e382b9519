"""The server's log: a line for each request, one every ten seconds under load, as text or JSON, and no prompt in it."""

import asyncio
import io
import json
import logging
import re
import types
from types import SimpleNamespace

import pytest
from serving import LeavingClient, make_served_checkpoint, serving

from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.options.serve import LEVELS
from nanoinfer.serve.ended import EndedRequest, bound_of
from nanoinfer.serve.load import LOAD_SECONDS, LoadMeter
from nanoinfer.serve.log import START, logging_to
from nanoinfer.serve.log_lines import load_text, log_request, request_text

ENDED = dict(
    name="cmpl-1", reasons=["length"], num_prompt_tokens=30, num_cached_tokens=16, num_generated_tokens=9,
    first_token=0.25, total=1.5, per_token=0.125, bound="link", failure=None, token_ids=[], num_found=0,
    streamed_bytes=3 * 2**29,
)  # fmt: skip
TEXT = (
    "request cmpl-1: 30 tokens in (16 from cache), 9 out, first after 0.250 s, 1.500 s in all, 8.0 tokens/s, finish "
    "length, 1.50 GiB over the link, bound by link"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def ended(**changes):
    return EndedRequest(**(ENDED | changes))


def written(level, form, *requests):
    stream = io.StringIO()
    with logging_to(level, form, stream):
        for one in requests:
            log_request(one)
    return stream.getvalue().splitlines()


def served_lines(path, work, level="info", **arguments):
    """The JSON lines of a server in which `work` was done."""
    stream = io.StringIO()

    async def serve():
        async with serving(path, **arguments) as served:
            await work(served)
            await served.wait_until_idle()

    with logging_to(level, "json", stream):
        asyncio.run(serve())
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_as_text_and_as_json():
    (line,) = written("info", "text", ended())
    assert line.endswith(f" INFO nanoinfer.serve: {TEXT}")
    (line,) = written("info", "json", ended())
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z") and entry == {
        "level": "info", "logger": "nanoinfer.serve", "event": "request", "id": "cmpl-1", "prompt_tokens": 30,
        "cached_tokens": 16, "output_tokens": 9, "time_to_first_token": 0.25, "total_time": 1.5,
        "tokens_per_second": 8.0, "finish_reason": "length", "bound": "link", "streamed_bytes": 3 * 2**29,
    }  # fmt: skip
    early = ended(first_token=None, per_token=None, reasons=["abort"] * 2, num_generated_tokens=0, streamed_bytes=0)
    assert "0 out, no token, 1.500 s in all, finish abort, bound" in request_text(early)


def test_the_level_chooses_and_ends_with_the_server():
    failure = ValueError("a tokenizer may quote w20 w21")
    both = [ended(), ended(reasons=["error"], failure=failure)]
    assert [len(written(level, "json", *both)) for level in LEVELS] == [3, 2, 1, 1]
    assert (
        "quote" not in "".join(written("info", "text", *both)) and "(ValueError)" in written("error", "text", *both)[0]
    )
    assert "a tokenizer may quote" in "".join(written("debug", "text", *both))
    stream = io.StringIO()
    with logging_to("error", "text", stream):
        logging.getLogger(START).info("serving on")
        logging.getLogger("nanoinfer").info("shutting down")
        logging.getLogger("another.library").warning("a warning")
        logging.getLogger("another.library").error("an error")
    logging.getLogger("nanoinfer").error("behind its end")
    said = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert said == ["INFO nanoinfer.start: serving on", "ERROR another.library: an error"], (
        "who waits must see the first"
    )


def test_a_clients_id_stays_within_its_line():
    (line,) = written("info", "text", ended(name="cmpl-x\n2026 ERROR all is lost\x1b[2J"))
    assert r"request 'cmpl-x\n2026 ERROR all is lost\x1b[2J': 30 tokens" in line


def test_each_prompt_has_a_line_with_the_answers_id_and_no_text(path):
    prompt = [20 + i % 90 for i in range(40)]

    async def work(served):
        asked = dict(max_tokens=40, ignore_eos=True, temperature=0)
        one = await served.complete("w20 w21 w22", request_id="mine", n=2, max_tokens=5)
        answers.append(one["id"])
        await served.complete(prompt, request_id="again", **asked)
        await served.complete([prompt, prompt[:20]], request_id="two", **asked)

    answers = []
    lines = served_lines(path, work)
    assert answers == ["cmpl-mine"] and all(line["event"] == "request" for line in lines)
    mine, again, *two = lines
    counts = ("id", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason")
    assert [mine[name] for name in counts] == ["cmpl-mine", 3, 0, 10, "length"]
    assert [again[name] for name in counts] == ["cmpl-again", 40, 0, 40, "length"]
    found = sorted([line[name] for name in counts] for line in two)
    assert found == [["cmpl-two-0", 40, 32, 40, "length"], ["cmpl-two-1", 20, 16, 40, "length"]]
    for line in lines:
        assert 0 < line["time_to_first_token"] <= line["total_time"] and line["tokens_per_second"] > 0
        assert line["bound"] in ("queue", "prefill", "link", "device memory", "CPU", "unknown")
    assert "w20" not in json.dumps(lines)


def test_clients_that_leave_and_requests_that_fail_have_a_line_each(path):
    async def work(served):
        client = LeavingClient(served.app, dict(prompt=[20, 21], max_tokens=300, ignore_eos=True))
        await served.wait_until(lambda served: served.engine.live.requests)
        client.leave()
        await client.task
        await served.wait_until(lambda served: not served.engine.live.requests)
        served.engine.runner.execute = None  # the next step fails
        assert (await served.post(prompt="w30 w31")).status_code == 500
        del served.engine.runner.execute

    lines = served_lines(path, work)  # the two kinds come from different threads
    (step,), (left, failed) = ([line for line in lines if ("event" in line) == kind] for kind in (False, True))
    assert (left["finish_reason"], left["prompt_tokens"], left["level"]) == ("abort", 2, "info")
    assert step["message"] == "a step of the engine failed" and "Traceback" in step["exception"]
    assert (failed["finish_reason"], failed["level"], failed["output_tokens"]) == ("error", "error", 0)


def test_what_bound_a_request_is_what_took_most_of_its_time():
    times = DecodeTimes(seconds=1.0, host_seconds=1.0)

    def bound(*moments, times=times):
        arrival, scheduled, first, now = moments
        return bound_of(types.SimpleNamespace(first_scheduled=scheduled, first_token=first), arrival, now, times)

    assert bound(0, 3, 4, 5) == "queue" and bound(0, 1, 4, 5) == "prefill"
    assert bound(0, 1, 2, 9) == "CPU" == times.bound and bound(0, 1, 2, 9, times=None) == "unknown"
    assert bound(0, None, None, 2) == "queue" and bound(0, 1, None, 3) == "prefill"


def test_the_load_is_said_every_ten_seconds_while_steps_run(path):
    async def ask():
        async with serving(path) as served:
            await served.complete([20, 21], max_tokens=2)
            server, engine = served.async_engine.requests, served.engine
            meter = LoadMeter(engine, server)

            def step(began, now, prompt_tokens=0, generated=0):
                meter.before_step(began)
                engine.meter.num_prefill_tokens += prompt_tokens
                server.num_generated_tokens += generated
                load = meter.after_step(now)
                return None if load is None else SimpleNamespace(**load, text=load_text(load))

            assert step(100, 104, prompt_tokens=50, generated=20) is step(104, 109.9) is None
            load = step(109.9, 110, prompt_tokens=50, generated=10)
            assert (load.seconds, load.prompt_tokens_per_second, load.tokens_per_second) == (LOAD_SECONDS, 10, 3)
            assert (load.num_running, load.num_waiting, load.mode, load.host_kv_share) == (0, 0, "resident", None)
            assert re.fullmatch(
                r"load: 0 running, 0 waiting, 10.0 tokens/s in, 0.0 from cache, 3.0 out, KV takes 0% of the GPU's "
                r"blocks, the prefix cache \d+%, resident mode, bound by \w+",
                load.text,
            )
            # One long step is load, too.
            assert step(110, 135, prompt_tokens=100).prompt_tokens_per_second == 4
            assert "over the link" not in load.text
            engine.meter.fetched_bytes += 50 * 10**9  # experts
            load = step(135, 145)
            assert load.link_gbps == 5 and "5.0 GB/s over the link, resident mode" in load.text
            # What was idle counts in no rate, and nothing is said of it.
            assert step(1000, 1001, generated=30) is None
            assert step(1009, 1010, generated=10).tokens_per_second == 4

    asyncio.run(ask())


def test_the_load_of_a_server(path):
    async def work(served):
        await served.complete(list(range(3, 35)), max_tokens=2)
        served.async_engine.requests.load.seconds = 1e-6  # after each step
        await served.complete([*range(3, 35), 40, 41], max_tokens=20)

    lines = served_lines(path, work)
    loads = [line for line in lines if line["event"] == "load"]
    assert len(loads) >= 20 and len(lines) == len(loads) + 2
    assert loads[3]["num_running"] == 1 and 0 < loads[3]["gpu_kv_share"] < 1 and loads[3]["mode"] == "resident"
    assert any(load["tokens_per_second"] > 0 for load in loads)
    assert [i for i, load in enumerate(loads) if load["cached_tokens_per_second"]] == [0]
    assert [i for i, load in enumerate(loads) if load["prompt_tokens_per_second"]] == [1], "it is read a step later"
    assert loads[1]["bound"] == "prefill" != loads[5]["bound"]
    assert loads[-1]["num_running"] == 0 < loads[-1]["gpu_cached_share"]


def test_nothing_is_prepared_where_nothing_is_written(monkeypatch):
    made = []
    monkeypatch.setattr("nanoinfer.serve.log_lines.request_text", made.append)
    assert written("warning", "text", ended()) == [] == made
    assert written("info", "text", ended()) and made
