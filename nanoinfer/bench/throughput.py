"""`nanoinfer bench throughput`: many requests at once, as fast as they go."""

from __future__ import annotations

import argparse
import random
import time

from nanoinfer.common.errors import choose
from nanoinfer.common.units import counted
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.engine.figures import experts_read
from nanoinfer.llm import LLM
from nanoinfer.measure.report import paragraph, write_figures
from nanoinfer.measure.run import Load, random_prompts
from nanoinfer.memory.setup import Setup
from nanoinfer.options.measuring import (
    ENGINE_MODES,
    bounds,
    check_at_least,
    check_can_write,
    open_model,
    shared_engine_arguments,
)
from nanoinfer.sampling_params import SamplingParams

DEFAULTS = dict(num_prompts=256, input_len="100-1024", output_len="100-1024")
"""Those of nano-vllm's benchmark."""
DEFAULTS_ON_HOST = dict(num_prompts=16, input_len="16-64", output_len="16-64")
"""With which a small model takes less than a minute."""
# Prompts take the first ids of every vocabulary, so that the load is the same for all models.
PROMPT_VOCABULARY = 2000
LINES = {
    "requests": "{requests_per_second:,.2f} per second, {seconds:.2f} s in all",
    "output tokens": "{output_tokens_per_second:,.0f} per second ({output_tokens:,})",
    "all tokens": "{total_tokens_per_second:,.0f} per second ({total_tokens:,})",
    "prefill": "{prefill_seconds:.2f} s in {num_prefill_steps:,} steps",
    "decode": "{decode_seconds:.2f} s in {num_decode_steps:,} steps of {mean_batch:.1f} sequences on average, bound by "
    "{bound}",
    "one decode step": "{step_seconds!m:.3f} ms; the host works {host_seconds_per_step!m:.3f} ms of it, the device "
    "{device_seconds_per_step!m:.3f} ms (from a sample, without sampling)",
}
# Shown where the figure that comes first is not 0.
LINES_WHERE_ANY = {
    "prefix cache": ("prefix_cache_hit_rate", "{prefix_cache_hit_rate:.1%} of the prompts' tokens were found"),
    "prefill graphs": ("prefill_graph_hit_rate", "{prefill_graph_hit_rate:.1%} of the prefill steps ran from them"),
    "experts": (
        "experts_read_per_layer",
        "{experts_read_per_layer:.1f} of a layer in a decode step on average, {expert_bytes_per_step!G:,.2f} GB in all",
    ),
    "over the link": (
        "streamed_bytes",
        "{streamed_bytes!G:,.1f} GB in all, {streamed_bytes_per_step!G:,.3f} GB in a decode step on average",
    ),
    "found experts": (
        "expert_fetches",
        "{expert_hit_rate:.0%} of the chosen ones were in slots, {expert_fetched_bytes!G:,.1f} GB brought, which steps "
        "wait for",
    ),
    "preemptions": ("num_preemptions", "{num_preemptions:,}"),
}


def make_load(
    num_prompts: int = 256,
    input_len: tuple[int, int] = (100, 1024),
    output_len: tuple[int, int] = (100, 1024),
    temperature: float = 0.6,
    seed: int = 0,
    vocab_size: int = PROMPT_VOCABULARY,
) -> Load:
    """Make requests of random lengths, the same for the same seed. The defaults are those of nano-vllm's benchmark.

    Args:
        input_len: fewest and most tokens of a prompt.
        output_len: fewest and most tokens to generate; no request ends early.
        vocab_size: token ids of the prompts are below this number and below `PROMPT_VOCABULARY`.
    """
    generator = random.Random(seed)
    lengths = [generator.randint(*input_len) for _ in range(num_prompts)]
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=generator.randint(*output_len))
        for _ in range(num_prompts)
    ]
    return Load(random_prompts(min(vocab_size, PROMPT_VOCABULARY), lengths, seed), params)


