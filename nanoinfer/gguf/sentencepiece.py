"""Merges of a SentencePiece vocabulary of byte pairs, which has scores of tokens in their place."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from nanoinfer.gguf.vocabulary import Vocabulary

_DIGEST_BYTES = hashlib.sha256().digest_size


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose texts together are a token, in the order of that token's score.

    Of equal scores, the token that comes first in the vocabulary counts first: in a text, that is the merge furthest
    to the left, which no order of merges can say.

    They are kept in the user's cache: to find them takes as long as all else (1 second for 262,144 tokens). Merges of
    byte pairs are in the file, and a tokenizer kept as JSON is slower to read than one that is built from the file.
    """
    path = _cache_path(vocabulary)
    pairs = _read(path)
    if pairs is None:
        pairs = _pairs(vocabulary)
        _write(path, pairs)
    lefts, rights = (map(vocabulary.tokens.__getitem__, column) for column in pairs.T.tolist())
    return list(zip(lefts, rights, strict=True))


def _pairs(vocabulary: Vocabulary) -> np.ndarray:
    """Return the pairs as ids, int32 [num_merges, 2]."""
    find = vocabulary.ids.get
    pairs: list[int] = []
    for at, token in enumerate(vocabulary.tokens):
        for cut in range(1, len(token)):
            if (left := find(token[:cut])) is not None and (right := find(token[cut:])) is not None:
                pairs += left, right, at
    lefts, rights, wholes = np.array(pairs, np.int32).reshape(-1, 3).T
    order = np.argsort(-vocabulary.scores[wholes], kind="stable")
    return np.stack((lefts, rights), axis=1)[order]


def _cache_path(vocabulary: Vocabulary) -> Path:
    """Return the file for these tokens and scores. Its directory need not exist."""
    content = hashlib.sha256("\0".join(vocabulary.tokens).encode())
    content.update(vocabulary.scores.tobytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nanoinfer" / "merges" / content.hexdigest()


def _read(path: Path) -> np.ndarray | None:
    """Return the pairs that were kept; None if there are none, or the file is not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return np.frombuffer(content, "<i4").reshape(-1, 2) if hashlib.sha256(content).digest() == digest else None


def _write(path: Path, pairs: np.ndarray) -> None:
    """Keep the pairs. Without a place for them they are found again the next time."""
    content = pairs.astype("<i4").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(file.name, path)
    except OSError:
        return
