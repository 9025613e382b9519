"""generation_config.json: a checkpoint's end tokens, and the sampling parameters that its authors recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.gguf.sources import ollama_stops
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.sampling_params import Advised, SamplingParams
from nanoinfer.weights.checkpoint import TOKEN_IDS
from nanoinfer.weights.headers import read_json_object

FILE = "generation_config.json"
# The fields that vLLM reads. Like vLLM we do not read do_sample: checkpoints often leave it at false although they give
# a temperature that is meant to be used.
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
# The same in GGUF's metadata, below general.sampling.
_GGUF_FIELDS = dict(temp="temperature", penalty_repeat="repetition_penalty") | {
    name: name for name in ("top_k", "top_p", "min_p")
}


def read(model_dir: Path) -> dict[str, Any]:
    """Return the content of the file, or {} if there is no file; ValueError if it is no JSON object."""
    path = model_dir / FILE
    return read_json_object(path) if path.exists() else {}


def end_token_ids(checkpoint: CheckpointInfo) -> frozenset[int]:
    """Return the tokens that end a completion: generation_config.json's, or config.json's where that has no such field.

    null means that no token does, in either file, as in transformers (5.17). A field that is left out does not mean
    that: transformers goes on for ever then, and vLLM takes the tokenizer's end token.
    """
    ids = read(checkpoint.directory).get("eos_token_id", getattr(checkpoint.hf_config, "eos_token_id", None))
    TOKEN_IDS.check(str(checkpoint.directory / FILE), "eos_token_id", ids)
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def suppressed_token_ids(checkpoint: CheckpointInfo) -> tuple[int, ...]:
    """Return the tokens that generation_config.json, or a GGUF file, says must never come, ascending.

    Raises:
        ValueError: they are no ids.
    """
    if checkpoint.gguf is None:
        where, name = str(checkpoint.directory / FILE), "suppress_tokens"
        ids = read(checkpoint.directory).get(name)
    else:
        where, name = str(checkpoint.directory), "tokenizer.ggml.suppress_tokens"
        ids = checkpoint.gguf.metadata.get(name)
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    TOKEN_IDS.check(where, name, ids)
    return tuple(sorted(set(ids if isinstance(ids, list) else [] if ids is None else [ids])))


def sampling_defaults(checkpoint: CheckpointInfo, model: str = "") -> dict[str, Any]:
    """Return values for fields of SamplingParams that a request leaves out; ValueError if one is not allowed.

    model: the name that a user gave; Ollama keeps the texts that end an answer beside the model of a name.
    """
    model_dir, gguf = checkpoint.directory, checkpoint.gguf
    content = read(model_dir) if gguf is None else {}
    defaults = {name: content[name] for name in _SAMPLING_FIELDS if content.get(name) is not None}
    if gguf is not None:
        held = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in _GGUF_FIELDS.items()}
        defaults = {name: value for name, value in held.items() if value is not None}
        defaults |= {"stop": stops} if (stops := ollama_stops(model)) else {}
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        path = model_dir / FILE if gguf is None else model_dir
        raise ValueError(
            f'{path}: {error} Mend the file, or set generation_config="vllm" to leave its values out.'
        ) from error
    if "max_tokens" in defaults:
        defaults["max_tokens"] = Advised(defaults["max_tokens"])
    return defaults
