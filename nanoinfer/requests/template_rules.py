"""What a chat template takes, found out by trying: chats of marks are rendered, and the marks looked for."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.parsers.turns import TurnRules

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], TurnRules, bool], str | None]
"""Renders checked messages, with a generation prompt or without; None: the template refuses them."""
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_PROPERTIES = {"text": {"type": "string", "description": "A text."}}
_EXAMPLE = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
# Ways to show a call, where it is not shown as most templates read it.
_CALLS = ({"text_arguments": True}, {"null_beside_calls": True}, {"text_arguments": True, "null_beside_calls": True})


def mark(place: int, kind: str, number: int = 0) -> str:
    """Return a text that stands for one of a message's, and that no template has: a word of letters and digits."""
    return f"qz{kind}{place}x{number}zq"


# In place of the tools of a request.
TOOL = mark(0, "t")
TOOLS = [{"type": "function", "function": {"name": TOOL, "description": "An example.", "parameters": _EXAMPLE}}]


def marked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return checked messages with marks in place of their texts, but for those that are empty, and plain ids."""
    found = []
    ids: dict[Any, str] = {}
    for place, message in enumerate(messages):
        chat = dict(message)
        for name, value in message.items():
            if isinstance(value, str) and name not in ("role", "tool_call_id") and value.strip():
                chat[name] = mark(place, {"content": "c"}.get(name, "o"))
        if "tool_call_id" in message:
            chat["tool_call_id"] = _plain_id(message["tool_call_id"], ids)
        if message["role"] == "assistant" and message.get("tool_calls"):
            chat["tool_calls"] = [_marked(call, place, at, ids) for at, call in enumerate(message["tool_calls"])]
        found.append(chat)
    return found


def _plain_id(given: Any, ids: dict[Any, str]) -> str | None:
    return ids.setdefault(given, f"call{len(ids):05}") if isinstance(given, str) else None


def _marked(call: Mapping[str, Any], place: int, number: int, ids: dict[Any, str]) -> dict[str, Any]:
    arguments, text = call["function"].get("arguments"), mark(place, "a", number)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments if arguments.strip() else "{}")
        except (ValueError, RecursionError):
            pass
    shown = {"text": text} if isinstance(arguments, Mapping) else f'{{"text": "{text}'
    own = {} if "id" not in call else {"id": _plain_id(call["id"], ids)}
    return {**own, "function": {"name": mark(place, "n", number), "arguments": shown if arguments else {}}}


def missing(messages: Sequence[Message], text: str | None) -> list[tuple[int, str]]:
    """Return what of marked messages is not in their prompt: the message's place, and which part of it.

    text: None: there is no prompt, and nobody can say.
    """
    lost: list[tuple[int, str]] = []
    if text is None:
        return lost
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        if message["content"].strip() and message["content"] not in text:
            lost.append((place, "content" if calls else ""))
        for number, call in enumerate(calls):
            wanted = mark(place, "a" if call["function"]["arguments"] else "n", number)
            if wanted not in text:
                lost.append((place, f"tool_calls[{number}]"))
    return lost


def find_rules(render: Render, template: str, *, with_calls: bool) -> TurnRules:
    """Return what a template takes. with_calls: tools are called, or may be."""
    rules = TurnRules(knows_developer=bool(_DEVELOPER.search(template)))
    if not _fits(render, rules, "u", "u a u"):
        rules = _if_it_fits(render, replace(rules, parts=True), rules, "u", "u a u")
    if not _fits(render, rules, "d u"):
        rules = replace(rules, knows_developer=False)
    if not _fits(render, rules, "u u", "u a a u"):
        rules = _if_it_fits(render, replace(rules, joins=True), rules, "u u a u")
    if with_calls:
        rules = _with_calls(render, rules)
    for field, role in (("late", "s"), ("late_developer", "d")) if rules.knows_developer else (("late", "s"),):
        as_it_is = replace(rules, **{field: "system" if role == "s" else "developer"})
        chats = [words.replace("L", role) for words in ("s u a L u", "u a L u", "s u a L", "u L u", "s u L u a u L u")]
        befores = ("s u a", "u a")  # without one, some templates begin with a text of their own
        stays = all(_kept(render, as_it_is, one, role) >= _kept(render, rules, one, "u") for one in befores)
        is_taken = stays and _fits(render, as_it_is, *chats)
        rules = as_it_is if is_taken else replace(rules, **{field: "user"})
    return replace(rules, behind_result=_behind_result(render, rules) if with_calls else rules.late)


def _with_calls(render: Render, rules: TurnRules) -> TurnRules:
    """Return the rules with those about calls and results."""
    if not _fits(render, rules, "u c t"):
        tried = (replace(rules, **one) for one in _CALLS)
        rules = next((one for one in tried if _fits(render, one, "u c t")), rules)
    if not _fits(render, rules, "u c2 t t"):
        rules = _if_it_fits(render, replace(rules, one_call=True), rules, "u c2 t t")
    if not _fits(render, rules, "u cut t"):
        rules = _if_it_fits(render, replace(rules, takes_text=False), rules, "u cut t")
    if not _fits(render, rules, "u c+text t"):
        rules = _if_it_fits(render, replace(rules, beside_calls="before"), rules, "u c+text t", "u c+text t a u")
    if not _fits(render, rules, "u c t u"):
        rules = _if_it_fits(render, replace(rules, joins_results=True), rules, "u c t u", "u c t u a u")
    if _fits(render, rules, "s u", "u c t") and missing(*_rendered(render, rules, "s u c t")):
        rules = _if_it_fits(render, replace(rules, front="user"), rules, "s u", "s u c t", "s u c t a u")
    return rules


def _if_it_fits(render: Render, tried: TurnRules, rules: TurnRules, *chats: str) -> TurnRules:
    return tried if _fits(render, tried, *chats) else rules


def _behind_result(render: Render, rules: TurnRules) -> str:
    """Return as what a late message of the system's stands behind a result, so that most of what is before stays."""
    kept = {}
    for role in dict.fromkeys((rules.late, "user", "tool")):
        tried = replace(rules, behind_result=role)
        if _fits(render, tried, "u c t s", "u c t s a u", "u c t s c t a u"):
            kept[role] = _kept(render, tried, "u c t", "s")
    return max(kept, key=kept.__getitem__) if kept else rules.late


