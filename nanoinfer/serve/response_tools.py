"""Tools of OpenAI's Responses API, and what they are for the model: functions, each with a name of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nanoinfer.common.errors import shown
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields
from nanoinfer.serve.translation import leave_out_tool, need

_BETWEEN = "__"
_TAKEN = '"function", "custom" or "namespace"'


class Tool(NamedTuple):
    """A tool as its client knows it.

    Attributes:
        is_custom: whether its input is text; the model knows it as a function with one argument, `input`.
        namespace: of tools that were given together, in which this one has its name.
    """

    name: str
    is_custom: bool
    namespace: str | None = None


def known_as(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else namespace.removesuffix(_BETWEEN) + _BETWEEN + name


def tools_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """Return the tools of a request, which `functions_of` has taken, by the names that the model knows."""
    found = [Tool(tool["name"], kind == "custom", namespace) for _, kind, tool, namespace in _each(tools, None)]
    return {known_as(tool.name, tool.namespace): tool for tool in found}


def functions_of(tools: Sequence[Any], fields: Fields) -> list[dict[str, Any]]:
    """Return the tools in the form that chat requests have. Raises BadRequestError."""
    functions, each = [], list(_each(tools, fields))
    about = {tool.get("name"): tool.get("description") for tool in tools if tool.get("type") == "namespace"}
    for where, kind, tool, namespace in each:
        need(tool.get("name"), str, f"{where}.name", "a text", "tools")
        description = need(tool.get("description") or "", str, f"{where}.description", "a text", "tools")
        function = _custom(tool, description) if kind == "custom" else _function(tool)
        if namespace is not None:
            function["name"] = known_as(tool["name"], namespace)
            if told := about.pop(namespace, None):  # once, as it may be long
                begin = known_as("", namespace)
                described = f"{function.get('description', '')}\n\nOf all tools whose names begin with {begin}: {told}"
                function["description"] = described.strip()
        functions.append({"type": "function", "function": function})
    return functions


def chosen(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a `tool_choice` that names a tool as chat requests have it. Raises BadRequestError."""
    if choice.get("type") not in ("function", "custom"):
        raise BadRequestError(
            f'tool_choice is {shown(choice)}: give "none", "auto", "required" or {{"type": "function", "name": ...}}',
            param="tool_choice",
        )
    name, known = choice.get("name"), tools_by_name(tools)
    if isinstance(name, str) and name not in known:  # of a namespace, for which the field has no place
        within = [known_name for known_name, tool in known.items() if tool.name == name]
        name = within[0] if len(within) == 1 else name
    return {"type": "function", "function": {"name": name}}


def _each(tools: Sequence[Any], fields: Fields | None) -> Iterator[tuple[str, str, Mapping[str, Any], str | None]]:
    """Yield where each tool stands, its type, itself, and its namespace.

    fields: raise or log as these say about tools that are left out; None: that was done.
    """
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if need(tool, dict, where, "an object", "tools").get("type") != "namespace":
            given, namespace = [(where, tool)], None
        else:
            namespace = need(tool.get("name"), str, f"{where}.name", "a text", "tools")
            need(tool.get("description") or "", str, f"{where}.description", "a text", "tools")
            inner = need(tool.get("tools"), list, f"{where}.tools", "a list of tools", "tools")
            given = [(f"{where}.tools[{number}]", one) for number, one in enumerate(inner)]
        for at, one in given:
            kind = need(one, dict, at, "an object", "tools").get("type")
            if kind in ("function", "custom"):
                yield at, kind, one, namespace
            elif fields is not None:
                leave_out_tool(at, kind, _TAKEN if namespace is None else '"function" or "custom"', fields)


def _custom(tool: Mapping[str, Any], description: str) -> dict[str, Any]:
    form = tool.get("format") or {}
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        description += f"\n\nThe input follows this grammar:\n{form['definition']}"
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": tool["name"], "description": description, "parameters": parameters}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in names if tool.get(name) is not None}
