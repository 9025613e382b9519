"""GGUF files written byte by byte, so that they can be wrong in every way."""

from __future__ import annotations

import struct

import numpy as np

TYPES = {int: ("<I", 4), float: ("<f", 6), bool: ("?", 7)}


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def value(given) -> bytes:
    """A value with its type, as it follows its key."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, list):
        inner = [value(one) for one in given]
        return (
            struct.pack("<I", 9)
            + (inner[0][:4] if inner else struct.pack("<I", 4))
            + struct.pack("<Q", len(inner))
            + b"".join(one[4:] for one in inner)
        )
    form, kind = TYPES[type(given)]
    return struct.pack("<I", kind) + struct.pack(form, given)


def tensor_info(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    """sizes: as files have them, that of a row first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def table(
    metadata: dict | list[tuple],
    infos: list[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """The table alone. A value that is bytes already goes in as it is."""
    pairs = list(metadata.items()) if isinstance(metadata, dict) else list(metadata)
    found = magic + struct.pack("<I", version)
    found += struct.pack("<QQ", len(infos) if num_tensors is None else num_tensors, num_keys or len(pairs))
    for key, given in pairs:
        found += text(key) + (given if isinstance(given, bytes) else value(given))
    return found + b"".join(infos)


def whole(table_bytes: bytes, tensors: bytes, alignment: int = 32) -> bytes:
    return table_bytes + b"\0" * (-len(table_bytes) % alignment) + tensors


def small_file() -> bytes:
    """A file with every kind of value and two tensors."""
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "flag": True,
        "flags": [True, False],
        "nothing": [],
        "floats": [0.5, 0.25],
        "nested": [[1, 2], [3]],
        "tokenizer.ggml.tokens": ["a", "", "ä", "end"],
    }
    infos = [tensor_info("wide", [4, 3], 0, 0), tensor_info("blocks", [64, 2], 8, 64)]
    values = np.arange(12, dtype="<f4").tobytes() + b"\0" * 16 + bytes(range(136))
    return whole(table(metadata, infos), values)
