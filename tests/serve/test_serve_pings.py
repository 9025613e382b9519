"""While a long prompt is read, streams are not silent."""

import asyncio
import queue
import threading

import pytest
from serving import LeavingClient, make_served_checkpoint, serving

from nanoinfer.serve.client import PING_SECONDS

ASKED = dict(prompt=[20 + i % 9 for i in range(200)], max_tokens=3, temperature=0, ignore_eos=True, stream=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


class Clock:
    """Its seconds pass when `tick` is called."""

    def __init__(self):
        self.asked, self._ticks = [], asyncio.Semaphore(0)

    async def sleep(self, seconds):
        self.asked.append(seconds)
        await self._ticks.acquire()

    async def tick(self):
        num_asked = len(self.asked)
        self._ticks.release()
        while len(self.asked) == num_asked:
            await asyncio.sleep(0)


def body_of(client):
    return b"".join(message.get("body", b"") for message in client.messages).decode()


def without_ids(text):
    """The events of a stream, and the comments apart."""
    parts = text.split("\n\n")
    head = '"choices"'
    return [part[part.index(head) :] if head in part else part for part in parts if not part.startswith(":")], [
        part for part in parts if part.startswith(":")
    ]


def test_a_silent_stream_is_pinged_with_progress_and_else_unchanged(path):
    async def ask():
        clock, may_step = Clock(), queue.Queue()
        async with serving(path, enable_prefix_caching=False, app_options=dict(sleep=clock.sleep)) as served:
            plain = await served.post(**ASKED)
            engine, original = served.engine, served.engine.step
            has_stepped = threading.Semaphore(0)

            def step():
                may_step.get(timeout=30)
                outputs = original()
                has_stepped.release()
                return outputs

            engine.step = step
            clock.asked.clear()
            client = LeavingClient(served.app, ASKED)
            await served.wait_until(lambda _: clock.asked)
            await clock.tick()
            await served.wait_until(lambda _: body_of(client))
            for num_steps in (1, 2):
                may_step.put(1)
                await asyncio.to_thread(has_stepped.acquire, timeout=30)
                await clock.tick()
                await served.wait_until(lambda _, n=num_steps: body_of(client).count(":") > n)
            for _ in range(20):
                may_step.put(1)
            await served.wait_until(lambda _: client.task.done())
            assert set(clock.asked) == {PING_SECONDS}
            await served.wait_until_idle()
            return plain.text, body_of(client)

    plain, pinged = asyncio.run(ask())
    events, comments = without_ids(pinged)
    assert comments == [f": {n} of 200 prompt tokens read" for n in (0, 64, 128)]
    assert without_ids(plain) == (events, [])


def test_a_stream_with_outputs_between_two_looks_is_not_pinged(path):
    async def ask():
        clock = Clock()
        async with serving(path, app_options=dict(sleep=clock.sleep)) as served:
            engine, original = served.engine, served.engine.step
            may_go_on, has_output = threading.Event(), []

            def step():
                assert not has_output or may_go_on.wait(30)
                outputs = original()
                has_output.extend(outputs)
                return outputs

            engine.step = step
            client = LeavingClient(served.app, ASKED | dict(max_tokens=20))
            await served.wait_until(lambda _: "choices" in body_of(client))
            await clock.tick()  # there was an output since the first look
            may_go_on.set()
            await served.wait_until(lambda _: client.task.done())
            assert "\n\n:" not in body_of(client) and not body_of(client).startswith(":")

    asyncio.run(ask())
