"""Answers of thinking, text and calls in the forms of both APIs of agents, as the official clients read them."""

import json

import anthropic
import httpx
import httpx2
import openai
import pytest

from nanoinfer.outputs import RequestMetrics, StreamOutput
from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Reasoning, Text
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields, checked
from nanoinfer.serve.messages_answer import MessagesAnswer
from nanoinfer.serve.messages_request import CountRequest, MessagesRequest
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.serve.responses_answer import ResponsesAnswer
from nanoinfer.serve.responses_request import ResponsesRequest

EVENTS = [
    [Reasoning("I look ")],
    [Reasoning("it up."), Text("Let me ")],
    [Text("see."), CallBegun(0, "call_a", "weather")],
    [CallArguments(0, '{"city":')],
    [CallArguments(0, ' "Oslo"}'), CallEnded(0), CallBegun(1, "call_b", "time")],
    [CallArguments(1, "{}"), CallEnded(1)],
]
TOOLS = ["weather", "time"]


def outputs(events, reason="stop"):
    """One output for each step's events; the parser that would find these is not part of what is tested here."""
    last = len(events) - 1
    return [
        StreamOutput(
            request_id="r", index=0, text_delta="", token_ids_delta=[place], finished=place == last,
            finish_reason=reason if place == last else None,
            metrics=RequestMetrics(**METRICS) if place == last else None,
        )
        for place in range(len(events))
    ]  # fmt: skip


METRICS = dict.fromkeys(RequestMetrics.__dataclass_fields__, 0) | dict(num_cached_tokens=2)


def answer_of(kind, events, **asked):
    chat = checked(ChatRequest, dict(messages=[], max_completion_tokens=20), Fields())
    arguments = (chat, "tiny", [(None, [1, 2, 3])], True)
    if kind is ResponsesAnswer:
        answer = kind(checked(ResponsesRequest, dict(input="a") | asked, Fields()), *arguments)
    else:
        answer = kind(*arguments)
    steps = iter(events)
    answer.read = lambda output: next(steps)
    return answer


def streamed(kind, events, reason="stop", **asked):
    answer = answer_of(kind, events, **asked)
    parts = [answer.first_events(), answer.ping(1, 3)]
    parts += [answer.events([(0, output)]) for output in outputs(events, reason)]
    return b"".join([*parts, answer.last_events()])


def whole(kind, events, reason="stop", **asked):
    return b"".join(answer_of(kind, events, **asked).whole([(0, output) for output in outputs(events, reason)]))


def sent(library, body, is_stream):
    """A client's transport that answers with this body."""
    headers = {"Content-Type": "text/event-stream" if is_stream else "application/json"}
    return library.Client(
        transport=library.MockTransport(lambda _: library.Response(200, content=body, headers=headers))
    )


def responses(body, is_stream=False):
    client = openai.OpenAI(base_url="http://x/v1", api_key="k", http_client=sent(httpx, body, is_stream)).responses
    asked = dict(model="tiny", input="a")
    if not is_stream:
        return client.create(**asked)
    with client.stream(**asked) as stream:
        return list(stream), stream.get_final_response()


def messages(body, is_stream=False):
    client = anthropic.Anthropic(base_url="http://x", api_key="k", http_client=sent(httpx2, body, is_stream)).messages
    asked = dict(model="tiny", max_tokens=20, messages=[{"role": "user", "content": "a"}])
    if not is_stream:
        return client.create(**asked)
    with client.stream(**asked) as stream:
        return list(stream), stream.get_final_message()


def test_responses_have_reasoning_text_and_calls_in_their_order():
    response = responses(whole(ResponsesAnswer, EVENTS))
    thought, said, weather, time = response.output
    assert thought.type == "reasoning" and thought.content[0].text == "I look it up." and not thought.encrypted_content
    assert said.content[0].text == response.output_text == "Let me see."
    assert (weather.name, weather.call_id, json.loads(weather.arguments)) == ("weather", "call_a", {"city": "Oslo"})
    assert (time.name, time.arguments, time.status) == ("time", "{}", "completed")
    assert response.status == "completed" and response.usage.output_tokens_details.reasoning_tokens == 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    kept = responses(whole(ResponsesAnswer, EVENTS, include=["reasoning.encrypted_content"]))
    assert kept.output[0].encrypted_content == "I look it up.", "some clients send back nothing else"


def test_a_stream_of_responses_with_calls_is_read_by_the_client():
    events, final = responses(streamed(ResponsesAnswer, EVENTS), is_stream=True)
    expected = responses(whole(ResponsesAnswer, EVENTS))

    def plain(response):
        return [item.to_dict() | {"id": None, "parsed_arguments": None} for item in response.output]

    assert [item["type"] for item in plain(final)] == ["reasoning", "message", "function_call", "function_call"]
    for one, other in zip(plain(final), plain(expected), strict=True):
        one.pop("parsed_arguments"), other.pop("parsed_arguments")
        assert json.dumps(one).replace(', "parsed": null', "") == json.dumps(other)
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in arguments if event.output_index == 2) == '{"city": "Oslo"}'
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert thought == ["I look ", "it up."]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers)), "a ping is an event, too"
    assert [event.type for event in events[:3]] == ["response.created", *["response.in_progress"] * 2]


