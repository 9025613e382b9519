"""The engine's options in all commands. Names, types, defaults and help come from `EngineConfig`."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import partial
from typing import Any

from nanoinfer.common.launched import num_launched
from nanoinfer.config import EngineConfig
from nanoinfer.options.parser import OFFLOAD, Parser, json_object, length

_WORDS = {value: word for word, value in OFFLOAD.items()}
# Fields that are no options: commands take the model by position, and have their own switch for progress bars.
_NO_OPTIONS = ("model", "progress_bar")
# The names of options, where there are others than the field's own: the first is shown, all are taken.
_NAMES = {
    "enable_cpu_offload": ("--offload", "--enable-cpu-offload"),
    "gpu_memory_limit": ("--gpu-memory-limit", "--gpu-memory"),
    "host_memory_limit": ("--host-memory-limit", "--host-memory"),
    "resident_kv_limit": ("--resident-kv-limit", "--resident-kv"),
    "max_num_batched_tokens": ("--max-num-batched-tokens", "--prefill-chunk"),
    "chat_template": ("--chat-template", "--chat-template-file"),
}
# The groups of `--help`, what is asked for most first; a field that is in none comes last.
_LAST = "tuning and tests"
GROUPS = {
    "length and memory": (
        "max_model_len", "gpu_memory_limit", "host_memory_limit", "enable_cpu_offload", "resident_weights_limit",
        "cpu_offload_gb", "max_num_seqs", "gpu_memory_utilization",
    ),
    "model and formats": (
        "quantization", "head_quantization", "kv_cache_dtype", "dtype", "hf_overrides", "tokenizer",
        "skip_tokenizer_init", "chat_template", "generation_config", "load_format",
    ),
    "machine": ("device", "attention_backend", "pin_host_memory"),
}  # fmt: skip
_HELP = {
    "enable_cpu_offload": "KV cache in host memory, too: on = from the start, auto = when the GPU is full, off",
    "speculative_config": "guess tokens from the text itself and compute them beside, which changes no token: auto = "
    'while KV or weights stream and few sequences run, none = never, \'{"method": "suffix"}\' = always',
    "cuda_graph_batch_sizes": 'padded batch sizes of decode graphs, such as 1,2,4,8, or "staged"',
    "capture_num_tokens": 'token counts of prefill steps that run from graphs, such as 16,64,256, or "none"',
}


def add_engine_options(
    parser: Parser,
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
    for group, field in _grouped(parser, wanted):
        default = defaults.get(field.name, field.default)
        text = help_of.get(field.name, "").replace("%", "%%")
        if default is not None and not field.type.startswith("bool"):
            if field.name in defaults:  # not the engine's
                text = re.sub(r" Default: .*", "", text)
            shown = _WORDS[default] if field.name == "enable_cpu_offload" else default
            text = f"{text.removesuffix('.')} (default: {shown})"
        kind = _kind(field.name, field.type, field.default)
        shown, *others = option_names(field.name)
        action = group.add_argument(shown, dest=field.name, default=default, help=text, **kind)
        if field.name == "enable_cpu_offload":
            action.completer = lambda **_: OFFLOAD  # which argcomplete asks for values
        parser.take_also(shown, *others)
        if field.name == "kv_cache_dtype":
            for part in "kv":
                names = f"-ct{part}", f"--cache-type-{part}"
                group.add_argument(
                    *names, action=_CacheType, const=part, dest=argparse.SUPPRESS, help=argparse.SUPPRESS
                )
    parser.set_defaults(engine_options=[field.name for field in wanted], check_engine=check_engine)


def _grouped(parser: Parser, wanted: Sequence[Field]) -> Iterator[tuple[Any, Field]]:
    """Yield the fields in the order of `--help`, each with the group of the parser that it belongs to."""
    by_name = {field.name: field for field in wanted}
    grouped = {name for names in GROUPS.values() for name in names}
    for title, names in (GROUPS | {_LAST: [name for name in by_name if name not in grouped]}).items():
        if found := [by_name[name] for name in names if name in by_name]:
            group = parser.add_argument_group(title)
            yield from ((group, field) for field in found)


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the command's engine options as arguments of an LLM."""
    return {name: getattr(options, name) for name in options.engine_options}


