"""The form that an answer must have, as OpenAI's API asks for it, as vLLM's does now, and as vLLM's did before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.errors import BadRequestError

# vLLM's earlier names: the field of `StructuredOutputsParams`.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS = ("response_format", "structured_outputs", *GUIDED)
_EXAMPLE = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}'


def form_of(given: dict[str, Any]) -> tuple[str | None, Any]:
    """Return which of `FIELDS` asks for a form, and what `SamplingParams.structured_outputs` gets for it; None: none.

    Raises:
        BadRequestError: several do, or `response_format` has another form than OpenAI's.
    """
    form = given.get("response_format")
    named = [name for name in FIELDS if given.get(name) is not None and (name != "response_format" or _asks(form))]
    if len(named) > 1:
        raise BadRequestError(f"{' and '.join(named)} both say what form the answer has: give one", param=named[1])
    if not named:
        return None, None
    (name,) = named
    if name == "structured_outputs":
        return name, given[name]
    return name, _of_response_format(form) if name == "response_format" else {GUIDED[name]: given[name]}


def behind_thinking(params: SamplingParams, form: AnswerFormat, prompt_end: str) -> SamplingParams:
    """Return the parameters of a chat, in which the form of the answer begins behind what is thought."""
    if (asked := params.structured_outputs) is None:
        return params
    return replace(params, structured_outputs=asked.behind(form.form_grammar(prompt_end)))


def _asks(form: Any) -> bool:
    return not (isinstance(form, dict) and form.get("type") == "text")


def _of_response_format(form: Any) -> dict[str, Any]:
    match form:
        case {"type": "json_object", "schema": dict(schema)}:  # llama.cpp's and others' way to give one
            return {"json": json.dumps(schema)}
        case {"type": "json_object"} if form.get("schema") is None:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": json.dumps(schema)}
        case {"type": "structural_tag", "structures": list(), "triggers": list()}:
            return {"structural_tag": json.dumps(form)}
    message = f'response_format is {shown(form)}: give {{"type": "text"}}, {{"type": "json_object"}} or {_EXAMPLE}'
    raise BadRequestError(message, param="response_format")
