"""`nanoinfer bench --replay`: drafts on text that copies and on text that does not, beside plain decode.

A shape has random weights, and what it would say copies nothing. So each step is made to give the token that a text has
next, by its logits, while the drafter sees prompt and past alone, and all else is as for any request.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoinfer.bench.texts import Texts, read
from nanoinfer.common.speculation import MAX_LINES
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.llm import LLM
from nanoinfer.measure.report import explain, table, write_figures
from nanoinfer.measure.run import Row, free_memory, release
from nanoinfer.memory.floors import Floors, bytes_read_per_step, measure_floors
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    check_at_least,
    check_can_write,
    counts,
    mode_names,
    open_model,
    shared_engine_arguments,
)
from nanoinfer.options.parser import in_options
from nanoinfer.sampling_params import SamplingParams

SUFFIX = dict(method="suffix")
REPEATS = 3
COLUMNS = {
    "mode": "{mode}",
    "KV": "{kv_cache_dtype}",
    "context": "{context}",
    "text": "{text}",
    "drafts": "{drafts}",
    "ms/token": "{seconds_per_token!m:,.2f}",
    "tok/s": "{tokens_per_second:,.1f}",
    "times": "{times:,.2f}",
    "tokens a pass": "{tokens_per_pass:,.2f}",
    "MB a pass": "{streamed_bytes_per_step!M:,.1f}",
    "floor ms": "{floor_seconds!m:,.2f}",
    "x floor": "{ratio_to_floor:,.3f}",
}
"""Title and text of each column; see `measure.report`. Of a token are the times, of a pass what it streams."""


@dataclass
class ReplayRow(Row):
    """One text through one engine: medians of several runs.

    Attributes:
        kv_cache_dtype, text: as they were named.
        drafts: "suffix", or "none".
        tokens_per_pass: those behind the first one, by the steps that gave them.
        num_drafted_tokens, num_accepted_tokens: tokens of one run.
        times: how many times as many tokens a second as the row that it is compared with.
        vocab_size: of the model.
    """

    kv_cache_dtype: str = "auto"
    text: str = ""
    drafts: str = "none"
    tokens_per_pass: float | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    times: float | None = None
    vocab_size: int = 0


class Forced:
    """Has each sampled token be that of a text: `LLMEngine.on_logits`, for a request that runs alone."""

    def say(self, answer: list[int], device: torch.device) -> None:
        """Have this come, behind which its last token may be asked for again."""
        self._ids = torch.tensor([*answer, *MAX_LINES * answer[-1:]], device=device)[:, None]

    def __call__(self, sequences: list, logits: torch.Tensor) -> None:
        # Two kernels, however many lines: what stands between logits and sampling makes a pass longer.
        first = sequences[0].num_sampled  # a drafted token's line comes behind its sequence's
        logits.fill_(-torch.inf)
        logits.scatter_(1, self._ids[first : first + len(logits)], 0)


@dataclass(frozen=True)
class Case:
    """One engine and what it is to say.

    Attributes:
        mode: of `ENGINE_MODES`.
        arguments: of the LLM.
        names: of texts.
    """

    mode: str
    context: int
    arguments: dict[str, Any]
    names: Sequence[str]

    def rows(self, model: str, texts: Texts, output_len: int, link: float | None) -> list[ReplayRow]:
        """Run each text once to warm up, and then several times. A case that does not fit gives rows with the reason.

        link: bytes per second of an emulated one.
        """
        try:
            llm = LLM(model, **self.arguments)
        except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return [self._row(name, problem=reason) for name in self.names]
        llm.engine.runner.offload.emulate_link(link)
        llm.engine.on_logits = forced = Forced()
        try:
            return [self._measured(llm, forced, name, texts, output_len, link) for name in self.names]
        finally:
            llm.engine.on_logits = None
            release(llm)

    def _row(self, name: str, **figures: Any) -> ReplayRow:
        drafts = "none" if self.arguments.get("speculative_config") is None else "suffix"
        own = dict(kv_cache_dtype=self.arguments["kv_cache_dtype"], text=name, drafts=drafts)
        return ReplayRow(self.mode, 1, self.context, **own, **figures)

    def _measured(
        self, llm: LLM, forced: Forced, name: str, texts: Texts, output_len: int, link: float | None
    ) -> ReplayRow:
        prompt, answer = texts.of(name, self.context, output_len, llm.engine.vocab_size)
        forced.say(answer, llm.engine.runner.runtime.device)
        params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
        engine, row, seconds = llm.engine, self._row(name, vocab_size=llm.engine.vocab_size), []
        for number in range(1 + REPEATS):
            before = engine.meter.snapshot()
            output = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == answer, "another token came than was to come"
            metrics = output.metrics
            if number:
                seconds.append((metrics.total_time - metrics.time_to_first_token) / (len(answer) - 1))
        times = engine.meter.times.since(before)
        row.num_drafted_tokens, row.num_accepted_tokens = metrics.num_drafted_tokens, metrics.num_accepted_tokens
        row.num_steps = len(answer) - 1 - row.num_accepted_tokens
        row.tokens_per_pass = (len(answer) - 1) / row.num_steps
        row.seconds_per_token = statistics.median(seconds)
        row.tokens_per_second = 1 / row.seconds_per_token
        row.streamed_bytes_per_step = times.streamed_bytes / times.num_steps
        row.link_gbps = row.streamed_bytes_per_step / (row.seconds_per_token * row.tokens_per_pass) / 1e9
        row.emulated_link_gbps = None if link is None else link / 1e9
        fetched = times.fetched_bytes / times.num_steps
        middle = [self.context + len(answer) // 2]
        read_bytes = bytes_read_per_step(engine.runner.spec, middle)
        of_pass = row.streamed_bytes_per_step - fetched, read_bytes, fetched
        row.least_bytes = tuple(one / row.tokens_per_pass for one in of_pass)  # of a token
        row.bound, row.kv_resident_share = times.bound, engine.meter.resident_share
        row.peak_gpu_bytes, row.host_bytes = engine.executor.peak_bytes(), engine.runner.offload.host.num_bytes
        return row


def arguments_of(options: argparse.Namespace, mode: str, context: int) -> dict[str, Any]:
    """Return the arguments of an engine for one request, without drafts; its prompt is computed once for all runs."""
    found = ENGINE_MODES[mode] | shared_engine_arguments(options) | dict(enable_prefix_caching=True)
    found |= dict(max_model_len=context + options.output_len, speculative_config=None)
    return found | dict(max_num_seqs=options.max_num_seqs or 1)


def contexts_of(options: argparse.Namespace, device: torch.device) -> list[int]:
    check_at_least(options, output_len=2)
    check_can_write(options.json)
    if options.link_gbps is not None and not 0 < options.link_gbps < float("inf"):
        raise ValueError(f"--link-gbps {options.link_gbps:g} must be a positive number of GB/s")
    return counts(options.context or ("1k" if device_of(device).is_host else "32000"), "--context")


def measured(
    cases: Sequence[Case], options: argparse.Namespace, model: str, texts: Texts, device: torch.device
) -> tuple[list[ReplayRow], Floors]:
    """Measure the cases with the floors around each; return the rows, and the floors at the start.

    Raises:
        ValueError: an option cannot be used, or the link that is to be emulated is faster than the machine's.
    """
    for case in cases:
        EngineConfig(model=model, **case.arguments)
    first = before = measure_floors(device)
    link = None if options.link_gbps is None else options.link_gbps * 1e9
    if link is not None and link > first.link:
        raise ValueError(
            f"--link-gbps {options.link_gbps:g} is more than this machine's link has ({first.link / 1e9:.1f} GB/s): an "
            "emulated link can only be slower"
        )
    rows: list[ReplayRow] = []
    for case in cases:
        of_case = case.rows(model, texts, options.output_len, link)
        free_memory()  # an error's traceback may have held what had been loaded
        after = measure_floors(device)
        for row in of_case:
            row.add_floor(before, after)
        rows, before = rows + of_case, after
    return rows, first.emulating(link)


def report(rows: list[ReplayRow], texts: Texts) -> str:
    """Return the rows as a table, with the reasons of those that were not measured."""
    done = [vars(row) for row in rows if row.problem is None]
    lines = [table(done, COLUMNS.items())] if done else []
    lines += [f"{row.mode}, KV {row.kv_cache_dtype}, {row.text}: {row.problem}" for row in rows if row.problem]
    lines.append(f"texts {texts.digest[:16]}: each step is made to give the token that its text has next")
    if done and (size := done[0]["vocab_size"]) < texts.num_ids:
        lines.append(f"the vocabulary has {size:,} tokens, fewer than the texts': some that differ are equal here")
    moved = [row.link_moved for row in rows if row.link_moved is not None and row.link_moved > 0.02]
    if moved:
        lines.append(f"the link moved by up to {max(moved):.0%} during the run: ratios are that uncertain")
    return "\n".join(lines)


def finish(
    options: argparse.Namespace, rows: list[ReplayRow], texts: Texts, floors: Floors, device: torch.device
) -> list[ReplayRow]:
    """Print and write what was measured."""
    print(in_options(report(rows, texts), options.parser))
    print(explain(floors, device))
    figures = dict(texts_sha256=texts.digest, rows=[row.figures() for row in rows])
    write_figures(options.json, figures, options.command_line, device, floors)
    return rows


def run(options: argparse.Namespace) -> list[ReplayRow]:
    """Run every text in each mode and context, without drafts and with them."""
    device, texts = resolve_device(options.device), read(options.replay)
    contexts, modes = contexts_of(options, device), mode_names(options.mode, ENGINE_MODES)
    drafts = dict(speculative_config=options.speculative_config or SUFFIX)
    with open_model(options, device_of(device).is_host) as (model, _):
        cases = [
            Case(mode, context, arguments_of(options, mode, context) | own, tuple(texts.cases))
            for mode in modes
            for context in contexts
            for own in ({}, drafts)
        ]
        rows, floors = measured(cases, options, model, texts, device)
    plain = {(row.mode, row.context, row.text): row for row in rows if row.drafts == "none"}
    for row in rows:
        compare(row, plain[row.mode, row.context, row.text])
    return finish(options, rows, texts, floors, device)


def compare(row: ReplayRow, plain: ReplayRow) -> None:
    """Note how many times as fast a row is."""
    if row.tokens_per_second and plain.tokens_per_second:
        row.times = row.tokens_per_second / plain.tokens_per_second
