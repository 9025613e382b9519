"""Images in a conversation: an error that names the option, or a text in their place, wherever they stand."""

import asyncio
import copy
import logging

import pytest
from serving import MODEL, make_served_checkpoint, serving

from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields, checked
from nanoinfer.serve.messages_request import MessagesRequest
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.serve.responses_request import ResponsesRequest

PIXELS = "iVBORw0KGgo="
URL = {"url": f"data:image/png;base64,{PIXELS}"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXELS}
ASKED = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
# A request, the place of what is no text, and the word for it.
BODIES = {
    "chat": (
        ChatRequest,
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": URL}]}
        ]},
        "messages[0].content[1]", "image",
    ),
    "chat's result": (
        ChatRequest,
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": URL}]}]},
        "messages[0].content[0]", "image",
    ),
    "sound": (
        ChatRequest, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0]", "sound",
    ),
    "messages": (
        MessagesRequest,
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
        "messages[0].content[0]", "image",
    ),
    "messages' result": (
        MessagesRequest,
        {"max_tokens": 1, "messages": [
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": SOURCE}]}
            ]},
        ]},
        "messages[1].content[0].content[0]", "image",
    ),
    "document": (
        MessagesRequest,
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document", "source": SOURCE}]}]},
        "messages[0].content[0]", "document",
    ),
    "responses": (
        ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0]", "image",
    ),
    "responses' result": (
        ResponsesRequest,
        {"input": [ASKED, {
            "type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "data:"}]
        }]},
        "input[1].output[0]", "image",
    ),
}  # fmt: skip


def as_chat(kind, body, fields):
    asked = checked(kind, body, fields)
    return asked if kind is ChatRequest else checked(ChatRequest, asked.chat(fields), fields)


@pytest.mark.parametrize("name", BODIES)
def test_a_text_stands_in_the_place_of_what_is_no_text_and_the_log_says_so_once(name, caplog):
    kind, body, _, word = BODIES[name]
    fields = Fields(refuses_unknown=True, replaces_images=True)
    with caplog.at_level(logging.WARNING):
        said = [as_chat(kind, copy.deepcopy(body), fields).conversation()[-1]["content"] for _ in range(2)]
    assert (
        said[0] == said[1] == ("w1\n" if name == "chat" else "") + f"[{word}: left out, as this model reads text only]"
    )
    (line,) = (record.getMessage() for record in caplog.records)
    assert "a text stands in their place" in line


@pytest.mark.parametrize("name", BODIES)
def test_else_an_error_names_its_place_and_the_option(name):
    kind, body, where, word = BODIES[name]
    with pytest.raises(BadRequestError) as error:
        as_chat(kind, copy.deepcopy(body), Fields())
    said = str(error.value)
    assert said.startswith(f"{where} has the type") and f"{word}s are not supported" in said
    assert "--images replace" in said and error.value.param == where.split("[")[0]


def test_a_server_goes_on_with_a_history_that_has_images(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": URL}, {"type": "text", "text": "w31"}]},
        {"role": "assistant", "content": "w33"}, {"role": "user", "content": "w32"},
    ]  # fmt: skip
    path = make_served_checkpoint(tmp_path)

    async def ask(**options):
        async with serving(path, app_options=options) as served:
            return await served.post("/v1/chat/completions", model=MODEL, messages=messages, max_tokens=2)

    refused, answered = (asyncio.run(ask(**options)) for options in ({}, {"images": "replace"}))
    assert refused.status_code == 400 and "--images replace" in refused.json()["error"]["message"]
    assert answered.status_code == 200, answered.text
