"""`nanoinfer verify`: the same requests in every mode on the user's own machine, compared token by token.

The runs follow one another in one process, each with an engine of its own. Freed ring slots and blocks are filled with
NaN, so that whoever reads one too late gives a wrong answer instead of an old one. Of each generated token its id and
the raw logits of the whole vocabulary are compared with those of the first run.

Two things would change the rounding and are kept equal in all runs: decode batches are padded to one size, and but for
the first two requests, which share a step, each prompt is computed in steps of its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoinfer.attention.registry import make_backend
from nanoinfer.bench.measure import random_prompts
from nanoinfer.bench.shapes import SHAPES, write_shape
from nanoinfer.build import attention_spec, resolve_device
from nanoinfer.config import EngineConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.loader import load_config, resolve_dtype
from nanoinfer.memory import MemoryPlan, gpu_budget, make_plan
from nanoinfer.models import ModelSpec, resolve
from nanoinfer.request import Request
from nanoinfer.runner import ModelRunner, PendingTokens
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.sequence import Sequence, SequenceState
from offload import CudaRuntime, Event, KVLayout, Runtime, SimulatedRuntime
from offload.pinned import memory_available_bytes

# Prompt lengths as shares of the context: the first request decodes, and ends, while others are in prefill.
LENGTH_SHARES = (0.25, 1.0, 0.5, 0.75)
LONGEST_DEFAULT_CONTEXT = 4096
LONGEST_DEFAULT_CONTEXT_CPU = 1024
MAX_PREFILL_TOKENS = 2048
MAX_LOGITS_BYTES = 4 * 2**30
# Without fixed splits logits may differ by this share of the row's largest: a few times what a type's rounding adds up
# to over the layers, and far less than another block's keys would change.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
# Arguments that make the runs what they are.
OWN_ARGUMENTS = (
    "cuda_graph_batch_sizes",
    "enable_cpu_offload",
    "enable_prefix_caching",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "resident_kv_limit",
)


# What is compared


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first difference of one request.

    Attributes:
        request: its number, from 0.
        position: number of the generated token, from 0; None where the request as a whole differs.
        text: both values.
    """

    request: int
    position: int | None
    text: str

    def __str__(self) -> str:
        place = "" if self.position is None else f", generated token {self.position}"
        return f"request {self.request}{place}: {self.text}"


@dataclass(frozen=True)
class Recorded:
    """What one run gave, per request: token ids, and for each token its logits, [vocab_size] float32 on the CPU."""

    tokens: list[list[int]]
    logits: list[list[torch.Tensor]]


