"""Request bodies of twelve front ends are accepted and answered."""

import asyncio
import json
import logging

import pytest
from front_ends import CHAT, COMPLETIONS, FRONT_ENDS, MESSAGES, RESPONSES
from serving import make_served_checkpoint, serving
from transformers import AutoTokenizer

# The tests' template, with what tells that calls are written as Qwen's models do.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }} "
    "{% if message.reasoning_content %}w41 {{ message.reasoning_content }} {% endif %}{{ message.content }} "
    '{% for call in message.tool_calls or [] %}<tool_call> {"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}} </tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}w9{% endif %}"
)
ENDS = {
    CHAT: "data: [DONE]",
    COMPLETIONS: "data: [DONE]",
    RESPONSES: "event: response.incomplete",
    MESSAGES: "event: message_stop",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = make_served_checkpoint(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_bodies_of_front_ends_are_accepted_and_answered(path, caplog):
    caplog.set_level(logging.WARNING, "nanoinfer.serve")

    async def ask():
        async with serving(path, max_model_len=96) as served:

            async def one(name, asked):
                response = await served.client.post(asked.path, json=asked.body, headers=asked.headers)
                assert response.status_code == 200, f"{name}: {response.text}"
                return response

            answers = await asyncio.gather(*(one(*item) for item in FRONT_ENDS.items()))
            await served.wait_until_idle()
            return dict(zip(FRONT_ENDS, answers, strict=True))

    for name, answer in asyncio.run(ask()).items():
        asked = FRONT_ENDS[name]
        if asked.body.get("stream"):
            last = answer.text.strip().split("\n\n")[-1]
            assert last.startswith(ENDS[asked.path.partition("?")[0]]), (name, last)
            assert '"error":{' not in answer.text.replace(" ", ""), name
        else:
            assert json.loads(answer.text)["usage"]["completion_tokens"] == 5, name
    lines = {record.getMessage() for record in caplog.records}
    assert {"temperature_last", "web_search"} <= {
        name for name in ("temperature_last", "web_search") for x in lines if name in x
    }


def test_twelve_front_ends_are_there():
    assert len({name.partition(",")[0] for name in FRONT_ENDS}) == 12