def _kept(render: Render, rules: TurnRules, before: str, then: str) -> int:
    """Return how many characters of a chat's rendering stay when a message follows."""
    texts = [render(chat(words), rules, False) for words in (before, f"{before} {then}")]
    return len(os.path.commonprefix(texts)) if None not in texts else 0


def _fits(render: Render, rules: TurnRules, *chats: str) -> bool:
    """Whether all of some chats comes out, one message behind the other."""
    for words in chats:
        messages, text = _rendered(render, rules, words)
        if text is None or missing(messages, text):
            return False
        places = [text.index(_mark_of(place, message)) for place, message in enumerate(messages)]
        if places != sorted(places):
            return False
    return True


def _rendered(render: Render, rules: TurnRules, words: str) -> tuple[list[dict[str, Any]], str | None]:
    messages = chat(words)
    return messages, render(messages, rules, True)


def _mark_of(place: int, message: Message) -> str:
    return mark(place, "a" if message.get("tool_calls") else "c")


def chat(words: str) -> list[dict[str, Any]]:
    """Return a chat of marks: s(ystem), d(eveloper), u(ser), a(ssistant), t(ool); c(all), c+text, c2 (two), cut."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    found: list[dict[str, Any]] = []
    ids: list[str] = []
    for place, word in enumerate(words.split()):
        message = {"role": roles.get(word, "assistant"), "content": "x" if word in (*roles, "c+text") else ""}
        if word == "t":
            message["tool_call_id"] = ids.pop(0)
        elif word not in roles:
            ids = [f"{place} {number}" for number in range(2 if word == "c2" else 1)]
            function = {"name": "x", "arguments": '{"' if word == "cut" else '{"text": ""}'}
            message["tool_calls"] = [{"id": one, "type": "function", "function": function} for one in ids]
            message |= {} if word == "c+text" else {"reasoning_content": "x"}
        found.append(message)
    return marked(found)
