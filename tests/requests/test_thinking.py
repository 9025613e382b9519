"""How much a sequence thinks: what counts, and which tokens must come where it is used up."""

import random

import pytest
from structured import make_structured_tokenizer

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.thinking import Bounds
from nanoinfer.requests.detokenizer import TokenTexts
from nanoinfer.requests.thinking import ThinkingBudget, ThinkingEnd

USUAL = Bounds("<think>", ("</think>",), "</think>")
TOKENS, TEXTS = make_structured_tokenizer(added=("<think>", "</think>")), make_structured_tokenizer()


def end_of(tokenizer, bounds=USUAL):
    return ThinkingEnd(bounds, tokenizer, TokenTexts(tokenizer))


def written(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def played(tokenizer, budget, said, *, is_thinking=True, bounds=USUAL, ahead=0):
    """The text of a sequence that says this, where nothing else must come."""
    thinking, output = ThinkingBudget(end_of(tokenizer, bounds), budget, is_thinking=is_thinking), []
    left = written(tokenizer, said)
    while left:
        may_end = thinking.may_end(output[: len(output) - ahead], 0, min(ahead, len(output)))
        token = thinking.next_token(output, 0)
        assert token is None or may_end, "a step must know before its layers run that its sampling waits"
        output.append(left.pop(0) if token is None else token)
    return tokenizer.decode(output)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokenizer", [TOKENS, TEXTS], ids=["a token", "texts"])
def test_it_counts_from_the_begin_and_the_end_comes_as_soon_as_it_is_used_up(tokenizer, ahead):
    how = dict(ahead=ahead)
    for budget in (0, 1, 3):
        assert played(tokenizer, budget, "abcdefgh", **how) == "abcdefgh"[:budget] + "</think>" + "abcdefgh"[budget:]
        begun = played(tokenizer, budget, "\n<think>abcdefgh", is_thinking=False, **how)
        assert begun == "\n<think>" + "abcdefgh"[:budget] + "</think>" + "abcdefgh"[budget:]
    assert played(tokenizer, 11, "abc</think>defghijkl", **how) == "abc</think>defghijkl", "what ended by itself"
    for text in ("<thing>abcdefgh", "Yes: <think>abcdefgh"):
        assert played(tokenizer, 2, text, is_thinking=False, **how) == text, "no thinking"


def test_an_end_that_has_begun_is_gone_on_with():
    assert played(TEXTS, 4, "ab</xyz") == "ab</think>xyz"
    assert played(TEXTS, 4, "abc<<xyz") == "abc</think><xyz"


def test_it_never_ends_inside_a_character():
    for text, budget in (("aé🦊漢b", number) for number in range(11)):
        found = played(TOKENS, budget, text)
        thought, end, rest = found.partition("</think>")
        assert (thought + rest, end) == (text, "</think>") and "\ufffd" not in thought
        assert budget <= len(thought.encode()) <= budget + 3
    odd = TOKENS.convert_tokens_to_ids(["ð"] * 9)  # the first byte of a character, and never more of it
    thinking, output = ThinkingBudget(end_of(TOKENS), 2, is_thinking=True), []
    while thinking.next_token(output, 0) is None:
        output.append(odd.pop())
    assert len(output) == 5


def test_where_another_token_came_it_waits_for_the_next_place():
    """A grammar may not let it end."""
    thinking, end = ThinkingBudget(end_of(TEXTS), 2, is_thinking=True), written(TEXTS, "</think>")
    output = written(TEXTS, "abc")
    assert thinking.next_token(output, 0) == end[0]
    output += [end[0], *written(TEXTS, "d")]
    assert thinking.next_token(output, 0) == end[0]
    assert thinking.next_token([*output, end[0]], 0) == end[1]


HARMONY = "<|channel|> <|message|> <|end|> <|start|> <|return|> <|call|>".split()


def test_gpt_oss_goes_on_with_another_message_and_then_with_the_last_one():
    tokenizer = make_structured_tokenizer("<|channel|>analysis<|message|>", HARMONY)
    bounds = AnswerFormat.of_tokenizer(tokenizer).bounds
    analysis, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    comment, next_one = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant", "<|end|><|start|>assistant"
    how = dict(is_thinking=False, bounds=bounds)
    assert played(tokenizer, 2, f"{comment}{analysis}ab{final}c", **how) == f"{comment}{analysis}ab{next_one}{final}c"
    assert played(tokenizer, 9, f"{analysis}ab{next_one}{final}cdefghijklmnop", **how) == (
        f"{analysis}ab{next_one}{final}cdefghijklmnop"
    )
    assert (
        played(tokenizer, 2, f"{analysis}ab{analysis}cd", **how)
        == f"{analysis}ab{next_one}{analysis}{next_one}{final}cd"
    )


def test_what_it_reads_at_once_or_token_by_token_is_the_same():
    draw, end = random.Random(3), written(TEXTS, "</think>")
    for _ in range(200):
        output = [draw.choice([*end, *written(TEXTS, "abé")]) for _ in range(draw.randrange(30))]
        budget, whole = draw.randrange(12), []
        steps = ThinkingBudget(end_of(TEXTS), budget, is_thinking=True)
        for size in range(len(output) + 1):
            whole.append(ThinkingBudget(end_of(TEXTS), budget, is_thinking=True).next_token(output[:size], 0))
            assert steps.next_token(output[:size], 0) == whole[-1]


def test_a_tokenizer_that_cannot_write_the_end_is_refused():
    bad = type("Tokenizer", (), {"encode": lambda *_, **__: [5], "decode": lambda *_, **__: "x"})()
    with pytest.raises(RequestError, match="thinking_token_budget is not possible: the tokenizer cannot write"):
        end_of(bad)
