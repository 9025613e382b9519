"""What a request's body says of its prompt, before anybody tokenises it."""

import random

import pytest

from nanoinfer.serve.ray.digests import PIECE_CHARS, digests_of, prompt_text

LONG = "a long document, word by word " * 100


def common(first, second):
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def test_two_texts_have_the_digests_of_their_common_pieces_in_common():
    draw = random.Random(1)
    for _ in range(200):
        length = draw.randrange(5 * PIECE_CHARS)
        begin = "".join(draw.choices("aé漢\ud800\n", k=length))
        first, second = (begin + mark + "x" * draw.randrange(2 * PIECE_CHARS) for mark in "01")
        found = digests_of(first), digests_of(second)
        assert [len(one) for one in found] == [len(first) // PIECE_CHARS, len(second) // PIECE_CHARS]
        assert common(*found) == length // PIECE_CHARS
        assert not set(found[0][length // PIECE_CHARS :]) & set(found[1])


def test_a_piece_at_another_place_or_behind_others_has_another_digest():
    a, b = "a" * PIECE_CHARS, "b" * PIECE_CHARS
    found = digests_of(a + a + b) + digests_of(b + a)
    assert len(set(found)) == 5 and all(0 <= one < 2**64 for one in found)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"maximum": 3}}}]
ASKED, SAID = {"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}


@pytest.mark.parametrize(
    ("body", "later"),
    [
        ({"messages": [ASKED]}, {"messages": [ASKED, SAID, {"role": "tool", "content": "two"}]}),
        ({"messages": [ASKED], "tools": TOOLS}, {"messages": [ASKED, ASKED], "tools": TOOLS}),
        ({"system": "be kind", "messages": [ASKED]}, {"messages": [ASKED, SAID], "system": "be kind"}),
        ({"instructions": "be kind", "input": [ASKED]}, {"instructions": "be kind", "input": [ASKED, SAID]}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3, 4]}),
    ],
    ids=["tool", "tools", "system", "input", "tokens"],
)
def test_the_next_turn_begins_with_the_text_of_this_one(body, later):
    before, text = prompt_text(body), prompt_text(later)
    assert before and text.startswith(before) and len(text) > len(before)


def test_a_text_that_goes_on_has_the_same_pieces():
    assert digests_of(prompt_text({"prompt": LONG + LONG}))[:2] == digests_of(prompt_text({"prompt": LONG}))


def test_tools_come_before_the_system_prompt_and_that_before_messages():
    text = prompt_text({"messages": [ASKED], "system": "be kind", "tools": TOOLS, "model": "m", "stop": ["x"]})
    assert text.index("look") < text.index("be kind") < text.index("one") and "m" not in text.split("\x1e")


def test_a_mark_that_moves_from_message_to_message_changes_nothing():
    part = {"type": "text", "text": "one"}
    marked = part | {"cache_control": {"type": "ephemeral"}}
    plain, other = ({"messages": [{"role": "user", "content": [one]}]} for one in (part, marked))
    assert prompt_text(plain) == prompt_text(other)


def test_what_differs_in_one_value_or_in_where_it_ends_is_another_text():
    bodies = [
        {"messages": [{"role": "user", "content": "ab"}]},
        {"messages": [{"role": "assistant", "content": "ab"}]},
        {"messages": [{"role": "user", "content": "a"}, "b"]},
        {"prompt": ["ab", "c"]},
        {"prompt": ["a", "bc"]},
        {"prompt": [12, 3]},
        {"prompt": [1, 23]},
    ]
    assert len({prompt_text(body) for body in bodies}) == len(bodies)


def test_a_body_without_a_prompt_has_no_text_and_nesting_costs_no_stack():
    assert [prompt_text(body) for body in (None, [], "x", {}, {"prompt": None}, {"messages": []})] == [""] * 6
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert prompt_text({"messages": nested}) == ""
