"""An engine that fails, and the end of a server: nobody waits for ever, and nobody else notices."""

import asyncio

import pytest
from serving import events, make_served_checkpoint, metrics_of, serving

from nanoinfer.serve.async_engine import AsyncEngine

LONG = dict(max_tokens=300, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("place", ["launch", "read", "schedule"])
def test_a_failed_step_ends_its_requests_and_no_others(path, place):
    """One long request runs; one that has all its tokens but the last read; a step fails; then others come."""

    async def ask():
        async with serving(path, max_num_seqs=1) as served:
            wanted = await served.complete([40], max_tokens=20)
            engine = served.engine
            owner, name = {
                "launch": (engine.runner, "decode"),
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


def test_tokens_read_before_a_failed_launch_are_delivered(path):
    """The engine keeps them for its next call, which must come although nothing is left to run."""

    async def ask():
        async with serving(path) as served:
            wanted = await served.complete([40], max_tokens=3)
            original = served.engine.runner.decode

            def broken(batch, timeline):
                if [sequence.prompt_token_ids for sequence in batch.sequences] == [[20]]:
                    raise RuntimeError("out of luck")  # the other's last token is in flight
                return original(batch, timeline)

            served.engine.runner.decode = broken
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
            await served.wait_until(lambda served: served.async_engine.num_generated_tokens > 10)

            def lost(*_):
                raise RuntimeError("the device is lost")

            served.engine.runner.decode = served.engine.runner.settle = lost
            for response in await asyncio.gather(*running):
                assert response.status_code == 503 and "the device is lost" in response.json()["error"]["message"]
            assert (await served.client.get("/health")).status_code == 503
            assert (await served.post(prompt=[5])).json()["error"]["code"] == "engine_dead"
            assert (await served.client.get("/metrics")).status_code == 503
            assert served.async_engine.has_failed and not served.async_engine.num_streams

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_an_engine_that_cannot_be_made_says_why():
    def make():
        raise ValueError("no such model")

    engine = AsyncEngine(make)
    with pytest.raises(ValueError, match="no such model"):
        engine.start()
    engine.close()
    with pytest.raises(ValueError, match="max_queue is 0"):
        AsyncEngine(make, max_queue=0)


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
            await served.wait_until(lambda served: served.async_engine.num_generated_tokens > 20)
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
            await served.wait_until(lambda served: served.async_engine.num_generated_tokens > 3)
            served.async_engine.close()
            assert (await running).status_code == 503

    asyncio.run(ask())
