"""`nanoinfer bench offload`: run each mode with one engine for all its cases, then print the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from typing import Any

import torch
import transformers

from nanoinfer.bench.hf import CACHES, load_reference, measure_reference
from nanoinfer.bench.rows import compare, plot, report
from nanoinfer.config import QUANTISED, EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.trace import write_trace
from nanoinfer.llm import LLM
from nanoinfer.measure.locality import sampling_of
from nanoinfer.measure.report import explain, write_figures
from nanoinfer.measure.run import TRACED_OUTPUT_LEN, Row, free_memory, measure, release
from nanoinfer.memory.floors import Floors, measure_floors
from nanoinfer.models.base import ModelSpec
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    check_at_least,
    check_can_plot,
    check_can_write,
    check_locality,
    counts,
    mode_names,
    open_model,
    shared_engine_arguments,
)
from nanoinfer.options.parser import in_options
from nanoinfer.weights.load import read_checkpoint

CHECKED_TOKENS = 8  # per sequence, with their log-probabilities
# Errors of a case that does not fit: its row says so, and the other cases go on.
_DOES_NOT_FIT = (ValueError, MemoryError, torch.OutOfMemoryError)


class _Run:
    """One call of the benchmark: what to measure, and where.

    Raises:
        ValueError: an option cannot be used. Later, the only errors left are cases that do not fit.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, model: str) -> None:
        self.options, self.device, self.model = options, device, model
        self.modes = mode_names(options.mode, (*ENGINE_MODES, *CACHES))
        can_compare = len(set(self.modes) & set(ENGINE_MODES)) > 1
        if options.check and not can_compare:
            raise ValueError(
                f"--check compares our modes, --mode is {','.join(self.modes)}: name two of {', '.join(ENGINE_MODES)}"
            )
        self.checks = can_compare if options.check is None else options.check
        references = [mode for mode in self.modes if mode in CACHES]
        if references and (options.quantization in QUANTISED or options.head_quantization is not None):
            raise ValueError(
                f"--mode {','.join(self.modes)}: {references[0]} measures transformers, which would have the wide "
                "weights: leave it out, or write the checkpoint with nanoinfer quantize and give --model DIR without "
                "these options"
            )
        if options.link_gbps is not None:
            if not 0 < options.link_gbps < float("inf"):
                raise ValueError(f"--link-gbps {options.link_gbps:g} must be a positive number of GB/s")
            if references:
                raise ValueError(
                    f"--link-gbps slows the copies of our modes only, --mode is {','.join(self.modes)}: leave "
                    f"{references[0]} out"
                )
        self.link = None if options.link_gbps is None else options.link_gbps * 1e9
        check_locality(options)
        check_at_least(options, output_len=1)
        check_can_write(options.json, options.plot, options.profile)
        check_can_plot(options.plot)
        default_contexts = "256,1k" if device_of(self.device).is_host else "1k,8k,32k"
        self.contexts = counts(options.context or default_contexts, "--context")
        self.batches = counts(options.batch, "--batch")
        self.traces: list[dict] = []
        # Of each measurement.
        self._arguments = dict(seed=options.seed, progress=not options.no_progress)
        for mode in self.modes:
            EngineConfig(model=model, **self._engine_arguments(mode, self.contexts[0]))
        read_checkpoint(model, options.hf_overrides)

    def _engine_arguments(self, mode: str, context: int) -> dict[str, Any]:
        """Return the arguments of the LLM that runs every case of `mode` up to `context` tokens."""
        output_len = max(self.options.output_len, TRACED_OUTPUT_LEN if self.options.profile else 0)
        own = dict(max_model_len=context + output_len)
        if self.options.max_num_seqs is None:
            own["max_num_seqs"] = max(self.batches)
        return ENGINE_MODES.get(mode, {}) | shared_engine_arguments(self.options) | own

    def measure(self) -> tuple[list[Row], Floors]:
        """Measure all cases of all modes. Return them with the floors at the start.

        Floors are measured before a mode's engine is made and after it is closed. Otherwise their buffers would take
        memory that the engine has reserved for its activations.
        """
        first = before = measure_floors(self.device)
        if self.link is not None and self.link > first.link:
            raise ValueError(
                f"--link-gbps {self.options.link_gbps:g} is more than this machine's link has "
                f"({first.link / 1e9:.1f} GB/s): an emulated link can only be slower"
            )
        rows = []
        for mode in self.modes:
            of_mode = self._rows(mode)
            after = measure_floors(self.device)
            for row in of_mode:
                row.add_floor(before, after)
            rows, before = rows + of_mode, after
        return rows, first.emulating(self.link)

    def _rows(self, mode: str) -> list[Row]:
        """Run all cases of a mode. A case that does not fit gives a row with the reason."""
        rows = []
        # Accept any error of transformers: it must not lose the figures of our own modes.
        errors = (Exception,) if mode in CACHES else _DOES_NOT_FIT
        with self._transformers(mode) if mode in CACHES else self._ours(mode) as case:
            for context, batch in product(self.contexts, self.batches):
                try:
                    rows.append(case([context] * batch))
                except errors as error:
                    rows.append(Row(mode=mode, batch=batch, context=context, problem=_reason(error)))
                if rows[-1].problem:
                    free_memory()  # not earlier: the error's traceback held what had been loaded
        return rows

    @contextmanager
    def _ours(self, mode: str) -> Iterator[Callable[[list[int]], Row]]:
        """Open an engine; yield what measures prompts of these lengths."""
        llm, refused = self._open(mode)
        output_len, last = self.options.output_len, [self.contexts[-1]] * self.batches[-1]

        def add_trace(engine: LLMEngine) -> None:
            name = mode if self.link is None else f"{mode}, emulated link of {self.options.link_gbps:g} GB/s"
            self.traces += engine.stop_trace(name, 1 + self.modes.index(mode))

        def case(lengths: list[int]) -> Row:
            if lengths[0] in refused:
                raise ValueError(refused[lengths[0]])
            own = self._arguments | dict(sampling=sampling_of(llm, self.options.router_locality, self.options.seed))
            row = measure(llm, lengths, output_len, **own)
            row.mode, row.emulated_link_gbps = mode, self.options.link_gbps
            if self.checks:
                num_checked = min(output_len, CHECKED_TOKENS)
                row.outputs = measure(llm, lengths, num_checked, with_logprobs=True, **own).outputs
            if self.options.profile and lengths == last:
                measure(llm, lengths, max(output_len, TRACED_OUTPUT_LEN), trace=add_trace, **own)
            return row

        try:
            yield case
        finally:
            if llm is not None:
                release(llm)

    @contextmanager
    def _transformers(self, mode: str) -> Iterator[Callable[[list[int]], Row]]:
        """Yield what measures prompts of these lengths; the model is loaded for the first of them."""
        load_format = shared_engine_arguments(self.options)["load_format"]

        @cache
        def reference() -> tuple[transformers.PreTrainedModel, ModelSpec]:
            return load_reference(
                self.model,
                dtype=self.options.dtype,
                device=self.device,
                load_format=load_format,
                hf_overrides=self.options.hf_overrides,
                **self._arguments,
            )

        yield lambda lengths: measure_reference(mode, *reference(), lengths, self.options.output_len, **self._arguments)
        reference.cache_clear()
        free_memory()

    def _open(self, mode: str) -> tuple[LLM | None, dict[int, str]]:
        """Return an engine for the longest context that fits, and by longer context the reason why it does not fit."""
        refused: dict[int, str] = {}
        for context in reversed(self.contexts):
            try:
                llm = LLM(self.model, **self._engine_arguments(mode, context))
            except _DOES_NOT_FIT as error:
                refused[context] = _reason(error)
            else:
                llm.engine.runner.offload.emulate_link(self.link)
                with suppress(*_DOES_NOT_FIT):  # the case itself will give the reason
                    # Compiles the prefill kernels.
                    measure(llm, [self.contexts[0]], min(4, self.options.output_len), seed=self.options.seed + 1)
                return llm, refused
            free_memory()  # not earlier: the error's traceback held what had been loaded
        return None, refused


def _reason(error: Exception) -> str:
    """Return one line of an error's message; messages of torch have many lines."""
    return (str(error) or type(error).__name__).splitlines()[0]


def run(options: argparse.Namespace) -> list[Row]:
    """Run all cases and print the table."""
    device = resolve_device(options.device)
    with open_model(options, device_of(device).is_host) as (model, _):
        this_run = _Run(options, device, model)
        rows, floors = this_run.measure()
    if this_run.checks:
        compare(rows)
    print(in_options(report(rows), options.parser))
    print(explain(floors, device))
    figures = {"rows": [row.figures() for row in rows]}
    write_figures(options.json, figures, options.command_line, device, floors)
    if options.profile:
        write_trace(options.profile, this_run.traces)
    if options.plot:
        plot(options.plot, rows)
    return rows
