"""An engine that fails, and the end of a server: nobody waits for ever, and nobody else notices."""

import asyncio
import math
import threading

import pytest
import torch
from serving import events, make_served_checkpoint, metrics_of, serving

from nanoinfer.outputs import Logprob, StreamOutput
from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.request import Request
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.errors import UnavailableError

LONG = dict(max_tokens=200, temperature=0, ignore_eos=True)
USER = {"role": "user", "content": "w20"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_top", [False, True])
def test_a_log_probability_that_is_nan_is_an_error_and_no_number(path, url, stream, is_top, monkeypatch):
    """-inf is -9999.0, as in vLLM."""
    asked = dict(prompt=[20], logprobs=2) if url == "/v1/completions" else dict(messages=[USER], logprobs=True)
    asked |= dict(max_tokens=4, temperature=0, ignore_eos=True, stream=stream)
    asked |= dict(top_logprobs=2) if url != "/v1/completions" else {}
    special = dict(value=-math.inf)

    def logprob(*, rank, **fields):
        return Logprob(rank=rank, **fields | (dict(logprob=special["value"]) if rank == 1 + is_top else {}))

    async def ask():
        async with serving(path) as served:
            monkeypatch.setattr("nanoinfer.requests.request.Logprob", logprob)
            lowest = await served.post(url, **asked)
            assert lowest.status_code == 200 and "-9999.0" in lowest.text
            special["value"] = math.nan
            response = await served.post(url, **asked)
            assert "NaN" in response.text and "-9999" not in response.text
            error = (events(response.text)[-1] if stream else response.json())["error"]
            assert error["code"] == "engine_error" and "a log-probability is NaN" in error["message"]
            assert response.status_code == (200 if stream else 500)
            await served.wait_until_idle()

    asyncio.run(ask())


def test_a_request_whose_logits_are_nan_gets_an_error_and_others_their_answers(path):
    async def ask():
        async with serving(path) as served:
            with torch.inference_mode():  # a checkpoint with such a weight would be refused
                served.engine.runner.model.embed_tokens.weight[150] = torch.nan
            asked = dict(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
            whole, streamed, other = await asyncio.gather(
                served.post(prompt=[7, 150], **asked),
                served.post(prompt=[7, 150], stream=True, **asked),
                served.post(prompt=[7, 15], **asked),
            )
            (event,) = events(streamed.text)
            for error in (whole.json()["error"], event["error"]):
                assert error["code"] == "engine_error" and "logits of the request are NaN" in error["message"]
            assert (whole.status_code, streamed.status_code, other.status_code) == (500, 200, 200)
            assert len(other.json()["choices"][0]["logprobs"]["tokens"]) == 4
            await served.wait_until_idle()

    asyncio.run(ask())


@pytest.mark.parametrize("place", ["launch", "read", "schedule"])
def test_a_failed_step_ends_its_requests_and_no_others(path, place):
    """One long request runs; one that has all its tokens but the last read; a step fails; then others come."""

    async def ask():
        async with serving(path, max_num_seqs=1) as served:
            wanted = await served.complete([40], max_tokens=20)
            engine = served.engine
            owner, name = {
                "launch": (engine.runner, "execute"),
                "read": (engine, "_read_tokens"),
                "schedule": (engine.scheduler, "schedule"),
            }[place]
            original, calls = getattr(owner, name), []

            def broken(*arguments):
                calls.append(1)
                if len(calls) == 12:
                    raise RuntimeError("out of luck")
                return original(*arguments)

            setattr(owner, name, broken)
            failing = asyncio.create_task(served.post(prompt=[20], stream=True, **LONG))
            await served.wait_until(lambda served: served.async_engine.num_streams == 1)
            waiting = asyncio.create_task(served.complete([40], max_tokens=20))
            streamed = await failing
            assert streamed.status_code == 200
            *parts, last = events(streamed.text)
            assert 5 <= len(parts) <= 12 and "out of luck" in last["error"]["message"]
            assert (await waiting)["choices"] == wanted["choices"], "it waited, so it is not affected"
            calls.clear()
            response = await served.post(prompt=[20], **LONG)
            assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
            setattr(owner, name, original)
            assert (await served.complete([40], max_tokens=20))["choices"] == wanted["choices"]
            await served.wait_until_idle()
            samples = await metrics_of(served)
            assert samples["nanoinfer:request_success_total error"] == 2

    asyncio.run(ask())


def test_a_full_gpu_is_told_with_what_to_lower(path, caplog):
    """To the client and in the log, and the server goes on."""

    async def ask():
        async with serving(path) as served:
            runner, execute = served.engine.runner, served.engine.runner.execute

            def full(*arguments):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total\nSee")

            runner.execute = full
            response = await served.post(prompt=[20], **LONG)
            runner.execute = execute
            assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
            assert (await served.complete([40], max_tokens=3))["usage"]["completion_tokens"] == 3
            return response.json()["error"]["message"]

    said = "the GPU's memory is full: 2.00 GiB more were wanted: lower gpu_memory_limit, max_num_batched_tokens or"
    assert said in asyncio.run(ask()) and said in caplog.text


def test_tokens_read_before_a_failed_launch_are_delivered(path):
    """The engine keeps them for its next call, which must come although nothing is left to run."""

    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40], max_tokens=3)
            begin_step = served.engine.planner.begin_step

            def broken(batch):
                if not batch.chunks and [sequence.prompt_token_ids for sequence in batch.decoding] == [[20]]:
                    raise RuntimeError("out of luck")  # the other's last token is in flight
                return begin_step(batch)

            served.engine.planner.begin_step = broken
            bodies = [dict(prompt=[20], max_tokens=9), dict(prompt=[40], max_tokens=3)]
            failed, fine = await asyncio.gather(
                *(served.post(temperature=0, ignore_eos=True, **body) for body in bodies)
            )
            assert failed.status_code == 500
            assert fine.status_code == 200 and fine.json()["choices"] == wanted["choices"]
            await served.wait_until_idle()

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_a_lost_device_ends_everything_and_is_seen_by_the_probe(path):
    async def ask():
        async with serving(path) as served:
            running = [asyncio.create_task(served.post(prompt=[20 + i], **LONG)) for i in range(3)]
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 10)

            def lost(*_):
                raise RuntimeError("the device is lost")

            served.engine.runner.execute = served.engine.runner.settle = lost
            for response in await asyncio.gather(*running):
                assert response.status_code == 503 and "the device is lost" in response.json()["error"]["message"]
            assert (await served.client.get("/health")).status_code == 503
            assert (await served.post(prompt=[5])).json()["error"]["code"] == "engine_dead"
            assert (await served.client.get("/metrics")).status_code == 503
            assert served.async_engine.failure and not served.async_engine.num_streams

    asyncio.run(asyncio.wait_for(ask(), 30))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["out of luck", None])
