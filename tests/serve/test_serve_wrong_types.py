"""Each field of a request of each API with each wrong type: an answer or a 400 that names the field, never a 500."""

import asyncio
import copy
import random

import pytest
from scripted import ROOM, make_speaking_checkpoint
from serving import serving
from written_calls import TEMPLATES

TYPES = [None, True, 5, 1.5, "x", [], [5], ["x"], {}, {"x": 5}, [{}], [[]]]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BODIES = {
    "/v1/completions": {"prompt": "w1", "stop": ["w2"], "stream_options": None, "logit_bias": {"5": 1}}
    | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
    | {"structured_outputs": None},
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "w1"},
            {"role": "user", "content": [{"type": "text", "text": "w2"}], "tool_calls": []},
            {"role": "assistant", "content": "w3", "tool_calls": [CALL], "reasoning_content": "w4"},
            {"role": "tool", "content": "w5", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1},
        "stream_options": None,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "w1"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w2"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "w3"}]},
        ],
        "tools": [{"name": "f", "type": "custom", "description": "d", "strict": False, "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": None},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w1"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "w2"}], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "w3"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "w4"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "w5"},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
            {"type": "custom", "name": "g", "description": "d", "format": {"type": "grammar", "definition": "x"}},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
    },
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
BODIES["/tokenize"] = {name: BODIES["/v1/chat/completions"][name] for name in ("messages", "tools")}
LIMITS = {"/v1/messages": {"max_tokens": 1}, "/v1/responses": {"max_output_tokens": 1}}


def places(value, path=()):
    """Yield the way to each part of a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def with_part(body: dict, path: tuple, value) -> dict:
    body = copy.deepcopy(body)
    part = body
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return body


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()
    return make_speaking_checkpoint(tmp_path_factory.mktemp("qwen3"), template, ("<think>", "</think>", "<tool_call>"))


@pytest.mark.parametrize("api", BODIES)
def test_no_field_of_a_wrong_type_is_a_fault_of_the_server(path, api, fuzz):
    body = BODIES[api] | LIMITS.get(
        api, {"max_tokens": 1} if api in ("/v1/completions", "/v1/chat/completions") else {}
    )
    found = [(way, value) for way in places(body) for value in TYPES]

    async def ask():
        faults = []
        async with serving(path, **ROOM) as served:
            assert (answer := await served.post(api, **body)).status_code == 200, answer.text
            for way, value in found if fuzz else random.Random(0).sample(found, k=60):
                answer = await served.post(api, **with_part(body, way, value))
                if answer.status_code not in (200, 400, 422):
                    faults.append((way, value, answer.status_code, answer.text[:200]))
        return faults

    assert asyncio.run(ask()) == []
