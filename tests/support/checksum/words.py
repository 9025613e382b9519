"""What a stored key says of itself, and who reads it: the layer and the position."""

from __future__ import annotations

import numpy as np

from checksum.mixing import BITS, number, sums_of_words, values

_HALF, _LOW, _PAIR = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0xD6E8FEB86659FD93)


class WrongKey(RuntimeError):
    """A row reads a key of another position or layer than the lists say."""


def layer_of(weights: np.ndarray) -> np.ndarray:
    """Return what a layer is called in keys: bits of the sum of its norm's weights."""
    return weights >> np.uint64(41)


def with_name(rows: np.ndarray, layer: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return rows, [N, n] float32, whose first word says which layer and position they are of."""
    rows[:, 0], rows[:, 1] = number(layer), number(positions)
    return rows


def key_rows(of: np.ndarray, size: int, layer: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the key, then the value, of each token: [N, 2 * size] float32. of: [N] uint64."""
    return with_name(values(of, 2 * size), layer, positions)


def shares(bits: np.ndarray, queries: np.ndarray, visible: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return what the visible keys add to each query: [n] uint64. It is a sum, whatever order they come in.

    bits: [n or 1, keys, words], of keys and values; queries: [n, words]; visible: [n, keys]; places: [n or 1, keys],
    the position that each key must have.
    """
    names = (queries[:, :1] & _LOW) | (number(places).view(np.uint32).astype(np.uint64) << _HALF)
    wrong = visible & (bits[..., 0] != names)
    if wrong.any():
        raise WrongKey(_wrong(*np.argwhere(wrong)[0], *np.broadcast_arrays(bits[..., 0], names), queries))
    return (mixed_pairs(sums_of_words(bits), sums_of_words(queries)) * visible).sum(-1)


def _wrong(row: int, key: int, found: np.ndarray, wanted: np.ndarray, queries: np.ndarray) -> str:
    def of(word: np.uint64) -> str:
        layer, position = (int(half) & BITS for half in (word & _LOW, word >> _HALF))
        return f"position {position} of layer {layer:06x}"

    own = of(queries[row, 0])
    return f"the query of {own} reads {of(wanted[row, key])}, where {of(found[row, key])} lies"


def mixed_pairs(of_keys: np.ndarray, of_queries: np.ndarray) -> np.ndarray:
    """Mix each key's sum with its query's: [n or 1, keys], [n] -> [n, keys]."""
    pairs = (of_keys ^ of_queries[:, None]) * _PAIR
    return pairs ^ (pairs >> _HALF)