def run_load(llm: LLM, load: Load, *, progress: bool = False) -> dict:
    """Run the load after a short request that compiles the kernels. Return figures in seconds and tokens.

    Step times are means over decode steps. `step_seconds` is the time from one read to the next,
    `host_seconds_per_step` is the part in which the host did not wait for the device, and `device_seconds_per_step` is
    the part in which the compute stream had work of the model, estimated from a sample of the steps.
    """
    warm_up = SamplingParams(temperature=load.params[0].temperature, max_tokens=min(4, load.params[0].max_tokens))
    llm.generate([load.prompts[0]], warm_up, use_tqdm=False)
    stats, times = llm.stats(), llm.engine.meter.snapshot()
    begin = time.perf_counter()
    llm.generate(load.prompts, load.params, use_tqdm=progress)
    seconds = time.perf_counter() - begin
    after = llm.stats()

    def gained(name: str) -> int | float:
        return after[name] - stats[name]

    graph_steps, fetches = gained("prefill_graph_steps"), gained("expert_fetches")
    decode = llm.engine.meter.times.since(times)
    steps = max(1, decode.num_steps)
    total = load.num_prompt_tokens + load.num_output_tokens
    return {
        "mode": llm.mode,
        "num_requests": len(load.prompts),
        "prompt_tokens": load.num_prompt_tokens,
        "output_tokens": load.num_output_tokens,
        "total_tokens": total,
        "seconds": seconds,
        "requests_per_second": len(load.prompts) / seconds,
        "output_tokens_per_second": load.num_output_tokens / seconds,
        "total_tokens_per_second": total / seconds,
        "prefill_seconds": gained("prefill_seconds"),
        "decode_seconds": decode.seconds,
        "num_prefill_steps": gained("num_prefill_steps"),
        "prefill_graph_hit_rate": graph_steps / max(1, graph_steps + gained("prefill_eager_steps")),
        "prefix_cache_hit_rate": gained("prefix_cache_hit_tokens") / max(1, gained("prefix_cache_queried_tokens")),
        "num_decode_steps": decode.num_steps,
        "mean_batch": gained("num_decode_tokens") / steps,
        "step_seconds": decode.seconds / steps,
        "host_seconds_per_step": decode.host_seconds / steps,
        "device_seconds_per_step": decode.compute_busy_fraction * decode.seconds / steps,
        "num_preemptions": gained("num_preemptions"),
        "streamed_bytes": gained("streamed_bytes"),
        "streamed_bytes_per_step": decode.streamed_bytes / steps,
        "expert_fetches": fetches,
        "expert_fetched_bytes": gained("expert_fetched_bytes"),
        "expert_hit_rate": gained("expert_hits") / max(1, gained("expert_hits") + fetches),
        "bound": decode.bound,
        **experts_read(llm.engine.runner.spec.sparse, decode),
    }


def run(options: argparse.Namespace) -> dict:
    """Run the load, print the report and return its figures (see `run_load`)."""
    device = resolve_device(options.device)
    is_host = device_of(device).is_host
    for name, value in (DEFAULTS_ON_HOST if is_host else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check_at_least(options, num_prompts=1)
    choose("--mode", options.mode, ENGINE_MODES)
    check_can_write(options.output_json)
    lengths = bounds(options.input_len, "--input-len"), bounds(options.output_len, "--output-len")
    arguments = ENGINE_MODES[options.mode] | shared_engine_arguments(options)
    with open_model(options, is_host) as (model, name):
        spec = Setup(EngineConfig(model=model, **arguments), device).spec
        load = make_load(options.num_prompts, *lengths, options.temperature, options.seed, spec.vocab_size)
        with LLM(model, **arguments | dict(max_model_len=load.max_model_len)) as llm:
            figures = run_load(llm, load, progress=not options.no_progress)
    title = (
        f"{name}, {figures['mode']} mode: {counted(options.num_prompts, 'request')} of "
        f"{options.input_len} tokens in and {options.output_len} out, temperature {options.temperature:g}"
    )
    lines = LINES | {name: text for name, (figure, text) in LINES_WHERE_ANY.items() if figures[figure]}
    print(paragraph(title, lines, figures))
    write_figures(options.output_json, figures, options.command_line, device)
    return figures
