"""Sums of 64 bits over the bytes of rows, and rows that carry such a sum.

A row is float32 values in [1, 2): 23 bits each, which copies keep and which no arithmetic between operations touches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import isfinite

import numpy as np
from torch import Tensor

_LONGEST = 2**14
_ODD = np.random.default_rng(1).integers(2**63, size=_LONGEST, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_FACTOR, _HALF, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(32), np.uint64(41)
_ONE = np.uint32(0x3F800000)  # 1.0
BITS = 0x7FFFFF
"""Of a value, those that carry a sum."""


note: Callable[..., None] | None = None
"""Takes what is read and written, where somebody looks (`watch.py`)."""


class ReadPoison(RuntimeError):
    """An operation has read memory that was given back, or never written."""


def mixed(sums: np.ndarray) -> np.ndarray:
    """Have high bits and low ones change each other. sums: uint64."""
    sums = sums * _FACTOR
    return sums ^ (sums >> _HALF)


def tagged(sums: np.ndarray, tag: str) -> np.ndarray:
    """Mix in which operation it is."""
    return mixed(sums + _tag(tag))


@cache
def _tag(tag: str) -> np.uint64:
    return np.uint64(int.from_bytes(tag.encode()[:8].ljust(8), "little"))


def words(x: Tensor | np.ndarray) -> np.ndarray:
    """Return the bits of float32 values, two in a word: [..., n] -> [..., n / 2] uint64; one in each if n is odd.

    `ReadPoison` for a NaN or an infinity.
    """
    if note is not None and isinstance(x, Tensor) and x.is_contiguous():
        note("read", x)
    array = np.ascontiguousarray(x.detach().numpy() if isinstance(x, Tensor) else x)
    assert array.dtype == np.float32, f"checksums are made of float32, not of {array.dtype}"
    flat = array.reshape(-1)
    if not isfinite(flat.dot(flat)):
        raise ReadPoison("an operation read NaN or infinity: memory that was given back, or never written")
    return array.view(np.uint32).astype(np.uint64) if array.shape[-1] % 2 else array.view(np.uint64)


def sums_of_words(bits: np.ndarray) -> np.ndarray:
    """Return a sum of each row of words, [..., n] uint64 -> [...] uint64: another word is another sum."""
    return mixed((bits * _ODD[: bits.shape[-1]]).sum(-1))


def sums(x: Tensor | np.ndarray) -> np.ndarray:
    """Return a sum of each row, [..., n] float32 -> [...] uint64."""
    return sums_of_words(words(x))


def values(of: np.ndarray, size: int) -> np.ndarray:
    """Return a row that carries each sum, [...] uint64 -> [..., size] float32."""
    bits = (of[..., None] * _ODD[-size:]) >> _SHIFT
    return (bits.astype(np.uint32) | _ONE).view(np.float32)


def number(value: np.ndarray | int) -> np.ndarray:
    """Return a number below 2**23 as a value."""
    return (np.asarray(value).astype(np.uint32) | _ONE).view(np.float32)
