"""What a model writes takes its reader a time that grows as the text does, whatever it is, in whatever pieces."""

import random

import pytest
from written_calls import parsed

from nanoinfer.parsers.answer_format import TOOL_READERS, AnswerFormat
from nanoinfer.parsers.thinking import MARKERS, USUAL, Thinking, ThinkingReader

STYLES = {reader: name for name, reader in reversed(TOOL_READERS.items())}  # a reader may have several names
FORMS = {name: AnswerFormat(name) for name in STYLES.values()} | {
    "openai": AnswerFormat("openai", Thinking(MARKERS["openai_gptoss"])),
    "thinking": AnswerFormat("hermes", Thinking(USUAL)),
    "thinking without tools": AnswerFormat(None, Thinking(MARKERS["cohere_command3"])),
}
COUNT = 900  # characters


class Steps:
    """How much a reader looks at: each time that it asks for the text it holds, all of that may be looked at."""

    def __init__(self, monkeypatch) -> None:
        self.number = 0
        for kind in (*STYLES, ThinkingReader):
            self._count(monkeypatch, kind)

    def _count(self, monkeypatch, kind) -> None:
        def get(reader):
            held = reader.__dict__["_held"]
            self.number += 1 + len(held)
            return held

        def put(reader, held):
            reader.__dict__["_held"] = held

        monkeypatch.setattr(kind, "_held", property(get, put), raising=False)


def marks_of(form: AnswerFormat) -> list[str]:
    marks = [mark for kind in (TOOL_READERS.get(form.tool_parser),) if kind for mark in kind.meant]
    marks += list(form.thinking.meant) if form.thinking else []
    tagged = ["<function=", "<parameter=", "</parameter>", "</function>"] if "<tool_call>" in marks else []
    return [
        *marks,
        *tagged,
        "to=a",
        "a",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        "=",
        ">",
        "<",
        ";",
        "1",
        '{"name": "f", ',
    ]


BLANKS = (" ", "\n", "  \n")


def texts_of(form: AnswerFormat, draw: random.Random):
    """One thing again and again, behind a beginning of a few others: what is waited for then never comes."""
    for again in [*marks_of(form), *BLANKS]:
        yield "", again
    for _ in range(60):
        beginning = "".join(draw.choice([*marks_of(form), *BLANKS]) for _ in range(draw.randrange(1, 5)))
        again = "".join(draw.choice([*marks_of(form), *BLANKS]) for _ in range(draw.randrange(1, 3)))
        yield beginning, again


@pytest.mark.parametrize("name", FORMS)
def test_a_text_of_twice_the_length_takes_at_most_twice_the_steps(name, monkeypatch, fuzz):
    form, draw = FORMS[name], random.Random(3)
    steps = Steps(monkeypatch)
    texts = list(texts_of(form, draw))
    for beginning, again in texts if fuzz else texts[::9]:
        for size in (1, 7, None) if fuzz else (1, None):  # characters of a piece; None: all at once
            taken, prompt = [], draw.choice(("<think>\n", ""))
            for count in (COUNT, 2 * COUNT):
                text = beginning + again * (count // len(again))
                pieces = [text] if size is None else [text[at : at + size] for at in range(0, len(text), size)]
                steps.number = 0
                parsed(form, prompt, pieces)
                taken.append(steps.number)
            assert taken[1] <= 2.2 * taken[0] + 100_000, (beginning, again, size, taken)


@pytest.mark.parametrize(
    "text",
    ["to=a" * 28, "to=a" * 5000, "<|channel|>commentary" + " to=a" * 28 + " ", "<|channel|>a " * 28 + "<|message|"],
)
def test_a_header_of_gpt_oss_is_read_once(text):
    """With a pattern that could read one part in two ways this never ended."""
    found = parsed(FORMS["openai"], "<|start|>assistant", [text])
    assert found.content.strip() == text.strip() and not found.tool_calls


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary json to=functions.f<|message|>",
    ],
)
@pytest.mark.parametrize("arguments", ['{"text": "a"}', ""])
def test_a_call_of_gpt_oss_may_name_its_type_without_a_token_and_have_no_arguments(header, arguments):
    for pieces in ([header + arguments], list(header + arguments)):
        found = parsed(FORMS["openai"], "<|start|>assistant", [*pieces, "<|call|>"])
        assert not found.content
        assert [(call.name, call.arguments, call.is_whole) for call in found.tool_calls] == [
            ("f", arguments or "{}", True)
        ]


def test_a_closing_tag_ends_a_value_of_glm_that_has_no_end():
    call = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>more</arg_key>\n<arg_value>b\n"
    for text in (call + "</tool_call>", call + "</tool_call>\n<tool_call>f</tool_call>"):
        for pieces in ([text], list(text)):
            found = parsed(AnswerFormat("glm45"), "", pieces)
            assert not found.content and all(one.is_whole for one in found.tool_calls)
            assert "tool_call" not in found.tool_calls[0].arguments and len(found.tool_calls) == text.count(
                "<tool_call>"
            )
    said = "<tool_call>f<arg_key>text</arg_key><arg_value>of </tool_call> it</arg_value></tool_call>"
    assert parsed(AnswerFormat("glm45"), "", [said]).tool_calls[0].arguments == '{"text": "of </tool_call> it"}'


@pytest.mark.parametrize("end", ["}\n</tool_call>", "}</tool_call>", "\n}\n</tool_call>", "}"])
def test_a_brace_too_many_is_no_content(end):
    call = '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}'
    for pieces in ([call + end], list(call + end)):
        found = parsed(AnswerFormat("hermes"), "", pieces)
        assert not found.content and [one.is_whole for one in found.tool_calls] == [True]
    kept = parsed(AnswerFormat("hermes"), "", [call + "} is a brace"])
    assert kept.content == "} is a brace"


@pytest.mark.parametrize("style", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_within_thinking_that_is_never_closed_is_a_call(style):
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    }
    form, text = AnswerFormat(style, Thinking(USUAL)), f"I call it.\n{calls[style]}"
    for pieces in ([text], list(text)):
        found = parsed(form, "<think>\n", pieces)
        assert found.reasoning.startswith("I call it.") and not found.content
        assert [(one.name, one.arguments, one.is_whole) for one in found.tool_calls] == [("f", '{"text": "a"}', True)]
        closed = parsed(form, "<think>\n", [*pieces, "\n</think>\n\nDone."])
        assert closed.content == "Done." and not closed.tool_calls, "what was only thought is none"
    assert not parsed(form, "<think>\n", [text[:-20]]).tool_calls, "the rest of the call may be another one"


def test_blanks_within_thinking_are_kept_as_they_were():
    form = AnswerFormat(None, Thinking(USUAL))
    text = "a\n\n\n b \n \nc\n\n"
    for pieces in ([text], list(text)):
        found = parsed(form, "<think>\n", [*pieces, "</think>\n\nd\n\n e\n"])
        assert (found.reasoning, found.content) == ("a\n\n\n b \n \nc", "d\n\n e\n")
