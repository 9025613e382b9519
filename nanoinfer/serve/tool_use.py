"""What a chat request asks of tools and thinking: what of it the template gets, and what reads the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat, OutputParser
from nanoinfer.parsers.branches import Unenforceable
from nanoinfer.parsers.grammar import tool_at
from nanoinfer.parsers.tools import Tool, checked_choice, checked_tools
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.structured_outputs import MAX_CHARS, StructuredOutputsParams

# Why llguidance takes no grammar, with the line at fault, if it is one.
_FAULT = re.compile(r"[^:]* cannot be generated: (?:at (\d+)\(\d+\): )?(?:failed to compile JSON schema: )?([^\n]*)")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: that may be called; none where tool_choice is "none".
        choice: "none", "auto", "required", or the one tool that must be called.
        max_calls: of one answer; None: any number.
    """

    tools: tuple[Tool, ...] = ()
    choice: str | Tool = "none"
    max_calls: int | None = None

    @classmethod
    def of(cls, asked: ChatRequest, form: AnswerFormat) -> ToolUse:
        """Read a request.

        Raises:
            RequestError: the tools, or the choice among them, have another form.
            BadRequestError: the model's template cannot show tools, or no parser for its calls is known.
        """
        tools = [] if asked.tools is None else checked_tools(asked.tools)
        choice = checked_choice(asked.tool_choice, tools)
        if choice == "none":
            return cls()
        if not form.shows_tools or form.tool_parser is None:
            lacks = "says nothing of tools" if not form.shows_tools else "writes calls in a form that is not known here"
            remedy = "--chat-template FILE" if not form.shows_tools else "--tool-call-parser NAME"
            raise BadRequestError(
                f"tools are not possible with this model, as its chat template {lacks}: start the server with "
                f'{remedy}, or send tool_choice="none"',
                param="tools",
                code="unsupported_parameter",
            )
        is_one = asked.parallel_tool_calls is False or isinstance(choice, Tool)
        return cls(tuple(tools), choice, 1 if is_one else None)

    def template_arguments(self, asked: ChatRequest, form: AnswerFormat) -> dict[str, Any]:
        """Return the arguments for `ChatTemplate.encode`."""
        arguments = asked.template_arguments
        effort, variables = asked.reasoning_effort, arguments["variables"] or {}
        if effort is not None:
            variables = form.variables_of_effort(effort) | variables
        return {**arguments, "variables": variables or None, "tools": asked.tools if self.tools else None}

    def constrained(self, params: SamplingParams, form: AnswerFormat, prompt_end: str) -> SamplingParams:
        """Return the parameters with which calls must come, or the arguments of strict tools follow their schemas.

        Raises:
            BadRequestError: calls must come, and the request asks for another form of the answer.
            RequestError: the tools are too large for a grammar.
        """
        if self._must_call and params.structured_outputs is not None:
            raise BadRequestError(
                "tool_choice asks for calls, and another field for another form of the answer: leave one of them out",
                param="tool_choice",
            )
        if params.structured_outputs is not None or not (self._must_call or any(tool.is_strict for tool in self.tools)):
            return params
        how = dict(must_call=self._must_call, is_parallel=self.max_calls is None)
        try:
            grammar = form.call_grammar(prompt_end, self._callable, **how)
        except Unenforceable as error:
            raise self._refusal(str(error), error.tool) from None
        if len(grammar) > MAX_CHARS:
            raise self._refusal(f"their grammar would have {len(grammar)} characters, {MAX_CHARS} are possible")
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))

    @property
    def _must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, Tool)

    @property
    def _callable(self) -> tuple[Tool, ...]:
        return (self.choice,) if isinstance(self.choice, Tool) else self.tools

    def explained(self, error: RequestError, grammar: str) -> RequestError:
        """Return what to say of an error with which the grammar of `constrained` was refused."""
        found = _FAULT.match(str(error))
        if found is None:  # no grammar can be compiled
            return RequestError(str(error), field="tools")
        line, reason = found.groups()
        place = None if line is None else tool_at(grammar, int(line))
        return self._refusal(reason, None if place is None else self._callable[place])

    def _refusal(self, reason: str, tool: Tool | None = None) -> RequestError:
        asks = "tool_choice asks" if self._must_call else "strict asks"
        if tool is not None:
            what, remedy = f"calls of the tool {tool.name!r} cannot be made to follow its schema", "change the schema"
        else:
            what = f"calls of {len(self._callable)} tools cannot be made to follow their schemas"
            remedy = "give fewer tools, or smaller schemas"
        remedy += ', or leave it to the model (tool_choice "auto", no strict)'
        return RequestError(f"{what}, as {asks}: {reason}: {remedy}", field="tools")

    def parser(self, form: AnswerFormat, prompt_end: str, *, drops_special: bool) -> OutputParser:
        """Return what reads one answer; the arguments are those of `AnswerFormat.parser`."""
        return form.parser(prompt_end, self.tools, drops_special=drops_special, max_calls=self.max_calls)
