"""What a command does about its model before anything is imported or loaded that takes long."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nanoinfer
from nanoinfer.common.units import format_size
from nanoinfer.options.engine import engine_arguments
from nanoinfer.options.parser import in_options


def prepare(
    options: argparse.Namespace,
    *,
    is_chat: bool = False,
    takes_text: bool = True,
    say: Callable[[str], None] | None = None,
) -> None:
    """Say which model it is, what is downloaded and that it is loaded, and choose the format of one that goes by its
    bare name, such as "qwen3-8b".

    is_chat: it is to answer messages. takes_text: prompts are text, not token ids.
    say: gets what there is to say; None: stderr does.

    Raises:
        ValueError: there is no such model, or it has no tokenizer or chat template and needs one.
    """
    from nanoinfer.weights.find import OnHub, find_model, locate
    from nanoinfer.weights.other_kinds import has_template, has_tokenizer, no_template

    def tell(text: str) -> None:
        print(f"{options.parser.prog}: {text}", file=sys.stderr, flush=True)

    is_shown, say = say is not None or sys.stderr.isatty(), say or tell
    found = locate(options.model)
    is_named = isinstance(found, OnHub) and "/" not in options.model
    if is_named:
        file = f", the hub's checkpoint, and not Ollama's file: ollama:{options.model}" if ":" in options.model else ""
        say(f"{options.model} is {found.repository}{file}")
    path = find_model(options.model, weights=False, say=say)
    if takes_text and options.tokenizer is None and not has_tokenizer(path):
        raise ValueError(
            f"{options.model} has no tokenizer: give a directory or hub id that has its own with --tokenizer"
        )
    if is_chat and options.chat_template is None and options.tokenizer is None and not has_template(path):
        raise ValueError(no_template(options.model))
    if is_named and options.quantization is None and options.head_quantization is None:
        _choose_format(options, say)
    if is_shown:
        say(f"loading {options.model}{_size_of(path)}")


def load(options: argparse.Namespace) -> Any:
    """Return the `LLM` of a command, which reports in the command's words."""

    class Worded(nanoinfer.LLM):
        def _report(self, text: str) -> None:
            print(f"{options.parser.prog}: {in_options(text, options.parser)}", file=sys.stderr)

    return Worded(options.model, **engine_arguments(options), progress_bar=sys.stderr.isatty())


def check(model: str | None, names: Any = ()) -> None:
    """Raise ValueError where there can be no model of this name; None is no name. names: others that are known."""
    if model is not None and model not in names:
        from nanoinfer.weights.find import locate

        locate(model, names)


def _size_of(path: Path) -> str:
    """Return how large the files are, for a line; "" where they are not there yet."""
    from nanoinfer.gguf.shards import shard_names

    names = shard_names(path.name) if path.is_file() else ()
    files = [path.with_name(name) for name in names] or list(path.glob("model*.safetensors"))
    size = sum(file.stat().st_size for file in files if file.is_file())
    return f", {format_size(size)}" if size else ""


def _choose_format(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Have the weights in the format with which the plan of this GPU is fastest, of those that lose least."""
    from nanoinfer.memory.here import best_format  # with torch

    changes, words = best_format(options.model, engine_arguments(options))
    for name, value in changes.items():
        setattr(options, name, value)
    if changes:
        say(f"{words}, in which it is fastest on this GPU (nanoinfer plan {options.model} says more)")
