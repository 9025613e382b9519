"""A conversation as a chat template wants it: what was thought, which tools were called, what these gave."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoinfer.common.errors import RequestError, shown
from nanoinfer.parsers.mistral import ID_LENGTH
from nanoinfer.parsers.thinking import Thinking
from nanoinfer.parsers.turns import TurnRules, in_turns

_REASONING = ("reasoning_content", "reasoning")
_MISTRAL_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_LENGTH}}}")
_FORM = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    thinking: Thinking | None,
    *,
    is_mistral: bool = False,
    is_harmony: bool = False,
    one_call: bool = False,
    written: Callable[[Sequence[Mapping[str, Any]]], str] | None = None,
    rules: TurnRules | None = None,
    notice: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return checked messages as a model's template wants them.

    Arguments of calls become objects, as most templates read them; a result gets the name of its tool, and results the
    order of their calls. What was thought comes where the template looks for it, or is left out where it looks nowhere.

    Args:
        messages: as `prompts.conversation` returns them.
        is_mistral: ids are made of nine letters and digits, whatever they were.
        is_harmony: before a call stands either text or what was thought, so both together are thought.
        one_call: a message has one call; several follow each other, each before its result.
        written: returns a message's calls as text, which its content begins with; None: the template writes them.
        rules: whose turn it may be; None: anybody's.
        notice: told of arguments that are no object.

    Raises:
        RequestError: a message's calls are none.
    """
    prepared: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of tools, by the id of their call
    rules = rules or TurnRules()
    for index, original in enumerate(_as_called(messages)):
        message = dict(original)
        if message["role"] == "assistant":
            broken = _take_calls(message, f"messages[{index}]", names, is_mistral, rules.text_arguments)
            for call, which in broken:
                if notice is not None:
                    notice(f"{which} has arguments that are no JSON object, perhaps cut off: they are shown as text")
                if not rules.takes_text:
                    call["arguments"] = {"arguments": call["arguments"]}
            if written is not None and message.get("tool_calls"):
                message["content"] = written(message.pop("tool_calls")) + (message.get("content") or "")
            message = _with_thought(message, thinking, joins=is_harmony, is_null=rules.null_beside_calls)
        elif message.get("tool_calls"):
            said = f"{shown(message['tool_calls'])}, and its role {shown(message['role'])}: calls are the assistant's"
            raise RequestError(f"messages[{index}].tool_calls is {said}", field="messages")
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if isinstance(call_id, str):
                if call_id in names:
                    message.setdefault("name", names[call_id])
                message["tool_call_id"] = _mistral_id(call_id) if is_mistral else call_id
        prepared.append(message)
    return in_turns(_one_by_one(prepared) if one_call or rules.one_call else prepared, rules)


def _as_called(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the results of calls behind these and in their order, as many templates show no ids.

    Where ids are missing, unknown or doubled, all that follows the same calls stays as it is.
    """
    ordered: list[Mapping[str, Any]] = []
    calls: list[Any] = []
    behind: list[Mapping[str, Any]] = []  # these calls
    for message in messages:
        if message["role"] != "assistant":
            behind.append(message)
            continue
        if behind:
            ordered += _sort(behind, calls)
            calls, behind = [], []
        tool_calls = message.get("tool_calls")
        calls += [_id_of(one) for one in tool_calls] if isinstance(tool_calls, list | tuple) else []
        ordered.append(message)
    return ordered + _sort(behind, calls)


def _sort(behind: list[Mapping[str, Any]], calls: list[Any]) -> list[Mapping[str, Any]]:
    order = {one: number for number, one in enumerate(calls) if isinstance(one, str)}
    ids = [one.get("tool_call_id") for one in behind if one["role"] == "tool"]
    is_known = len(order) == len(calls) and all(isinstance(one, str) and one in order for one in ids)
    if not is_known or len(set(ids)) < len(ids):
        return behind
    return sorted(behind, key=lambda one: order[one["tool_call_id"]] if one["role"] == "tool" else len(order))


def _id_of(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else None


def _take_calls(
    message: dict[str, Any], where: str, names: dict[str, str], is_mistral: bool, as_text: bool
) -> list[tuple[dict[str, Any], str]]:
    """Have a message's calls in the form that templates read; return those whose arguments are no object, named."""
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where}.tool_calls is {shown(calls)}: give a list of {_FORM}", field="messages")
    if message.get("function_call"):
        raise RequestError(f"{where}.function_call is not supported: give tool_calls instead", field="messages")
    made: list[dict[str, Any]] = []
    broken = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.tool_calls[{number}] is {shown(call)}: give {_FORM}", field="messages")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            raise RequestError(
                f"{where}.tool_calls[{number}].function.arguments is {shown(arguments)}: give an object, or its text",
                field="messages",
            )
        call_id = call.get("id")
        if isinstance(call_id, str):
            names[call_id] = name
            call_id = _mistral_id(call_id) if is_mistral else call_id
        elif is_mistral:
            call_id = _mistral_id(f"{where} {number}")
        ids = {} if call_id is None else {"id": call_id}
        read = _object(arguments)
        given = arguments if isinstance(arguments, str) and arguments.strip() else json.dumps(read, ensure_ascii=False)
        function = {"name": name, "arguments": given if as_text else read}
        made.append({**ids, "type": "function", "function": function})
        if isinstance(read, str):
            broken.append((made[-1]["function"], f"{where}.tool_calls[{number}] ({name}, {shown(call.get('id'))})"))
    if made:
        message["tool_calls"] = made
    return broken


def _object(arguments: str | Mapping[str, Any] | None) -> Any:
    """Return arguments as an object; as they are where they are none, for the template to decide."""
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _mistral_id(call_id: str) -> str:
    """Return the id, or one that follows from it, as these templates want them."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_LENGTH]


def _with_thought(message: dict[str, Any], thinking: Thinking | None, *, joins: bool, is_null: bool) -> dict[str, Any]:
    """Return a message with its thought where the template reads it. is_null: not in the content beside calls alone."""
    thoughts = [message.pop(name, None) for name in _REASONING]
    thought = next((one for one in thoughts if isinstance(one, str) and one), None)
    if joins and message.get("tool_calls") and thought is not None and message.get("content"):
        thought, message["content"] = f"{thought}\n{message['content']}", ""
    has_none = is_null and message.get("tool_calls") and not message.get("content")
    if thinking is None or thought is None or has_none and thinking.field is None:
        return message
    return {**message, **thinking.message(message.get("content") or "", thought)}


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each call of a message that has several as a message of its own, before the result of this call."""
    split, at = [], 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": "assistant", "content": ""}
            split.append({**said, "tool_calls": [call]})
            mine = [one for one in results if one.get("tool_call_id") == call.get("id")][:1] or results[:1]
            split += mine
            results = [one for one in results if one is not (mine[0] if mine else None)]
        split += results
    return split