def test_an_output_that_is_an_error_ends_its_request_and_no_other(path, stream, text):
    """The engine goes on; it says in a step's outputs that one request of it has failed."""

    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40], max_tokens=40)
            engine, original, failed = served.engine, served.engine.step, []

            def step():
                outputs = original()
                for output in outputs:
                    request = engine.live.requests.get(output.request_id)
                    if request and request.prompt_token_ids == [20] and request.sequences[0].num_generated > 5:
                        failed.append(output.request_id)
                        error = dict(finished=True, finish_reason="error", error=text)
                        name = output.request_id
                        gone = StreamOutput(request_id=name, index=0, text_delta="", token_ids_delta=[], **error)
                        return [one for one in outputs if one.request_id != name] + [gone, gone]
                return outputs

            engine.step = step
            failing = asyncio.create_task(served.post(prompt=[[21], [20]], n=2, stream=stream, **LONG))
            fine = asyncio.create_task(served.complete([40], max_tokens=40))
            response = await failing
            assert (await fine)["choices"] == wanted["choices"]
            message = text or "it says no more"
            if stream:
                assert response.status_code == 200
                *parts, last = events(response.text)
                assert len(parts) > 5
            else:
                assert response.status_code == 500
                last = response.json()
            assert message in last["error"]["message"] and last["error"]["code"] == "engine_error"
            stats = await served.wait_until_idle()
            assert len(failed) == 1 and stats["num_decode_tokens"] < 200, "the rest of it has gone on"
            samples = await metrics_of(served)
            assert samples["nanoinfer:request_success_total error"] == 2
            assert samples["nanoinfer:request_success_total abort"] == 2, "the other prompt of the same client"

    asyncio.run(ask())


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_after_a_failed_step_only_those_end_that_the_engine_has_ended(path, reason):
    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40], max_tokens=40)
            engine, original = served.engine, served.engine.step

            def step():
                for name, request in engine.live.requests.items():
                    if request.prompt_token_ids == [20] and request.sequences[0].num_generated > 5:
                        engine.abort(name)
                        request.sequences[0].finish_reason = reason
                        raise RuntimeError("out of luck")
                return original()

            engine.step = step
            failing = asyncio.create_task(served.post(prompt=[20], **LONG))
            await served.wait_until(lambda served: served.async_engine.num_streams == 1)
            fine = asyncio.create_task(served.complete([40], max_tokens=40))
            assert (await failing).status_code == 500
            assert (await fine)["choices"] == wanted["choices"]
            await served.wait_until_idle()

    asyncio.run(ask())


