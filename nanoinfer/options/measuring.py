"""Options that all benchmarks share: the model, the engine, and how numbers and files are given."""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nanoinfer.common.errors import choose
from nanoinfer.models.shapes import SHAPES, has_experts, refuse_shape, write_shape
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.parser import Parser, length

# The modes that are measured: engine arguments in which they differ.
ENGINE_MODES: dict[str, dict] = {
    "streamed": dict(enable_cpu_offload=True, resident_kv_limit=0),
    "offload": dict(enable_cpu_offload=True),
    "auto": dict(enable_cpu_offload="auto"),
    "resident": dict(enable_cpu_offload=False),
}

# Arguments of engines that the benchmarks choose themselves.
_CHOSEN = (
    "chat_template", "enable_cpu_offload", "generation_config", "load_format", "max_model_len", "resident_kv_limit",
    "skip_tokenizer_init", "tokenizer",
)  # fmt: skip

# Prefix caching is off by default, so that each run computes all of its prompts; None: the benchmark decides. What
# random weights say is no text, so steps are measured without drafts.
_DEFAULTS = {"enable_prefix_caching": None, "speculative_config": None}

# File name endings of a picture.
PICTURES = (".png", ".svg", ".pdf")


def add_model_arguments(
    parser: Parser, text: str = "checkpoint directory, GGUF file or hub id", *, has_shapes: bool = True
) -> None:
    """Add the options for the model, or, if the command `has_shapes`, for the shape of random weights."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
    model.add_argument("--model", metavar="MODEL", help="the same as an option")
    if has_shapes:
        model.add_argument("--shape", help=f"random weights in a known shape: {', '.join(SHAPES)}")


def add_engine_arguments(
    parser: Parser, texts_of_lists: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> None:
    """Add the options of the engine that benchmarks leave to the user.

    texts_of_lists: help texts of options that take several values, with commas.
    """
    texts = {"max_num_seqs": "sequences that run at once; default: as the benchmark needs"}
    texts |= dict(texts_of_lists or {})
    add_engine_options(parser, without=(*_CHOSEN, *without), defaults=_DEFAULTS, texts=texts)
    if texts_of_lists:  # which are taken apart by the benchmark
        parser.set_defaults(check_engine=None)
    parser.add_argument("--no-progress", action="store_true", help="show no progress bars")


def add_locality_argument(parser: Parser) -> None:
    parser.add_argument(
        "--router-locality",
        type=float,
        metavar="SHARE",
        help="of a sparse --shape: the share of generated tokens, and so of chosen experts, that are of a small "
        "working set; 0.84 is about as published for Qwen3-30B-A3B, 0 = uniform choices (default: 0)",
    )


def check_locality(options: argparse.Namespace) -> None:
    """Raise ValueError if a locality is given, but not of a sparse model with random weights, or not in [0, 1)."""
    locality = options.router_locality
    if locality is None:
        return
    if options.model is not None or not has_experts(options.shape):
        shape = f"--shape {options.shape or '(the default)'}"
        what = shape if options.model is None else f"--model {options.model}"
        sparse = ", ".join(filter(has_experts, SHAPES))
        raise ValueError(
            f"--router-locality is of sparse models with random weights, not of {what}: leave it out, or give --shape "
            f"with one of {sparse}"
        )
    if not 0 <= locality < 1:
        raise ValueError(f"--router-locality {locality:g} must be at least 0, uniform choices, and below 1")


def shared_engine_arguments(options: argparse.Namespace) -> dict:
    """Return the arguments of an LLM that come from options shared by all benchmarks."""
    return engine_arguments(options) | dict(
        load_format="dummy" if options.model is None else "auto",
        skip_tokenizer_init=True,
        enable_prefix_caching=bool(options.enable_prefix_caching),
        progress_bar=not options.no_progress,
    )


@contextmanager
def open_model(options: argparse.Namespace, is_host: bool) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint that the options name, else a directory with a shape's config, and its name in reports."""
    if options.model is not None:
        refuse_shape(options.model)
        yield options.model, options.model
        return
    shape = options.shape or ("tiny" if is_host else "qwen3-4b")
    with tempfile.TemporaryDirectory() as directory:
        yield str(write_shape(shape, directory)), f"{shape} shape, random weights"


def mode_names(text: str, allowed: Collection[str]) -> list[str]:
    """Parse modes such as "resident,offload"; return each mode once, in the given order, or raise ValueError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        choose("--mode", name, allowed)
    if not names:
        raise ValueError(f"--mode {text!r} names no mode: choose from {', '.join(allowed)}")
    return names


def check_can_write(*paths: str | None) -> None:
    """Raise ValueError if a file cannot be written, so that hours of measuring do not end in this error."""
    for path in paths:
        if path and Path(path).is_dir():
            raise ValueError(f"{path!r} is a directory: name a file")
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"the directory of {path!r} does not exist: make it first")


def check_can_plot(path: str | None) -> None:
    """Raise ValueError if a picture is wanted, but matplotlib cannot write this format or is not installed."""
    if path and Path(path).suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path!r} must end in {', '.join(PICTURES)}: they say what is drawn")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def check_at_least(options: argparse.Namespace, **minima: int) -> None:
    """Raise ValueError if an option is below its minimum; the keywords are the options' names."""
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {minimum}")


def bounds(text: str, option: str) -> tuple[int, int]:
    """Return smallest and largest of a range such as "100-1024", or of a number; raise ValueError if it is neither."""
    found = _lengths(text.split("-"))
    if not 1 <= len(found) <= 2 or found[0] > found[-1]:
        raise ValueError(f"{option} {text!r} must be a number of at least 1 or a range, such as 512 or 100-1024")
    return found[0], found[-1]


def counts(text: str, option: str) -> list[int]:
    """Parse numbers such as "1,8" or "1k,32k", or raise ValueError. Return them ascending, each once."""
    found = _lengths(text.split(","))
    if not found:
        raise ValueError(f"{option} {text!r} must be whole numbers of at least 1, such as 1,8 or 1k,32k")
    return sorted(set(found))


def _lengths(texts: list[str]) -> list[int]:
    """Parse each as a `length` of at least 1; none at all if one is not."""
    try:
        found = [length(text) for text in texts]
    except argparse.ArgumentTypeError:
        return []
    return found if min(found) >= 1 else []
