"""Digests of a request's prompt, from its JSON body alone: no tokenizer is needed, so whoever routes stays thin.

Two prompts have as many digests in common as whole pieces of text at their beginnings, much as the blocks of the prefix
cache: a piece of 1,024 characters is some 256 tokens, the size of a block.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

PIECE_CHARS = 1024
CHARS_PER_TOKEN = 4  # of English text, about; loads are compared with each other, so only their unit depends on it
PIECE_TOKENS = PIECE_CHARS // CHARS_PER_TOKEN

# In the order in which chat templates show them. A body has one of the last three.
_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
_MARKS = ("cache_control",)  # no part of the prompt: clients move it from message to message
_END = "\x1e"  # behind each value, so that two values are not taken for one


def prompt_text(body: Any) -> str:
    """Return the text of the prompt in a request's parsed body: tools, system prompt, messages, in order.

    A conversation that goes on has the text before as its beginning. A body without a prompt has none.
    """
    parts: list[str] = []
    waiting = [body[name] for name in reversed(_FIELDS) if body.get(name)] if isinstance(body, dict) else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            parts += value, _END
        elif isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            for name, member in reversed(value.items()):
                if name not in _MARKS:
                    waiting += member, name
        else:
            parts += json.dumps(value), _END
    return "".join(parts)


def digests_of(text: str) -> list[int]:
    """Return a digest of 64 bits for each whole piece of a text, made of its characters and of the digest before it."""
    data, digests = b"", []
    for begin in range(0, len(text) - PIECE_CHARS + 1, PIECE_CHARS):
        piece = text[begin : begin + PIECE_CHARS].encode(errors="surrogatepass")
        data = blake2b(data + piece, digest_size=8).digest()
        digests.append(int.from_bytes(data))
    return digests
