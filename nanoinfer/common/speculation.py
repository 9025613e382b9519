"""`speculative_config`, as vLLM writes it: which of its settings there are here."""

from __future__ import annotations

from typing import Any

from nanoinfer.common.errors import did_you_mean

METHODS = "suffix", "ngram"
MAX_LINES = 32
"""Rows and drafted tokens of a step together: so many cost a GPU hardly more than one row does."""
DEFAULT_TOKENS = 8
MOST_TOKENS = 16
_OF_NGRAM = "prompt_lookup_min", "prompt_lookup_max"
_ALLOWED = "method", "num_speculative_tokens", *_OF_NGRAM
_NEEDS_MODEL = "model", "draft_model", "draft_tensor_parallel_size"


def checked_speculation(given: Any) -> dict[str, Any] | str | None:
    """Return the settings that the engine reads, with `num_speculative_tokens`; None for None, "auto" for "auto".

    "ngram" is taken as "suffix", which finds the same and longer matches; what it says of their lengths is not needed.

    Raises:
        ValueError: something in it is not known, or wants a model that drafts.
    """
    if given is None or given == "auto":
        return given
    example = (
        'give {"method": "suffix", "num_speculative_tokens": 8}, None for no drafts, or leave speculative_config out'
    )
    if not isinstance(given, dict):
        raise ValueError(f"speculative_config={given!r} is not valid: {example}")
    for name in given:
        if name in _NEEDS_MODEL:
            raise ValueError(f"speculative_config names {name!r}, and no second model drafts here: {example}")
        if name not in _ALLOWED:
            raise ValueError(f"speculative_config has {name!r}{did_you_mean(name, _ALLOWED)}: {example}")
    if (method := given.get("method")) not in METHODS:
        raise ValueError(f"speculative_config has method={method!r}, and there are {', '.join(METHODS)}: {example}")
    count = given.get("num_speculative_tokens", DEFAULT_TOKENS)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_TOKENS:
        raise ValueError(f"speculative_config has num_speculative_tokens={count!r}: give 1 to {MOST_TOKENS}")
    return dict(method="suffix", num_speculative_tokens=count)