def test_a_step_that_hangs_is_seen_by_the_probe(path):
    async def ask():
        async with serving(path, limits=dict(max_step_seconds=0.05)) as served:
            assert served.async_engine.step_seconds == 0
            original, may_go_on = served.engine.step, threading.Event()

            def hanging():
                assert may_go_on.wait(30)
                return original()

            served.engine.step = hanging
            waiting = asyncio.create_task(served.complete([40], max_tokens=2))
            await served.wait_until(lambda served: served.async_engine.step_seconds > 0.05)
            for url in ("/health", "/ping"):
                response = await served.client.get(url)
                assert response.status_code == 503 and response.json()["error"]["code"] == "engine_hangs"
                assert "longer than --max-step-seconds 0.05" in response.json()["error"]["message"]
            served.async_engine.max_step_seconds = 1000
            assert (await served.client.get("/health")).status_code == 200, "long, and not too long"
            may_go_on.set()
            await waiting
            assert served.async_engine.step_seconds == 0

            def failing():
                served.engine.step = original
                raise RuntimeError("out of luck")

            served.engine.step = failing
            assert (await served.post(prompt=[40])).status_code == 500
            await served.wait_until_idle()
            assert served.async_engine.step_seconds == 0, "a step that failed does not run"

    asyncio.run(ask())


class WatchedLock:
    """A lock that says who comes to it."""

    def __init__(self) -> None:
        self._lock, self.engine_is_here = threading.Lock(), threading.Event()

    def __enter__(self):
        if threading.current_thread().name == "nanoinfer-engine":
            self.engine_is_here.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_what_is_asked_while_the_engine_ends_is_answered(path):
    """The engine's thread empties its inbox for the last time between somebody's look whether it has and the
    putting."""

    async def ask():
        async with serving(path) as served:
            engine = served.async_engine
            inner, lock = engine._inbox, WatchedLock()
            engine._lock = lock

            class Inbox:
                get, get_nowait, empty = inner.get, inner.get_nowait, inner.empty

                def put(self, call):
                    if call is not None:  # the question below
                        inner.put(None)  # what `close` puts
                        assert lock.engine_is_here.wait(10) or not engine._thread.is_alive()
                        engine._thread.join(0.3)  # it cannot end before this is put, if it is locked out
                    inner.put(call)

            engine._inbox = Inbox()
            with pytest.raises(UnavailableError, match="the engine is not running"):
                await asyncio.wait_for(engine.stats(), 10)
            engine._inbox = inner

    asyncio.run(ask())


def test_an_engine_that_cannot_be_made_says_why():
    def make():
        raise ValueError("no such model")

    engine = AsyncEngine(make)
    with pytest.raises(ValueError, match="no such model"):
        engine.start()
    engine.close()
    with pytest.raises(ValueError, match="max_queue is 0"):
        AsyncEngine(make, max_queue=0)
    with pytest.raises(ValueError, match="max_queue_bytes is 1000, it must be at least 33554432"):
        AsyncEngine(make, max_queue_bytes=1000)
    with pytest.raises(ValueError, match="max_step_seconds is 0"):
        AsyncEngine(make, max_step_seconds=0)


# Shutdown


def test_running_requests_end_and_new_ones_are_refused_at_shutdown(path):
    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40], **LONG)
            running = asyncio.create_task(served.complete([40], **LONG))
            await served.wait_until(lambda served: served.async_engine.num_streams == 1)
            served.async_engine.begin_shutdown()
            response = await served.post(prompt=[5])
            assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
            await served.async_engine.drain(30)
            assert (await running)["choices"] == wanted["choices"]
            await served.wait_until_idle()

    asyncio.run(ask())


def test_what_outlasts_the_grace_period_ends_with_an_error(path):
    async def ask():
        async with serving(path) as served:
            whole = asyncio.create_task(served.post(prompt=[40], **LONG))
            streamed = asyncio.create_task(served.post(prompt=[40], stream=True, **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 20)
            await served.async_engine.drain(0)
            assert (await whole).status_code == 503
            *parts, last = events((await streamed).text)
            assert len(parts) >= 5 and "had not ended within 0 s" in last["error"]["message"]
            await served.wait_until_idle()

    asyncio.run(ask())


def test_requests_get_an_end_when_the_engine_is_closed_under_them(path):
    async def ask():
        async with serving(path) as served:
            running = asyncio.create_task(served.post(prompt=[40], **LONG))
            await served.wait_until(lambda served: served.async_engine.requests.num_generated_tokens > 3)
            served.async_engine.close()
            assert (await running).status_code == 503

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ["flush", "metrics"])
def test_a_client_is_told_what_fails_at_the_last_token(path, monkeypatch, what, stream):
    """And the server goes on."""

    def broken(one):
        raise KeyError("no such piece")

    async def ask():
        async with serving(path) as served:
            with monkeypatch.context() as patch:
                patch.setattr(*{"flush": (Detokenizer, "flush"), "metrics": (Request, "metrics")}[what], broken)
                asked = dict(prompt=[20], max_tokens=3, temperature=0, ignore_eos=True, stream=stream)
                response = await asyncio.wait_for(served.post(**asked), 60)
            error = (events(response.text)[-1] if stream else response.json())["error"]
            assert error["code"] == "engine_error" and "no such piece" in error["message"]
            assert (await served.complete([40], max_tokens=4))["choices"][0]["finish_reason"] == "length"
            await served.wait_until_idle()

    asyncio.run(ask())