def check_engine(options: argparse.Namespace) -> None:
    """Refuse values that no engine takes, before the command imports and loads what takes long.

    Raises:
        ValueError: says what is allowed.
    """
    given = {name: value for name, value in engine_arguments(options).items() if value is not None}
    if given.get("tensor_parallel_size", 1) > 1 and num_launched() > 1:
        raise ValueError(
            "this command runs under torchrun, or another launcher that has set WORLD_SIZE, and starts its ranks "
            "itself: run it with python, or unset WORLD_SIZE"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the command's own config says it again
        EngineConfig(model="any", **given)


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
        elif field.name == "speculative_config" and value is None:
            words += [option, "none"]
        elif isinstance(value, dict):
            words += [option, json.dumps(value)]
        elif isinstance(value, list):
            words += [option, ",".join(map(str, value)) or "none"]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def option_names(field: str) -> tuple[str, ...]:
    """Return the names of the option for a field of `EngineConfig`: the one that is shown, and what else is taken."""
    return _NAMES.get(field, (f"--{field.replace('_', '-')}",))


def field_help() -> dict[str, str]:
    """Return what the docstring of `EngineConfig` says about each field, in one line."""
    text = inspect.cleandoc(EngineConfig.__doc__ or "")  # none with python -OO
    found = {}
    for name, said in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
        said = re.sub(r"^True (\w+)s\b", r"\1", " ".join(said.split()))
        said = re.sub(r"\bNone(: |, or )", r"Default\1", said)
        found[name] = re.sub(r"`(\w+)`", lambda match: option_names(match[1])[0], said)
    return found


def _kind(name: str, annotation: str, default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that follow from a field's type."""
    if name == "enable_cpu_offload":
        return dict(nargs="?", const=True, type=_offload, metavar="{on,auto,off}")
    if annotation.startswith("bool"):
        return dict(action="store_true" if default is False else argparse.BooleanOptionalAction)
    if name in ("max_model_len", "max_num_batched_tokens"):
        return dict(type=length, metavar="TOKENS")
    if name == "speculative_config":
        return dict(type=_speculation, metavar="JSON")
    if "dict" in annotation:
        return dict(type=json_object, metavar="JSON")
    if "list" in annotation:
        word, meaning = ("staged", "staged") if "str" in annotation else ("none", [])
        return dict(type=partial(_numbers, word=word, meaning=meaning), metavar="NUMBERS")
    if "str" not in annotation:
        unit = "GIB" if name.endswith("_gb") else "SHARE"
        return dict(type=float if "float" in annotation else int, metavar=unit if "float" in annotation else "N")
    return dict(type=_size, metavar="SIZE") if "int" in annotation else {}


class _CacheType(argparse.Action):
    """llama.cpp's two options for the formats of keys and of values, which have one name here."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: str, option: str) -> None:
        types = dict(k="f16", v="f16") | getattr(namespace, "cache_types", {}) | {self.const: value}
        namespace.cache_types, namespace.kv_cache_dtype = types, "/".join(types.values())


def _offload(text: str) -> bool | str:
    if text not in OFFLOAD:
        raise argparse.ArgumentTypeError(f"{text!r} is not known: choose from {', '.join(OFFLOAD)}")
    return OFFLOAD[text]


def _speculation(text: str) -> dict[str, Any] | str | None:
    return text if text == "auto" else None if text == "none" else json_object(text, '{"method": "suffix"}, or none')


def _size(text: str) -> int | float | str:
    if re.fullmatch(r"0?\.[0-9]+|1\.0*", text):
        return float(text)  # a share; "1" is a byte, as it is for the engine
    return 0 if text == "0" else text


def _numbers(text: str, word: str, meaning: Any) -> Any:
    try:
        return meaning if text == word else [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} must be whole numbers, such as 16,64,256, or "{word}"') from None
