"""JSON in pieces is JSON, with the refusals of `json.loads`, at any size of the pieces; and what errors show of it."""

import json
import random
import re

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


@pytest.fixture(params=["small pieces", "as it is"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":
        monkeypatch.setattr(json_body, "PIECE_CHARS", 7)
        small = json_body.STRING_PIECE.pattern.replace("{1,64}", "{1,2}").replace("{0,1024}", "{0,2}")
        monkeypatch.setattr(json_body, "STRING_PIECE", re.compile(small))


def test_values_and_refusals_are_those_of_the_standard_library(pieces, fuzz):
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


def test_large_values_are_whole(pieces):
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


def test_no_call_of_the_json_module_gets_more_than_a_piece(monkeypatch):
    """Python's lock is held all through such a call, and with it the event loop."""
    sizes = []
    whole, scanstring = json_body.WHOLE, json_body.scanstring

    class Recorded:
        def decode(self, text):
            sizes.append(len(text))
            return whole.decode(text)

    def recorded(text, at):
        sizes.append(len(text))
        return scanstring(text, at)

    monkeypatch.setattr(json_body, "WHOLE", Recorded())
    monkeypatch.setattr(json_body, "scanstring", recorded)
    value = {"text": "w " * 200_000, "lines": "\n\\é" * 50_000, "ids": [[5] * 300_000, [6] * 10]}
    body = json.dumps(value).encode()
    assert json_body.load(body) == value
    assert sum(sizes) > 0.99 * len(body) and max(sizes) < 70_000


def test_a_wrong_number_is_looked_for_once(monkeypatch):
    """The numbers before it are not read again for each of them."""
    sizes, whole = [], json_body.WHOLE

    class Recorded:
        def decode(self, text):
            sizes.append(len(text))
            return whole.decode(text)

    monkeypatch.setattr(json_body, "WHOLE", Recorded())
    body = b"[%s,,5,%s5]" % (b"5," * 2000, b"5," * 2000)
    with pytest.raises(ValueError, match="Expecting value"):
        json_body.load(body)
    assert 0 < sum(sizes) <= len(body) + 2


def test_a_body_of_very_many_values_is_refused(monkeypatch):
    monkeypatch.setattr(json_body, "MAX_VALUES", 50)
    for text in ("[5]", '"x"', "{}", '{"a": 1}', "null"):
        with pytest.raises(ValueError, match="more than 50 values"):
            json_body.load(f"[{','.join([text] * 60)}]".encode())
    assert len(json_body.load(f"[{','.join(['5'] * 5000)}]".encode())) == 5000, "numbers do not count"


def test_reading_ends_when_nobody_wants_it():
    asked = []

    def is_wanted():
        asked.append(1)
        return len(asked) < 3

    for body in (b'"%s"' % (b"w" * 10**6), b"[%s5]" % (b"5," * 10**6), b"[%s[]]" % (b"[]," * 5000)):
        asked.clear()
        with pytest.raises(json_body.GivenUpError):
            json_body.load(body, is_wanted)
        assert len(asked) == 3


def test_what_is_shown_of_a_large_value_is_its_beginning():
    some = (None, 5, "x", "x" * 80, "x" * 81, [], {}, [1, ["a", {"b": None}]], {"a": [1.5, True], "b": {}}, "'\"é\n")
    for value in some:
        whole = repr(value)
        assert shown(value) == (whole if len(whole) <= 80 else whole[:80] + "...")
    for value in ([5] * 10**5, {"a": ["x" * 10**6] * 3}, {str(i): i for i in range(10**4)}, ["y" * 100]):
        text = shown(value)
        assert len(text) == 83 and text.endswith("...") and repr(value)[:80] == text[:80]
