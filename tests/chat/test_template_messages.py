"""Chats of every order of roles, in templates that models are published with: no message vanishes, no result comes to
another call, and what stands before a message stays as it was.

`make templates-test TEMPLATES=DIR` does the same with every template of a folder.
"""

import logging
import os
import re

import pytest
from small_templates import SMALL
from template_chats import OWN, templates
from trained_tokenizers import make_tokenizer

from nanoinfer.common.errors import RequestError, shown
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.thinking import HARMONY
from nanoinfer.requests.chats import ChatTemplate

FILES = templates()
TEMPLATES = {name: path.read_text() for name, path in FILES.items()} | SMALL
# Templates of ours without a form for some messages: for the system's, or for calls.
LACKING = {
    "no-system-role",
    "HuggingFaceTB-SmolLM3-3B",
    "ibm-granite-granite-3.3-2B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
}
SYSTEM_AT_LAST = {"mistralai-Mistral-Nemo-Instruct-2407", "system at the end"}  # before the last question
CALL_OR_TEXT = {"mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}]  # fmt: skip
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
CHATS = (
    "u|s u|s u a u|d u|s d u|d s u|s s d u|u a s u|u s u|s u s u|s u a s u|s u a s s u|s u a s|u a d u|s u a d"
    "|u u|s u u u|u u a u|u a a u"
)
CALLING = (
    "s u c t|s u c t a u|u c t s|s u c t s|s u c t d|s u c t s a u|s u c t u|s u c t u a u|s u c t s u|u c c2 t t"
    "|s u c2 t t|s u c2 t t s|s u c2 t t u|s u c2 t t a u c t|s u c t c t s c t a u|u u c t u u a s u|s u C t a u"
)


def is_own(name):
    return name in SMALL or FILES[name].parent == OWN


def chat(words, *, is_swapped=False):
    """c: a call, c2: two, C: with text beside. Each text is a mark of its own. is_swapped: the two results are."""
    found, ids = [], []
    for place, word in enumerate(words.split()):
        message = {"role": ROLES.get(word, "assistant"), "content": f"Mark{place}m" if word in (*ROLES, "C") else ""}
        if word[0] in "cC":
            ids = [f"toolu_{place}_{number}" for number in range(2 if word == "c2" else 1)]
            message["reasoning_content"] = f"Thought{place}t"
            functions = [{"name": "look", "arguments": f'{{"at": "At{place}x{number}"}}'} for number in range(len(ids))]
            message["tool_calls"] = [
                {"id": one, "type": "function", "function": function}
                for one, function in zip(ids, functions, strict=True)
            ]
        elif word == "t":
            message["tool_call_id"] = ids.pop(0)
        found.append(message)
    if is_swapped:
        one, two = results_of_two(words)
        found[one], found[two] = found[two], found[one]
    return found


def results_of_two(words):
    behind = words.split().index("c2")
    return [place for place, word in enumerate(words.split()) if word == "t" and place > behind][:2]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer("qwen")
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


class Rendered:
    """Renders chats with one template; those with calls with tools, if it shows any."""

    def __init__(self, tokenizer, name):
        self._tokenizer, self._text = tokenizer, TEMPLATES[name]
        self._template = ChatTemplate(tokenizer, AnswerFormat.of(self._text), self._text)

    def __call__(self, messages, *, tools=TOOLS, begins=True):
        messages = chat(messages) if isinstance(messages, str) else messages
        is_shown = "tools" in self._text and any(message.get("tool_calls") for message in messages)
        tools = tools if is_shown or tools is not TOOLS else None
        return self._template.encode(messages, tools=tools, tokenize=False, add_generation_prompt=begins)

    def takes(self, *chats):
        """Whether the template has a form for such messages at all; else it says so, or the message is named."""
        try:
            for words in chats:
                self(words)
        except RequestError as error:
            assert re.search(r"the chat template refuses|messages\[\d+\].* would not be in the prompt", str(error))
            return False
        return True

    def chats(self):
        """Chats of messages that it has a form for."""
        has_system = self.takes("s u")
        chats = CHATS.split("|") if self.takes("u") else []
        chats += CALLING.split("|") if self.takes("u c t", "u c t a u") else []
        return [words for words in chats if has_system or words[0] not in "sd"]


@pytest.fixture
def rendered(tokenizer, name):
    return Rendered(tokenizer, name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_of_every_role_comes_out_in_its_place(rendered, name):
    chats = rendered.chats()
    if is_own(name):
        assert len(chats) == len(CHATS.split("|")) + len(CALLING.split("|")) or name in LACKING
    for words in chats:
        messages = chat(words)
        text = rendered(messages)
        places = []
        for place, message in enumerate(messages):
            wanted = [f"At{place}x{number}" for number in range(len(message.get("tool_calls", ())))]
            is_shown = not wanted or name not in CALL_OR_TEXT and HARMONY not in TEMPLATES[name]
            wanted += [message["content"]] if message["content"] and is_shown else []
            assert all(one in text for one in wanted), (words, wanted)
            places.append(text.index(wanted[0]))
        if name in SYSTEM_AT_LAST and words[0] in "sd":
            places = places[sum(word in "sd" for word in words.split()[:3]) :] if words[2] in "sd" else places[1:]
        assert places == sorted(places), words


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_stands_before_a_late_message_stays(rendered, name):
    """Behind a result all of it does; else as much as a question of the user's would leave."""

    def kept(before, then):
        texts = [rendered(words, begins=False) for words in (before, f"{before} {then}")]
        return os.path.commonprefix(texts)

    for words in rendered.chats():
        before, _, late = words.rpartition(" ")
        if late in ("s", "d") and set(before.split()) - {"s", "d"} and rendered.takes(before):
            stays = kept(before, late)
            if before[-1] == "t":
                assert chat(before)[-1]["content"] in stays, words
            assert chat(before)[-1]["content"] in stays or len(stays) >= len(kept(before, "u")), words


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_in_another_order_make_the_same_prompt(rendered, name):
    chats = [words for words in rendered.chats() if "c2" in words]
    for words in chats and [*chats, "u c2 t u t"]:
        text = rendered(words)
        assert rendered(chat(words, is_swapped=True)) == text, words
        # Each result stands behind its call, and the results in the order of the calls.
        call = words.split().index("c2")
        marks = [(f"At{call}x{number}", f"Mark{place}m") for number, place in enumerate(results_of_two(words))]
        (call_1, result_1), (call_2, result_2) = [[text.index(mark) for mark in pair] for pair in marks]
        assert call_1 < result_1 < result_2 and call_1 < call_2 < result_2


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"at": "At1x0', '{"at": "At1x0"} and', '["At1x0"]'])
def test_arguments_that_a_limit_cut_off_are_shown_as_text_and_named(rendered, name, arguments, caplog):
    if not rendered.takes("u c t"):
        return
    messages = chat("u c t a u")
    messages[1]["tool_calls"][0] |= {"id": f"call_{name}_{arguments}"}
    messages[2]["tool_call_id"] = f"call_{name}_{arguments}"
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    with caplog.at_level(logging.WARNING):
        texts = [rendered(messages) for _ in range(2)]
    assert texts[0] == texts[1] and "At1x0" in texts[0] and "Mark2m" in texts[0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        f"messages[1].tool_calls[0] (look, {shown(f'call_{name}_{arguments}')}) has arguments that are no JSON" in said
    )


OBJECT = {"type": "object"}
SCHEMAS = [
    {}, OBJECT, None, {"$schema": "x", **OBJECT, "properties": {}}, {**OBJECT, "properties": None},
    {**OBJECT, "properties": {"at": {"type": "string"}}},
    {**OBJECT, "properties": {"at": {}}, "required": None},
    {**OBJECT, "properties": {"at": {"type": ["string", "null"], "description": None}}, "additionalProperties": False},
    {**OBJECT, "properties": {"at": {"type": "array", "items": {}}, "x": {"enum": ["a", 1, None]}}, "required": ["at"]},
    {**OBJECT, "properties": {"at": True, "x": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}},
    {**OBJECT, "properties": {"at": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}},
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_with_less_in_their_schemas_than_a_template_reads_are_shown(rendered, name):
    messages = [{"role": "user", "content": "Mark0m"}]

    def shown(schema, **own):
        own |= {} if schema is None else {"parameters": schema}
        return rendered(messages, tools=[{"type": "function", "function": {"name": "look", **own}}])

    try:
        shown(TOOLS[0]["function"]["parameters"], description="Looks.")
    except RequestError:
        assert not is_own(name)
        return
    for schema in SCHEMAS:
        for own in ({}, {"description": "Looks."}):
            if "tools" in TEMPLATES[name]:
                assert "look" in shown(schema, **own), schema


@pytest.mark.parametrize("name", ["takes all", "Qwen-Qwen3-0.6B"])
def test_a_tool_has_one_form_whatever_the_order_of_its_keys(rendered, name):
    (tool,) = TOOLS
    others = [dict(reversed(tool.items())), {**tool, "function": dict(reversed(tool["function"].items()))}]
    assert len({rendered("u", tools=[one]) for one in (tool, *others)}) == 1
