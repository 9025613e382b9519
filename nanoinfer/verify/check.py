"""Perform all runs one after the other, and give the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoinfer.common.units import counted
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.measure.logits import check_can_keep
from nanoinfer.memory.setup import Setup
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.verify.play import attempt
from nanoinfer.verify.report import Answer, RunReport, Verdict, compare
from nanoinfer.verify.runs import make_runs
from nanoinfer.verify.workload import BLOCK_ON_HOST, Workload, choose_workload
from offload import Runtime

# Without fixed splits, logits may differ by this share of the row's largest logit. This is a few times the rounding
# that accumulates over the layers in this dtype, and far less than the effect of the keys of a wrong block.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
SAID_SECONDS = 60.0
# Arguments that the runs set themselves.
OWN_ARGUMENTS = (
    "capture_num_tokens", "cuda_graph_batch_sizes", "enable_cpu_offload", "enable_prefix_caching", "enforce_eager",
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "resident_kv_limit",
)  # fmt: skip


def verify(
    model: str | Path,
    *,
    num_requests: int = 4,
    context: int | None = None,
    output_len: int | None = None,
    seed: int = 0,
    make_runtime: Callable[[str], Runtime] | None = None,
    progress: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
    **engine_arguments: Any,
) -> Verdict:
    """Run the same requests in every mode, alone and beside others, and compare the results.

    Args:
        model: local directory of a Hugging Face checkpoint, or a hub id.
        num_requests: requests of several lengths; all but the last run at once.
        context: prompt tokens of the longest request. None: what resident mode can hold, at most 4096 (160 on the CPU).
        output_len: generated tokens of each request, half of it for the first. None: 32 (8 on the CPU).
        seed: of prompts and sampling, and of random weights.
        make_runtime: makes a run's runtime from the run's name; None: the device's own, with poison.
        progress: show progress bars, of the runs among them, with how long those that are left take.
        note: told after the first run how long all of them will take, if that is more than a minute.
        tell: called with each part of the report as soon as it is known: the setting, then each run.
        engine_arguments: fields of `nanoinfer.EngineConfig`, except those that differ from run to run.

    Raises:
        ValueError: an argument cannot be used, or a required run does not fit. The message says what to change.
        MemoryError: the host has too little memory.
    """
    _check_arguments(num_requests, context, output_len, engine_arguments)
    num_ranks = engine_arguments.pop("tensor_parallel_size", 1)
    own = dict(progress_bar=progress, model=model, seed=seed)
    setup, common = _set_up(engine_arguments | own, is_brief=context is None)
    _check_ranks(num_ranks, setup)
    is_exact = setup.backends[0].exact_splits
    workload = choose_workload(setup, common, num_requests, context, output_len, seed)
    common |= workload.arguments
    plan = setup.plan(EngineConfig(**common | dict(enable_cpu_offload=True)))  # raises if not even this fits
    check_can_keep(workload.num_output_tokens, setup.spec.vocab_size, "ask for fewer requests or a shorter output")
    make_runtime = make_runtime or (lambda name: setup.device.runtime(poison=True))
    tell("\n".join([*(setting := describe(setup, workload, plan)), ""]))
    reports: list[RunReport] = []
    reference: list[Answer] | None = None
    runs, begin = make_runs(workload, plan, setup.spec.sparse, num_ranks), time.perf_counter()
    for run in tqdm(runs, desc="verify", unit="run", leave=False, mininterval=0, disable=not progress):
        report = RunReport(name=run.name, what=run.what)
        reports.append(report)
        answers = attempt(run, common | run.arguments, workload, make_runtime, report)
        if answers is not None:
            report.is_reference = reference is None
            reference = reference or answers
            # The reference is compared with itself, too: this finds logits that are not finite.
            compare(reference, answers, report, None if is_exact else ROUNDING[setup.spec.dtype])
        with tqdm.external_write_mode():  # not into the bar
            tell(report.text(is_exact))
            if len(reports) == 1:
                _say_how_long(note, len(runs), time.perf_counter() - begin)
    return Verdict(setting=setting, runs=reports, is_exact=is_exact)


def _say_how_long(note: Callable[[str], None], num_runs: int, seconds: float) -> None:
    if num_runs * seconds > SAID_SECONDS:
        note(
            f"all {num_runs} runs take about {num_runs * seconds / 60:.0f} minutes, as the first one took "
            f"{seconds:.0f} s: lower context, num_requests or output_len for less"
        )


def _check_arguments(
    num_requests: int, context: int | None, output_len: int | None, engine_arguments: dict[str, Any]
) -> None:
    for name in OWN_ARGUMENTS:
        if name in engine_arguments:
            raise ValueError(f"{name}={engine_arguments[name]!r}: verify chooses it for each run, leave it out")
    counts = (("num_requests", num_requests, 1), ("context", context, 1), ("output_len", output_len, 2))
    for name, value, minimum in counts:
        if value is not None and (type(value) is not int or value < minimum):
            raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}")


def _set_up(arguments: dict[str, Any], is_brief: bool) -> tuple[Setup, dict[str, Any]]:
    """Return what the arguments come to, and those that all runs have. is_brief: a CPU may take small blocks."""
    common = dict(skip_tokenizer_init=True, enable_prefix_caching=False) | arguments
    config = EngineConfig(**common)
    common["kv_cache_dtype"] = config.kv_cache_dtype  # so that another name of it is told once
    device = resolve_device(config.device)
    if is_brief and config.block_size is None and device_of(device).is_host:
        common["block_size"] = BLOCK_ON_HOST
        config = replace(config, block_size=BLOCK_ON_HOST)
    return Setup(config, device, offload=True), common


def _check_ranks(num_ranks: int, setup: Setup) -> None:
    """Raise ValueError if several ranks have not the bits of one."""
    config, spec = setup.config, setup.spec
    if num_ranks not in (1, 2):
        raise ValueError(
            f"tensor_parallel_size={num_ranks}: verify compares with one GPU, whose bits two have, and four or eight "
            "have not: give 2"
        )
    if num_ranks > 1 and config.load_format == "dummy" and (spec.sparse is not None or config.quantization):
        raise ValueError(
            "tensor_parallel_size=2 with random weights: two GPUs make those of one in 16 or 32 bits and without "
            "experts alone: give a model's files"
        )


def describe(setup: Setup, workload: Workload, plan: MemoryPlan) -> list[str]:
    config, spec = setup.config, setup.spec
    weights = "random weights" if config.load_format == "dummy" else str(config.model)
    if config.quantization is not None:
        weights += f" in {config.quantization}"
    if config.head_quantization is not None:
        weights += f", head in {config.head_quantization}"
    lengths = ", ".join(str(len(prompt)) for prompt in workload.prompts)
    num_greedy = sum(params.is_greedy for params in workload.params)
    how = "bit for bit"
    backend = setup.backends[0]
    if not backend.exact_splits:
        how = f"to rounding only: the attention backend {backend.name!r} has no fixed splits"
    return [
        f"{spec.architecture} ({weights}), {str(spec.dtype).removeprefix('torch.')}, {setup.device.name}, "
        f"attention backend {backend.name!r}, KV blocks of {config.block_size} tokens "
        f"({plan.block_bytes / 2**20:.2f} MiB)",
        f"{counted(len(workload.prompts), 'request')}: prompts of {lengths} tokens, {workload.num_output_tokens} "
        f"generated tokens, {num_greedy} greedy and {len(workload.params) - num_greedy} sampled with a seed",
        f"compared: token ids and the raw logits of all {spec.vocab_size:,} tokens of the vocabulary, {how}",
        "varied: where KV blocks lie, the mode, who runs beside a request, rows of a step, the prefill chunk, CUDA "
        "graphs, prefix hits, preemption, n",
        "freed ring slots and freed KV blocks of both pools are filled with NaN",
    ]