def test_tools_with_text_get_calls_with_text():
    tools = [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "start: x"}}]
    events = [[CallBegun(0, "call_a", "apply_patch"), CallArguments(0, '{"input": "*** Be')],
              [CallArguments(0, 'gin\\n"}'), CallEnded(0)]]  # fmt: skip
    (call,) = responses(whole(ResponsesAnswer, events, tools=tools)).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    seen, final = responses(streamed(ResponsesAnswer, events, tools=tools), is_stream=True)
    assert final.output[0].input == "*** Begin\n"
    assert [event.delta for event in seen if event.type == "response.custom_tool_call_input.delta"] == ["*** Begin\n"]
    odd = [[CallBegun(0, "c", "apply_patch"), CallArguments(0, '"no object"'), CallEnded(0)]]
    assert responses(whole(ResponsesAnswer, odd, tools=tools)).output[0].input == '"no object"'


def test_messages_have_thinking_text_and_calls_in_their_order():
    message = messages(whole(MessagesAnswer, EVENTS))
    thought, said, weather, time = message.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "I look it up.", "Let me see.")
    assert (weather.type, weather.id, weather.name, weather.input) == (
        "tool_use",
        "call_a",
        "weather",
        {"city": "Oslo"},
    )
    assert (time.name, time.input, message.stop_reason) == ("time", {}, "tool_use")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, 2), "apart, as Anthropic has them"
    _, final = messages(streamed(MessagesAnswer, EVENTS), is_stream=True)
    for one, other in zip(final.content, message.content, strict=True):
        assert one.to_dict() == other.to_dict()
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == len(EVENTS)
    assert final.usage.cache_read_input_tokens == 2 and final.usage.input_tokens == 1


@pytest.mark.parametrize("kind", [ResponsesAnswer, MessagesAnswer])
def test_outputs_that_are_much_work_are_told_in_parts(kind):
    said = [f"{place} " for place in range(300)]
    given = [(0, output) for output in outputs([[Text(text)] for text in said])]
    given[7][1].token_ids_delta = [5] * 2000
    answer = answer_of(kind, [[Text(text)] for text in said])
    answer.first_events()
    parts = list(answer.events_in_turns(given))
    told = [json.loads(line[6:]) for line in b"".join(parts).decode().splitlines() if line.startswith("data: ")]
    deltas = [one["delta"] for one in told if one["type"].endswith(("output_text.delta", "block_delta"))]
    assert len(parts) > 3 and said == [one if isinstance(one, str) else one["text"] for one in deltas]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_answer_that_is_cut_says_so(num_steps):
    cut = EVENTS[:num_steps]
    response = responses(whole(ResponsesAnswer, cut, "length"))
    assert response.status == "incomplete" and response.output[-1].status == "incomplete"
    assert [item.status for item in response.output[:-1]] == ["completed"] * (len(response.output) - 1)
    message = messages(whole(MessagesAnswer, cut, "length"))
    assert message.stop_reason == "model_context_window_exceeded", "before its limit"
    if num_steps == 4:
        assert message.content[-1].input == {} and response.output[-1].arguments == '{"city":'


def test_pings_of_messages_are_events_with_progress_in_a_comment():
    assert answer_of(MessagesAnswer, []).ping(64, 200) == (
        b': 64 of 200 prompt tokens read\n\nevent: ping\ndata: {"type":"ping"}\n\n'
    )


# What is asked


def chat_of(kind, **given):
    return checked(kind, given, Fields()).chat(Fields())


def test_items_of_a_history_become_messages():
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "I look."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x\ny"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "Rain."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    ]
    messages = chat_of(ResponsesRequest, input=given, instructions="You help.")["messages"]
    system, developer, user, first, rain, done, second = messages
    assert system == {"role": "system", "content": "You help."}
    assert developer == {"role": "developer", "content": "Be brief."}
    assert user == {"role": "user", "content": "Weather?"}
    assert (first["role"], first["content"], first["reasoning_content"]) == ("assistant", "Let me see.", "I look.")
    assert [call["id"] for call in first["tool_calls"]] == ["a", "b"]
    assert json.loads(first["tool_calls"][1]["function"]["arguments"]) == {"input": "x\ny"}
    assert rain == {"role": "tool", "tool_call_id": "a", "content": "rain"} and done["content"] == "done"
    assert second["reasoning_content"] == "Rain." and second["tool_calls"][0]["id"] == "c"


