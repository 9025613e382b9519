"""`nanoinfer bench latency`: one batch at a time, compared with the time that reading its bytes takes."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from nanoinfer.common.errors import choose
from nanoinfer.common.units import counted
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.llm import LLM
from nanoinfer.measure.locality import sampling_of
from nanoinfer.measure.report import explain, paragraph, write_figures
from nanoinfer.measure.run import Row, free_memory, measure
from nanoinfer.memory.floors import Floors, measure_floors
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    check_at_least,
    check_can_write,
    check_locality,
    open_model,
    shared_engine_arguments,
)

PERCENTILES = (10, 25, 50, 75, 90, 99)
LINES = {
    "time to first token": "{time_to_first_token!m:.1f} ms median, {least!m:.1f} to {most!m:.1f}",
    "time per output token": "{seconds_per_token!m:.3f} ms median, {seconds_per_token_p99!m:.3f} p99, {num_steps} "
    "steps, bound by {bound}",
    "floor per token": "{floor_seconds!m:.3f} ms ({read_bytes_per_step!G:.2f} GB read, {streamed_bytes_per_step!G:.2f} "
    "GB over the link): {ratio_to_floor:.2f} times the floor",
    "total latency": "{avg_latency:.4f} s average; {of_percentiles}",
}
EXPERTS = {
    "experts": "{expert_hit_rate:.0%} of the chosen ones were in slots, {expert_fetched_bytes_per_step!G:.3f} GB "
    "brought in a step on average, which it waits for",
}


def run(options: argparse.Namespace) -> dict:
    """Run the iterations, print the report and return its figures (see `summary`)."""
    device = resolve_device(options.device)
    # The first token of a prompt comes from its prefill, so a single token has no decode step.
    check_locality(options)
    check_at_least(options, input_len=1, output_len=2, batch_size=1, num_iters=1, num_iters_warmup=0)
    choose("--mode", options.mode, ENGINE_MODES)
    check_can_write(options.output_json)
    arguments = ENGINE_MODES[options.mode] | shared_engine_arguments(options)
    arguments["max_model_len"] = options.input_len + options.output_len
    if options.max_num_seqs is None:
        arguments["max_num_seqs"] = options.batch_size
    with open_model(options, device_of(device).is_host) as (model, name):
        # Measured before the engine exists: the buffers would take memory that it reserves for its activations.
        before = measure_floors(device)
        with LLM(model, **arguments) as llm:
            rows = _iterations(llm, options)
    free_memory()
    figures = summary(rows, options.output_len, before, measure_floors(device))
    title = (
        f"{name}, {rows[-1].mode} mode: {options.batch_size} x {options.input_len} tokens in, "
        f"{options.output_len} out, {counted(options.num_iters, 'time')}"
    )
    first = figures["times_to_first_token"]
    percentiles = ", ".join(f"p{p} {seconds:.4f}" for p, seconds in figures["percentiles"].items())
    lines = LINES if figures["expert_hit_rate"] is None else LINES | EXPERTS
    print(paragraph(title, lines, figures | dict(least=min(first), most=max(first), of_percentiles=percentiles)))
    print(explain(before, device))
    write_figures(options.output_json, figures, options.command_line, device, before)
    return figures


def _iterations(llm: LLM, options: argparse.Namespace) -> list[Row]:
    """Run the iterations and return one row for each that counts. Every iteration has different prompts."""
    rows = []
    lengths = [options.input_len] * options.batch_size
    for number in tqdm(
        range(-options.num_iters_warmup, options.num_iters), desc="iterations", disable=options.no_progress
    ):
        seed = options.seed + options.num_iters_warmup + number
        sampling = sampling_of(llm, options.router_locality, seed)
        row = measure(llm, lengths, options.output_len, seed=seed, sampling=sampling)
        if row.problem:
            raise ValueError(row.problem)
        if number >= 0:
            rows.append(row)
    return rows


def summary(rows: list[Row], output_len: int, before: Floors, after: Floors) -> dict:
    """Return figures over equal iterations, in seconds and bytes. Figures that vLLM's JSON has keep vLLM's names.

    before, after: floors measured before and after the iterations.
    """
    steps = [step for row in rows for step in row.steps]
    totals = [row.total_seconds for row in rows]
    whole = replace(rows[-1])
    whole.seconds_per_token = statistics.median(steps)
    whole.streamed_bytes_per_step = statistics.median(row.streamed_bytes_per_step for row in rows)
    if whole.expert_hit_rate is not None:
        whole.expert_hit_rate = statistics.fmean(row.expert_hit_rate for row in rows)
        fetched = [row.expert_fetched_bytes_per_step for row in rows]
        whole.expert_fetched_bytes_per_step = statistics.fmean(fetched)
    whole.least_bytes = tuple(map(statistics.median, zip(*(row.least_bytes for row in rows), strict=True)))
    whole.add_floor(before, after)
    return {
        "mode": whole.mode,
        "batch_size": whole.batch,
        "input_len": whole.context,
        "output_len": output_len,
        "num_iters": len(rows),
        "time_to_first_token": statistics.median(row.time_to_first_token for row in rows),
        "times_to_first_token": [row.time_to_first_token for row in rows],
        "seconds_per_token": whole.seconds_per_token,
        "seconds_per_token_p99": float(np.percentile(steps, 99)),
        "num_steps": len(steps),
        "avg_latency": statistics.fmean(totals),
        "latencies": totals,
        "percentiles": {str(p): float(np.percentile(totals, p)) for p in PERCENTILES},
        "read_bytes_per_step": whole.least_bytes[1],
        "streamed_bytes_per_step": whole.streamed_bytes_per_step,
        "expert_hit_rate": whole.expert_hit_rate,
        "expert_fetched_bytes_per_step": whole.expert_fetched_bytes_per_step,
        "floor_seconds": whole.floor_seconds,
        "ratio_to_floor": whole.ratio_to_floor,
        "bound": whole.bound,
        "peak_gpu_bytes": whole.peak_gpu_bytes,
    }
