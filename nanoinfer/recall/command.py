"""`nanoinfer eval recall` and `bench_offload.py --task recall`: questions about long contexts, in any mode."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer.bench.measure import release
from nanoinfer.bench.options import (
    ENGINE_MODES,
    add_engine_arguments,
    check_can_plot,
    check_can_write,
    check_mode,
    counts,
    shared_engine_arguments,
)
from nanoinfer.bench.report import write_figures
from nanoinfer.build import resolve_device
from nanoinfer.llm import LLM
from nanoinfer.loader import find_model
from nanoinfer.recall.evaluate import Answers, EngineAnswers, Grid, Scores, evaluate
from nanoinfer.recall.reference import ReferenceAnswers
from nanoinfer.recall.report import compare, figures, plot, table

SUMMARY = "answers about facts planted in long contexts, by length and depth"
REFERENCE = "hf"
MODES = (REFERENCE, *ENGINE_MODES)
DEFAULT_MODES = "hf,resident,offload"
DEFAULT_LENGTHS = {"cuda": "1k,2k,4k,8k,16k,32k,64k", "cpu": "1k,2k"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the evaluation and of the engine."""
    parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="default: recall, the model that comes along")
    parser.add_argument("--model", metavar="MODEL", help="the same as an option")
    parser.add_argument("--context", help="tokens, such as 1k,16k; default: 1k to 64k on a GPU, 1k,2k on a CPU")
    parser.add_argument(
        "--mode",
        default=DEFAULT_MODES,
        help=f"of {', '.join(MODES)}; hf = transformers in float32, the reference where it is the first "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw accuracy over length and depth")
    add_grid_arguments(parser)
    add_engine_arguments(parser)


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the questions that `bench_offload.py` has not under another meaning."""
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="where facts lie (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=20, help="in each cell (default: %(default)s)")


def run(options: argparse.Namespace, command: str) -> dict[str, Scores]:
    """Asks all questions in all modes; prints the table, and writes what the options name.

    Raises:
        ValueError: an option cannot be used; nothing has run then. Or a context does not fit.
    """
    if getattr(options, "shape", None):
        raise ValueError(f"--shape {options.shape} has random weights, which answer nothing: give a model")
    device = resolve_device(options.device)
    modes = list(dict.fromkeys(name.strip() for name in options.mode.split(",") if name.strip()))
    for name in modes:
        check_mode(name, MODES)
    if not modes:
        raise ValueError(f"--mode {options.mode!r} names no mode: choose from {', '.join(MODES)}")
    check_can_write(options.json, options.plot)
    check_can_plot(options.plot)
    lengths = counts(options.context or DEFAULT_LENGTHS[device.type], "--context")
    grid = Grid(
        lengths=tuple(lengths), depths=_depths(options.depths), num_questions=options.questions, seed=options.seed
    )
    model_dir = find_model(options.model or options.checkpoint or "recall")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    results = {}
    for mode in modes:
        answers, close = _open(mode, model_dir, tokenizer, grid, options, device)
        try:
            results[mode] = evaluate(answers, tokenizer, grid, progress=not options.no_progress, label=mode)
        finally:
            close()
    print(table(results, grid))
    for line in compare(results):
        print(line)
    if options.json:
        write_figures(options.json, figures(results, grid), None, device, command)
    if options.plot:
        plot(options.plot, results, grid)
    return results


def _open(
    mode: str,
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    grid: Grid,
    options: argparse.Namespace,
    device: torch.device,
) -> tuple[Answers, Callable[[], None]]:
    """Who answers, and what ends it."""
    end = tokenizer.eos_token_id
    if mode == REFERENCE:
        return ReferenceAnswers(model_dir, end, device=device), lambda: None
    longest = grid.lengths[-1]
    own = dict(
        load_format="auto", enable_prefix_caching=options.enable_prefix_caching is not False, max_model_len=longest
    )
    if options.max_num_seqs is None:
        own["max_num_seqs"] = 32
    llm = LLM(model_dir, **ENGINE_MODES[mode] | shared_engine_arguments(options) | own)
    return EngineAnswers(llm, end), lambda: release(llm)


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1, such as 0,0.5,1") from error
