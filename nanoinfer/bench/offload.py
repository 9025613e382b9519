"""`nanoinfer bench offload`: run each mode with one engine for all its cases, then print the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from nanoinfer.bench.hf import Reference, load_reference, measure_reference
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.trace import write_trace
from nanoinfer.llm import LLM
from nanoinfer.measure.report import explain, plot, table, write_figures
from nanoinfer.measure.run import Row, add_floor, compare, free_memory, measure, release
from nanoinfer.memory.floors import Floors, measure_floors
from nanoinfer.memory.machine import resolve_device
from nanoinfer.models.base import ModelSpec
from nanoinfer.options.measuring import CACHES, TRACED_OUTPUT_LEN, default_shape, is_dummy, model_directory
from nanoinfer.options.offload import Cases, engine_arguments, read_cases
from nanoinfer.options.parser import in_options
from nanoinfer.weights.load import load_config

CHECKED_TOKENS = 8  # per sequence, with their log-probabilities
# Errors of a case that does not fit: its row says so, and the other cases go on.
_DOES_NOT_FIT = (ValueError, MemoryError, torch.OutOfMemoryError)


@dataclass
class _Run:
    """One call of the benchmark: what to measure, where, and the bandwidths measured after the latest mode."""

    model: str
    options: argparse.Namespace
    cases: Cases
    device: torch.device
    floors: Floors
    traces: list[dict] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of each measurement."""
        return dict(seed=self.options.seed, progress=not self.options.no_progress)

    def rows(self, mode: str) -> list[Row]:
        """Measure all cases of a mode.

        Floors are measured before the mode's engine is made and after it is closed. Otherwise their buffers would take
        memory that the engine has reserved for its activations.
        """
        rows, spec = self._rows_of_transformers(mode) if mode in CACHES else self._rows_of_ours(mode)
        before, self.floors = self.floors, measure_floors(self.device)
        floors = (before, self.floors)
        for row in rows:
            lengths = [row.context] * row.batch
            add_floor(row, spec, lengths, self.cases.output_len, floors, streams_all=mode in CACHES)
        return rows

    def _rows_of_ours(self, mode: str) -> tuple[list[Row], ModelSpec | None]:
        llm, refused = self._open(mode)
        spec = None if llm is None else llm.engine.runner.model.spec
        output_len, arguments = self.cases.output_len, self.arguments
        number = 1 + self.cases.modes.index(mode)

        def add_trace(engine: LLMEngine) -> None:
            self.traces += engine.stop_trace(mode, number)

        def case(lengths: list[int]) -> Row:
            if lengths[0] in refused:
                raise ValueError(refused[lengths[0]])
            row = measure(llm, lengths, output_len, **arguments)
            row.mode = mode
            if self.cases.check:
                again = measure(llm, lengths, min(output_len, CHECKED_TOKENS), with_logprobs=True, **arguments)
                row.outputs = again.outputs
            if self.options.profile and lengths == self.cases.last:
                measure(llm, lengths, max(output_len, TRACED_OUTPUT_LEN), trace=add_trace, **arguments)
            return row

        try:
            return self._each(mode, case), spec
        finally:
            if llm is not None:
                release(llm)

    def _open(self, mode: str) -> tuple[LLM | None, dict[int, str]]:
        """Return an engine for the longest context that fits, and by longer context the reason why it does not fit."""
        refused: dict[int, str] = {}
        for context in reversed(self.cases.contexts):
            try:
                llm = LLM(self.model, **engine_arguments(self.options, self.cases, mode, context))
            except _DOES_NOT_FIT as error:
                refused[context] = _reason(error)
            else:
                with suppress(*_DOES_NOT_FIT):  # the case itself will give the reason
                    # Compiles the prefill kernels.
                    measure(llm, [self.cases.contexts[0]], min(4, self.cases.output_len), seed=self.options.seed + 1)
                return llm, refused
            free_memory()  # not earlier: the error's traceback held what had been loaded
        return None, refused

    def _rows_of_transformers(self, mode: str) -> tuple[list[Row], ModelSpec | None]:
        reference: Reference | None = None
        load_format = "dummy" if is_dummy(self.options) else "auto"

        def case(lengths: list[int]) -> Row:
            nonlocal reference
            reference = reference or load_reference(
                self.model, dtype=self.options.dtype, device=self.device, load_format=load_format, **self.arguments
            )
            return measure_reference(mode, reference, lengths, self.cases.output_len, **self.arguments)

        # Accept any error: a failure of transformers must not lose the figures of our own modes.
        rows = self._each(mode, case, (Exception,))
        spec = None if reference is None else reference.spec
        reference = None
        free_memory()
        return rows, spec

    def _each(
        self, mode: str, case: Callable[[list[int]], Row], errors: tuple[type[Exception], ...] = _DOES_NOT_FIT
    ) -> list[Row]:
        """Runs all cases of a mode. A case that does not fit gives a row with the reason."""
        rows = []
        for context in self.cases.contexts:
            for batch in self.cases.batches:
                try:
                    rows.append(case([context] * batch))
                except errors as error:
                    rows.append(Row(mode=mode, batch=batch, context=context, problem=_reason(error)))
                if rows[-1].problem:
                    free_memory()  # not earlier: the error's traceback held what had been loaded
        return rows


def _reason(error: Exception) -> str:
    """Return one line of an error's message; messages of torch have many lines."""
    return (str(error) or type(error).__name__).splitlines()[0]


def run(options: argparse.Namespace, command: str) -> list[Row]:
    """Runs all cases and prints the table.

    Args:
        options: as defined by `add_arguments`.
        command: how the benchmark was called, for the JSON.

    Raises:
        ValueError: an option cannot be used; nothing has run then.
    """
    device = resolve_device(options.device)
    cases = read_cases(options, device.type == "cuda")
    with model_directory(options, default_shape(device)) as model:
        # A wrong option is refused here, once. Below, the only errors left are cases that do not fit.
        for mode in cases.modes:
            EngineConfig(model=model, **engine_arguments(options, cases, mode, cases.contexts[0]))
        load_config(model)
        floors = measure_floors(device)
        this_run = _Run(model, options, cases, device, floors)
        rows = [row for mode in cases.modes for row in this_run.rows(mode)]
    if cases.check:
        compare(rows)
    print(in_options(table(rows), options.parser))
    print(explain(floors, device))
    if options.json:
        write_figures(options.json, {"rows": [row.figures() for row in rows]}, floors, device, command)
    if options.profile:
        write_trace(options.profile, this_run.traces)
    if options.plot:
        plot(options.plot, rows)
    return rows
