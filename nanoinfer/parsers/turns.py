"""Whose turn it is: messages in an order, and with the roles, that a chat template takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
_INSTRUCTS = ("system", "developer")
_BETWEEN = "\n\n"  # of texts that are joined


@dataclass(frozen=True)
class TurnRules:
    """What a chat template takes, as `requests/template_rules.py` finds out by trying.

    Attributes:
        knows_developer: it has a form for this role.
        front: the role of a system's message at the beginning; "user": of one that is left out while results come.
        late: the role of a system's message that stands behind others.
        late_developer: the same of a developer's.
        behind_result: the same of either behind a tool's result; "tool": its text joins the result's.
        joins: messages of the user in a row are one, and so are the assistant's.
        joins_results: the user's text behind a tool's result joins it.
        one_call: a message has one call; several follow each other, each before its result.
        takes_text: arguments of a call may be text, as those are that a limit cut off; else the text is an argument.
        beside_calls: where the assistant's text goes that stands beside calls: "before": into a message of its own.
        text_arguments: arguments of calls are JSON text, not objects.
        null_beside_calls: there is no content beside calls, not an empty one.
        parts: contents are lists of parts, not texts.
    """

    knows_developer: bool = False
    front: str = "system"
    late: str = "system"
    late_developer: str = "system"
    behind_result: str = "system"
    joins: bool = False
    joins_results: bool = False
    one_call: bool = False
    takes_text: bool = True
    beside_calls: Literal["beside", "before"] = "beside"
    text_arguments: bool = False
    null_beside_calls: bool = False
    parts: bool = False


def in_turns(messages: Sequence[Mapping[str, Any]], rules: TurnRules) -> list[Message]:
    """Return messages as a template takes them; what stands before a message does not depend on it."""
    front, rest = _split(messages, rules)
    turns: list[Message] = list(front)
    for message in rest:
        for one in _parts(dict(message), rules):
            _add(turns, one, rules)
    return [_with_content(message, rules) for message in turns]


def _split(messages: Sequence[Mapping[str, Any]], rules: TurnRules) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """Return what is said to the model before anybody speaks, as one message, and all others."""
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] in _INSTRUCTS:
        num_leading += 1
    leading, rest = messages[:num_leading], list(messages[num_leading:])
    if not leading:
        return [], rest
    if len(leading) == 1 and leading[0]["role"] == "developer" and rules.knows_developer:
        return [dict(leading[0])], rest
    text = leading[0]["content"]
    if len(leading) > 1:
        text = _BETWEEN.join(one["content"] for one in leading if one["content"].strip())
    if rules.front == "user" and not text.strip():
        return [], rest
    return [{**leading[0], "role": rules.front, "content": text}], rest


def _parts(message: Message, rules: TurnRules) -> list[Message]:
    if rules.beside_calls == "before" and message.get("tool_calls") and message["content"].strip():
        text = {name: value for name, value in message.items() if name != "tool_calls"}
        return [text, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
    return [message]


def _add(turns: list[Message], message: Message, rules: TurnRules) -> None:
    last = turns[-1] if turns else {"role": None}
    behind_result, is_blank = last["role"] == "tool", not message["content"].strip()
    if message["role"] in _INSTRUCTS:
        is_developer = message["role"] == "developer" and rules.knows_developer
        role = rules.late_developer if is_developer else rules.late
        role = rules.behind_result if behind_result else role
        if role == "tool":
            turns[-1] = _join(last, message)
            return
        if is_blank and role == "user":
            return
        message["role"] = role
    if behind_result:
        if rules.joins_results and message["role"] == "user":
            message = _join(last, message)
            turns.pop()
    elif rules.joins:
        if is_blank and message["role"] == "assistant" and message.keys() <= {"role", "content"}:
            return
        if last["role"] == message["role"] and _may_join(last):
            message = {**last, **message, "content": _join(last, message)["content"]}
            turns.pop()
    turns.append(message)


def _with_content(message: Message, rules: TurnRules) -> Message:
    """Return a message with its content in the form that the template reads."""
    if rules.null_beside_calls and message.get("tool_calls") and not message["content"].strip():
        return {**message, "content": None}
    return {**message, "content": [{"type": "text", "text": message["content"]}]} if rules.parts else message


def _may_join(message: Message) -> bool:
    return message["role"] == "user" or message["role"] == "assistant" and not message.get("tool_calls")


def _join(first: Message, second: Message) -> Message:
    return {**first, "content": _BETWEEN.join(filter(str.strip, (first["content"], second["content"])))}
