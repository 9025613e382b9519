"""Answers of a given form from the server: `response_format`, vLLM's fields, and OpenAI's client with pydantic."""

import asyncio
import json
import threading
from enum import Enum
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from serving import MODEL, serving
from structured import is_answer, make_structured_checkpoint

from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.forms import form_of

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "a question"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["a", 7]}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
DENSE = dict(temperature=1, seed=3, max_tokens=60)


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    kind: Literal["point"]
    x: int = Field(ge=0, le=99)


class Answer(BaseModel):
    color: Color
    points: list[Point] = Field(min_length=1, max_length=2)
    sure: bool | None


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"))


def test_the_openai_client_parses_what_pydantic_asks_for(path):
    async def ask():
        async with serving(path) as served, httpx.AsyncClient(transport=httpx.ASGITransport(served.app)) as transport:
            client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=transport)
            bias = {str(space): -100 for space in served.engine.tokenizer.convert_tokens_to_ids(["Ġ", "Ċ", "č", "ĉ"])}
            asked = dict(model=MODEL, messages=USER, temperature=1, max_tokens=200, logit_bias=bias)
            found = await client.chat.completions.parse(**asked, seed=1, response_format=Answer)
            answer = found.choices[0].message.parsed
            assert found.choices[0].finish_reason == "stop" and isinstance(answer, Answer)
            assert answer == Answer.model_validate_json(found.choices[0].message.content)
            async with client.chat.completions.stream(**asked, seed=1, response_format=Answer) as stream:
                async for _ in stream:
                    pass
                last = await stream.get_final_completion()
            assert last.choices[0].message.parsed == answer, "streamed and whole"

    asyncio.run(ask())


def test_each_way_of_asking_gives_the_form(path):
    spaces = dict(disable_any_whitespace=True)
    ways = {
        "response_format": (dict(response_format={"type": "json_object"}), lambda text: text.strip()[:1] in "{"),
        "structured_outputs": (
            dict(structured_outputs=dict(json=SCHEMA) | spaces), lambda text: is_answer(text, SCHEMA),
        ),
        "guided_json": (dict(guided_json={"enum": [1, "b"]}), lambda text: json.loads(text) in (1, "b")),
        "guided_regex": (dict(guided_regex="[ab]{3}"), lambda text: len(text) == 3 and set(text) <= set("ab")),
        "guided_choice": (dict(guided_choice=["yes", "no"]), lambda text: text in ("yes", "no")),
        "guided_grammar": (dict(guided_grammar='root ::= "x" [0-9] "y"'), lambda text: text[0] + text[2] == "xy"),
        "none": (dict(response_format={"type": "text"}), lambda text: True),
    }  # fmt: skip

    async def ask():
        async with serving(path) as served:
            alone = (await served.post(CHAT, messages=USER, **DENSE)).json()["choices"][0]["message"]["content"]
            asked = [served.post(CHAT, messages=USER, **DENSE | given) for given, _ in ways.values()]
            asked += [served.post(prompt="text", **DENSE | given) for given, _ in ways.values()]
            responses = await asyncio.gather(*asked)
            texts = []
            for response, (name, (_, check)) in zip(responses, [*ways.items()] * 2, strict=True):
                assert response.status_code == 200, (name, response.text)
                choice = response.json()["choices"][0]
                texts.append(choice["message"]["content"] if "message" in choice else choice["text"])
                assert check(texts[-1]), (name, texts[-1])
            assert texts[len(ways) - 1] == alone, "a row beside keeps its bits"

    asyncio.run(ask())


REFUSED = {
    "unknown type": (dict(response_format={"type": "xml"}), "response_format is {'type': 'x", "response_format"),
    "no schema": (dict(response_format={"type": "json_schema"}), "response_format is", "response_format"),
    "two": (dict(response_format=FORMAT, guided_regex="a"), "both say what form the answer has", "guided_regex"),
    "bad schema": (
        dict(response_format={"type": "json_schema", "json_schema": {"schema": {"properties": {"p": {"type": "x"}}}}}),
        "structured_outputs.json cannot be generated at #/properties/p: Invalid type: x", "response_format",
    ),
    "bad expression": (dict(guided_regex="("), "structured_outputs.regex cannot be generated", "guided_regex"),
    "no choice": (dict(guided_choice=[]), "structured_outputs.choice is []", "guided_choice"),
    "wrong field": (dict(structured_outputs={"jsn": {}}), "structured_outputs has an unknown field 'jsn'", None),
    "many choices": (dict(guided_choice=["a" * 1025] * 2 + ["b" * 2**20]), "characters, 1048576 are possible", None),
    "deep": (dict(guided_json='{"items":' * 300 + "{}" + "}" * 300), "nested too deeply", "guided_json"),
}  # fmt: skip


def test_what_cannot_be_is_a_400_with_its_path_and_others_go_on(path):
    async def ask():
        async with serving(path) as served:
            wanted = (await served.post(CHAT, messages=USER, **DENSE)).json()["choices"]
            staying = asyncio.create_task(served.post(CHAT, messages=USER, **DENSE))
            for name, (given, message, param) in REFUSED.items():
                response = await served.post(CHAT, messages=USER, **given)
                assert response.status_code == 400, (name, response.text)
                error = response.json()["error"]
                assert message in error["message"] and param in (None, error["param"]), (name, error)
            assert (await staying).json()["choices"] == wanted

    asyncio.run(ask())


def test_grammars_are_compiled_off_the_loop(path, monkeypatch):
    async def ask():
        async with serving(path) as served:
            intake, threads = served.engine.intake, []
            limits = intake.limits

            def noted(*given):
                threads.append(threading.current_thread().name)
                return limits(*given)

            monkeypatch.setattr(intake, "limits", noted)
            assert (await served.post(prompt="a", guided_choice=["b"])).status_code == 200
            assert [name.rsplit("_", 1)[0] for name in threads] == ["nanoinfer-tokenizer-grammars"]

    asyncio.run(ask())


def test_forms_are_read_by_any_of_their_names():
    assert form_of({}) == form_of({"response_format": {"type": "text"}}) == (None, None)
    name, form = form_of({"response_format": FORMAT})
    assert name == "response_format" and json.loads(form["json"]) == SCHEMA
    tags = {"type": "structural_tag", "structures": [], "triggers": []}
    assert json.loads(form_of({"response_format": tags})[1]["structural_tag"]) == tags
    assert form_of({"guided_json": True, "response_format": {"type": "text"}}) == ("guided_json", {"json": True})
    with pytest.raises(BadRequestError, match="guided_json and guided_regex both say"):
        form_of({"guided_json": {}, "guided_regex": "a"})


def test_a_schema_beside_json_object_holds():
    """As llama.cpp and others take it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert form_of({"response_format": {"type": "json_object", "schema": schema}}) == (
        "response_format", {"json": json.dumps(schema)},
    )  # fmt: skip
    assert form_of({"response_format": {"type": "json_object", "schema": None}})[1] == {"json_object": True}
    with pytest.raises(BadRequestError, match="response_format is"):
        form_of({"response_format": {"type": "json_object", "schema": "x"}})
