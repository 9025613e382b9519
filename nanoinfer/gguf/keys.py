"""The metadata of one architecture, as its config asks for it: what is asked for is known, the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from nanoinfer.common.errors import listed, shown
from nanoinfer.gguf.reader import GGUFFile

_MISSING = object()
# Of a model with images or sound, whose text part runs alone: Ollama has all in one file.
_OTHER_PARTS = ("vision.", "mm.", "audio.")


class Keys:
    """The values whose keys begin with the architecture's name. Each that is read is noted."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.architecture = file, file.metadata["general.architecture"]
        begin = f"{self.architecture}."
        self._values = {key[len(begin) :]: one for key, one in file.metadata.items() if key.startswith(begin)}
        self._asked: set[str] = set()

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ValueError about a key."""
        raise ValueError(f"{self.file.path}: {self.architecture}.{name} {why}")

    def has(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Return a value as it is; ValueError if it is not there and has no default."""
        self._asked.add(name)
        if name in self._values:
            return self._values[name]
        if default is _MISSING:
            self.refuse(name, "is missing: the file is not whole, or was not made by llama.cpp")
        return default

    def count(self, name: str, default: Any = _MISSING) -> int:
        """Return a whole number; of an array with one for each layer, the number that all have."""
        value = self._of_layers(name, self.take(name, default))
        if type(value) is not int or not 0 <= value < 2**31:
            self.refuse(name, f"is {shown(value)}, it must be a whole number of at least 0")
        return value

    def counts(self, name: str, num_layers: int, default: Any = _MISSING) -> list[int]:
        """Return a whole number for each layer, given so or as one for all."""
        value = self.take(name, default)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        values = list(values) if isinstance(values, list | tuple) else [values] * num_layers
        if len(values) < num_layers or not all(type(one) is int and 0 <= one < 2**31 for one in values):
            self.refuse(name, f"is {shown(value)}, it must be a whole number, or one for each of {num_layers:,} layers")
        return values[:num_layers]

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Return a finite number."""
        value = self._of_layers(name, self.take(name, default))
        if type(value) not in (int, float) or not abs(value) < 1e30:
            self.refuse(name, f"is {shown(value)}, it must be a number")
        return value

    def flags(self, name: str, num_layers: int, default: int) -> list[bool]:
        """Return for each layer whether it has a window: given so, or as a period, whose last layer has none."""
        value = self.take(name, default)
        if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str):
            value = list(value)
            if len(value) < num_layers:
                self.refuse(name, f"has {len(value):,} entries for {num_layers:,} layers")
            return [bool(one) for one in value[:num_layers]]
        if type(value) is not int or not 0 <= value < 2**31:
            self.refuse(name, f"is {shown(value)}, it must be a whole number or one flag for each layer")
        return [value == 0 or layer % value < value - 1 for layer in range(num_layers)]

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse another value than these, the first of which stands for none."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            self.refuse(name, f"is {shown(value)}: supported is {' or '.join(map(repr, allowed))}")

    def check_all_asked(self) -> None:
        """Raise ValueError if the file says what nobody has asked for: it may change what the model computes."""
        others = sorted(name for name in self._values.keys() - self._asked if not name.startswith(_OTHER_PARTS))
        if others:
            named = listed([f"{self.architecture}.{name}" for name in others])
            raise ValueError(
                f"{self.file.path} has {named}, which is not supported: what it changes in the model is not known here"
            )

    def _of_layers(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        values = set(value.tolist())
        if len(values) != 1:
            self.refuse(name, f"is {shown(value.tolist())}: layers that differ are not supported")
        return values.pop()
