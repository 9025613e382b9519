"""Bodies are JSON, with the refusals of `json.loads` and few more; and what errors show of them."""

import json
import random

import pytest

from nanoinfer.common.errors import shown
from nanoinfer.serve import json_body

ATOMS = [
    '"', "\\", '\\"', "\\u", "\\ud83d", "\\ude00", "d83d", "{", "}", "[", "]", ",", ":", " ", "\n", "5", "-", "1.5e3",
    "e", ".", "true", "null", "NaN", "-Infinity", "a", "é", "😀", '"a":', "[5,6,7,", '"x",', "\\n", "\x01", "\\\\",
    "00", "[]", "{}", "123,", "\ufeff", "\\u00e9",
]  # fmt: skip


def known_good(body: bytes):
    """What the standard library makes of it, without NaN and halves of surrogate pairs."""

    def refuse(constant):
        raise ValueError(constant)

    value = json.loads(body, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def outcome(function, body: bytes):
    try:
        return repr(function(body))
    except (ValueError, RecursionError):
        return "refused"


def test_values_and_refusals_are_those_of_the_standard_library(fuzz):
    choose, num_read = random.Random(0), 0
    for i in range(15_000 if fuzz else 5_000):
        text = "".join(choose.choice(ATOMS) for _ in range(choose.randint(1, 14)))
        text = (text, f'["{text}"]', f"[{text}]", f'{{"k": [1,2,{text}]}}', f'{{"{text}": 1}}')[i % 5]
        wanted = outcome(known_good, text.encode())
        assert outcome(json_body.load, text.encode()) == wanted, text
        num_read += wanted != "refused"
    assert num_read > 500


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32", "utf-16-le", "utf-8-sig"])
def test_encodings_are_those_of_the_standard_library(encoding):
    body = '{"prompt": "é漢😀", "n": [1, 2.5, -3]}'.encode(encoding)
    assert outcome(json_body.load, body) == outcome(known_good, body)


def test_large_values_are_whole():
    value = {
        "text": 'a"\\\n\u2028é漢😀' * 3000,
        "ids": list(range(9000)),
        "floats": [i / 7 for i in range(999)],
        "rows": [[i, i + 1] for i in range(999)],
        "mixed": [1, 2, None, 3, True, "x", 4],
    }
    for ascii_only in (True, False):
        for indent in (None, 1):
            assert json_body.load(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()) == value


def test_a_body_of_very_many_values_is_refused(monkeypatch):
    monkeypatch.setattr(json_body, "MAX_VALUES", 50)
    for text in ("[5]", '"x"', "{}", '{"a": 1}', '"\\\\"', '"[\\""'):
        with pytest.raises(ValueError, match="more than 50 lists, objects and texts"):
            json_body.load(f"[{','.join([text] * 60)}]".encode())
    many = "[" + ",".join(["5", "null"] * 5000) + "]"
    assert len(json_body.load(many.encode())) == 10_000, "numbers do not count"
    text = '[{"' * 100
    assert json_body.load(json.dumps([text] * 40).encode()) == [text] * 40, "nor what stands in texts"


def test_a_body_that_is_nested_too_deeply_is_refused():
    assert json_body.load(b"[" * 200 + b"]" * 200)
    with pytest.raises(RecursionError):
        json_body.load(b"[" * 210 + b"]" * 210)


def test_what_is_shown_of_a_large_value_is_its_beginning():
    some = (None, 5, "x", "x" * 80, "x" * 81, [], {}, [1, ["a", {"b": None}]], {"a": [1.5, True], "b": {}}, "'\"é\n")
    for value in some:
        whole = repr(value)
        assert shown(value) == (whole if len(whole) <= 80 else whole[:80] + "...")
    for value in ([5] * 10**5, {"a": ["x" * 10**6] * 3}, {str(i): i for i in range(10**4)}, ["y" * 100]):
        text = shown(value)
        assert len(text) == 83 and text.endswith("...") and repr(value)[:80] == text[:80]
