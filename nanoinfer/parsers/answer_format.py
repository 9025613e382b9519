"""How a model writes its answers: found out once from its chat template and vocabulary, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from nanoinfer.common.errors import choose
from nanoinfer.common.tables import by_name
from nanoinfer.parsers.base import Reader, ToolReader, pieces_of
from nanoinfer.parsers.events import CallArguments, CallBegun, CallEnded, Event, Reasoning, Text
from nanoinfer.parsers.gemma4 import Gemma4Reader
from nanoinfer.parsers.grammar import FINAL, SHAPES, CallGrammar
from nanoinfer.parsers.harmony import CALL, CHANNEL, END, RETURN, START, HarmonyReader
from nanoinfer.parsers.hermes import HermesReader
from nanoinfer.parsers.history import template_messages
from nanoinfer.parsers.lfm2 import Lfm2Reader, written_calls
from nanoinfer.parsers.llama3 import Llama3Reader
from nanoinfer.parsers.mistral import MistralReader
from nanoinfer.parsers.specials import SpecialFilter, Specials, unguarded
from nanoinfer.parsers.tagged import Glm4Reader, Qwen3CoderReader, SeedOssReader
from nanoinfer.parsers.thinking import HARMONY, MARKERS, Bounds, Thinking
from nanoinfer.parsers.tools import Tool
from nanoinfer.parsers.turns import TurnRules

# By vLLM's names of a parser, the usual one first: what reads calls, and texts that stand in the templates of models
# that write them so. The first of which all do counts.
_CALLS: dict[str, tuple[type[ToolReader], tuple[str, ...]]] = {
    "openai": (HarmonyReader, (HARMONY,)),
    "gemma4": (Gemma4Reader, ("<|tool_call>call:", "<tool_call|>")),
    "seed_oss": (SeedOssReader, ("<seed:tool_call>", "<function=", "<parameter=")),
    "qwen3_coder qwen3_xml": (Qwen3CoderReader, ("<tool_call>", "<function=", "<parameter=")),
    "glm45 glm47": (Glm4Reader, ("<tool_call>", "<arg_key>", "<arg_value>")),
    "mistral": (MistralReader, ("[TOOL_CALLS]",)),
    "lfm2": (Lfm2Reader, ("<|im_start|>", "List of tools: ")),
    "hermes": (HermesReader, ("<tool_call>", '"name', "arguments")),
    "llama3_json llama4_json": (Llama3Reader, ("<|start_header_id|>", '"parameters": ')),
}
TOOL_READERS = {name: reader for name, (reader, _) in by_name(_CALLS).items()}
AUTO, NONE = "auto", "none"
_NEXT_MESSAGE = f"{END}{START}assistant"  # of gpt-oss
PROMPT_END_TOKENS = 64
"""In the text of which thinking, or a message of gpt-oss, may have begun."""
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def tool_parser_of(template: str) -> str | None:
    """Return the name of the parser for calls as a template writes them; None: none is known."""
    if "tools" not in template:
        return None
    parsers = (names for names, (_, texts) in _CALLS.items() if all(text in template for text in texts))
    return next((names.split()[0] for names in parsers), None)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError if there is no such parser."""
    choose("--tool-call-parser", tool_parser, (AUTO, NONE, *TOOL_READERS))
    choose("--reasoning-parser", reasoning_parser, (AUTO, NONE, *MARKERS))


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes.

    Attributes:
        tool_parser: the name of how it calls tools; None: no parser for that is known.
        thinking: None: what is thought is a part of the answer.
        special_ids: all special tokens of the vocabulary.
        shows_tools: whether the template tells the model of tools.
        added_ids: all tokens that were added to the vocabulary, the special ones among them.
        call_shape: the name of how calls are written, for their grammar; None: as `tool_parser`.
        shows_calls: whether the template writes the calls of a message that is over.
    """

    tool_parser: str | None = None
    thinking: Thinking | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    shows_tools: bool = False
    added_ids: Mapping[str, int] = field(default_factory=dict)
    call_shape: str | None = None
    shows_calls: bool = True

    @classmethod
    def of(
        cls,
        template: str,
        special_ids: Mapping[str, int] | None = None,
        vocabulary: Mapping[str, int] | None = None,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> AnswerFormat:
        """Find out from the text of a chat template.

        Args:
            special_ids: special tokens of the vocabulary.
            vocabulary: all tokens that were added to it.
            tool_parser, reasoning_parser: vLLM's name of a parser; "auto": by the template; "none": no parser.

        Raises:
            ValueError: there is no such parser.
        """
        check_parsers(tool_parser, reasoning_parser)
        parser = tool_parser_of(template) if tool_parser == AUTO else None if tool_parser == NONE else tool_parser
        if reasoning_parser == NONE:
            thinking = None
        else:
            thinking = Thinking.of(template, vocabulary or (), MARKERS.get(reasoning_parser))
        special_ids = dict(special_ids or {})
        shape = parser
        if parser == "mistral":
            shape = "mistral_id" if "[CALL_ID]" in template else parser if "[ARGS]" in template else "mistral_list"
        added_ids, shows_calls = special_ids | dict(vocabulary or {}), "tool_calls" in template
        return cls(parser, thinking, special_ids, "tools" in template, added_ids, shape, shows_calls)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, template: str | None = None, **parsers: str) -> AnswerFormat:
        """Find out from a tokenizer of transformers; None: there is none.

        template: in place of the tokenizer's. `parsers` as of `of`.
        """
        if tokenizer is None:
            return cls.of("", **parsers)
        template = template or getattr(tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):  # several, by name
            template = "\n".join(template.values())
        if not isinstance(template, str):
            template = ""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        for text in tokenizer.all_special_tokens:
            special.setdefault(text, tokenizer.convert_tokens_to_ids(text))
        return cls.of(template, special, tokenizer.get_added_vocab(), **parsers)

    @property
    def is_harmony(self) -> bool:
        """Whether all of an answer is written as messages in channels."""
        return self.thinking is not None and self.thinking.markers.begin == HARMONY

    def variables_of_effort(self, effort: str) -> dict[str, Any]:
        """Return the variables with which a template hears how much is to be thought, from "none" to "max"; those that
        it does not know mean nothing to it."""
        if self.is_harmony:
            return {"reasoning_effort": _HARMONY_EFFORTS.get(effort, effort)}
        switches = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
        return {"reasoning_effort": effort, **switches}

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        rules: TurnRules | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return checked messages as the template wants them; arguments and errors as of `template_messages`."""
        return template_messages(
            messages,
            self.thinking,
            is_mistral=self.tool_parser == "mistral",
            is_harmony=self.is_harmony,
            one_call=self.is_harmony or self.tool_parser in ("llama3_json", "llama4_json"),
            written=written_calls if self.tool_parser == "lfm2" and not self.shows_calls else None,
            rules=rules,
            notice=notice,
        )

    def sees_special(self, with_tools: bool) -> bool:
        """Whether the text of an answer must have its special tokens, as some of them mean something."""
        return bool(self._specials(with_tools).kept)

    def parser(
        self,
        prompt: str,
        tools: Sequence[Tool] = (),
        *,
        new_id: Callable[[], str] | None = None,
        drops_special: bool = True,
        max_calls: int | None = None,
    ) -> OutputParser:
        """Return what reads one answer.

        Args:
            prompt: the end of the prompt as text, special tokens included, in which thinking may have begun.
            tools: that may be called; without them no calls are looked for.
            new_id: makes the id of a call; None: as the model's template wants them.
            drops_special: leave special tokens without a meaning out of the text, if `sees_special` has them there.
            max_calls: further calls are left out; None: none is.
        """
        specials = self._specials(bool(tools))
        reader: Reader
        if self.is_harmony:
            reader = HarmonyReader(tools, new_id, prompt=prompt)
        else:
            reader = TOOL_READERS[self.tool_parser](tools, new_id) if tools and self.tool_parser else PlainReader()
            reader = self.thinking.reader(prompt, reader) if self.thinking is not None else reader
        if not specials.kept:
            specials = Specials()
        return OutputParser(reader, SpecialFilter(specials, drops=drops_special), max_calls)

    def call_grammar(
        self, prompt: str, tools: Sequence[Tool], *, must_call: bool = True, is_parallel: bool = True
    ) -> str:
        """Return a grammar of llguidance, in Lark, for an answer that calls tools with arguments by their schemas.

        Args:
            prompt: as of `parser`.
            must_call: all of the answer, but for what is thought, are calls. Else it is text with calls in it, and
                the arguments of those tools follow their schemas that are strict.
        """
        thinking, begun = self._thinking_behind(prompt)
        shape = SHAPES[self.call_shape or self.tool_parser]
        how = dict(is_thinking=begun, must_call=must_call, is_parallel=is_parallel)
        grammar = CallGrammar(shape, self.added_ids, thinking, **how)
        return grammar.of(tools, (lambda tool: False) if must_call else (lambda tool: not tool.is_strict))

    def form_grammar(self, prompt: str, *, only_if_begun: bool = False) -> str | None:
        """Return a grammar of llguidance, in Lark, for an answer of a given form, which is called `@form` there.

        Args:
            prompt: as of `parser`.
            only_if_begun: what is thought must have begun in the prompt.

        Returns:
            None: nothing can come before the form.
        """
        thinking, begun = self._thinking_behind(prompt)
        if thinking is None or not begun and (only_if_begun or not self.thinking.is_known):
            return None
        return CallGrammar(None, self.added_ids, thinking, is_thinking=begun).of_form(FINAL if self.is_harmony else "")

    def begins_thinking(self, prompt: str) -> bool:
        """Whether the end of a prompt, as text, begins what is thought."""
        return self._thinking_behind(prompt)[1]

    @property
    def bounds(self) -> Bounds | None:
        """The texts around what is thought; None: it is a part of the answer."""
        if self.thinking is None:
            return None
        markers = self.thinking.markers
        if self.is_harmony:
            return Bounds(HARMONY, (END, START, CHANNEL, CALL, RETURN), _NEXT_MESSAGE, _NEXT_MESSAGE + FINAL)
        return Bounds(markers.begin, markers.end, markers.end[0])

    def _thinking_behind(self, prompt: str) -> tuple[tuple[str, str] | None, bool]:
        """Return the texts around what is thought, None if nothing is, and whether the prompt has begun it."""
        if self.thinking is None:
            return None, False
        begin, end = self.thinking.markers.begin, self.thinking.markers.end[0]
        if prompt.rstrip().endswith(end.strip()):
            return None, False  # the prompt has what is thought, and it is nothing
        if self.is_harmony:
            end = _NEXT_MESSAGE
        return (begin, end), prompt.rstrip().endswith(begin.rstrip())

    def _specials(self, with_tools: bool) -> Specials:
        meant: tuple[str, ...] = ()
        if self.is_harmony:
            meant = HarmonyReader.meant
        else:
            if self.thinking is not None:
                meant += self.thinking.meant
            if with_tools and self.tool_parser:
                meant += TOOL_READERS[self.tool_parser].meant
        return Specials(self.special_ids, meant)


