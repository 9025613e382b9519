"""The tools of a request: what is read of OpenAI's form of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.common.errors import RequestError, did_you_mean, shown

MAX_TOOLS = 1024
MAX_DEPTH = 100  # of a schema: templates and grammars go through it by recursion
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_PARTS = ("name", "description", "parameters")
_FORM = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of its arguments; empty: any object.
        is_strict: its arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


def find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    """Return the tool of this name, if there is one."""
    return next((tool for tool in tools if tool.name == name), None)


def checked_tools(raw_tools: Any) -> list[Tool]:
    """Return the tools of a request.

    Raises:
        RequestError: they are not in OpenAI's form, too many, or two have one name.
    """
    if not isinstance(raw_tools, list | tuple):
        raise _wrong(f"tools is {shown(raw_tools)}: give a list of {_FORM}")
    if len(raw_tools) > MAX_TOOLS:
        raise _wrong(f"there are {len(raw_tools)} tools, {MAX_TOOLS} are possible: give fewer")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(raw_tools):
        where = f"tools[{index}]"
        function = one.get("function") if isinstance(one, Mapping) else None
        if not isinstance(function, Mapping) or one.get("type") != "function":
            raise _wrong(f"{where} is {shown(one)}: only functions are tools here, give {_FORM}")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong(f"{where}.function.name is {shown(name)}: give up to 128 letters, digits, _, . and -")
        if name in tools:
            raise _wrong(f"{where}.function.name is {name!r}, as that of another tool: give each a name of its own")
        parameters, strict = function.get("parameters"), function.get("strict")
        if not isinstance(parameters, Mapping | None):
            raise _wrong(f"{where}.function.parameters is {shown(parameters)}: give a JSON Schema, an object")
        if not isinstance(strict, bool | None):
            raise _wrong(f"{where}.function.strict is {shown(strict)}: give true or false")
        if is_deeper(parameters, MAX_DEPTH):
            raise _wrong(f"{where}.function.parameters has more than {MAX_DEPTH} levels: give a flatter schema")
        tools[name] = Tool(name, parameters or {}, bool(strict))
    return list(tools.values())


def shown_tools(tools: Any, *, is_filled: bool = False) -> list[dict[str, Any]] | None:
    """Return checked tools as templates are shown them: of these some read what need not be there. None: no tools.

    One tool has one form, whatever the order in which clients and APIs name its parts.

    is_filled: with all that any template reads of a schema.
    """
    blank = {"description": "", "parameters": {"type": "object", "properties": {}}}
    forms = []
    for one in tools or ():
        told = blank | {name: value for name, value in one["function"].items() if value is not None}
        if is_filled:
            told["parameters"] = blank["parameters"] | _fill(told["parameters"])
        function = {name: told[name] for name in (*_PARTS, *told) if name in told}
        others = {name: value for name, value in one.items() if name not in ("type", "function")}
        forms.append({"type": one["type"], "function": function, **others})
    return forms or None


def _fill(schema: Any) -> dict[str, Any]:
    """Return a schema whose properties have descriptions and one type each, without nulls."""
    if not isinstance(schema, Mapping):
        return {}
    filled = {name: value for name, value in schema.items() if value is not None}
    if isinstance(kinds := filled.get("type"), list | tuple):
        filled["type"] = next((kind for kind in kinds if kind != "null"), "null")
    if isinstance(filled.get("properties"), Mapping):
        filled["properties"] = {name: {"description": ""} | _fill(one) for name, one in filled["properties"].items()}
    if isinstance(filled.get("items"), Mapping | bool):
        filled["items"] = _fill(filled["items"])
    return filled


def is_deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested in more than so many levels."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for one in level
            if isinstance(one, Mapping | list | tuple)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return False
    return True


def checked_choice(choice: Any, tools: Sequence[Tool]) -> str | Tool:
    """Return "none", "auto", "required", or the one tool that must be called.

    Raises:
        RequestError: it is none of these, or no tool has the name.
    """
    if choice is None:
        return "auto" if tools else "none"
    name = choice if isinstance(choice, str) else None
    if name in ("none", "auto") or name == "required" and tools:
        return name if tools else "none"
    if name == "required":
        raise RequestError('tool_choice is "required", but there are no tools: give tools', field="tool_choice")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f'tool_choice is {shown(choice)}: give "none", "auto", "required", or {{"type": "function", "function": '
            '{"name": ...}}',
            field="tool_choice",
        )
    tool = find_tool(tools, name)
    if tool is None:
        hint = did_you_mean(name, [one.name for one in tools])
        raise RequestError(f"tool_choice names {shown(name)}, which no tool is called{hint}", field="tool_choice")
    return tool


def _wrong(message: str) -> RequestError:
    return RequestError(message, field="tools")
