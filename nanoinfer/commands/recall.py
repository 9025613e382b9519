"""`nanoinfer eval recall` and `bench_offload.py --task recall`: questions about long contexts, in any mode."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nanoinfer.llm import LLM
from nanoinfer.measure.report import write_figures
from nanoinfer.measure.run import free_memory
from nanoinfer.recall.answers import Answers, EngineAnswers
from nanoinfer.recall.evaluate import Exam, Scores, evaluate
from nanoinfer.recall.formats import divergences, prompts_of
from nanoinfer.recall.reference import ReferenceAnswers
from nanoinfer.recall.report import compare, compare_formats, figures, plot, table
from nanoinfer.recall.settings import Evaluation, read_options


def run(options: argparse.Namespace, command: str) -> dict[str, Scores]:
    """Ask all questions in all modes and print the table. After each mode, write the files that the options name.

    Raises:
        ValueError: an option cannot be used; nothing has run then.
    """
    asked = read_options(options)
    tokenizer = AutoTokenizer.from_pretrained(asked.model_dir)
    exam = Exam(tokenizer, asked.grid)
    checkpoint = {"model": asked.model_dir.name, "checkpoint_sha256": checkpoint_sha256(asked.model_dir)}
    prompts = prompts_of(exam)
    results: dict[str, Scores] = {}
    found: dict[str, float] = {}
    try:
        for label, arguments in asked.runs.items():
            with _open(arguments, asked, tokenizer.eos_token_id) as answers:
                results[label] = evaluate(answers, exam, progress=not options.no_progress, label=label)
            if options.json:
                write_figures(options.json, checkpoint | figures(results, asked.grid), None, asked.device, command)
            if options.plot:
                plot(options.plot, results, asked.grid)
        if asked.compared:
            found = divergences(asked.model_dir, asked.compared, prompts, asked.device)
            if options.json:
                content = checkpoint | figures(results, asked.grid) | {"mean_kl_nats": found}
                write_figures(options.json, content, None, asked.device, command)
    finally:  # an interrupted run shows the results that it has
        if results:
            print("\n".join([table(results, asked.grid), *compare(results), *compare_formats(found, prompts)]))
    return results


@contextmanager
def _open(arguments: dict[str, Any] | None, asked: Evaluation, end_token_id: int) -> Iterator[Answers]:
    """Open what answers the questions: the engine, or the reference. Free its memory afterwards."""
    try:
        if arguments is None:
            yield ReferenceAnswers(asked.model_dir, end_token_id, device=asked.device)
        else:
            with LLM(**arguments) as llm:
                yield EngineAnswers(llm, end_token_id)
    finally:
        free_memory()


def checkpoint_sha256(model_dir: Path) -> str | None:
    """Return the SHA-256 of the file with the weights; None if the weights are sharded."""
    path = model_dir / "model.safetensors"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
