"""Names of fields in requests: which are taken, which ignored, and which refused; and the page that lists them."""

import asyncio
import logging
import re

import pytest
from serving import MODEL, make_served_checkpoint, serving

from nanoinfer.serve.docs_page import ENDPOINTS, docs_page
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import IGNORED, UNSUPPORTED, Fields, parse
from nanoinfer.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

MESSAGES = b'"messages": [{"role": "user", "content": "w1"}]'


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_names_that_no_api_has_are_ignored_with_one_line_each(path, caplog):
    caplog.set_level(logging.INFO, "nanoinfer.serve")
    odd = {"temprature": 1, "num_ctx": 8192, "my_field": [1, {"a": "b"}], "x\n" * 300: None}
    options = dict(stream=True, stream_options={"include_use": True})

    async def ask():
        async with serving(path) as served:
            wanted = await served.complete("w20", max_tokens=3)
            for _ in range(2):
                assert (await served.complete("w20", max_tokens=3, **odd))["choices"] == wanted["choices"]
                assert (await served.post(prompt="w20", max_tokens=3, **options)).status_code == 200

    asyncio.run(ask())
    lines = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert len(lines) == 5 and all(line.endswith("--strict refuses such fields") for line in lines)
    assert lines[0].startswith("the request has a field 'temprature' that is not known (did you mean 'temperature'?)")
    assert "'num_ctx' that is not known (the context is --max-model-len)" in lines[1]
    assert len(lines[3]) < 300 and "\n" not in lines[3]
    assert lines[4].startswith("stream_options has a field 'include_use' that is not known (did you mean 'include_us")


def test_no_client_can_fill_the_log(caplog):
    fields = Fields()
    for number in range(300):
        parse(CompletionRequest, b'{"prompt": "a", "field_%d": 1}' % number, fields)
    assert len(caplog.records) == 200


def test_a_strict_server_refuses_them():
    with pytest.raises(BadRequestError, match="the request has an unknown field 'temprature': did you mean 'temper"):
        parse(CompletionRequest, b'{"prompt": "a", "temprature": 1}', Fields(refuses_unknown=True))
    with pytest.raises(BadRequestError, match="stream_options has an unknown field"):
        body = b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}'
        parse(CompletionRequest, body, Fields(refuses_unknown=True))


@pytest.mark.parametrize("strict", [False, True])
def test_what_another_api_calls_otherwise_is_refused_with_our_name_unless_it_says_the_same_again(strict):
    fields = Fields(refuses_unknown=strict)
    for theirs, ours in (("repeat_penalty", "repetition_penalty"), ("n_predict", "max_tokens"), ("rng_seed", "seed")):
        with pytest.raises(BadRequestError, match=f"has the field '{theirs}', which is '{ours}' here") as caught:
            parse(ChatRequest, b'{%s, "%s": 2}' % (MESSAGES, theirs.encode()), fields)
        assert caught.value.param == theirs
        both = b'{%s, "%s": 2, "%s": 2}' % (MESSAGES, theirs.encode(), ours.encode())
        assert getattr(parse(ChatRequest, both, fields), ours) == 2
    with pytest.raises(BadRequestError, match="'prompt' here"):
        parse(CompletionRequest, b'{"prompt": "a", "input": "b"}', fields)


@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_the_answer_is_refused_and_what_would_not_is_taken(strict):
    fields = Fields(refuses_unknown=strict)
    for name, value in (("typical_p", b"0.9"), ("grammar", b'"root ::= [0-9]"'), ("lora", b'[{"id": 0}]')):
        with pytest.raises(BadRequestError, match=f"{name}=.* is not supported") as caught:
            parse(CompletionRequest, b'{"prompt": "a", "%s": %s}' % (name.encode(), value), fields)
        assert caught.value.code == "unsupported_parameter"
    neutral = (
        b'{"prompt": "a", "typical_p": 1.0, "xtc_probability": 0, "xtc_threshold": 0.1, "mirostat": 0, "lora": []}'
    )
    assert parse(CompletionRequest, neutral, fields).prompt == "a"


def test_a_name_is_either_taken_or_refused():
    assert not IGNORED & UNSUPPORTED.keys()
    assert not GenerationRequest.model_fields.keys() & (IGNORED | UNSUPPORTED.keys())


def test_the_page_lists_every_path_and_field_and_needs_no_network(path):
    async def ask():
        async with serving(path, api_key="secret") as served:
            answer = await served.client.get("/docs")
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert {route.path for route in served.app.routes if "{" not in route.path} == ENDPOINTS.keys()
            methods = {one.path: one.methods for one in served.app.routes if one.path != "/ping"}
            assert {path: {row[0]} for path, row in ENDPOINTS.items() if path != "/ping"}.items() <= methods.items()
            assert (await served.client.get("/docs", headers={"Origin": "http://evil.example"})).status_code == 403
            return answer.text

    text = asyncio.run(ask())
    assert text == docs_page() and MODEL not in re.sub("<[^>]*>", "", text)
    assert not re.search(r"https?://|src=|href=|<script", text)
    for _, _, kind in ENDPOINTS.values():
        for name in kind.model_fields if kind else ():
            assert f"<code>{name}</code>" in text
    assert "<td>integer, 1 to 128</td>" in text and "object with include_usage" in text
