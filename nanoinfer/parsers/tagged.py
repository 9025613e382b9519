"""Calls whose arguments stand between tags, each by itself: those of Qwen3-Coder, Seed-OSS and GLM."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from nanoinfer.parsers.base import ToolReader, first, num_held
from nanoinfer.parsers.schema_types import is_text, json_of, property_types, quoted
from nanoinfer.parsers.tools import named

_MAX_KEY = 300  # characters
_NAME = re.compile(r"[^\s<>\"]{1,200}")


class TaggedReader(ToolReader):
    """Makes JSON of arguments that stand between tags: strings as they come, other types when they are whole."""

    begin, end = "<tool_call>", "</tool_call>"
    value_end: str
    trims_lines = False
    """Whether one line end on either side of a value belongs to the form."""

    _raw: str  # of what is no call until its first argument or its end has come

    def _refuse(self) -> bool:
        """What was read is no call."""
        self._say_as_it_is(self._raw)
        self._step = self._outside
        return True

    def _expect(self, followers: dict[str, Callable[[str], None]], otherwise: Callable[[], bool]) -> bool:
        """Go on by the text that comes behind blanks; False: it is not known yet."""
        rest = self._held.lstrip()
        found = first(rest, tuple(followers))
        if found is not None and found[0] == 0:
            length = len(self._held) - len(rest) + len(found[1])
            followers[found[1]](self._cut(length))
            return True
        if any(one.startswith(rest) for one in followers):
            return False
        return otherwise()

    def _begin_call(self, name: str) -> None:
        tool = named(self._tools, name)
        self._parameters = tool.parameters if tool is not None else {}
        self._num_arguments = 0
        self._begin(name)

    def _begin_value(self, key: str) -> None:
        self._types = property_types(self._parameters, key)
        self._argue(("{" if not self._num_arguments else ", ") + quoted(key) + ": ")
        self._num_arguments += 1
        self._parts: list[str] = []
        self._is_first, self._line = True, ""
        if is_text(self._types):
            self._argue('"')
        self._step = self._value

    def _more(self, text: str) -> None:
        """Take more of a value."""
        if self.trims_lines and text:
            text = text.removeprefix("\n") if self._is_first else self._line + text
            self._is_first = False
            self._line = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if is_text(self._types):
            self._argue(quoted(text)[1:-1])
        else:
            self._parts.append(text)

    def _end_value(self) -> None:
        self._argue('"' if is_text(self._types) else json_of("".join(self._parts), self._types))

    def _end_call(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._end()

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
        ends = {self.value_end: self._followers(), **self._other_ends()}
        for found in re.finditer("|".join(map(re.escape, ends)), self._held):
            rest = self._held[found.end() :].lstrip()
            followers = ends[found.group()]
            if any(rest.startswith(one) for one in followers):
                length = len(self.value_end) if found.group() == self.value_end else 0
                return found.start(), length, True
            if any(one.startswith(rest) for one in followers):
                return found.start(), 0, False
        return len(self._held) - num_held(self._held, tuple(ends)), 0, False

    def _followers(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _other_ends(self) -> dict[str, tuple[str, ...]]:
        """What ends a value where its own end is missing, and what must follow that."""
        return {}

    def _between(self) -> bool:
        """The step between two arguments."""
        raise NotImplementedError

    def _stop(self) -> bool:
        """Something else than an argument comes: the call ends before it."""
        self._end_call()
        self._step = self._outside
        return True

    def _finish(self) -> None:
        if self._step == self._value:
            if self._held.startswith(self.value_end):
                self._end_value()
            else:
                self._more(self._held)
                if not is_text(self._types):
                    self._argue("".join(self._parts))
        elif self._step == self._outside:
            self._say(self._held)
        elif self._step != self._between and not self._is_behind_call:
            self._say_as_it_is(self._raw + self._held)
        self._held = ""


class Qwen3CoderReader(TaggedReader):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, the outer tags optional."""

    meant = ("<tool_call>", "</tool_call>")
    value_end = "</parameter>"
    trims_lines = True
    function, function_end, parameter = "<function=", "</function>", "<parameter="

    def _outside(self) -> bool:
        marks = (self.begin, self.function)
        found = first(self._held, marks)
        self._say(self._cut(len(self._held) - num_held(self._held, marks) if found is None else found[0]))
        if found is None:
            return False
        self._raw, self._name = self._cut(len(found[1])), ""
        self._step = self._opened if found[1] == self.begin else self._named
        return True

    def _opened(self) -> bool:
        def name(text: str) -> None:
            self._raw += text
            self._step = self._named

        return self._expect({self.function: name}, self._refuse)

    def _named(self) -> bool:
        """The name of the function, and that its form goes on."""
        name, _, rest = self._held.partition(">")
        if rest or self._held.endswith(">"):
            if not _NAME.fullmatch(name):
                return self._refuse()
            before, self._held = self._held, rest

            def begin(text: str) -> None:
                self._begin_call(name)
                self._held = text + self._held
                self._step = self._between

            followers = dict.fromkeys((self.parameter, self.function_end, self.end), begin)
            if self._expect(followers, lambda: False):
                return True
            if any(one.startswith(rest.lstrip()) for one in followers):
                self._held = before
                return False
            self._held = before
            return self._refuse()
        return self._refuse() if name and not _NAME.fullmatch(name) else False

    def _between(self) -> bool:
        def key(_: str) -> None:
            self._step = self._key

        def ended(_: str) -> None:
            self._end_call()
            self._step = self._behind

        def closed(_: str) -> None:
            self._end_call()
            self._step = self._outside

        return self._expect({self.parameter: key, self.function_end: ended, self.end: closed}, self._stop)

    def _key(self) -> bool:
        key, _, rest = self._held.partition(">")
        if not (rest or self._held.endswith(">")):
            return self._no_key() if key and not _NAME.fullmatch(key) else False
        if not _NAME.fullmatch(key):
            return self._no_key()
        self._held = rest
        self._begin_value(key)
        return True

    def _no_key(self) -> bool:
        self._held = self.parameter + self._held
        return self._stop()

    def _behind(self) -> bool:
        def closed(_: str) -> None:
            self._step = self._outside

        def otherwise() -> bool:
            self._step = self._outside
            return True

        return self._expect({self.end: closed}, otherwise)

    def _followers(self) -> tuple[str, ...]:
        return self.parameter, self.function_end, self.end

    def _other_ends(self) -> dict[str, tuple[str, ...]]:
        return {self.function_end: (self.end,)}


