"""What `/set` sets: fields of SamplingParams, and variables of the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanoinfer.common.errors import choose
from nanoinfer.common.other_names import INSTEAD, MEANT
from nanoinfer.common.told_elsewhere import TOLD_ELSEWHERE
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.sampling_params import SamplingParams

VARIABLES = "chat_template_kwargs"
# A chat shows one text, and decides itself which tokens it needs to see of it.
_OTHERS = (
    "n", "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output", "detokenize",
    "structured_outputs",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How answers are made.

    Attributes:
        variables: variables of the chat template, such as {"enable_thinking": False}.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=None))
    variables: dict[str, Any] = field(default_factory=dict)

    def with_value(self, name: str, text: str) -> Settings:
        """Return other settings, with a value as a user writes it: JSON, a word, or none.

        Raises:
            ValueError: there is no such setting (the message names the nearest one), or the value is not allowed.
        """
        name = checked(name)
        value = _value(text)
        if name == VARIABLES:
            if not isinstance(value, dict | None):
                raise ValueError(f'{name} must be an object in JSON, such as {{"enable_thinking": false}}')
            return replace(self, variables=value or {})
        if name == "stop" and not isinstance(value, list | None):
            value = text  # "7" is a string here
        if name == "bad_words" and not isinstance(value, list | None):
            value = [text]
        return replace(self, params=replace(self.params, **{name: value}))

    def with_thinking(self, form: AnswerFormat, *, is_on: bool) -> Settings:
        """Return settings with which the template has the model think, or not; ValueError: it has no switch."""
        if form.thinking is None or not (form.thinking.is_known or form.thinking.field):
            raise ValueError("the model's template says nothing of thinking, so there is nothing to switch")
        off = form.variables_of_effort("none")
        kept = {name: value for name, value in self.variables.items() if name not in off}
        return replace(self, variables=kept if is_on else kept | off)

    def lines(self) -> list[str]:
        """Return a line for each setting."""
        values = {name: getattr(self.params, name) for name in names()} | {VARIABLES: self.variables}
        return [f"{name:20} {_written(value)}" for name, value in values.items()]


def checked(name: str) -> str:
    """Return the name of a setting as fields have it; ValueError: there is none, and what to do instead."""
    name = name.lstrip("-").replace("-", "_")
    if name not in names():
        if instead := TOLD_ELSEWHERE["chat"].get(name, INSTEAD.get(name)):
            raise ValueError(f"there is no setting {name!r} here: {instead}")
        if "max_model_len" in MEANT.get(name, ()):
            raise ValueError(f"{name!r} is set when a model is loaded: begin the chat with --max-model-len")
    choose("the setting", name, (*names(), VARIABLES))
    return name


def names() -> list[str]:
    """Return the fields of SamplingParams that are settings."""
    return [one.name for one in fields(SamplingParams) if one.name not in _OTHERS]


def _value(text: str) -> Any:
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _written(value: Any) -> str:
    return "none" if value in (None, ()) else json.dumps(value, ensure_ascii=False)
