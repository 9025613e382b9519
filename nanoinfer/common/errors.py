"""Refusing names that do not exist, with the nearest one that does."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from nanoinfer.common.other_names import MEANT, VALUES_MEANT


class UnknownNameError(TypeError, ValueError):
    """An unknown name: a TypeError, as Python raises for keywords, and a ValueError, as our user errors are."""


class RequestError(ValueError):
    """A request that the engine cannot take as it is.

    Attributes:
        field: what is at fault: "prompt", "messages" or a field of SamplingParams.
        is_too_long: the request does not fit into max_model_len or a KV pool.
        lengths: of a prompt that is too long, its tokens, or so many at least, and the most that there may be.
    """

    def __init__(
        self, message: str, *, field: str, is_too_long: bool = False, lengths: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.field, self.is_too_long, self.lengths = field, is_too_long, lengths


SHOWN_CHARS = 80


def shown(value: Any) -> str:
    """Return repr(value), cut to its beginning where it is long; all of a large value's would take seconds."""
    text = ""
    for part in _repr_parts(value):
        text += part
        if len(text) > SHOWN_CHARS:
            return text[:SHOWN_CHARS] + "..."
    return text


def _repr_parts(value: Any) -> Iterator[str]:
    if isinstance(value, list | dict):
        brackets = "[]" if isinstance(value, list) else "{}"
        yield brackets[0]
        for index, one in enumerate(value):
            yield ", " if index else ""
            yield from _repr_parts(one)
            if isinstance(value, dict):
                yield ": "
                yield from _repr_parts(value[one])
        yield brackets[1]
    else:
        yield repr(value[: SHOWN_CHARS + 1] if isinstance(value, str) else value)


def listed(names: Sequence[str]) -> str:
    """Return the first 8 of the names, and how many more there are: a wrong checkpoint may lack hundreds."""
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + rest


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that means the same, or else the one that looks most like `name`; None if none is close.

    Dashes of options do not count. What takes a file is no misspelling of what takes a text.
    """
    known = {_plain(one): one for one in allowed}
    if _plain(name).endswith("_file"):
        known = {plain: one for plain, one in known.items() if "file" in plain}
    meanings = (*MEANT.get(_plain(name), ()), *VALUES_MEANT.get(_plain(name).lower(), ()))
    meant = [known[one] for one in meanings if one in known]
    matches = meant or [known[one] for one in difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.7)]
    return matches[0] if matches else None


def _plain(name: str) -> str:
    return str(name).lstrip("-").replace("-", "_")


def same_digits(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names with the digits of `name`: another size is no misspelling."""
    return [one for one in allowed if re.findall(r"\d", one) == re.findall(r"\d", name)]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return what a message says behind an unknown name: " (did you mean 'x'?)", or "" where no name comes close."""
    guess = nearest(name, allowed)
    return f" (did you mean {guess!r}?)" if guess else ""


def choose(what: str, name: str, allowed: Collection[str], near: Collection[str] | None = None) -> None:
    """Refuse a name that is not allowed; `what` is chosen, such as "--mode". `near`: what may be guessed; None: all.

    Raises:
        ValueError: names the nearest allowed name and all of them.
    """
    if name not in allowed:
        hint = did_you_mean(name, allowed if near is None else near)
        raise ValueError(f"{what} {name!r} is not known{hint}: choose from {', '.join(allowed)}")


def unknown(what: str, name: str, allowed: Collection[str]) -> str:
    """Return the message about an unknown name, "LLM got an unknown argument": with the nearest allowed one, or all."""
    guess = nearest(name, allowed)
    return f"{what} {name!r}" + (f": did you mean {guess!r}?" if guess else f". Allowed: {', '.join(allowed)}.")
