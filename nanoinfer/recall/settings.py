"""What the options of the recall evaluation mean, and what is refused before anything runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.memory.machine import resolve_device
from nanoinfer.memory.setup import Setup, spec_and_layout
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    check_can_plot,
    check_can_write,
    counts,
    mode_names,
    shared_engine_arguments,
)
from nanoinfer.options.recall import DEFAULT_DEPTHS, DEFAULT_MODES, DEFAULT_QUESTIONS, MODES, REFERENCE, UNQUANTISED
from nanoinfer.recall.evaluate import Grid
from nanoinfer.recall.formats import AS_IT_IS, WeightFormat
from nanoinfer.weights.load import check_safetensors, find_model, load_config

DEFAULT_LENGTHS = {"cuda": "1k,2k,4k,8k,16k,32k,64k", "cpu": "1k,2k"}
ANSWER_ROOM = 64
"""Tokens beyond a context: with another tokenizer than recall's own some answers are longer than those it is cut
for."""
DEFAULT_MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class Evaluation:
    """What one call asks, and whom.

    Attributes:
        runs: for each mode in each format of weights and KV, what the report calls it -> arguments of the LLM; None:
            transformers answer.
        compared: formats of weights whose distributions are compared with those of the checkpoint as it is; none if the
            latter is not asked.
    """

    model_dir: Path
    device: torch.device
    grid: Grid
    runs: dict[str, dict[str, Any] | None]
    compared: list[WeightFormat]


def read_options(options: argparse.Namespace) -> Evaluation:
    """What the options ask for.

    Raises:
        ValueError: an option cannot be used, or something does not fit into the model or into memory.
    """
    if getattr(options, "shape", None):
        raise ValueError(f"--shape {options.shape} has random weights, which answer nothing: give a model")
    device = resolve_device(options.device)
    modes = mode_names(DEFAULT_MODES if options.mode is None else options.mode, MODES)
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
    model_dir = find_model(options.model or "recall")
    check_safetensors(model_dir)
    common = shared_engine_arguments(options) | dict(
        model=model_dir,
        load_format="auto",
        enable_prefix_caching=options.enable_prefix_caching is not False,  # a document is read once for its questions
        max_model_len=grid.lengths[-1] + ANSWER_ROOM,
        max_num_seqs=DEFAULT_MAX_NUM_SEQS if options.max_num_seqs is None else options.max_num_seqs,
    )
    formats: list[tuple[WeightFormat, str, dict[str, Any]]] = []
    for quantization, head_quantization, kv in product(
        _weights(options.quantization), _weights(options.head_quantization), _names(options.kv_cache_dtype)
    ):
        weights = WeightFormat(quantization=quantization, head_quantization=head_quantization)
        arguments = common | asdict(weights) | dict(kv_cache_dtype=kv)
        # A wrong value is refused also where transformers alone answer.
        spec, _ = spec_and_layout(EngineConfig(**arguments), load_config(model_dir))
        if arguments["max_model_len"] > spec.max_position:
            raise ValueError(
                f"--context {grid.lengths[-1]} and {ANSWER_ROOM} tokens for longer answers are beyond the model's own "
                f"limit of {spec.max_position} positions: lower --context"
            )
        formats.append((weights, kv, arguments))
    runs: dict[str, dict[str, Any] | None] = {}
    for mode in modes:
        if mode == REFERENCE:
            runs[mode] = None
            continue
        for weights, kv, arguments in formats:
            label = " ".join(filter(None, (mode, weights.name, "" if kv == "auto" else kv)))
            runs[label] = ENGINE_MODES[mode] | arguments
            # Raises where the engine would when it starts; the modes before it would have run in vain.
            Setup(EngineConfig(**runs[label]), device).plan()
    asked = dict.fromkeys(weights for weights, _, _ in formats)
    compared = [weights for weights in asked if weights != AS_IT_IS] if AS_IT_IS in asked else []
    return Evaluation(model_dir, device, grid, runs, compared)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _weights(text: str | None) -> list[str | None]:
    return [None if name == UNQUANTISED else name for name in _names(UNQUANTISED if text is None else text)]


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1, such as 0,0.5,1") from error
