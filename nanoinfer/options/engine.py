"""The engine's options in all commands. Names, types, defaults and help come from `EngineConfig`."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.options.parser import OFFLOAD, length

_WORDS = {value: word for word, value in OFFLOAD.items()}
# Fields that are no options: commands take the model by position, and have their own switch for progress bars.
_NO_OPTIONS = ("model", "progress_bar")
# Names of options whose field has another one; the first is shown.
_NAMES = {
    "enable_cpu_offload": ("--offload",),
    "gpu_memory_limit": ("--gpu-memory", "--gpu-memory-limit"),
    "host_memory_limit": ("--host-memory", "--host-memory-limit"),
    "resident_kv_limit": ("--resident-kv-limit", "--resident-kv"),
    "max_num_batched_tokens": ("--max-num-batched-tokens", "--prefill-chunk"),
}
_HELP = {
    "enable_cpu_offload": "host memory for KV blocks: on = from the start, auto = when the GPU is full, off",
    "cuda_graph_batch_sizes": 'padded batch sizes of decode graphs, such as 1,2,4,8, or "staged"',
    "capture_num_tokens": 'token counts of prefill steps that run from graphs, such as 16,64,256, or "none"',
}


def add_engine_options(
    parser: argparse.ArgumentParser,
    only: Collection[str] | None = None,
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Add options for fields of `EngineConfig`, all by default; `defaults` and `texts` are others than the engine's."""
    help_of, defaults = field_help() | _HELP | dict(texts or {}), dict(defaults or {})
    known = [field for field in fields(EngineConfig) if field.name not in (*_NO_OPTIONS, *without)]
    wanted = [field for field in known if only is None or field.name in only]
    for field in wanted:
        default = defaults.get(field.name, field.default)
        text = help_of.get(field.name, "").replace("%", "%%")
        if default is not None and field.type != "bool":
            shown = _WORDS[default] if field.name == "enable_cpu_offload" else default
            text = f"{text.removesuffix('.')} (default: {shown})"
        kind = _kind(field.name, field.type, field.default)
        parser.add_argument(*option_names(field.name), dest=field.name, default=default, help=text, **kind)
    parser.set_defaults(engine_options=[field.name for field in wanted])


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the command's engine options as arguments of an LLM."""
    return {name: getattr(options, name) for name in options.engine_options}


def option_words(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that give these fields of `EngineConfig` to a command.

    Fields that have the command's default, which is the engine's or in `defaults`, are left out, as are those that are
    no options.
    """
    words = []
    for field in fields(EngineConfig):
        value = settings.get(field.name, field.default)
        if field.name in _NO_OPTIONS or value == defaults.get(field.name, field.default):
            continue
        option = option_names(field.name)[0]
        if field.name == "enable_cpu_offload":
            words += [option, _WORDS[value]]
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, dict):
            words += [option, json.dumps(value)]
        elif isinstance(value, list):
            words += [option, ",".join(map(str, value)) or "none"]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def option_names(field: str) -> tuple[str, ...]:
    """Return the names of the option for a field of `EngineConfig`; the first is shown."""
    return _NAMES.get(field, (f"--{field.replace('_', '-')}",))


def field_help() -> dict[str, str]:
    """Return what the docstring of `EngineConfig` says about each field, in one line."""
    text = inspect.cleandoc(EngineConfig.__doc__ or "")  # none with python -OO
    found = {}
    for name, said in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
        said = re.sub(r"^True (\w+)s\b", r"\1", " ".join(said.split())).replace("None: ", "Default: ")
        found[name] = re.sub(r"`(\w+)`", lambda match: option_names(match[1])[0], said)
    return found


def _kind(name: str, annotation: str, default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that follow from a field's type."""
    if name == "enable_cpu_offload":
        return dict(nargs="?", const=True, type=_offload, metavar="{on,auto,off}")
    if annotation == "bool":
        return dict(action=argparse.BooleanOptionalAction if default else "store_true")
    if name in ("max_model_len", "max_num_batched_tokens"):
        return dict(type=length, metavar="TOKENS")
    if "dict" in annotation:
        return dict(type=_object, metavar="JSON")
    if "list" in annotation:
        word, meaning = ("staged", "staged") if "str" in annotation else ("none", [])
        return dict(type=partial(_numbers, word=word, meaning=meaning), metavar="NUMBERS")
    if "str" not in annotation:
        return dict(type=float if "float" in annotation else int, metavar="SHARE" if "float" in annotation else "N")
    return dict(type=_size, metavar="SIZE") if "int" in annotation else {}


def _offload(text: str) -> bool | str:
    if text not in OFFLOAD:
        raise argparse.ArgumentTypeError(f"{text!r} is not known: choose from {', '.join(OFFLOAD)}")
    return OFFLOAD[text]


def _size(text: str) -> int | float | str:
    if re.fullmatch(r"0?\.[0-9]+|1\.0*", text):
        return float(text)  # a share; "1" is a byte, as it is for the engine
    return 0 if text == "0" else text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be an object in JSON, such as '{{\"rope_theta\": 5e5}}'")
    return found


def _numbers(text: str, word: str, meaning: Any) -> Any:
    try:
        return meaning if text == word else [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} must be whole numbers, such as 16,64,256, or "{word}"') from None
