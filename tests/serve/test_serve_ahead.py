"""The next turn of a conversation finds what was computed ahead, through each API, and has the bits of a cold start."""

import asyncio

import pytest
from serving import LeavingClient, events, make_served_checkpoint, metrics_of, serving

from nanoinfer.engine import ahead
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import Message, ToolCall
from nanoinfer.requests import chats
from nanoinfer.serve.next_prompts import message_of

WORDS = "w31 w32 w33 w34 w35 w36 w37 w38 w39 w40 w41 w42 w43 w44 w45 w46 w47 w48 w49 w50"
COMMON = dict(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _marks_are_words(monkeypatch):
    """And steps are as short as they may be."""
    monkeypatch.setattr(chats, "_MARKS", ("w98", "w99"))
    monkeypatch.setattr(ahead, "MAX_SECONDS", 1e9)


async def chat(served, messages, **more):
    body = dict(messages=messages, max_tokens=24, logprobs=True, top_logprobs=3, **COMMON, **more)
    response = (await served.post("/v1/chat/completions", **body)).json()
    (choice,) = response["choices"]
    return choice["message"]["content"], response["usage"]["prompt_tokens_details"]["cached_tokens"], choice["logprobs"]


async def responses(served, messages):
    response = (await served.post("/v1/responses", input=messages, max_output_tokens=24, **COMMON)).json()
    (message,) = response["output"]
    cached = response["usage"]["input_tokens_details"]["cached_tokens"]
    return message["content"][0]["text"], cached, None


async def agents(served, messages):
    response = (await served.post("/v1/messages", messages=messages, max_tokens=24, **COMMON)).json()
    return response["content"][0]["text"], response["usage"]["cache_read_input_tokens"], None


async def streamed(served, messages):
    body = dict(messages=messages, max_tokens=24, stream=True, stream_options=dict(include_usage=True), **COMMON)
    chunks = events((await served.post("/v1/chat/completions", **body)).text)
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], None


async def computed(served):
    requests = served.async_engine.requests
    await served.wait_until(lambda served: not requests.ahead.is_wanted and not served.engine.has_work)


async def turns(served, ask, number=3):
    """What turn after turn says, how much each found, and how much could be found."""
    messages, said = [], []
    for turn in range(number):
        messages = [*messages, {"role": "user", "content": f"w{60 + turn} {WORDS}"}]
        text, found, logprobs = await ask(served, messages)
        said.append((text, found, logprobs))
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(0.05)
        await computed(served)
    return said


@pytest.mark.parametrize("ask", [chat, streamed, responses, agents])
def test_a_turn_finds_all_that_was_known_and_is_that_of_a_cold_start(path, ask):
    async def talk():
        async with serving(path) as served, serving(path, enable_prefix_caching=False) as cold:
            found, wanted = await turns(served, ask), await turns(cold, ask)
            metrics = await metrics_of(served)
            await served.wait_until_idle()
            return found, wanted, metrics

    found, wanted, metrics = asyncio.run(talk())
    assert [(text, logprobs) for text, _, logprobs in found] == [(text, logprobs) for text, _, logprobs in wanted]
    # Each message has a word in front; nothing is known of whether the first turn will be the last.
    assert [cached for _, cached, _ in found] == [0, (1 + 21) // 16 * 16, 2 * (22 + 25) // 16 * 16]
    assert metrics["nanoinfer:computed_ahead_tokens_total"] == 2 * 16
    assert metrics["nanoinfer:computed_ahead_left_out_total"] == 0


def test_it_can_be_turned_off(path):
    async def talk():
        async with serving(path, limits=dict(compute_ahead=False)) as served:
            return await turns(served, chat), await metrics_of(served)

    found, metrics = asyncio.run(talk())
    assert [cached for _, cached, _ in found] == [0, 16, (22 + 25 + 22) // 16 * 16]
    assert metrics["nanoinfer:computed_ahead_tokens_total"] == 0


def test_requests_that_come_meanwhile_get_their_answers(path, fuzz):
    async def talk():
        async with serving(path, num_gpu_blocks_override=30, max_queue=2) as served:
            alone = [(await chat(served, [{"role": "user", "content": f"w{70 + i} {WORDS}"}]))[0] for i in range(4)]
            await turns(served, chat)
            beginnings = [[i] * 64 for i in range(20, 28)]
            for i, beginning in enumerate(beginnings * 3 if fuzz else beginnings):
                served.async_engine.offer(beginning)
                await asyncio.sleep(0.002 * (i % 5))
                assert (await chat(served, [{"role": "user", "content": f"w{70 + i % 4} {WORDS}"}]))[0] == alone[i % 4]
            await computed(served)
            await served.wait_until_idle()

    asyncio.run(talk())


def test_nothing_is_computed_for_a_client_that_left_or_several_choices(path):
    asked = dict(messages=[{"role": "assistant", "content": WORDS}, {"role": "user", "content": WORDS}], **COMMON)

    async def talk():
        async with serving(path) as served:
            client = LeavingClient(served.app, dict(max_tokens=50, **asked), "/v1/chat/completions")
            await served.wait_until(lambda served: served.engine.live.requests)
            client.leave()
            await client.task
            await served.post("/v1/chat/completions", n=2, max_tokens=24, **asked)
            await served.post("/v1/chat/completions", max_tokens=1, messages=asked["messages"][1:], **COMMON)
            await asyncio.sleep(0.05)
            await computed(served)
            return await metrics_of(served)

    assert asyncio.run(talk())["nanoinfer:computed_ahead_tokens_total"] == 0


def test_behind_calls_results_come_next_and_what_was_thought_only_if_it_comes_back():
    spoken = Message("said", "thought", [ToolCall("call_1", "look", "{}", True)])
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    without = {"role": "assistant", "content": "said", "tool_calls": [call]}
    assert message_of(spoken, with_reasoning=False) == without
    answer = message_of(spoken, with_reasoning=True)
    assert answer == without | {"reasoning_content": "thought"}
    shown = []

    class Template(chats.ChatTemplate):
        def encode(self, messages, *arguments, **how):
            shown.append(messages)
            return [1, 2, ord(messages[-1]["content"][-1]), 4]

    template = Template(None, AnswerFormat.of(""))
    history = [{"role": "user", "content": "ask"}]
    assert template.next_beginning(history, answer) == [1, 2]
    assert [[message["role"] for message in messages] for messages in shown] == [["user", "assistant", "tool"]] * 2
    assert shown[0][-1]["tool_call_id"] == "call_1"
    assert template.next_beginning(history, {"role": "assistant", "content": "said"}) == [1, 2]
    assert shown[-1][-1]["role"] == "user"