class PlainReader(Reader):
    """All is the answer."""

    def feed(self, text: str) -> Iterator[Event]:
        if text:
            yield Text(text)

    def flush(self) -> Iterator[Event]:
        return iter(())


class OutputParser:
    """Reads one answer as it is generated: what was thought, what is answered, which tools are called.

    The events joined, whatever the pieces in which the text comes, are those of the whole text. Nothing that a model
    writes raises.
    """

    def __init__(self, reader: Reader, specials: SpecialFilter, max_calls: int | None = None) -> None:
        self._reader, self._specials = reader, specials
        self._max_calls = max_calls

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Take more text, and the tokens that were generated meanwhile; their text may still be to come."""
        return self._seen(self._read(self._specials.feed(text, token_ids)))

    def finish(self) -> list[Event]:
        """Return what is left, at the end of the answer."""
        return self._seen(chain(self._read(self._specials.flush()), self._reader.flush()))

    def _read(self, text: str) -> Iterator[Event]:
        for piece in pieces_of(text):
            yield from self._reader.feed(piece)

    def _seen(self, events: Iterator[Event]) -> list[Event]:
        """Return the events that are not left out; pieces of one kind are joined."""
        kept: list[Event] = []
        texts: list[str] = []  # of the last one
        for event in events:
            if isinstance(event, CallBegun | CallArguments | CallEnded):
                if self._max_calls is not None and event.index >= self._max_calls:
                    continue
                if isinstance(event, CallBegun):
                    event = replace(event, name=unguarded(event.name))
            has_text = isinstance(event, Text | Reasoning | CallArguments)
            last = kept[-1] if kept else None
            is_more = has_text and type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0)
            if not is_more:
                _join(kept, texts)
                kept.append(event)
                texts = []
            texts += [event.text] if has_text else []
        _join(kept, texts)
        return kept


def _join(events: list[Event], texts: list[str]) -> None:
    """Give the last event all of its text."""
    if texts:
        events[-1] = replace(events[-1], text=unguarded("".join(texts)))
