"""A reader of calls that are written as JSON objects: what those of Qwen, Llama and Mistral share."""

from __future__ import annotations

from nanoinfer.parsers.base import ToolReader
from nanoinfer.parsers.json_text import JsonCall, NamedArguments


class JsonCallReader(ToolReader):
    """Reads the object of a call; what comes around it is the subclass's.

    A call begins when its name and the begin of its arguments are known. What is no call until there is text of the
    answer, with all around it. Where the arguments go wrong behind that, they are given on as they were written, up to
    the end of the call: what was sent is sent.
    """

    ends: tuple[str, ...] = ()
    """Texts that end a call's arguments that are no JSON."""

    def _open(self, before: str, call: JsonCall | NamedArguments, call_id: str | None = None) -> bool:
        """Begin to read an object; `before` is the text that opened it."""
        self._raw, self._call, self._has_begun, self._call_id = [before], call, False, call_id
        self._step = self._inside
        return True

    def _inside(self) -> bool:
        call = self._call
        end = call.take(self._held, 0)
        if not self._has_begun:
            self._raw.append(self._held[:end])
        self._held = self._held[end:]
        self._go_on()
        if call.is_wrong:
            return self._go_wrong()
        if call.is_whole and self._has_begun:
            self._end()
            self._step = self._behind
        elif call.is_whole:
            self._refuse_call()
        return call.is_whole

    def _go_on(self) -> None:
        """Give what is known of the call."""
        call = self._call
        if call.name is not None and not self._is_call(call.name):
            call.is_wrong = True
        elif not self._has_begun and call.name is not None and call.has_arguments:
            self._begin(call.name, self._call_id)
            self._has_begun, self._raw = True, []
        if self._has_begun:
            self._argue(call.arguments())

    def _is_call(self, name: str) -> bool:
        """Whether a call of this name is one."""
        return True

    def _go_wrong(self) -> bool:
        call = self._call
        if call.is_between and any(one.startswith(self._held) or self._held.startswith(one) for one in self.ends):
            if self._held not in self.ends and any(one.startswith(self._held) for one in self.ends):
                return False  # it may become what ends the call
            self._forgive()
        if self._has_begun and call.is_between:
            self._end()
            self._step = self._behind
        elif self._has_begun:
            self._step = self._astray
        else:
            self._refuse_call()
        return True

    def _refuse_call(self) -> None:
        """What was read is no call."""
        self._say_as_it_is("".join(self._raw))
        self._raw = []
        self._refused()

    def _refused(self) -> None:
        self._step = self._outside

    def _forgive(self) -> None:
        """Take an object without its last brace for whole."""
        self._call.is_wrong = False
        self._call.end()
        if not self._call.is_wrong:
            self._go_on()

    def _astray(self) -> bool:
        """Arguments that are no JSON, up to the end of the call."""
        text, mark = self._cut_before(self.ends)
        self._argue(text)
        if mark is not None:
            self._end()
            self._step = self._behind
        return mark is not None

    def _behind(self) -> bool:
        """The step behind an object."""
        raise NotImplementedError

    def _finish(self) -> None:
        if self._step == self._inside:
            if self._call.is_between:
                self._forgive()
                if self._has_begun:
                    self._end()
            if self._has_begun:
                self._argue(self._call.rest())
            else:
                self._say_as_it_is("".join(self._raw) + self._held)
        elif self._step == self._astray:
            self._argue(self._held)
        else:
            self._say(self._held)
        self._held = ""
