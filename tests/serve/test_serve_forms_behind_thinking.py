"""A form of the answer and thinking: it begins behind what is thought, in all APIs, whoever begins the thinking."""

import asyncio
import contextlib
import json
import string

import pytest
from serving import events, serving
from structured import THINKING, fulfils, make_structured_checkpoint

from nanoinfer import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["a", 7]}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "a question"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
OFF = dict(chat_template_kwargs={"enable_thinking": False})
ROOM = dict(max_model_len=512, max_num_batched_tokens=128, resident_kv_limit=None)
MARKERS = ("<think>", "</think>")


@pytest.fixture(scope="module", params=THINKING)
def begins(request):
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, begins):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"), THINKING[begins], MARKERS)


@contextlib.asynccontextmanager
async def thinking(path, biases=(100, 4)):
    """A server, and what a request of any API has; by its biases the model soon begins to think, and ends it."""
    async with serving(path, **ROOM) as served:
        ids = served.engine.tokenizer.convert_tokens_to_ids([*MARKERS, "Ġ", "Ċ", "č", "ĉ"])
        bias = dict(zip(map(str, ids), (*biases, -100, -100, -100, -100), strict=True))
        yield served, dict(temperature=1, seed=5, logit_bias=bias)


async def said(served, path, **asked) -> list[tuple[str, str]]:
    """What each completion thought and said, streamed or not."""
    response = await served.post(path, **asked)
    assert response.status_code == 200, response.text
    if path.endswith("completions"):
        if not asked.get("stream"):
            return [_parts(choice["message"]) for choice in response.json()["choices"]]
        found = {}
        for event in events(response.text):
            for choice in event["choices"]:
                before = found.get(choice["index"], ("", ""))
                found[choice["index"]] = tuple(map("".join, zip(before, _parts(choice["delta"]), strict=True)))
        return [found[index] for index in sorted(found)]
    if asked.get("stream"):
        data = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        kinds = ("reasoning_text.delta", "output_text.delta") if "responses" in path else ("thinking", "text")
        pieces = [one.get("delta") for one in data], [one["type"] for one in data]
        if "responses" in path:
            of = lambda kind: "".join(d for d, t in zip(*pieces, strict=True) if t == f"response.{kind}")
        else:
            of = lambda kind: "".join((d or {}).get(kind, "") for d in pieces[0] if isinstance(d, dict))
        return [tuple(map(of, kinds))]
    if "responses" in path:
        blocks = [(one["type"], one["content"][0]["text"]) for one in response.json()["output"]]
        names = "reasoning", "message"
    else:
        blocks = [(one["type"], one.get("text") or one.get("thinking")) for one in response.json()["content"]]
        names = "thinking", "text"
    return [tuple("".join(text for kind, text in blocks if kind == name) for name in names)]


def _parts(message):
    return message.get("reasoning_content") or "", message.get("content") or ""


