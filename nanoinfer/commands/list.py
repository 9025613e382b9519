"""`nanoinfer list` on the command line: the models that lie here, and what becomes of them on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from nanoinfer.common.terminal import without_orders
from nanoinfer.common.units import counted, format_size
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser


def add_arguments(parser: Parser) -> None:
    add_engine_options(parser, only=("device",))
    parser.epilog = (
        "What is looked at: the hub's cache (HF_HOME), ~/.lmstudio/models, Ollama's folders (OLLAMA_MODELS), and "
        "packages. Times are those of nanoinfer plan, with 32k tokens of context."
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for each model."""
    from nanoinfer.weights.lying_here import models_here

    found = list(models_here())
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        line = f"{one.name:{width}}  {format_size(one.num_bytes):>10}  {_here(one.path, options.device)}"
        print(without_orders(line), flush=True)
    print(f"\n{counted(len(found), 'model')}; others are downloaded when they are first used: nanoinfer chat qwen3-4b")
    return 0


def _here(path: Any, device: str) -> str:
    """Return in words whether a model runs here, and how fast."""
    from nanoinfer.memory.here import what_becomes_of  # with torch

    try:
        return what_becomes_of(path, device)
    except (ValueError, OSError) as error:
        return f"does not run: {str(error).replace(f'{path}: ', '').replace(f'{path} ', '')}".replace("\n", " ")
