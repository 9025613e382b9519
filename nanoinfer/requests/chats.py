"""Chats become prompts through a model's chat template, and no message vanishes in it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.tools import shown_tools
from nanoinfer.parsers.turns import TurnRules
from nanoinfer.requests.prompts import conversation, encode_chat
from nanoinfer.requests.spelled import Speller, spell
from nanoinfer.requests.template_rules import TOOL, TOOLS, find_rules, marked, missing

logger = logging.getLogger("nanoinfer.chat")
_MAX_KEPT = 4096  # of each template
_MAX_LOGGED = 200  # clients can make up any number
_TOOLS_NAME = "xml_tools"  # of SmolLM3's template for the tools
_MARKS = ("0", "x")  # in place of a message: no token begins with both


class ChatTemplate:
    """The chat template of a tokenizer. May be used on any thread.

    Args:
        tokenizer: None: there is none, and every chat is refused.
        form: how the model writes, and reads what it wrote.
        template: in place of the tokenizer's, in Jinja.
        spells_special: texts that look like special tokens are text; else they are these tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        form: AnswerFormat,
        template: str | None = None,
        *,
        spells_special: bool = False,
    ) -> None:
        self._speller = Speller(form.special_ids) if spells_special else None
        self.form, self._tokenizer, self._template = form, tokenizer, template
        own = template or getattr(tokenizer, "chat_template", None) or ""
        self._text = own if isinstance(own, str) else json.dumps(own)
        self._findings = findings_of(self._text, form.tool_parser, form.thinking)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Any = None,
        tokenize: bool = True,
        **how: bool,
    ) -> list[int] | str:
        """Return the token ids, or the text, of a conversation; of a text that `is_spelled`, `spell` says the ids.

        What the template drops or refuses comes in a form that it takes. Log lines name what is shown otherwise than as
        it was given.

        Args:
            messages: as `prompts.conversation` returns them.
            variables, tokenize: as of `encode_chat`, as is the rest.
            tools: checked, in OpenAI's form.

        Raises:
            RequestError: as `encode_chat` and `AnswerFormat.messages`, or a message or the tools would not be in the
                prompt.
        """
        has_calls = bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        key = (bool(tools), has_calls, _digest(variables))

        def render(chat: Sequence[Mapping[str, Any]], rules: TurnRules, adds_prompt: bool) -> str | None:
            told = TOOLS if tools else None
            own = dict(tools=told, add_generation_prompt=adds_prompt, tokenize=False, chat_template=self._template)
            try:
                return encode_chat(
                    self._tokenizer, self.form.messages(chat, rules), self._variables(variables, told), **own
                )
            except RequestError:
                return None

        rules = self._findings.get(("rules", *key), lambda: find_rules(render, self._text, with_calls=has_calls))
        said = messages if self._speller is None else self._speller.messages(messages)
        shown = self.form.messages(said, rules, self._findings.notice)
        found = self._rendered(shown, variables, tools, tokenize, dict(chat_template=self._template, **how))

        def lost() -> tuple[list[tuple[int, str]], bool]:
            chat = marked(messages)
            text = render(chat, rules, how.get("add_generation_prompt", True))
            are_named = not tools or _TOOLS_NAME in (variables or {}) or text is None or TOOL in text
            return missing(chat, text), not are_named

        self._check(messages, *self._findings.get((_order(messages), *key), lost))
        return found

    def _check(self, messages: Sequence[Mapping[str, Any]], parts: list[tuple[int, str]], has_no_tools: bool) -> None:
        """Raise RequestError if something of the conversation would not be in the prompt.

        parts: those that would not, by their message. has_no_tools: neither would the tools.
        """
        if has_no_tools:
            raise RequestError(
                "the tools would not be in the prompt, as the chat template leaves them out of such a conversation: "
                "give none, or use another template (--chat-template FILE)",
                field="tools",
            )
        for place, part in parts:
            where = f"messages[{place}]" + (f".{part}" if part else "")
            if part != "content":
                role = messages[place]["role"]
                raise RequestError(
                    f"{where} (of the role {role!r}) would not be in the prompt, as the chat template leaves it out: "
                    "leave it out, give it another role, or use another template (--chat-template FILE)",
                    field="messages",
                )
            if not self.form.is_harmony:  # where it is a thought
                self._findings.notice(f"{where} is left out: the chat template has no place for text beside calls")

    def next_beginning(
        self, messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], *arguments: Any, **how: Any
    ) -> list[int]:
        """Return the token ids with which a conversation's next prompt begins, whatever its next message says.

        Args:
            messages: the conversation, as of `encode`, as are the other arguments.
            answer: the message that goes behind it. Results of tools come next if it calls them, else a user's text.
        """
        calls = answer.get("tool_calls") or ()

        def encoded(mark: str) -> list[int]:
            results = [{"role": "tool", "tool_call_id": call["id"], "content": mark} for call in calls]
            come = results or [{"role": "user", "content": mark}]
            return self.encode(conversation([*messages, answer, *come]), *arguments, **how)

        one, other = map(encoded, _MARKS)
        return one[: next((at for at, ids in enumerate(zip(one, other, strict=False)) if ids[0] != ids[1]), len(one))]

    def _variables(self, variables: Mapping[str, Any] | None, tools: Any) -> Mapping[str, Any] | None:
        """Return variables with the tools among them, where the template reads these by another name."""
        is_read = bool(tools) and _TOOLS_NAME in self._text and isinstance(variables, Mapping | None)
        return {_TOOLS_NAME: tools, **(variables or {})} if is_read else variables

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Any,
        tokenize: bool,
        how: dict[str, Any],
    ) -> list[int] | str:
        def rendered(**filled: bool) -> list[int] | str:
            shown = shown_tools(tools, **filled)
            shown = shown if self._speller is None else self._speller.guarded(shown)
            told = self._variables(variables, shown)
            if self._speller is None:
                return encode_chat(self._tokenizer, messages, told, tools=shown, tokenize=tokenize, **how)
            text = encode_chat(self._tokenizer, messages, told, tools=shown, tokenize=False, **how)
            return spell(self._tokenizer, text) if tokenize else text

        try:
            return rendered()
        except RequestError:
            if not tools:
                raise
            try:
                return rendered(is_filled=True)  # some templates read what schemas need not have
            except RequestError:
                pass
            raise


class Findings:
    """What was found out of one template, and what was logged of its chats."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._logged: set[str] = set()

    def get(self, key: Any, find: Callable[[], Any]) -> Any:
        """Return what belongs to a key. Two threads may find out the same."""
        try:
            return self._found[key]
        except KeyError:
            found = find()
        if len(self._found) >= _MAX_KEPT:
            self._found.clear()
        self._found[key] = found
        return found

    def notice(self, text: str) -> None:
        """Log a line, once."""
        if text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(text)
            logger.warning("%s", text)


@lru_cache(maxsize=64)
def findings_of(*template: Any) -> Findings:
    """Return what is known of a template, by its text and how its model writes."""
    return Findings()


def _order(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Return what the rendering of messages depends on, but for their texts."""
    return _digest(marked(messages))


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=16).digest()