WAYS = {
    "/v1/chat/completions": dict(messages=USER, response_format=FORMAT, max_tokens=200),
    "/v1/responses": dict(
        input="a question", text={"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
        max_output_tokens=200,
    ),
    "/v1/messages": dict(
        messages=USER, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=200
    ),
}  # fmt: skip


def test_the_form_begins_behind_what_is_thought(path):
    async def ask():
        async with thinking(path) as (served, how):
            for way, given in WAYS.items():
                for extra in ({}, dict(n=2)) if way.endswith("completions") else ({},):
                    asked = given | how | extra
                    whole, off, streamed = [
                        await said(served, way, **asked | more) for more in ({}, OFF, dict(stream=True))
                    ]
                    assert whole == streamed and len(whole) == extra.get("n", 1)
                    assert all(fulfils(json.loads(text), SCHEMA) for _, text in [*whole, *off])
                    assert any(thought for thought, _ in whole) and not any(thought for thought, _ in off)

    asyncio.run(ask())


FORMS = {
    "json_object": (dict(response_format={"type": "json_object"}), lambda text: isinstance(json.loads(text), dict)),
    "regex": (dict(structured_outputs={"regex": "[ab]{3}"}), lambda text: len(text) == 3 and set(text) <= set("ab")),
    "choice": (dict(structured_outputs={"choice": ["yes", " no"]}), lambda text: text in ("yes", " no")),
    "Lark": (dict(guided_grammar='start: "x" digit "y"\ndigit: /[0-9]/'), lambda text: text[0] + text[2] == "xy"),
    "GBNF": (dict(guided_grammar='root ::= "x" [0-9] "y"'), lambda text: text[0] + text[2] == "xy"),
    "tags": (
        dict(response_format={"type": "structural_tag", "triggers": ["<f"],
                              "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}),
        lambda text: "<f" not in text or fulfils(json.loads(text.split("<f>")[1].split("</f>")[0]), SCHEMA),
    ),
}  # fmt: skip


def test_every_kind_of_form_begins_there(path):
    async def ask():
        async with thinking(path) as (served, how):
            closing = served.engine.tokenizer.convert_tokens_to_ids(["<end>", "}", '"'])
            how["logit_bias"] |= dict.fromkeys(map(str, closing), 5)
            for name, (given, is_right) in FORMS.items():
                (found,) = await said(served, "/v1/chat/completions", messages=USER, max_tokens=300, **how, **given)
                assert is_right(found[1]), (name, found)

    asyncio.run(ask())


def test_thinking_that_takes_all_tokens_ends_by_length(path):
    async def ask():
        async with thinking(path, biases=(100, -100)) as (served, how):
            for way, asked in WAYS.items():
                limit = "max_output_tokens" if "responses" in way else "max_tokens"
                response = await served.post(way, **asked | how | {limit: 20})
                assert response.status_code == 200, response.text
                ended = response.json()
                if way.endswith("completions"):
                    (choice,) = ended["choices"]
                    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
                    assert choice["message"]["reasoning_content"]
                elif "responses" in way:
                    assert ended["incomplete_details"] == {"reason": "max_output_tokens"}
                else:
                    assert ended["stop_reason"] == "max_tokens"

    asyncio.run(ask())


@pytest.mark.parametrize("begins", ["begun"], indirect=True)
def test_what_is_thought_is_what_it_would_be_without_the_form(path):
    async def ask():
        async with thinking(path, biases=(4, 4)) as (served, how):
            ids = served.engine.tokenizer.convert_tokens_to_ids(
                [*string.ascii_letters, *string.digits, *'{}":,', *MARKERS]
            )
            asked = dict(messages=USER, max_tokens=200, allowed_token_ids=[*ids, served.engine.tokenizer.eos_token_id])
            asked |= how
            ((free, _),) = await said(served, "/v1/chat/completions", **asked, ignore_eos=True)
            ((thought, _),) = await said(served, "/v1/chat/completions", **asked, response_format=FORMAT)
            assert thought and free == thought

    asyncio.run(ask())


def test_without_a_parser_of_thinking_all_of_the_answer_has_the_form(path):
    async def ask():
        async with serving(path, app_options=dict(reasoning_parser="none"), **ROOM) as served:
            asked = dict(messages=USER, max_tokens=5, temperature=0, structured_outputs={"choice": ["yes", "no"]})
            ((thought, text),) = await said(served, "/v1/chat/completions", **asked)
            assert (thought, text in ("yes", "no")) == ("", True)

    asyncio.run(ask())


def test_chats_in_python_think_first_where_the_template_has_begun_it(path, begins):
    with LLM(path, **dict(ROOM, block_size=16, dtype="float32", device="cpu", progress_bar=False)) as llm:
        end = llm.get_tokenizer().convert_tokens_to_ids("</think>")
        params = SamplingParams(
            temperature=1, seed=5, max_tokens=200, structured_outputs={"choice": ["yes", "no"]},
            logit_bias={end: 5}, skip_special_tokens=False,
        )  # fmt: skip
        ((whole,), (off,)) = (
            [output.outputs[0].text for output in llm.chat(USER, params, chat_template_kwargs=variables)]
            for variables in ({}, {"enable_thinking": False})
        )
        thought, marker, text = whole.rpartition("</think>")
        assert (bool(thought), bool(marker)) == (begins == "begun",) * 2
        assert text.strip("\n").removesuffix("<end>") in ("yes", "no") and off.removesuffix("<end>") in ("yes", "no")
        assert params.structured_outputs.before is None, "the caller's object is as it was"
