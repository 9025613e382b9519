"""How much a chat may think, by all the names that servers and clients have for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.serve.errors import BadRequestError

BUDGET = "thinking_token_budget"
"""The name that counts here, which is vLLM's."""
# llama.cpp's, those of Qwen's API and of others.
OTHER_NAMES = (
    "thinking_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens", "max_thinking_tokens",
    "max_reasoning_tokens",
)  # fmt: skip
_UNBOUNDED = -1


def with_budget(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a request's fields with the budget under its name here, if a request of this kind has any.

    Args:
        known: the fields of such requests. A chat's are among them where they have `reasoning_effort`.

    Raises:
        BadRequestError: two names say something else, or a value is none.
    """
    if BUDGET not in known:
        return given
    found: dict[str, dict[str, Any]] = {}
    for name in (BUDGET, *OTHER_NAMES):
        if given.get(name) is not None:
            found[name] = {BUDGET: checked_budget(given[name], name)}
    if "reasoning_effort" in known:
        for name, read in (("thinking", of_thinking), ("reasoning", of_reasoning)):
            if given.get(name) is not None:
                found[name] = read(given[name])
    rest = {name: value for name, value in given.items() if name not in found and name not in OTHER_NAMES}
    said = {name: name for name, value in rest.items() if value is not None}
    for name, fields in found.items():
        for field, value in fields.items():
            if field in said and rest[field] != value:
                raise BadRequestError(
                    f"{said[field]} says {field}={shown(rest[field])} and {name} says {shown(value)}: give one of them",
                    param=name,
                )
            rest[field], said[field] = value, said.get(field, name)
    return rest


def checked_budget(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < _UNBOUNDED:
        raise BadRequestError(
            f"{name} is {shown(value)}: give how many tokens may be thought, from 0, or {_UNBOUNDED} for any number",
            param=name.partition(".")[0],
        )
    return value


def of_thinking(given: Any) -> dict[str, Any]:
    """Return what Anthropic's `thinking` says as fields of a chat: {"type": "enabled", "budget_tokens": 2000}."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in ("enabled", "adaptive", "auto", "disabled"):
        raise BadRequestError(
            f'thinking is {shown(given)}: give {{"type": "enabled", "budget_tokens": 2000}} or {{"type": "disabled"}}',
            param="thinking",
        )
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    budget = given.get("budget_tokens")
    return {} if budget is None else {BUDGET: checked_budget(budget, "thinking.budget_tokens")}


def of_reasoning(given: Any) -> dict[str, Any]:
    """Return what `reasoning` says as fields of a chat: {"effort": "low"}, or OpenRouter's {"max_tokens": 2000}."""
    if not isinstance(given, Mapping):
        raise BadRequestError(
            f'reasoning is {shown(given)}: give {{"effort": "low"}} or {{"max_tokens": 2000}}', param="reasoning"
        )
    found: dict[str, Any] = {}
    if given.get("effort") is not None:
        found["reasoning_effort"] = given["effort"]
    elif given.get("enabled") is False:
        found["reasoning_effort"] = "none"
    if given.get("max_tokens") is not None:
        found[BUDGET] = checked_budget(given["max_tokens"], "reasoning.max_tokens")
    if given.get("exclude") is True:
        found["include_reasoning"] = False
    return found
