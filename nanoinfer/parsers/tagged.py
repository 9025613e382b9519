"""Calls whose arguments stand between tags, each by itself: those of Qwen3-Coder, Seed-OSS and GLM."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy as copy

from nanoinfer.parsers.base import MAX_BLANKS, ToolReader, first, num_held
from nanoinfer.parsers.json_text import JsonValue
from nanoinfer.parsers.schema_types import is_text, json_of, property_types, quoted
from nanoinfer.parsers.tools import find_tool

_NAME = re.compile(r"[^\s<>\"]{1,200}")
_TEXT = re.compile(r"(?s).{0,300}")
_MAX_OPENING = 2 * MAX_BLANKS + 200  # characters: a name between blanks
Step = Callable[[], bool]


def _next_of(text: str, marks: Collection[str]) -> str | None:
    """Return which of the marks comes behind blanks; "": it is not known yet; None: none does, or too far away."""
    rest = text.lstrip()
    if len(text) - len(rest) > MAX_BLANKS:
        return None
    mark = max((one for one in marks if rest.startswith(one)), key=len, default=None)
    return "" if mark is None and any(one.startswith(rest) for one in marks) else mark


class TaggedReader(ToolReader):
    """Makes JSON of arguments that stand between tags: strings as they come, other types when they are whole.

    Attributes:
        opens: what may begin a call; `begin` is one of these.
        key, key_end: before and behind a key. key_form: all that a key may be.
        value, value_end: before and behind a value; value: "", as its key ends there.
        trims_lines: whether one line end on either side of a value belongs to the form.
    """

    begin, end = "<tool_call>", "</tool_call>"
    opens: tuple[str, ...] = (begin,)
    key: str
    key_end: str
    key_form = _NAME
    value = ""
    value_end: str
    trims_lines = False

    _raw: str  # of what is no call until its first argument or its end has come

    def _outside(self) -> bool:
        text, mark = self._cut_before(self.opens)
        self._say(text)
        if mark is not None:
            self._raw = self._cut(len(mark))
            self._step = self._opened if mark == self.begin else self._named
        return mark is not None

    @abstractmethod
    def _opened(self) -> bool:
        """The step behind `begin`."""

    def _named(self) -> bool:
        """The step behind any other of `opens`."""
        raise NotImplementedError

    def _refuse(self) -> bool:
        """What was read is no call."""
        self._say_as_it_is(self._raw)
        self._step = self._outside
        return True

    def _expect(self, steps: Mapping[str, Step], otherwise: Step) -> bool:
        """Go on by the text that comes behind blanks; False: it is not known yet."""
        mark = _next_of(self._held, steps)
        if mark is None:
            return otherwise()
        if mark:
            self._raw += self._cut(self._held.index(mark) + len(mark))
            self._step = steps[mark]
        return bool(mark)

    def _begin_call(self, name: str) -> None:
        tool = find_tool(self._tools, name)
        self._parameters = tool.parameters if tool is not None else {}
        self._num_arguments = 0
        self._begin(name)
        self._step = self._between

    def _steps(self) -> dict[str, Step]:
        """What may stand between two arguments, and the step behind it."""
        return {self.key: self._key, self.end: self._stop}

    def _between(self) -> bool:
        return self._expect(self._steps(), self._stop)

    def _stop(self) -> bool:
        """The call ends here; what else comes is text."""
        self._end_call()
        self._step = self._outside
        return True

    def _end_call(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._end()

    def _key(self) -> bool:
        key, end, rest = self._held.partition(self.key_end)
        if (key or end) and not self.key_form.fullmatch(key) and not self._is_property(key, bool(end)):
            return self._no_key("")
        if end:
            self._found, self._held = key, rest
            self._step = self._keyed
        return bool(end)

    def _is_property(self, key: str, is_whole: bool) -> bool:
        """Whether a tool has an argument of this name, or of one that begins so."""
        names = self._parameters.get("properties") if isinstance(self._parameters, Mapping) else None
        return isinstance(names, Mapping) and any(
            name == key if is_whole else name.startswith(key) for name in names if isinstance(name, str)
        )

    def _no_key(self, read: str) -> bool:
        """What was read is no argument, but text behind the call."""
        self._held = self.key + read + self._held
        return self._stop()

    def _keyed(self) -> bool:
        if self.value:
            return self._expect({self.value: self._begin_value}, lambda: self._no_key(self._found + self.key_end))
        return self._begin_value()

    def _begin_value(self) -> bool:
        self._types = property_types(self._parameters, self._found)
        self._argue(("{" if not self._num_arguments else ", ") + quoted(self._found) + ": ")
        self._num_arguments += 1
        self._parts: list[str] = []
        self._is_first, self._line = True, ""
        self._json = JsonValue() if self._types & {"object", "array"} else None
        if is_text(self._types):
            self._argue('"')
        self._step = self._value
        return True

    def _more(self, text: str) -> None:
        """Take more of a value."""
        if self.trims_lines and text:
            text = text.removeprefix("\n") if self._is_first else self._line + text
            self._is_first = False
            self._line = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._json is not None:
            self._json.take(text, 0)
            self._json.drain()  # nobody asks for it
        if is_text(self._types):
            self._argue(quoted(text)[1:-1])
        else:
            self._parts.append(text)

    def _end_value(self) -> None:
        self._argue('"' if is_text(self._types) else json_of("".join(self._parts), self._types))

    def _value(self) -> bool:
        """The step within a value. Its end counts where the form goes on behind it: a value may speak of tags."""
        at, length, is_known = self._end_of_value()
        self._more(self._cut(at))
        if not is_known:
            return False
        self._held = self._held[length:]
        self._end_value()
        self._step = self._between
        return True

    def _end_of_value(self) -> tuple[int, int, bool]:
        """Return where a value ends or may end, how long the text is that says so, and whether it does."""
        ends = {self.value_end: self._steps().keys(), **self._other_ends()}
        for match in re.finditer("|".join(map(re.escape, ends)), self._held):
            mark = _next_of(self._held[match.end() :], ends[match.group()])
            if mark is not None and not self._is_in_string(self._held[: match.start()]):
                length = len(self.value_end) if mark and match.group() == self.value_end else 0
                return match.start(), length, bool(mark)
        return len(self._held) - num_held(self._held, tuple(ends)), 0, False

    def _is_in_string(self, more: str) -> bool:
        """Whether a tag behind so much more of a value stands in a string of its JSON."""
        if self._json is None or self._json.is_wrong:
            return False
        value = copy(self._json)
        value.take(more, 0)
        return value.is_in_string

    def _other_ends(self) -> dict[str, tuple[str, ...]]:
        """What ends a value where its own end is missing, and what must follow that."""
        return {}

    def _finish(self) -> None:
        if self._step == self._value:
            if self._held.startswith(self.value_end):
                self._end_value()
            elif any(self._held.startswith(end) for end in self._other_ends()):
                self._end_value()
                self._end_call()
            else:
                self._more(self._held)
                if not is_text(self._types):
                    self._argue("".join(self._parts))
        elif self._step == self._outside:
            self._say(self._held)
        elif self._step in (self._opened, self._named) and not self._is_behind_call:
            self._say_as_it_is(self._raw + self._held)
        self._held = ""


class Qwen3CoderReader(TaggedReader):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, the outer tags optional."""

    meant = ("<tool_call>", "</tool_call>")
    function, function_end = "<function=", "</function>"
    opens = ("<tool_call>", function)
    key, key_end, value_end = "<parameter=", ">", "</parameter>"
    trims_lines = True

    def _opened(self) -> bool:
        return self._expect({self.function: self._named}, self._refuse)

    def _named(self) -> bool:
        """The name of the function, and that its form goes on."""
        name, end, rest = self._held.partition(">")
        if (name or end) and not _NAME.fullmatch(name):
            return self._refuse()
        mark = _next_of(rest, self._steps()) if end else ""
        if mark is None:
            return self._refuse()
        if mark:
            self._held = rest
            self._begin_call(name)
        return bool(mark)

    def _steps(self) -> dict[str, Step]:
        return super()._steps() | {self.function_end: self._ended}

    def _ended(self) -> bool:
        self._end_call()
        self._step = self._behind
        return True

    def _behind(self) -> bool:
        def otherwise() -> bool:
            self._step = self._outside
            return True

        return self._expect({self.end: self._outside}, otherwise)

    def _other_ends(self) -> dict[str, tuple[str, ...]]:
        return {self.function_end: (self.end,)}


class SeedOssReader(Qwen3CoderReader):
    """As Qwen3-Coder's, with outer tags of its own."""

    begin, end = "<seed:tool_call>", "</seed:tool_call>"
    meant = (begin, end)
    opens = (begin, Qwen3CoderReader.function)
    trims_lines = False


class Glm4Reader(TaggedReader):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, as GLM 4.5 to 4.7 write it."""

    key, key_end, value, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    meant = ("<tool_call>", "</tool_call>", key, key_end, value, value_end)
    key_form = _TEXT

    def _other_ends(self) -> dict[str, tuple[str, ...]]:
        return {self.end: (self.begin,)}

    def _opened(self) -> bool:
        """The name."""
        marks = tuple(self._steps())
        hit = first(self._held, marks)
        name = self._held[: len(self._held) - num_held(self._held, marks) if hit is None else hit[0]].strip()
        is_far = (len(self._held) if hit is None else hit[0]) > _MAX_OPENING
        if is_far or (name or hit) and not _NAME.fullmatch(name):
            return self._refuse()
        if hit is not None:
            self._cut(hit[0])
            self._begin_call(name)
        return hit is not None
