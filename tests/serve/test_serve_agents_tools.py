"""Tools and thinking in the Responses API and the Messages API: the official clients, and a model that says them."""

import asyncio
import json

import anthropic
import httpx2
import pytest
from scripted import client_of, make_speaking_checkpoint, saying
from serving import MODEL
from transformers import AutoTokenizer
from written_calls import TEMPLATES

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("get_weather", "clock")]
TOOLS = [{"name": one["name"], "input_schema": SCHEMA} for one in FUNCTIONS]
SAID = (
    "<think>\nI look.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()
    return make_speaking_checkpoint(tmp_path_factory.mktemp("qwen3"), template, ("<think>", "</think>", "<tool_call>"))


def ask(path, work, said=SAID):
    """What `work` returns, called with both clients of a model that says this, and the server."""
    tokenizer = AutoTokenizer.from_pretrained(path)

    async def run():
        async with client_of(path) as (client, served):
            transport = httpx2.ASGITransport(served.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport) as http:
                other = anthropic.AsyncAnthropic(
                    base_url="http://server", api_key="none", max_retries=0, timeout=60, http_client=http
                )
                with saying(tokenizer, said):
                    return await work(client, other, served)

    return asyncio.run(run())


def test_responses_call_tools(path):
    asked = dict(model=MODEL, input="Hi", tools=FUNCTIONS)

    async def work(client, other, served):
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            return whole, events, await stream.get_final_response()

    whole, events, final = ask(path, work)
    for response in (whole, final):
        thought, said, weather, clock = response.output
        assert thought.content[0].text.strip() == "I look." and said.content[0].text == "Let me see."
        assert (weather.type, weather.name, json.loads(weather.arguments)) == (
            "function_call", "get_weather", {"city": "Ålesund"},
        )  # fmt: skip
        assert (clock.name, clock.arguments) == ("clock", "{}") and weather.call_id != clock.call_id
        assert response.status == "completed" and 0 < response.usage.output_tokens_details.reasoning_tokens
        assert response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 2 and "".join(deltas) == weather.arguments + clock.arguments


def test_messages_call_tools(path):
    asked = dict(model=MODEL, max_tokens=500, messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)

    async def work(client, other, served):
        whole = await other.messages.create(**asked)
        async with other.messages.stream(**asked) as stream:
            return whole, [event async for event in stream], await stream.get_final_message()

    whole, events, final = ask(path, work)
    for message in (whole, final):
        thought, said, weather, clock = message.content
        assert thought.thinking.strip() == "I look." and said.text == "Let me see."
        assert (weather.name, weather.input, clock.name, clock.input) == (
            "get_weather",
            {"city": "Ålesund"},
            "clock",
            {},
        )
        assert message.stop_reason == "tool_use"
    deltas = [
        event for event in events if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert len(deltas) > 2 and {event.index for event in deltas} == {2, 3}


@pytest.mark.parametrize("stop, is_call", [("Åle", False), ("clock", True)])
def test_a_stop_string_within_arguments_is_no_call(path, stop, is_call):
    """A call that was whole before it is one."""
    asked = dict(model=MODEL, max_tokens=500, messages=[{"role": "user", "content": "Hi"}])
    functions = [{"type": "function", "function": {"name": one["name"], "parameters": SCHEMA}} for one in FUNCTIONS]

    async def work(client, other, served):
        chat = await client.chat.completions.create(**asked, tools=functions, stop=stop)
        return chat.choices[0], await other.messages.create(**asked, tools=TOOLS, stop_sequences=[stop])

    choice, message = ask(path, work)
    has_begun = bool(choice.message.tool_calls)
    assert has_begun and choice.finish_reason == ("tool_calls" if is_call else "stop")
    assert message.stop_reason == ("tool_use" if is_call else "stop_sequence")


def test_both_apis_show_the_model_what_a_chat_does(path):
    """A history with thinking, calls and results, and tools: the prompt is the same in all three."""
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Oslo"}'}}
    chat = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]
    functions = [{"type": "function", "function": {"name": one["name"], "parameters": SCHEMA}} for one in FUNCTIONS]
    items = [
        {"role": "user", "content": "Time?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "clock", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "a", "output": "12"},
    ]
    blocks = [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "clock", "input": {"city": "Oslo"}},
    ]
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "12"}]},
    ]

    async def work(client, other, served):
        prompts, tokenize = [], served.engine.add_request

        def add(request_id, prompt, params, token_ids, *rest):
            prompts.append(token_ids)
            return tokenize(request_id, prompt, params, token_ids, *rest)

        served.engine.add_request = add
        await client.chat.completions.create(model=MODEL, messages=chat, tools=functions)
        await client.responses.create(model=MODEL, instructions="You help.", input=items, tools=FUNCTIONS)
        asked = dict(model=MODEL, system="You help.", messages=messages, tools=TOOLS)
        await other.messages.create(**asked, max_tokens=500)
        return prompts, (await other.messages.count_tokens(**asked)).input_tokens

    (wanted, *others), counted = ask(path, work, said="")
    assert others == [wanted, wanted] and counted == len(wanted)
