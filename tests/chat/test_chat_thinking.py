"""What is thought and what is answered, and what of it the template gets to see."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanoinfer.chat.thinking import Markers, Splitter, Thinking, prompt_messages
from nanoinfer.requests.prompts import encode_chat

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
    messages = prompt_messages("S", SAID, Thinking.of(template))
    return encode_chat(fast, messages, variables, tokenize=False)


@pytest.mark.parametrize("template", [QWEN3, R1, GPT_OSS], ids=["qwen3", "r1", "gpt-oss"])
def test_the_template_decides_whether_earlier_thinking_is_in_the_prompt(template):
    without, kept = rendered(template), rendered(template, keeps=True)
    assert all(word in text for word in ("S", "Q1", "A1", "Q2") for text in (without, kept))
    assert "T1" not in without and "T1" in kept


def test_a_template_that_knows_no_thinking_gets_none():
    assert rendered(KEEPS_ALL) == "[system] S [user] Q1 [assistant] A1 [user] Q2 [assistant]"


def split(thinking, text, prompt="[assistant]", size=1):
    """The text of each part, in their order."""
    splitter, found = thinking.splitter(prompt), []
    pieces = [piece for i in range(0, len(text), size) for piece in splitter.feed(text[i : i + size])]
    for kind, part in [*pieces, *splitter.flush()]:
        if not found or found[-1][0] != kind:
            found.append([kind, ""])
        found[-1][1] += part
    return [tuple(part) for part in found]


@pytest.mark.parametrize("size", [1, 2, 7, 99])
def test_parts_are_split_whatever_pieces_they_come_in(size):
    qwen, oss = Thinking.of(QWEN3), Thinking.of(GPT_OSS, ("<|channel|>", "<|message|>", "<|end|>", "<|pad|>"))
    cases = [
        (qwen, "<think>\nhm\n</think>\n\nyes", "[assistant]", [("thinking", "\nhm\n"), ("answer", "\n\nyes")]),
        (qwen, "hm</think>yes", "[assistant]<think>\n", [("thinking", "hm"), ("answer", "yes")]),
        (qwen, "a < b <thin", "[assistant]", [("answer", "a < b <thin")]),
        (qwen, "The tag <think> opens.", "[assistant]", [("answer", "The tag <think> opens.")]),
        (qwen, "\n<think>x", "[assistant]", [("answer", "\n"), ("thinking", "x")]),
        (
            oss,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|pad|>!",
            "<|start|>assistant",
            [("thinking", "hm"), ("answer", "yes!")],
        ),
    ]
    for thinking, text, prompt, wanted in cases:
        assert split(thinking, text, prompt, size) == wanted


def test_what_cannot_become_a_marker_is_shown_at_once():
    splitter = Splitter(Markers("<think>", ("</think>",)))
    assert list(splitter.feed("yes")) == [("answer", "yes")]
    assert list(splitter.feed(" <th")) == [("answer", " <th")]  # thinking only begins where an answer does
    thinking = Splitter(Markers("<think>", ("</think>",)), is_thinking=True)
    assert list(thinking.feed("so </th")) == [("thinking", "so ")]
    assert list(thinking.feed("is")) == [("thinking", "</this")]


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
    found = Thinking.of(template, special, vocabulary)
    assert (found.markers.begin, found.special, found.field) == (begin, special if sees_special else (), field)