class SeedOssReader(Qwen3CoderReader):
    """As Qwen3-Coder's, with outer tags of its own."""

    begin, end = "<seed:tool_call>", "</seed:tool_call>"
    meant = (begin, end)
    trims_lines = False


class Glm4Reader(TaggedReader):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, as GLM 4.5 to 4.7 write it."""

    key, key_end, value, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    meant = ("<tool_call>", "</tool_call>", key, key_end, value, value_end)

    def _outside(self) -> bool:
        found = first(self._held, (self.begin,))
        self._say(self._cut(len(self._held) - num_held(self._held, (self.begin,)) if found is None else found[0]))
        if found is None:
            return False
        self._raw = self._cut(len(self.begin))
        self._step = self._named
        return True

    def _named(self) -> bool:
        found = first(self._held, (self.key, self.end))
        name = self._held[: found[0]].strip() if found else self._held.lstrip()
        if found is None:
            name = name[: len(name) - num_held(name, (self.key, self.end))].strip()
            return self._refuse() if name and not _NAME.fullmatch(name) else False
        if not _NAME.fullmatch(name):
            return self._refuse()
        self._held = self._held[found[0] :]
        self._begin_call(name)
        self._step = self._between
        return True

    def _between(self) -> bool:
        def key(_: str) -> None:
            self._step = self._named_key

        def closed(_: str) -> None:
            self._end_call()
            self._step = self._outside

        return self._expect({self.key: key, self.end: closed}, self._stop)

    def _named_key(self) -> bool:
        key, _, rest = self._held.partition(self.key_end)
        if key == self._held and not rest and not self._held.endswith(self.key_end):
            return self._no_key(key) if len(key) > _MAX_KEY else False
        if len(key) > _MAX_KEY:
            return self._no_key(key)
        self._held, self._found = rest, key
        self._step = self._valued
        return True

    def _valued(self) -> bool:
        otherwise = partial(self._no_key, self._found + self.key_end)
        return self._expect({self.value: lambda _: self._begin_value(self._found)}, otherwise)

    def _no_key(self, read: str) -> bool:
        self._held = self.key + read + ("" if self._held == read else self._held)
        return self._stop()

    def _followers(self) -> tuple[str, ...]:
        return self.key, self.end
