"""Chats of every order of roles, in templates that models are published with: no message vanishes, no result comes to
another call, and what stands before a message stays as it was.

`make templates-test TEMPLATES=DIR` does the same with every template of a folder.
"""

import logging
import os
import re
from itertools import permutations

import pytest
from small_templates import SMALL
from template_chats import OWN, templates
from trained_tokenizers import make_tokenizer

from nanoinfer.common.errors import RequestError, shown
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.thinking import HARMONY
from nanoinfer.parsers.tools import shown_tools
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.requests.prompts import conversation, encode_chat

FILES = templates()
TEMPLATES = {name: path.read_text() for name, path in FILES.items()} | SMALL
# Templates of ours without a form for some messages: for the system's, or for calls.
LACKING = {
    "no-system-role",
    "HuggingFaceTB-SmolLM3-3B",
    "ibm-granite-granite-3.3-2B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
}
# Of ours, those that show calls, but tell of no tools.
TELLS_OF_NONE = {
    "no-system-role",
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
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
SAYS_SO = r"the chat template refuses|(messages\[\d+\].*|the tools) would not be in the prompt"
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
CHATS = (
    "u|s u|s u a u|d u|s d u|d s u|s s d u|u a s u|u s u|s u s u|s u a s u|s u a s s u|s u a s|u a d u|s u a d"
    "|u u|s u u u|u u a u|u a a u"
)
CALLING = (
    "s u c t|s u c3 t t t u|s u c t a u|u c t s|s u c t s|s u c t d|s u c t s a u|s u c t u|s u c t u a u|s u c t s u"
    "|u c c2 t t|s u c2 t t|s u c2 t t s|s u c2 t t u|s u c2 t t a u c t|s u c t c t s c t a u"
    "|u u c t u u a s u|s u C t a u"
)


def is_own(name):
    return name in SMALL or FILES[name].parent == OWN


def chat(words, order=None):
    """c: a call, c2: two, c3: three, C: with text beside. Each text is a mark of its own. order: of several results."""
    found, ids = [], []
    for place, word in enumerate(words.split()):
        message = {"role": ROLES.get(word, "assistant"), "content": f"Mark{place}m" if word in (*ROLES, "C") else ""}
        if word[0] in "cC":
            ids = [f"toolu_{place}_{number}" for number in range(int(word[1:] or 1))]
            message["reasoning_content"] = f"Thought{place}t"
            functions = [{"name": "look", "arguments": f'{{"at": "At{place}x{number}"}}'} for number in range(len(ids))]
            message["tool_calls"] = [
                {"id": one, "type": "function", "function": function}
                for one, function in zip(ids, functions, strict=True)
            ]
        elif word == "t":
            message["tool_call_id"] = ids.pop(0)
        found.append(message)
    if order is not None:
        places = results_of_several(words)[1]
        for place, other in zip(places, [found[places[one]] for one in order], strict=True):
            found[place] = other
    return found


def results_of_several(words):
    """The place of the first message with several calls, and those of its results."""
    words = words.split()
    call = next(place for place, word in enumerate(words) if word in ("c2", "c3"))
    return call, [place for place, word in enumerate(words) if word == "t" and place > call][: int(words[call][1:])]


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

    def shows(self, text, messages):
        """Whether all of a chat is in a prompt, one message behind the other."""
        marks = []
        for place, message in enumerate(messages):
            marks += [message["content"]] if message["content"] else []
            marks += [f"At{place}x{number}" for number in range(len(message.get("tool_calls", ())))]
        places = [text.find(mark) for mark in marks]
        are_told = "tools" not in self._text or not any(one.get("tool_calls") for one in messages) or "Looks." in text
        return -1 not in places and places == sorted(places) and are_told

    def as_transformers(self, messages):
        """What transformers makes of messages in which nothing but their form is another; None: it refuses them."""
        tools = TOOLS if "tools" in self._text and any(message.get("tool_calls") for message in messages) else None
        how = dict(tools=shown_tools(tools), chat_template=self._text, tokenize=False)
        try:
            return encode_chat(self._tokenizer, self._template.form.messages(conversation(messages)), **how)
        except RequestError:
            return None

    def has_system_at_last(self):
        """Whether a template puts the system's message before the last question."""
        text = self("s u a u")
        return text.index("Mark2m") < text.index("Mark0m")

    def takes(self, *chats):
        """Whether the template has a form for such messages at all; else it says so, or the message is named."""
        try:
            for words in chats:
                self(words)
        except RequestError as error:
            assert re.search(SAYS_SO, str(error))
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
def test_every_message_of_every_role_comes_out_in_its_place(rendered, name, caplog):
    chats = rendered.chats()
    is_at_last = name in SYSTEM_AT_LAST
    if not is_own(name) and rendered.takes("s u"):
        is_at_last = rendered.has_system_at_last()
    if is_own(name):
        assert len(chats) == len(CHATS.split("|")) + len(CALLING.split("|")) or name in LACKING
    for words in chats:
        messages = chat(words)
        text = rendered(messages)
        is_said = "no place for text beside calls" in caplog.text
        assert not is_said or not is_own(name) or name in CALL_OR_TEXT
        lacks_text = name in CALL_OR_TEXT or is_said
        places = []
        for place, message in enumerate(messages):
            wanted = [f"At{place}x{number}" for number in range(len(message.get("tool_calls", ())))]
            is_shown = not wanted or not lacks_text and HARMONY not in TEMPLATES[name]
            wanted += [message["content"]] if message["content"] and is_shown else []
            assert all(one in text for one in wanted), (words, wanted)
            places.append(text.index(wanted[0]))
        if is_at_last and words[0] in "sd":
            places = places[sum(word in "sd" for word in words.split()[:3]) :] if words[2] in "sd" else places[1:]
        assert places == sorted(places), words


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_stands_before_a_late_message_stays(rendered, name):
    """Behind a result all of it does; else as much as a question of the user's would leave."""

    def kept(before, then):
        texts = [rendered(words, begins=False) for words in (before, f"{before} {then}")]
        return os.path.commonprefix(texts)

    every = [words.split() for words in rendered.chats()]
    cuts = {(" ".join(words[:at]), words[at]) for words in every for at in range(1, len(words)) if words[at] in "sd"}
    for before, late in sorted(cuts):
        if set(before.split()) - {"s", "d"} and rendered.takes(before):
            stays = kept(before, late)
            if before[-1] == "t":
                assert chat(before)[-1]["content"] in stays, (before, late)
            assert chat(before)[-1]["content"] in stays or len(stays) >= len(kept(before, "u")), (before, late)


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_in_another_order_make_the_same_prompt(rendered, name):
    chats = [words for words in rendered.chats() if "c2" in words or "c3" in words]
    for words in chats and [*chats, "u c2 t u t"]:
        text = rendered(words)
        call, places = results_of_several(words)
        for order in permutations(range(len(places))):
            assert rendered(chat(words, order)) == text, (words, order)
        # Each result stands behind its call, and the results in the order of the calls.
        calls = [text.index(f"At{call}x{number}") for number in range(len(places))]
        results = [text.index(f"Mark{place}m") for place in places]
        assert calls == sorted(calls) and results == sorted(results)
        assert all(one < other for one, other in zip(calls, results, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_comes_to_it_as_it_is(rendered):
    for words in rendered.chats():
        messages = chat(words)
        plain = rendered.as_transformers(messages)
        if plain is not None and rendered.shows(plain, messages) and not set(words.split()[1:]) & {"s", "d"}:
            assert words[0] == "d" or rendered(messages) == plain, words


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"at": "At1x1', '{"at": "At1x1"} and', '["At1x1"]'])
def test_arguments_that_a_limit_cut_off_are_shown_as_text_and_named(rendered, name, arguments, caplog):
    """Of one call, and of the last of two, which have all of their results or none."""
    if not rendered.takes("u c t", "u c2 t t"):
        return
    for words, last in (("u c t a u", 0), ("u c2 t t a u", 1), ("u c2 u", 1), ("u c2", 1)):
        messages = chat(words)
        cut, call_id = messages[1]["tool_calls"][last], f"call_{name}_{arguments}_{words}"
        if words[-1] != "2" and "t" in words:
            messages[2 + last]["tool_call_id"] = call_id
        cut["id"], cut["function"]["arguments"] = call_id, arguments
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                texts = [rendered(messages) for _ in range(2)]
        except RequestError:
            assert "t" not in words and not rendered.takes(words), words
            continue
        wanted = ["At1x1", *(message["content"] for message in messages), *(["At1x0"] if last else [])]
        assert texts[0] == texts[1] and all(one in texts[0] for one in wanted), words
        (said,) = [record.getMessage() for record in caplog.records]
        assert f"messages[1].tool_calls[{last}] (look, {shown(call_id)}) has arguments that are no JSON" in said


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
        assert "look" in shown(TOOLS[0]["function"]["parameters"], description="Looks.")
    except RequestError as error:
        assert re.search(SAYS_SO, str(error))
        assert not is_own(name) or name in TELLS_OF_NONE
        return
    for schema in SCHEMAS:
        for own in ({}, {"description": "Looks."}):
            assert "look" in shown(schema, **own), schema


@pytest.mark.parametrize("name", ["takes all", "tools by another name"])
def test_a_tool_has_one_form_whatever_the_order_of_its_keys(rendered, name):
    (tool,) = TOOLS
    others = [dict(reversed(tool.items())), {**tool, "function": dict(reversed(tool["function"].items()))}]
    assert len({rendered("u", tools=[one]) for one in (tool, *others)}) == 1
