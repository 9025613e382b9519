"""Options of the recall evaluation: what they mean, and what is refused before anything runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoinfer.attention.registry import make_backend
from nanoinfer.bench.options import (
    ENGINE_MODES,
    add_engine_arguments,
    check_can_plot,
    check_can_write,
    counts,
    mode_names,
    shared_engine_arguments,
)
from nanoinfer.build import attention_spec, resolve_device, spec_and_layout
from nanoinfer.config import EngineConfig
from nanoinfer.loader import check_safetensors, find_model, load_config
from nanoinfer.memory import gpu_budget, make_plan
from nanoinfer.recall.evaluate import Grid
from offload.host_memory import memory_available_bytes

REFERENCE = "hf"
MODES = (REFERENCE, *ENGINE_MODES)
DEFAULT_MODES = "hf,resident,offload"
DEFAULT_LENGTHS = {"cuda": "1k,2k,4k,8k,16k,32k,64k", "cpu": "1k,2k"}
DEFAULT_DEPTHS = "0,0.25,0.5,0.75,1"
DEFAULT_QUESTIONS = 20
ANSWER_ROOM = 64
"""Tokens beyond a context: with another tokenizer than recall's own some answers are longer than those it is cut for."""
DEFAULT_MAX_NUM_SEQS = 32
KV_CACHE_DTYPE_HELP = '"auto" (as the model) or "fp8"; "auto,fp8" asks each engine mode once with each'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the evaluation and of the engine."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("checkpoint", nargs="?", metavar="MODEL", help="default: recall, the model that comes along")
    model.add_argument("--model", metavar="MODEL", help="the same as an option")
    parser.add_argument("--context", help="tokens, such as 1k,16k; default: 1k to 64k on a GPU, 1k,2k on a CPU")
    parser.add_argument(
        "--mode",
        help=f"of {', '.join(MODES)}; hf = transformers in float32, the reference where it is the first "
        f"(default: {DEFAULT_MODES})",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw accuracy over length and depth")
    add_grid_arguments(parser)
    add_engine_arguments(parser, KV_CACHE_DTYPE_HELP)


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the questions, which have no defaults: `bench_offload.py` tells whether they were given."""
    parser.add_argument("--depths", help=f"where facts lie (default: {DEFAULT_DEPTHS})")
    parser.add_argument("--questions", type=int, help=f"in each cell, a multiple of 5 (default: {DEFAULT_QUESTIONS})")


@dataclass(frozen=True)
class Run:
    """One mode in one KV format.

    Attributes:
        label: what the report calls it.
        arguments: of the LLM; None: transformers answer.
    """

    label: str
    arguments: dict[str, Any] | None


@dataclass(frozen=True)
class Evaluation:
    """What one call asks, and whom."""

    model_dir: Path
    device: torch.device
    grid: Grid
    runs: list[Run]


def read_options(options: argparse.Namespace) -> Evaluation:
    """What the options ask for.

    Raises:
        ValueError: an option cannot be used, or something does not fit into the model or into memory.
    """
    if getattr(options, "shape", None):
        raise ValueError(f"--shape {options.shape} has random weights, which answer nothing: give a model")
    device = resolve_device(options.device)
    modes = mode_names(DEFAULT_MODES if options.mode is None else options.mode, MODES)
    formats = list(dict.fromkeys(name.strip() for name in options.kv_cache_dtype.split(",")))
    check_can_write(options.json, options.plot)
    check_can_plot(options.plot)
    grid = Grid(
        lengths=tuple(
            counts(DEFAULT_LENGTHS[device.type] if options.context is None else options.context, "--context")
        ),
        depths=_depths(DEFAULT_DEPTHS if options.depths is None else options.depths),
        num_questions=DEFAULT_QUESTIONS if options.questions is None else options.questions,
        seed=options.seed,
    )
    model_dir = find_model(options.model or options.checkpoint or "recall")
    check_safetensors(model_dir)
    _check_context(model_dir, grid.lengths[-1])
    for name in formats:  # a wrong value is refused also where transformers alone answer
        EngineConfig.from_arguments(_engine_arguments(options, model_dir, "resident", name, grid.lengths[-1]))
    runs = []
    for mode in modes:
        if mode == REFERENCE:
            runs.append(Run(mode, None))
            continue
        for name in formats:
            arguments = _engine_arguments(options, model_dir, mode, name, grid.lengths[-1])
            _check_engine(arguments, device)
            runs.append(Run(mode if name == "auto" else f"{mode} {name}", arguments))
    return Evaluation(model_dir, device, grid, runs)


def _engine_arguments(
    options: argparse.Namespace, model_dir: Path, mode: str, kv_cache_dtype: str, longest: int
) -> dict[str, Any]:
    own = dict(
        model=model_dir,
        load_format="auto",
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=options.enable_prefix_caching is not False,  # a document is read once for its questions
        max_model_len=longest + ANSWER_ROOM,
        max_num_seqs=DEFAULT_MAX_NUM_SEQS if options.max_num_seqs is None else options.max_num_seqs,
    )
    return ENGINE_MODES[mode] | shared_engine_arguments(options) | own


def _check_context(model_dir: Path, longest: int) -> None:
    spec, _ = spec_and_layout(EngineConfig(model=model_dir), load_config(model_dir))
    if longest + ANSWER_ROOM > spec.max_position:
        raise ValueError(
            f"--context {longest} and {ANSWER_ROOM} tokens for longer answers are beyond the model's own limit of "
            f"{spec.max_position} positions: lower --context"
        )


def _check_engine(arguments: dict[str, Any], device: torch.device) -> None:
    """Raises ValueError where the engine would when it starts; the modes before it would have run in vain."""
    config, available = EngineConfig.from_arguments(arguments), memory_available_bytes()
    spec, layout = spec_and_layout(config, load_config(config.model))
    make_backend(config.attention_backend, attention_spec(spec, config.block_size), device, config.enable_cpu_offload)
    make_plan(
        config,
        spec,
        layout,
        budget_bytes=gpu_budget(config, device, available),
        host_available_bytes=available,
        is_cuda=device.type == "cuda",
    )


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1, such as 0,0.5,1") from error
