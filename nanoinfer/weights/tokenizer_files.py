"""A checkpoint's tokenizer, loaded by transformers after its files were checked to be harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import shown
from nanoinfer.config import EngineConfig
from nanoinfer.gguf.tokenizer import tokenizer_of
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.weights.checkpoint import MAX_VOCAB_SIZE
from nanoinfer.weights.headers import read_json_object
from nanoinfer.weights.other_kinds import TOKENIZER_FILES

_FILES_WITH_IDS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json")
# A value with more digits than the ids of any model. This search takes a tenth of the time of reading the JSON.
_LARGE_VALUE = re.compile(rb":\s*\d{8}")


def load_tokenizer(config: EngineConfig, checkpoint: CheckpointInfo) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, or None if it is not wanted or the checkpoint has none; ValueError if it does not load.

    No code of the checkpoint runs. The chat template is the config's, if that has one.
    """
    if config.skip_tokenizer_init:
        return None
    tokenizer = _load(config.tokenizer, checkpoint)
    if tokenizer is not None and config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file has
            raise ValueError(
                f"chat_template {shown(str(config.chat_template))} cannot be read "
                f"({getattr(error, 'strerror', None) or error}): give a file with a template in Jinja"
            ) from error
    return tokenizer


def _load(tokenizer: str | Path | None, checkpoint: CheckpointInfo) -> PreTrainedTokenizerBase | None:
    if tokenizer is None and checkpoint.gguf is not None:
        return tokenizer_of(checkpoint.gguf.metadata)
    if tokenizer is None and not any((checkpoint.directory / name).exists() for name in TOKENIZER_FILES):
        return None
    source = tokenizer or checkpoint.directory
    try:
        _check_ids(Path(source))
        # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # errors of two libraries that do not check the files before they use them
        text = str(error).strip().partition("\n")[0]
        path = Path(source)
        lacking = " (it holds no tokenizer.json)" if path.is_dir() and not (path / "tokenizer.json").is_file() else ""
        raise ValueError(
            f"tokenizer {str(source)!r} cannot be loaded ({type(error).__name__}: {text}): check its files{lacking}, "
            "or set skip_tokenizer_init=True to work on token ids"
        ) from error


def _check_ids(directory: Path) -> None:
    """Raise ValueError for token ids beyond any vocabulary: transformers' time and memory grow with the ids."""
    for name in _FILES_WITH_IDS:
        path, has_keys = directory / name, name == "tokenizer_config.json"  # a small file whose ids are keys
        if not path.is_file() or not (has_keys or _LARGE_VALUE.search(path.read_bytes())):
            continue
        for token_id in _token_ids(name, read_json_object(path)):
            if isinstance(token_id, int) and token_id >= MAX_VOCAB_SIZE:
                raise ValueError(f"{path} has token id {shown(token_id)}, it must be below {MAX_VOCAB_SIZE:,}")


def _token_ids(name: str, content: dict[str, Any]) -> Iterable[Any]:
    """Return the values at the places where a file has token ids. Not every value need be a token id."""
    if name == "tokenizer.json":
        added = content.get("added_tokens")
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        return [*_object(_object(content.get("model")).get("vocab")).values(), *(token.get("id") for token in tokens)]
    if name == "tokenizer_config.json":
        return [int(key) for key in _object(content.get("added_tokens_decoder")) if key.isdecimal()]
    return content.values()


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
