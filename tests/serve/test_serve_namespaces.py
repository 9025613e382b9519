"""Tools of a namespace in the Responses API, as Codex sends those of MCP servers."""

import json

import pytest
from openai.types.responses import Response

from nanoinfer.common.errors import RequestError
from nanoinfer.outputs import RequestMetrics, StreamOutput
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields, checked
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.serve.responses_answer import ResponsesAnswer
from nanoinfer.serve.responses_request import ResponsesRequest
from nanoinfer.serve.tool_use import ToolUse

CRM = {
    "type": "namespace", "name": "crm", "description": "About customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ],
}  # fmt: skip
FILES = {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]}
FIND = {"type": "function", "name": "look"}


def chat_of(**given):
    return checked(ResponsesRequest, given, Fields()).chat(Fields())


def answer_of(said, tools):
    """An answer whose steps say these events; the parser that would find them is not part of what is tested here."""
    chat = checked(ChatRequest, dict(messages=[]), Fields())
    answer = ResponsesAnswer(
        checked(ResponsesRequest, dict(input="a", tools=tools), Fields()), chat, "tiny", [(None, [1])], True
    )
    steps = iter(said)
    answer.read = lambda output: next(steps)
    return answer


def outputs(said):
    last = dict(finished=True, finish_reason="stop", metrics=RequestMetrics(arrival_time=0.0))
    return [
        (0, StreamOutput(
            request_id="r", index=0, text_delta="", token_ids_delta=[5], **(last if place == len(said) - 1 else {})
        ))
        for place in range(len(said))
    ]  # fmt: skip


def test_tools_of_a_namespace_are_functions_with_its_name_in_front():
    given = chat_of(input="a", tools=[CRM, FIND, FILES])
    found = [tool["function"] for tool in given["tools"]]
    assert [function["name"] for function in found] == ["crm__find", "crm__note", "look", "mcp__files__read"]
    assert found[0]["description"] == "Finds.\n\nOf all tools whose names begin with crm__: About customers."
    assert found[0]["parameters"] == {"type": "object"} and "About" not in found[1]["description"]
    assert found[1]["parameters"]["required"] == ["input"]
    for name, wanted in (("look", "look"), ("read", "mcp__files__read"), ("crm__find", "crm__find")):
        chosen = chat_of(input="a", tools=[CRM, FIND, FILES], tool_choice={"type": "function", "name": name})
        assert chosen["tool_choice"]["function"]["name"] == wanted
    odd = dict(input="a", tools=[CRM], tool_choice={"type": "function", "name": ["find"]})
    with pytest.raises(RequestError, match="tool_choice"):
        ToolUse.of(checked(ChatRequest, chat_of(**odd), Fields()), AnswerFormat.of("", {}))


def test_calls_of_a_namespaces_tools_come_back_as_they_are_sent_again():
    said = [
        [CallBegun(0, "a", "crm__find"), CallArguments(0, '{"q": 1}'), CallEnded(0)],
        [CallBegun(1, "b", "crm__note"), CallArguments(1, '{"input": "x"}'), CallEnded(1)],
        [CallBegun(2, "c", "look"), CallArguments(2, "{}"), CallEnded(2)],
    ]
    tools = [CRM, FIND]
    calls = Response.model_validate_json(b"".join(answer_of(said, tools).whole(outputs(said)))).output
    assert [(call.type, call.name, call.namespace) for call in calls] == [
        ("function_call", "find", "crm"), ("custom_tool_call", "note", "crm"), ("function_call", "look", None),
    ]  # fmt: skip
    sent = answer_of(said, tools).events(outputs(said)).decode()
    told = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    assert [one["name"] for one in told if one["type"] == "response.function_call_arguments.done"] == ["find", "look"]
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert done == [call.to_dict() for call in calls]
    (message,) = chat_of(input=[call.to_dict() for call in calls], tools=tools)["messages"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["crm__find", "crm__note", "look"]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "namespace", "name": "x"}, "tools[0].tools is None: give a list of tools"),
        ({"type": "namespace", "tools": []}, "tools[0].name is None: give a text"),
        ({"type": "namespace", "name": "x", "description": 5, "tools": []}, "tools[0].description is 5: give a text"),
        ({"type": "namespace", "name": "x", "tools": [5]}, "tools[0].tools[0] is 5: give an object"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "function"}]}, "tools[0].tools[0].name is None: give"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "shell"}]}, "tools[0].tools[0] has the type 'shell'"),
        ({"type": "namespace", "name": "x", "tools": [CRM]}, "tools[0].tools[0] has the type 'namespace'"),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(tool, message):
    with pytest.raises(BadRequestError) as caught:
        chat_of(input="a", tools=[tool])
    assert message in str(caught.value) and caught.value.param == "tools"
