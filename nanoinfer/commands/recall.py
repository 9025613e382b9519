"""`nanoinfer eval recall` and `bench_offload.py --task recall`: questions about long contexts, in any mode."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.llm import LLM
from nanoinfer.measure.report import write_figures
from nanoinfer.measure.run import free_memory
from nanoinfer.memory.setup import Setup
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    check_can_plot,
    check_can_write,
    counts,
    mode_names,
    shared_engine_arguments,
)
from nanoinfer.recall.answers import EngineAnswers
from nanoinfer.recall.evaluate import Exam, Grid, Scores, evaluate
from nanoinfer.recall.formats import AS_IT_IS, WeightFormat, divergences, prompts_of
from nanoinfer.recall.report import figures, plot, report
from nanoinfer.weights.find import find_model
from nanoinfer.weights.headers import check_safetensors

DEFAULT_LENGTHS, LENGTHS_ON_HOST = "1k,2k,4k,8k,16k,32k,64k", "1k,2k"
ANSWER_ROOM = 64
"""Tokens beyond a context: with another tokenizer than recall's own some answers are longer than those it is cut
for."""
DEFAULT_MAX_NUM_SEQS = 32


def run(options: argparse.Namespace) -> dict[str, Scores]:
    """Ask all questions in all modes and print the table. After each mode, write the files that the options name."""
    if getattr(options, "shape", None):
        raise ValueError(f"--shape {options.shape} has random weights, which answer nothing: give a model")
    device = resolve_device(options.device)
    modes = mode_names(options.mode, ENGINE_MODES)
    check_can_write(options.json, options.plot)
    check_can_plot(options.plot)
    grid = grid_of(options, device)
    model_dir = find_model(options.model or "recall")
    check_safetensors(model_dir)
    runs, formats = _runs(options, modes, model_dir, device, grid.lengths[-1])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    exam = Exam(tokenizer, grid)
    checkpoint = {"model": model_dir.name, "checkpoint_sha256": checkpoint_sha256(model_dir)}
    prompts = prompts_of(exam)
    results: dict[str, Scores] = {}
    found: dict[str, float] = {}
    try:
        for label, arguments in runs.items():
            with LLM(**arguments) as llm:
                answers = EngineAnswers(llm, tokenizer.eos_token_id)
                results[label] = evaluate(answers, exam, progress=not options.no_progress, label=label)
            del llm, answers
            free_memory()
            content = figures(results, grid)
            write_figures(options.json, checkpoint | content, options.command_line, device)
            if options.plot:
                plot(options.plot, content)
        if AS_IT_IS in formats and len(formats) > 1:
            found = divergences(model_dir, [weights for weights in formats if weights != AS_IT_IS], prompts, device)
            write_figures(options.json, checkpoint | content | {"mean_kl_nats": found}, options.command_line, device)
    finally:  # an interrupted run shows the results that it has
        if results:
            print(report(figures(results, grid), found, sum(map(len, prompts))))
    return results


def grid_of(options: argparse.Namespace, device: torch.device) -> Grid:
    """Return what the options ask for."""
    contexts = options.context
    if contexts is None:
        contexts = LENGTHS_ON_HOST if device_of(device).is_host else DEFAULT_LENGTHS
    return Grid(
        lengths=tuple(counts(contexts, "--context")),
        depths=_depths(options.depths),
        num_questions=options.questions,
        seed=options.seed,
    )


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1, such as 0,0.5,1") from error


def _runs(
    options: argparse.Namespace, modes: list[str], model_dir: Path, device: torch.device, longest: int
) -> tuple[dict[str, dict[str, Any]], list[WeightFormat]]:
    """Return for each mode in each format, by the report's name for it, the LLM's arguments for contexts of `longest`
    tokens; and the formats of weights.

    Raises:
        ValueError: what the engine would raise when it starts; the modes before it would have run in vain.
    """
    common = shared_engine_arguments(options) | dict(
        model=model_dir,
        load_format="auto",
        enable_prefix_caching=options.enable_prefix_caching,  # a document is read once for its questions
        max_model_len=longest + ANSWER_ROOM,
        max_num_seqs=DEFAULT_MAX_NUM_SEQS if options.max_num_seqs is None else options.max_num_seqs,
    )
    texts = (options.quantization, options.head_quantization, options.kv_cache_dtype)
    names = [["none"] if text is None else [name.strip() for name in text.split(",")] for text in texts]
    runs: dict[str, dict[str, Any]] = {}
    formats: dict[WeightFormat, None] = {}
    for mode, *chosen, kv in product(modes, *map(dict.fromkeys, names)):
        weights = WeightFormat(*(None if name == "none" else name for name in chosen))
        arguments = ENGINE_MODES[mode] | common | asdict(weights) | dict(kv_cache_dtype=kv)
        setup = Setup(EngineConfig(**arguments), device)
        arguments["kv_cache_dtype"] = kv = setup.config.kv_cache_dtype
        if arguments["max_model_len"] > setup.spec.max_position:
            raise ValueError(
                f"--context {longest} and {ANSWER_ROOM} tokens for longer answers are beyond the model's own "
                f"limit of {setup.spec.max_position} tokens: lower --context"
            )
        formats[weights] = None
        setup.plan()
        runs[" ".join(filter(None, (mode, weights.name, "" if kv == "auto" else kv)))] = arguments
    return runs, list(formats)


def checkpoint_sha256(model_dir: Path) -> str | None:
    """Return the SHA-256 of the file with the weights; None if the weights are sharded."""
    path = model_dir / "model.safetensors"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
