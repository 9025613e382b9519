"""Sizes and numbers, read and shown."""

from __future__ import annotations

import math
import re

GIB = 2**30
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_LEAST_GIB = 0.1  # what is smaller is shown in MiB
_LEAST_MEMORY = 1000  # a number below it is not meant as bytes where it has no unit


class Size(int):
    """A number of bytes, which messages and commands show as it was given, such as "12GiB"."""

    def __new__(cls, num_bytes: int, written: float | str) -> Size:
        size = super().__new__(cls, num_bytes)
        size.written = written
        return size

    def __getnewargs__(self) -> tuple[int, float | str]:
        return int(self), self.written

    def __repr__(self) -> str:
        return repr(self.written)

    def __str__(self) -> str:
        return str(self.written)


def parse_bytes(value: float | str, name: str) -> Size:
    """Return the bytes from a number or from text such as "12GiB" (2^30) or "12GB" (10^9).

    Raises:
        ValueError: the text is no size, or the size is not positive.
    """
    if isinstance(value, Size):
        return value
    size = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f'{name}={value!r} is no size: give bytes or text such as "12GiB" or "500MB"')
        size = float(match[1]) * _UNITS[match[2].lower()]
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
        raise ValueError(f'{name}={value!r} must be a positive number of bytes or text such as "12GiB"')
    return Size(size, value)


def parse_memory(value: float | str, name: str) -> Size:
    """Return the bytes of a limit of memory, as `parse_bytes` does; ValueError also where the unit was forgotten."""
    size = parse_bytes(value, name)
    if size < _LEAST_MEMORY and not re.search("[a-zA-Z]", str(value)):
        raise ValueError(f'{name}={value!r} is {size:d} bytes: did you mean "{str(value).strip()}GiB"?')
    return size


def parse_count(text: str, name: str) -> int:
    """Return a number of tokens from text: "4096", or "4k" for the same; ValueError: it is none."""
    match = re.fullmatch(r"\s*(-?[0-9]+)([kK]?)\s*", text)
    if match is None:
        raise ValueError(f'{name}={text!r} is no whole number, such as 4096 or "4k" for the same')
    return int(match[1]) * (1024 if match[2] else 1)


def format_gib(num_bytes: float) -> str:
    """Return a size in GiB as text, without the unit."""
    return f"{num_bytes / 2**30:.2f}"


def format_size(num_bytes: float) -> str:
    """Return a size as text, in GiB, or in MiB below a tenth of one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= _LEAST_GIB * GIB else f"{num_bytes / 2**20:.2f} MiB"


def enough(num_bytes: int) -> str:
    """Return a limit that can be given and has so many bytes, such as "15.73GiB", in the same units."""
    if num_bytes < _LEAST_GIB * GIB:
        return f"{-(-num_bytes // 2**20)}MiB"
    return f"{math.ceil(num_bytes / GIB * 100) / 100:.2f}GiB"


def counted(number: int, noun: str) -> str:
    """Return a number of things as text: "1 request", "2,000 requests"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_share(value: int | float | str | None) -> bool:
    """Whether a memory limit is meant as a share of the memory: a float above 0 and at most 1."""
    return isinstance(value, float) and 0 < value <= 1