@dataclass(kw_only=True)
class RunReport:
    """One run.

    Attributes:
        what: what the run does.
        facts: what it did: bytes streamed, blocks that stayed, switches.
        left_out: why it was not run, or why it does not count.
        failure: the error that ended it.
        num_tokens, num_logits: how many were compared with the reference's, or given by the reference.
        largest_difference: of a logit, as a share of its row's largest; 0 where all bits are equal.
    """

    name: str
    what: str
    is_reference: bool = False
    facts: list[str] = field(default_factory=list)
    left_out: str | None = None
    failure: str | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    num_tokens: int = 0
    num_logits: int = 0
    largest_difference: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.failure is not None or bool(self.mismatches)

    def result(self, is_exact: bool) -> str:
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        if self.mismatches:
            return "DIFFERENT"
        if self.is_reference:
            return "the reference"
        return "identical" if is_exact else f"equal to rounding (up to {self.largest_difference:.1e} of the largest)"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All runs, and what they say.

    Attributes:
        setting: the lines that describe model, requests and conditions.
        is_exact: whether bits were compared; False where the attention backend has no fixed splits.
    """

    setting: list[str]
    runs: list[RunReport]
    is_exact: bool

    @property
    def is_identical(self) -> bool:
        return not any(run.is_wrong for run in self.runs)

    def line(self) -> str:
        """The verdict in one line."""
        wrong = [run.name for run in self.runs if run.is_wrong]
        if wrong:
            return f"DIFFERENT in {', '.join(wrong)}"
        done = [run for run in self.runs if run.left_out is None]
        compared = [run for run in done if not run.is_reference]
        how = "identical" if self.is_exact else "equal to rounding"
        line = (
            f"{how}: {sum(run.num_tokens for run in compared):,} tokens and "
            f"{sum(run.num_logits for run in compared):,} logits in {len(done)} runs"
        )
        left_out = [run.name for run in self.runs if run.left_out is not None]
        return line + (f" (left out: {', '.join(left_out)})" if left_out else "")

    def report(self) -> str:
        """Everything: what was compared, each run, each difference, and the verdict in the last line."""
        lines = [*self.setting, ""]
        for run in self.runs:
            lines.append(f"{run.name:<10}{run.what}: {run.result(self.is_exact)}")
            if run.facts and run.left_out is None:
                lines.append(f"{'':<10}{', '.join(run.facts)}")
            lines += [f"{'':<10}{mismatch}" for mismatch in run.mismatches]
        return "\n".join([*lines, "", self.line()])


# What is run


@dataclass(frozen=True)
class Workload:
    """Requests, in the order in which they come."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    block_size: int

    @property
    def num_rows(self) -> int:
        """One less than there are requests: the last one takes over the blocks of the first one that ends."""
        return max(1, len(self.prompts) - 1)

    @property
    def num_tokens(self) -> int:
        return sum(params.max_tokens for params in self.params)

    @property
    def max_model_len(self) -> int:
        return max(len(prompt) for prompt in self.prompts) + max(params.max_tokens for params in self.params)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill step: a quarter of the longest prompt, so that prompts come in several chunks."""
        wanted = min(MAX_PREFILL_TOKENS, max(map(len, self.prompts)) // 4)
        return max(1, wanted // self.block_size) * self.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks that the requests of all rows can hold at once."""
        blocks = [
            -(-(len(prompt) + params.max_tokens) // self.block_size)
            for prompt, params in zip(self.prompts, self.params, strict=True)
        ]
        return sum(sorted(blocks)[-self.num_rows :])

    @property
    def prompt_blocks(self) -> list[int]:
        """KV blocks of each prompt."""
        return [-(-len(prompt) // self.block_size) for prompt in self.prompts]


def make_workload(
    vocab_size: int, num_requests: int, context: int, output_len: int, block_size: int, seed: int
) -> Workload:
    """Random prompts of several lengths up to `context` tokens; every request fills a block while it decodes.

    Every second request is sampled with a seed, the others are greedy. The first is the shortest and ends at half of
    `output_len`.
    """
    shares = LENGTH_SHARES if num_requests > 1 else (1.0,)
    lengths, params = [], []
    for i in range(num_requests):
        max_tokens = output_len if i else max(2, output_len // 2)
        num_blocks = max(1, int(shares[i % len(shares)] * (context // block_size)))
        until_full = 1 + (i * (max_tokens - 2) // num_requests) % (block_size - 1)
        lengths.append(num_blocks * block_size - until_full)
        is_greedy = i % 2 == 0
        params.append(
            SamplingParams(
                temperature=0.0 if is_greedy else 0.8,
                top_p=1.0 if is_greedy else 0.95,
                seed=None if is_greedy else seed + i,
                max_tokens=max_tokens,
                ignore_eos=True,
            )
        )
    return Workload(random_prompts(vocab_size, lengths, seed), params, block_size)


@dataclass(frozen=True)
class _Run:
    """One engine's arguments; `switches` changes the mode while requests run."""

    name: str
    what: str
    arguments: dict[str, Any]
    is_required: bool = False
    switches: bool = False
    min_gpu_blocks: int = 0  # smaller pools do not run it


def _runs(workload: Workload, plan: MemoryPlan) -> list[_Run]:
    half = sum(workload.prompt_blocks[: workload.num_rows]) * plan.block_bytes // 2
    # Two requests fill the pool exactly, and it overflows when one of them grows. In offload mode a prefill chunk, its
    # tail and the other request's tail must have room.
    num_crowded = min(2, workload.num_rows)
    chunk = workload.prefill_tokens // workload.block_size
    crowded = max(sum(workload.prompt_blocks[:num_crowded]), chunk + num_crowded)
    return [
        _Run("resident", "every KV block on the GPU", dict(enable_cpu_offload=False), min_gpu_blocks=workload.num_blocks),
        _Run(
            "streamed",
            "offload mode, every full block streams",
            dict(enable_cpu_offload=True, resident_kv_limit=0),
            is_required=True,
        ),
        _Run(
            "mixture",
            "offload mode, about half of the full blocks stay on the GPU",
            dict(enable_cpu_offload=True, resident_kv_limit=max(half, plan.block_bytes)),
            is_required=True,
        ),
        _Run(
            "switch",
            "resident mode, to offload, back and again",
            dict(enable_cpu_offload=False, resident_kv_limit=max(half, plan.block_bytes)),
            switches=True,
            min_gpu_blocks=workload.num_blocks,
        ),
        _Run(
            "auto",
            'enable_cpu_offload="auto", a GPU pool that fills up',
            dict(
                enable_cpu_offload="auto",
                resident_kv_limit=0,
                max_num_seqs=num_crowded,
                num_gpu_blocks_override=crowded + 1,  # and the scratch block
            ),
            min_gpu_blocks=crowded,
        ),
    ]


def verify(
    model: str | Path,
    *,
    num_requests: int = 4,
    context: int | None = None,
    output_len: int = 32,
    seed: int = 0,
    make_runtime: Callable[[str], Runtime] | None = None,
    progress: bool = False,
    **engine_arguments: Any,
) -> Verdict:
    """Runs the same requests resident, streamed, as a mixture, with switches and with "auto", and compares them.

    Args:
        model: local directory of a Hugging Face checkpoint, or a hub id.
        num_requests: requests of several lengths; all but the last run at once.
        context: prompt tokens of the longest request. None: what resident mode can hold on this machine, at most 4096
            (1024 on the CPU).
        output_len: generated tokens of each request but the first, which ends at half of it.
        seed: of prompts and sampling, and of random weights.
        make_runtime: makes a run's runtime from the run's name; None: the device's own, with poison.
        progress: show progress bars.
        engine_arguments: fields of `nanoinfer.EngineConfig`, but for those that differ from run to run.

    Raises:
        ValueError: an argument cannot be used, or what must run does not fit; says what to change.
        MemoryError: the host has too little memory.
    """
    _check_arguments(num_requests, context, output_len, engine_arguments)
    arguments = dict(
        skip_tokenizer_init=True, enable_prefix_caching=False, progress_bar=progress, model=model, seed=seed
    )
    arguments |= engine_arguments
    config = EngineConfig.from_arguments(arguments)
    device = resolve_device(config.device)
    machine = _Machine(config, device)
    workload = _choose_workload(machine, arguments, num_requests, context, output_len, seed)
    common = arguments | workload_arguments(workload)
    plan = machine.plan(common | dict(enable_cpu_offload=True))  # raises where not even this fits
    kept_bytes = 4 * workload.num_tokens * machine.spec.vocab_size
    if kept_bytes > MAX_LOGITS_BYTES:
        raise ValueError(
            f"{workload.num_tokens} generated tokens have {kept_bytes / 2**30:.1f} GiB of logits to compare, "
            f"{MAX_LOGITS_BYTES / 2**30:.0f} GiB are allowed: ask for fewer requests or a shorter output"
        )
    make_runtime = make_runtime or (
        lambda name: CudaRuntime(device, poison=True) if device.type == "cuda" else SimulatedRuntime(poison=True)
    )
    tolerance = None if machine.is_exact else ROUNDING[machine.spec.dtype]
    reports: list[RunReport] = []
    reference: Recorded | None = None
    for run in _runs(workload, plan):
        report = RunReport(name=run.name, what=run.what)
        reports.append(report)
        found = _attempt(run, common | run.arguments, workload, make_runtime, report)
        if found is None:
            continue
        if reference is None:
            reference, report.is_reference = found, True
        compare(reference, found, report, tolerance)
    return Verdict(setting=_describe(machine, workload, plan), runs=reports, is_exact=machine.is_exact)


def _check_arguments(
    num_requests: int, context: int | None, output_len: int, engine_arguments: dict[str, Any]
) -> None:
    for name in OWN_ARGUMENTS:
        if name in engine_arguments:
            raise ValueError(f"{name}={engine_arguments[name]!r}: verify chooses it for each run, leave it out")
    counts = (("num_requests", num_requests, 1), ("context", context, 1), ("output_len", output_len, 2))
    for name, value, minimum in counts:
        if value is not None and (type(value) is not int or value < minimum):
            raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}")


# Before anything is loaded


class _Machine:
    """What model, settings and device allow, from the config alone.

    Raises:
        ValueError: the model is not supported, or the attention backend cannot run offload mode.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        hf_config = load_config(config.model)
        self.spec: ModelSpec = resolve(hf_config).spec_from_config(hf_config, resolve_dtype(config.dtype, hf_config))
        self.layout = KVLayout(
            num_layers=self.spec.num_layers,
            block_size=config.block_size,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.spec.dtype,
        )
        backend = make_backend(config.attention_backend, attention_spec(self.spec, config.block_size), device, True)
        self.backend_name, self.is_exact = backend.name, backend.exact_splits

    def plan(self, arguments: dict[str, Any]) -> MemoryPlan:
        """How an engine with these arguments spends the memory; raises ValueError where it is too small."""
        config, available = EngineConfig.from_arguments(arguments), memory_available_bytes()
        return make_plan(
            config,
            self.spec,
            self.layout,
            budget_bytes=gpu_budget(config, self.device, available),
            host_available_bytes=available,
            is_cuda=self.device.type == "cuda",
        )


def workload_arguments(workload: Workload) -> dict[str, Any]:
    """Engine arguments with which all runs form the same batches."""
    return dict(
        max_num_seqs=workload.num_rows,
        max_model_len=workload.max_model_len,
        max_num_batched_tokens=workload.prefill_tokens,
        cuda_graph_batch_sizes=[workload.num_rows],
    )


def _choose_workload(
    machine: _Machine, arguments: dict[str, Any], num_requests: int, context: int | None, output_len: int, seed: int
) -> Workload:
    """The requests of `context` tokens; without one, the longest that resident mode can hold all at once."""
    block_size, spec = machine.config.block_size, machine.spec
    shortest, longest = 2 * block_size, spec.max_position - output_len

    def workload(tokens: int) -> Workload:
        return make_workload(spec.vocab_size, num_requests, tokens, output_len, block_size, seed)

    if longest < shortest:
        raise ValueError(
            f"the model allows {spec.max_position} positions, a request of two KV blocks of {block_size} tokens with "
            f"{output_len} generated tokens needs {shortest + output_len}: lower block_size or output_len"
        )
    if context is not None:
        if not shortest <= context <= longest:
            raise ValueError(
                f"context={context} must be from {shortest} (two KV blocks: with less, nothing streams) to {longest} "
                f"(the model's {spec.max_position} positions less {output_len} generated tokens)"
            )
        return workload(context)
    default = LONGEST_DEFAULT_CONTEXT if machine.device.type == "cuda" else LONGEST_DEFAULT_CONTEXT_CPU
    tokens = max(shortest, min(default, longest))
    while tokens > shortest:
        candidate = workload(tokens)
        try:
            plan = machine.plan(arguments | workload_arguments(candidate))
        except ValueError:
            plan = None
        if plan is not None and plan.num_gpu_blocks - 1 >= candidate.num_blocks:
            return candidate
        tokens = max(shortest, tokens // 2)
    return workload(shortest)


def _describe(machine: _Machine, workload: Workload, plan: MemoryPlan) -> list[str]:
    config, spec = machine.config, machine.spec
    weights = "random weights" if config.load_format == "dummy" else str(config.model)
    lengths = ", ".join(str(len(prompt)) for prompt in workload.prompts)
    num_greedy = sum(params.is_greedy for params in workload.params)
    if machine.is_exact:
        compared = f"token ids and the raw logits of all {spec.vocab_size:,} tokens of the vocabulary, bit for bit"
    else:
        compared = (
            f"token ids and the raw logits of all {spec.vocab_size:,} tokens of the vocabulary, to rounding only: the "
            f"attention backend {machine.backend_name!r} has no fixed splits"
        )
    return [
        f"{spec.architecture} ({weights}), {str(spec.dtype).removeprefix('torch.')}, {_device_name(machine.device)}, "
        f"attention backend {machine.backend_name!r}, KV blocks of {config.block_size} tokens "
        f"({plan.block_bytes / 2**20:.2f} MiB)",
        f"{len(workload.prompts)} requests: prompts of {lengths} tokens, {workload.num_tokens} generated tokens, "
        f"{num_greedy} greedy and {len(workload.params) - num_greedy} sampled with a seed",
        f"compared: {compared}",
        "freed ring slots and freed KV blocks of both pools are filled with NaN",
    ]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# One run


class _LeftOut(Exception):
    """This run says nothing on this machine; the text says why."""


def _attempt(
    run: _Run,
    arguments: dict[str, Any],
    workload: Workload,
    make_runtime: Callable[[str], Runtime],
    report: RunReport,
) -> Recorded | None:
    """The run's tokens and logits; None where it was left out or failed, which the report says."""
    try:
        config = EngineConfig.from_arguments(arguments)
        try:
            engine = LLMEngine(config, make_runtime(run.name))
        except ValueError as error:
            if run.is_required:
                raise
            raise _LeftOut(str(error)) from error
    except _LeftOut as error:
        report.left_out = str(error)
        return None
    try:
        return _record(run, engine, workload, report)
    except _LeftOut as error:
        report.left_out = str(error)
    except MemoryError:
        raise
    except Exception as error:  # whatever a wrong block or a missing wait leads to; the other runs go on
        report.failure = f"{type(error).__name__}: {error}"
    finally:
        device = engine.runner.runtime.device
        engine.close()
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _record(run: _Run, engine: LLMEngine, workload: Workload, report: RunReport) -> Recorded:
    """Plays the workload through the engine."""
    num_blocks = engine.runner.kv_cache.gpu_blocks.num_blocks
    if num_blocks < run.min_gpu_blocks:
        raise _LeftOut(
            f"the requests need {run.min_gpu_blocks} KV blocks on the GPU, {num_blocks} fit: raise gpu_memory_limit "
            "or lower the context"
        )
    recorder = _LogitsRecorder(engine.runner)
    switches = _Switches(engine, workload.num_tokens) if run.switches else None
    requests: list[Request] = []
    most_resident = 0
    with tqdm(total=workload.num_tokens, desc=run.name, unit="tok", disable=not engine.config.progress_bar) as bar:
        while len(requests) < len(workload.prompts) or not all(request.is_finished for request in requests):
            _add_requests(engine, workload, requests)
            if switches is not None:
                switches.before_step(requests)
            bar.update(sum(len(output.token_ids_delta) for output in engine.step()))
            recorder.collect(keep=1)
            most_resident = max(most_resident, engine.runner.kv_cache.residency.num_resident)
    recorder.collect(keep=0)
    stats = engine.stats()
    if engine.config.enable_cpu_offload == "auto" and engine.mode != "offload":
        raise _LeftOut("the GPU pool did not fill up, so offload mode was never entered: ask for a longer context or output")
    if stats["host_blocks_total"]:
        report.facts.append(f"{stats['streamed_bytes'] / 2**20:,.1f} MiB streamed")
        report.facts.append(f"at most {most_resident} full blocks stayed on the GPU")
    if switches is not None:
        report.facts += switches.done
    if stats["num_preemptions"]:
        report.facts.append(f"{stats['num_preemptions']} preemptions")
    return Recorded(
        tokens=[request.output().outputs[0].token_ids for request in requests],
        logits=[recorder.rows[request.request_id] for request in requests],
    )


def _add_requests(engine: LLMEngine, workload: Workload, requests: list[Request]) -> None:
    """The first two come together, each later one when the one before it has its first token.

    So a smaller GPU pool, which admits requests later, still computes the same prompts in the same steps.
    """
    while len(requests) < len(workload.prompts):
        number = len(requests)
        if number >= 2 and requests[-1].first_token is None:
            return
        requests.append(engine.add_request(f"verify-{number}", workload.prompts[number], workload.params[number]))


class _Switches:
    """Enters offload mode while a prompt is in prefill, leaves it at half of the tokens, enters it at three quarters."""

    def __init__(self, engine: LLMEngine, num_tokens: int) -> None:
        self._engine = engine
        self._later = deque([(num_tokens // 2, "resident"), (3 * num_tokens // 4, "offload")])
        self._first_at_the_latest = num_tokens // 4
        self.done: list[str] = []

    def before_step(self, requests: list[Request]) -> None:
        num_tokens = sum(sequence.num_generated for request in requests for sequence in request.sequences)
        if not self.done:
            states = [sequence.state for sequence in self._engine.scheduler.running]
            is_mixed = SequenceState.PREFILL in states and SequenceState.DECODE in states
            if is_mixed or num_tokens >= self._first_at_the_latest:
                self._switch("offload", num_tokens)
        elif self._later and num_tokens >= self._later[0][0]:
            self._switch(self._later.popleft()[1], num_tokens)

    def _switch(self, mode: str, num_tokens: int) -> None:
        in_prefill = sum(sequence.state is SequenceState.PREFILL for sequence in self._engine.scheduler.running)
        self._engine.switch_mode(mode)
        self.done.append(f"to {mode} after {num_tokens} tokens ({in_prefill} in prefill)")


class _LogitsRecorder:
    """Keeps the raw logits of every sampled token without waiting for a step that runs.

    Attributes:
        rows: request id -> one row per sampled token, [vocab_size] float32, CPU.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.rows: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._runner = runner
        self._read_back = runner._read_back
        self._unread: deque[tuple[list[str], list[torch.Tensor], Event]] = deque()
        runner._read_back = self._observe

    def _observe(
        self, sequences: list[Sequence], tokens: torch.Tensor, logits: Callable[[], torch.Tensor | None]
    ) -> PendingTokens:
        """Copies the step's logits on the compute stream, before the next step overwrites them."""
        if sequences:
            copies: list[torch.Tensor] = []
            event = self._runner.runtime.event()
            self._runner.compute.run(lambda: copies.append(logits().clone()))
            self._runner.compute.record(event)
            self._unread.append(([sequence.request_id for sequence in sequences], copies, event))
        return self._read_back(sequences, tokens, logits)

    def collect(self, keep: int) -> None:
        """Fetches the logits of all steps but the newest `keep`, which may still run."""
        while len(self._unread) > keep:
            request_ids, copies, event = self._unread.popleft()
            event.synchronize("verify.read_after_step")
            for request_id, row in zip(request_ids, copies[0].cpu(), strict=True):
                self.rows[request_id].append(row)


# The comparison


def compare(reference: Recorded, found: Recorded, report: RunReport, tolerance: float | None) -> None:
    """Notes in the report how much was compared and the first difference of each request.

    Args:
        tolerance: None compares bits. A number allows logits to differ by this share of the row's largest, and ends
            the comparison of a request, without a mismatch, where that makes it take another token.
    """
    for number in range(len(reference.tokens)):
        wanted, got = reference.tokens[number], found.tokens[number]
        wanted_rows, got_rows = reference.logits[number], found.logits[number]
        if not len(wanted) == len(got) == len(got_rows):
            text = f"{len(got)} tokens with {len(got_rows)} rows of logits instead of {len(wanted)} tokens"
            report.mismatches.append(Mismatch(request=number, position=None, text=text))
            continue
        for position, row in enumerate(got_rows):
            report.num_tokens += 1
            report.num_logits += row.numel()
            text = _difference(wanted_rows[position], row, report, tolerance)
            if text is None and wanted[position] != got[position]:
                if tolerance is not None:
                    break  # two tokens nearly tied; what follows has another context
                text = "the logits are equal"
            if text is not None:
                if wanted[position] != got[position]:
                    text = f"token {got[position]} instead of {wanted[position]}; {text}"
                report.mismatches.append(Mismatch(request=number, position=position, text=text))
                break


def _difference(wanted: torch.Tensor, got: torch.Tensor, report: RunReport, tolerance: float | None) -> str | None:
    """What is wrong with a row of logits, [vocab_size] float32; None if nothing."""
    broken = torch.nonzero(~torch.isfinite(got))
    if len(broken):
        advice = "; the reference itself: try another dtype, or memory was read after it was freed"
        return (
            f"logit of token {int(broken[0])} is {float(got[broken[0]])}, {len(broken)} of {got.numel()} logits are "
            f"not finite{advice if got is wanted else ''}"
        )
    is_different = wanted.view(torch.int32) != got.view(torch.int32)
    if not is_different.any():
        return None
    distance = (got - wanted).abs().nan_to_num(nan=torch.inf)
    place = int((distance + is_different).argmax())
    share = float(distance.max() / wanted.abs().max())
    report.largest_difference = max(report.largest_difference, share)
    if tolerance is not None and share <= tolerance:
        return None
    return (
        f"logit of token {place} is {float(got[place])!r} instead of {float(wanted[place])!r}, "
        f"{int(is_different.sum())} of {got.numel()} logits differ"
    )


# The command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    parser.add_argument("model", nargs="?", help="checkpoint directory or hub id")
    parser.add_argument("--shape", help=f"random weights in a known shape instead: {', '.join(SHAPES)}")
    parser.add_argument("--gpu-memory", help='GPU memory limit, such as "12GiB"')
    parser.add_argument("--host-memory", help="host memory limit for KV blocks")
    parser.add_argument(
        "--context", type=int, help="prompt tokens of the longest request; default: what resident mode can hold"
    )
    parser.add_argument("--requests", type=int, default=4, help="requests of several lengths (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--device", default=defaults["device"])
    parser.add_argument("--attention-backend", default=defaults["attention_backend"])
    parser.add_argument("--seed", type=int, default=defaults["seed"])


def run(options: argparse.Namespace) -> int:
    """Runs `nanoinfer verify`, prints the report and returns the exit code: 0 where all is equal, 1 if not.

    Raises:
        ValueError: an option cannot be used.
    """
    if (options.model is None) == (options.shape is None):
        raise ValueError("give either a model (checkpoint directory or hub id) or --shape")
    with tempfile.TemporaryDirectory() as directory:
        model = options.model if options.shape is None else str(write_shape(options.shape, directory))
        verdict = verify(
            model,
            num_requests=options.requests,
            context=options.context,
            output_len=options.output_len,
            seed=options.seed,
            progress=sys.stderr.isatty(),
            gpu_memory_limit=options.gpu_memory,
            host_memory_limit=options.host_memory,
            dtype=options.dtype,
            device=options.device,
            attention_backend=options.attention_backend,
            load_format="auto" if options.shape is None else "dummy",
        )
    print(verdict.report())
    return 0 if verdict.is_identical else 1