def test_tools_of_responses_become_those_of_chats_and_those_of_servers_are_left_out(caplog):
    tools = [
        {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True, "description": None},
        {
            "type": "custom",
            "name": "patch",
            "description": "Patches.",
            "format": {"type": "grammar", "definition": "g"},
        },
        {"type": "web_search", "external_web_access": False},
    ]
    given = chat_of(ResponsesRequest, input="a", tools=tools, tool_choice={"type": "function", "name": "weather"})
    weather, patch = given["tools"]
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert weather == {"type": "function", "function": function}
    assert patch["function"]["description"] == "Patches.\n\nThe input follows this grammar:\ng"
    assert given["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    (record,) = caplog.records
    assert "requests have a tool of the type 'web_search', which is left out, as the server runs" in record.getMessage()
    with pytest.raises(BadRequestError, match="'web_search' is not supported"):
        checked(ResponsesRequest, dict(input="a", tools=tools), Fields()).chat(Fields(refuses_unknown=True))


def test_forms_and_efforts_of_responses_become_those_of_chats():
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    given = chat_of(ResponsesRequest, input="a", text={"format": form}, reasoning={"effort": "low", "summary": "auto"})
    assert given["response_format"] == {"type": "json_schema", "json_schema": {k: form[k] for k in form if k != "type"}}
    assert checked(ChatRequest, given, Fields()).reasoning_effort == "low"
    assert chat_of(ResponsesRequest, input="a", text={"format": {"type": "text"}})["response_format"] == {
        "type": "text"
    }


def test_messages_of_anthropic_become_those_of_chats():
    given = chat_of(
        MessagesRequest,
        max_tokens=5,
        system="You help.",
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ålesund"}},
                {"type": "tool_use", "id": "b", "name": "time", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "12"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stop_sequences=["x"],
    )  # fmt: skip
    system, _, assistant, rain, twelve, user = given["messages"]
    assert system == {"role": "system", "content": "You help."} and user == {"role": "user", "content": "And?"}
    assert assistant["reasoning_content"] == "I look." and assistant["content"] == "Let me see."
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ålesund"}'}
    assert [one["tool_call_id"] for one in (rain, twelve)] == ["a", "b"] and twelve["content"] == "12"
    function = {"name": "weather", "parameters": {"type": "object"}, "description": "d"}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert given["tool_choice"] == "required" and given["parallel_tool_calls"] is False
    assert given["reasoning_effort"] == "high" and given["stop"] == ["x"] and given["max_completion_tokens"] == 5
    assert given["response_format"]["json_schema"]["schema"] == {"type": "object"}
    off = chat_of(MessagesRequest, max_tokens=5, messages=[], thinking={"type": "disabled"})
    assert off["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "a"}], "the last message is the assistant's"),
        ([{"role": "nobody", "content": "a"}], "messages[0].role is 'nobody'"),
        ([{"role": "user", "content": [{"type": "odd"}]}], "has the type 'odd': give text or tool_result"),
        ([{"role": "user", "content": 3}], "messages[0].content is 3: give a text or a list of blocks"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "messages[0].content[0].tool_use_id is None"),
        (["a"], "messages[0] is 'a': give an object"),
    ],
)
def test_messages_that_cannot_be_are_refused(messages, message):
    with pytest.raises(BadRequestError, match=message.replace("[", r"\[").replace("]", r"\]")):
        chat_of(MessagesRequest, max_tokens=5, messages=messages)


def test_fields_of_chats_are_refused_with_their_names_there():
    for kind, name, ours in (
        (MessagesRequest, "max_completion_tokens", "give max_tokens"),
        (MessagesRequest, "n", "it is a field of /v1/chat/completions"),
        (ResponsesRequest, "response_format", "give text.format"),
    ):
        needed = dict(max_tokens=5, messages=[]) if kind is MessagesRequest else dict(input="a")
        with pytest.raises(BadRequestError, match=ours):
            checked(kind, needed | {name: 2}, Fields())
    harmless = dict(context_management={"edits": []}, cache_control={"type": "ephemeral"}, metadata={"user_id": "x"})
    assert checked(MessagesRequest, dict(max_tokens=5, messages=[]) | harmless, Fields(refuses_unknown=True))


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch", "bash_20250124", "memory_20250818"])
def test_tools_that_clients_run_in_a_form_of_their_own_are_refused_by_name(kind):
    tools = [{"type": kind, "name": "x"}]
    for request, body in ((ResponsesRequest, {"input": "a"}), (CountRequest, {"messages": []})):
        with pytest.raises(
            BadRequestError, match=rf"tools\[0\] has the type '{kind}', which the client runs"
        ) as caught:
            checked(request, body | {"tools": tools}, Fields()).chat(Fields())
        assert caught.value.param == "tools"
