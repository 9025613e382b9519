"""Which tokens end a completion, and which are special although the file does not say so: both by their texts.

Many files name `eos` alone, and a chat would not end. llama.cpp (`src/llama-vocab.cpp`) has lists of texts for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoinfer.gguf.vocabulary import named_ids

_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)
# What surrounds code in the prompt of a model that fills a gap. The last three end an answer too.
_GAP_PREFIX = "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>".split()
_GAP_SUFFIX = "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>".split()
_GAP_MIDDLE = "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split()
_GAP_ENDS = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
    "fim_sep": ["<|file_sep|>"],
}
_GAPS = frozenset([*_GAP_PREFIX, *_GAP_SUFFIX, *_GAP_MIDDLE, *(text for texts in _GAP_ENDS.values() for text in texts)])
# With both tokens of such a pair, the model speaks of parts of an answer: <|end|> ends a part, not the answer.
_PARTS = (
    ("<|return|>", "<|call|>"),
    ("<|return|>", "<|calls|>"),
    ("<|call|>", "<|flush|>"),
    ("<|calls|>", "<|flush|>"),
)


# Where the one is a token, the other is text: HTML, in Gemma 4's vocabulary.
_PLAIN_BESIDE = "<|tool_response>", "</s>"


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a completion, in order. No tokenizer need be known: the list of tokens is enough.

    Without such a list nothing is known of the ids that the file names, and nothing ends a completion.

    Raises:
        ValueError: an id is outside of the list.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list | tuple):
        return []
    ids = {text: at for at, text in enumerate(tokens) if isinstance(text, str) and (text in _ENDS or text in _GAPS)}
    named = named_ids(metadata, len(tokens))
    ends = {ids[text] for text in _ends_of(ids)}
    ends |= {named[name] for name in ("eos", "eot", "eom") if name in named}
    for name, texts in _GAP_ENDS.items():
        first = next((ids[text] for text in texts if text in ids), None)
        ends |= {named.get(name, first)} - {None}
    if any(all(ids.get(text) in ends for text in pair) for pair in _PARTS):
        ends.discard(ids.get("<|end|>"))
    return sorted(ends)


def special_by_text(texts: Collection[str]) -> Iterable[str]:
    """Return those texts that are special tokens, whatever the file says of them."""
    ends = _ends_of(texts)
    return (text for text in texts if text in ends or text in _GAPS)


def _ends_of(texts: Collection[str]) -> set[str]:
    """Return those texts that say that they end something."""
    marker, plain = _PLAIN_BESIDE
    return {text for text in _ENDS if text in texts} - ({plain} if marker in texts else set())
