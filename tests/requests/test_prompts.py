"""Messages as clients send them: what is no text in form, and is some in meaning."""

import pytest

from nanoinfer.common.errors import RequestError
from nanoinfer.requests.prompts import conversation
from nanoinfer.serve.protocol import ChatRequest


@pytest.mark.parametrize(
    "content, text",
    [
        (None, ""),
        ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"text": "a"}, {"type": None, "text": "b"}], "a\nb"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_may_be_null_and_its_parts_be_named_as_in_either_api(role, content, text):
    assert conversation([{"role": role, "content": content}]) == [{"role": role, "content": text}]


@pytest.mark.parametrize(
    "content",
    [7, [{"type": "image_url"}], [{"type": "refusal", "text": "x"}], [{"type": ["text"], "text": "x"}], [None]],
)
def test_what_has_no_text_is_refused(content):
    with pytest.raises(RequestError):
        conversation([{"role": "user", "content": content}])


def test_an_empty_stop_string_is_none():
    assert ChatRequest(messages=[], stop="").stop is None and ChatRequest(messages=[], stop="x").stop == "x"
