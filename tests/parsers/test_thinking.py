"""What is thought and what is answered, and what of it the template gets to see."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import Reasoning, Text
from nanoinfer.requests.prompts import encode_chat

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = (  # as in Qwen3: what was thought before the newest question is left out
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for message in messages %}[{{ message.role }}] "
    "{% set content = message.content %}{% set thought = '' %}"
    "{% if message.reasoning_content is string %}{% set thought = message.reasoning_content %}"
    "{% elif '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if thought and (loop.index0 > ns.last or keeps) %}<think>{{ thought }}</think>{% endif %}{{ content }} "
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
R1 = (  # as in DeepSeek-R1 and QwQ: split off the content; a prompt opens the thinking itself
    "{% for message in messages %}[{{ message.role }}] {% if keeps %}{{ message.content }}{% else %}"
    "{{ message.content.split('</think>')[-1].strip() }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
KEEPS_ALL = "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}[assistant]"
GPT_OSS = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.thinking and keeps %}<|channel|>analysis"
    "<|message|>{{ message.thinking }}<|end|>{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
SAID = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "reasoning_content": "T1"},
    {"role": "user", "content": "Q2"},
]


def rendered(template, **variables):
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    fast.chat_template = template
    messages = AnswerFormat.of(template).messages([{"role": "system", "content": "S"}, *SAID])
    return encode_chat(fast, messages, variables, tokenize=False)


@pytest.mark.parametrize("template", [QWEN3, R1, GPT_OSS], ids=["qwen3", "r1", "gpt-oss"])
def test_the_template_decides_whether_earlier_thinking_is_in_the_prompt(template):
    without, kept = rendered(template), rendered(template, keeps=True)
    assert all(word in text for word in ("S", "Q1", "A1", "Q2") for text in (without, kept))
    assert "T1" not in without and "T1" in kept


def test_a_template_that_knows_no_thinking_gets_none():
    assert rendered(KEEPS_ALL) == "[system] S [user] Q1 [assistant] A1 [user] Q2 [assistant]"


def split(form, text, prompt="[assistant]", size=1):
    """The text of each part, in their order."""
    parser, found = form.parser(prompt), []
    events = [event for i in range(0, len(text), size) for event in parser.push(text[i : i + size])]
    for event in [*events, *parser.finish()]:
        if not found or type(found[-1]) is not type(event):
            found.append(type(event)(""))
        found[-1] = type(event)(found[-1].text + event.text)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 99])
def test_parts_are_split_whatever_pieces_they_come_in(size):
    special = dict.fromkeys(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|pad|>"), 0)
    qwen, oss = AnswerFormat.of(QWEN3), AnswerFormat.of(GPT_OSS, special)
    cases = [
        (qwen, "<think>\nhm\n</think>\n\nyes", "[assistant]", [Reasoning("hm"), Text("yes")]),
        (qwen, "hm</think>yes", "[assistant]<think>\n", [Reasoning("hm"), Text("yes")]),
        (qwen, "<think>a\n\nb</think> c\n\nd\n", "[assistant]", [Reasoning("a\n\nb"), Text(" c\n\nd\n")]),
        (qwen, "a < b <thin", "[assistant]", [Text("a < b <thin")]),
        (qwen, "The tag <think> opens.", "[assistant]", [Text("The tag <think> opens.")]),
        (qwen, "\n<think>x", "[assistant]", [Reasoning("x")]),
        (qwen, "\n\nx", "[assistant]", [Text("\n\nx")]),
        (qwen, "\n\n", "[assistant]", [Text("\n\n")]),
        (
            oss,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|pad|>!",
            "<|start|>assistant",
            [Reasoning("hm"), Text("yes!")],
        ),
    ]
    for form, text, prompt, wanted in cases:
        assert split(form, text, prompt, size) == wanted


def test_what_cannot_become_a_marker_is_shown_at_once():
    form = AnswerFormat.of(QWEN3)
    answer = form.parser("[assistant]")
    assert answer.push("yes") == [Text("yes")]
    assert answer.push(" <th") == [Text(" <th")]  # thinking only begins where an answer does
    thinking = form.parser("[assistant]<think>")
    assert thinking.push("so </th") == [Reasoning("so ")]
    assert thinking.push("is") == [Reasoning("</this")]


@pytest.mark.parametrize(
    "template, special, vocabulary, begin, sees_special, field",
    [
        ("plain", (), (), "<think>", False, None),
        ("plain", (), ("<seed:think>", "</seed:think>"), "<seed:think>", False, None),
        (r"{{ '<|channel>thought\n<channel|>' }}", (), (), "<|channel>thought\n", False, None),
        ("{{ block['thinking'] }} [THINK][/THINK]", ("[THINK]",), (), "[THINK]", True, None),
        ("{{ message.get('reasoning') }}<think>", ("</s>",), (), "<think>", False, "reasoning"),
        ("{% if 'reasoning_content' in message %}", ("<think>",), (), "<think>", True, "reasoning_content"),
        ("{% if thinking %} {{ ns.thinking }} {{ message.thinking_budget }}", (), (), "<think>", False, None),
    ],
)
def test_markers_and_field_follow_from_template_and_tokenizer(
    template, special, vocabulary, begin, sees_special, field
):
    form = AnswerFormat.of(template, dict.fromkeys(special, 0), dict.fromkeys(vocabulary, 0))
    assert (form.thinking.markers.begin, form.thinking.field) == (begin, field)
    assert form.sees_special(with_tools=False) == sees_special


def test_special_tokens_without_a_meaning_are_left_out_and_texts_that_look_like_one_stay():
    form = AnswerFormat.of(QWEN3, {"<think>": 1, "</think>": 2, "<pad>": 3})
    text, ids = "<think>a<pad>b</think>c<pad></think><pad>", [1, 9, 3, 9, 2, 9, 3, 2]
    parser = form.parser("")
    assert parser.push(text, ids) + parser.finish() == [Reasoning("ab"), Text("c</think><pad>")]
    literal = form.parser("")
    assert literal.push("<think>a</think><pad>", [9, 9]) + literal.finish() == [Text("<think>a</think><pad>")]
    shown = form.parser("", drops_special=False)
    assert shown.push(text, ids) + shown.finish() == [Reasoning("a<pad>b"), Text("c<pad></think><pad>")]
    late = form.parser("")  # the text of a token may come behind it, in pieces
    assert late.push("", [1, 3]) + late.push("<thi") + late.push("nk><p") + late.push("ad>x") == [Reasoning("x")]


def test_a_parser_is_named_or_refused_with_the_nearest_name():
    assert AnswerFormat.of(QWEN3, reasoning_parser="none").parser("").push("<think>x") == [Text("<think>x")]
    named = AnswerFormat.of("plain", reasoning_parser="mistral").parser("")
    assert named.push("[THINK]x[/THINK]y") == [Reasoning("x"), Text("y")]
    with pytest.raises(ValueError, match=r"--reasoning-parser 'qwen' is not known \(did you mean 'qwen3'\?\): choose"):
        AnswerFormat.of(QWEN3, reasoning_parser="qwen")
    with pytest.raises(ValueError, match=r"--tool-call-parser 'hermess' .*'hermes'"):
        AnswerFormat.of(QWEN3, tool_parser="hermess")


@pytest.mark.parametrize("asked", [{}, {"enable_thinking": True}, {"reasoning_effort": "high"}])
def test_a_line_before_the_template_turns_thinking_off_for_a_whole_server(asked):
    line = re.search(r"echo '(.*)'", (ROOT / "docs" / "tools.md").read_text())[1]
    template = (ROOT / "tests" / "chat" / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    ended = "<think>\n\n</think>\n\n"
    assert not rendered(template, **asked).endswith(ended)
    assert rendered(f"{line}\n{template}", **asked).endswith(ended)
    assert AnswerFormat.of(f"{line}\n{template}").thinking == AnswerFormat.of(template).thinking is not None
