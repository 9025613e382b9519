"""One case: a batch of random prompts through an engine, each step timed."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from nanoinfer.devices.registry import accelerator, device_of
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.measure.answers import Answer, answer_of
from nanoinfer.memory.floors import Floors, bytes_read_per_step
from nanoinfer.memory.streamed import missed_bytes, streamed_bytes
from nanoinfer.requests.request import Request
from nanoinfer.sampling_params import SamplingParams

# Progress bars appear if a case takes longer than this.
PROGRESS_DELAY_S = 2.0
WARM_UP_STEPS = 3
# Decode steps in a trace: enough to see how steps follow each other, and few enough for a browser.
TRACED_STEPS = 5
TRACED_CHUNKS = 2  # traced in addition to TRACED_STEPS
TRACED_OUTPUT_LEN = WARM_UP_STEPS + TRACED_STEPS + 4  # output tokens of a traced case


@dataclass
class Row:
    """One line of the table. Times are in seconds, sizes in bytes; None: does not apply or was not measured."""

    mode: str
    batch: int
    context: int
    prefill_tokens_per_second: float | None = None
    time_to_first_token: float | None = None  # of the last sequence to get its first token
    total_seconds: float | None = None  # until the last token
    seconds_per_token: float | None = None  # median decode step
    tokens_per_second: float | None = None
    streamed_bytes_per_step: float | None = None  # all that came over the link
    link_gbps: float | None = None
    floor_seconds: float | None = None
    ratio_to_floor: float | None = None
    forecast_seconds: float | None = None  # the planner's, with these bandwidths
    ratio_to_forecast: float | None = None
    link_floor_gbps: float | None = None
    emulated_link_gbps: float | None = None  # of a slower link than the machine's; see offload/runtime/throttle.py
    link_moved: float | None = None  # relative change of the link's bandwidth during the case
    peak_gpu_bytes: int | None = None
    host_bytes: int | None = None
    expert_hit_rate: float | None = None  # share of the chosen experts that were in slots
    expert_fetched_bytes_per_step: float | None = None  # of experts that were not
    kv_resident_share: float | None = None  # share of full KV blocks, in the last step
    bound: str | None = None  # what the steps were bound by
    num_steps: int = 0
    check: str | None = None
    problem: str | None = None
    outputs: list[Answer] = field(default_factory=list, repr=False)
    steps: list[float] = field(default_factory=list, repr=False)  # the steps that the median is computed from
    least_bytes: tuple[float, ...] | None = field(default=None, repr=False)  # as for `Floors.offload_step`
    planned_bytes: tuple[float, ...] | None = field(default=None, repr=False)  # the same as planned

    def figures(self) -> dict:
        """Return what is written as JSON: no tokens, no single steps."""
        others = ("outputs", "steps", "least_bytes", "planned_bytes")
        return {name: value for name, value in vars(self).items() if name not in others}

    def take_steps(self, steps: list[float]) -> None:
        """Fill in the figures that follow from `steps`: seconds of the decode steps of the whole batch, in order."""
        self.steps = steps[WARM_UP_STEPS:] or steps
        self.num_steps = len(self.steps)
        if self.steps:
            self.seconds_per_token = statistics.median(self.steps)
            self.tokens_per_second = self.batch / self.seconds_per_token

    def take_experts(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Fill in what steps found in slots; nothing if there are none. before, after: stats around the steps."""
        names = ("expert_hits", "expert_fetches", "expert_fetched_bytes", "num_decode_steps")
        hits, fetches, num_bytes, num_steps = (after[name] - before[name] for name in names)
        if hits + fetches and num_steps:
            self.expert_hit_rate = hits / (hits + fetches)
            self.expert_fetched_bytes_per_step = num_bytes / num_steps

    def take_bytes(self, engine: LLMEngine, streamed: list[tuple[int, int]], lengths: list[int]) -> None:
        """Fill in the bytes of the steps that were taken. The plan is asked for the share of experts that was found.

        Args:
            streamed: what came over the link in each decode step, and the part of it that are experts which came one by
                one, in order.
            lengths: tokens of each sequence in the middle of these steps.
        """
        timed = streamed[WARM_UP_STEPS:] or streamed
        self.streamed_bytes_per_step = statistics.median(whole for whole, _ in timed)
        self.link_gbps = self.streamed_bytes_per_step / self.seconds_per_token / 1e9
        spec, plan = engine.runner.spec, engine.plan
        read, copied = bytes_read_per_step(spec, lengths), statistics.median(whole - part for whole, part in timed)
        self.least_bytes = copied, read, statistics.median(part for _, part in timed)
        missed = missed_bytes(spec, plan, len(lengths), self.expert_hit_rate)
        self.planned_bytes = streamed_bytes(engine.config, spec, plan, lengths), read, missed

    def add_floor(self, before: Floors, after: Floors) -> None:
        """Compare the step with the better of the bandwidths measured before and after it, and with the forecast.

        before, after: of the machine; where a link was emulated, that one takes the place of its own.
        """
        if self.seconds_per_token is None:
            return
        link = None if self.emulated_link_gbps is None else self.emulated_link_gbps * 1e9
        before, after = before.emulating(link), after.emulating(link)
        best = Floors(max(before.link, after.link), max(before.device, after.device))
        self.floor_seconds = best.offload_step(*self.least_bytes)
        self.ratio_to_floor = self.seconds_per_token / self.floor_seconds
        if self.planned_bytes is not None:
            self.forecast_seconds = best.offload_step(*self.planned_bytes)
            self.ratio_to_forecast = self.seconds_per_token / self.forecast_seconds
        self.link_floor_gbps = best.link / 1e9
        self.link_moved = abs(before.link - after.link) / best.link


@dataclass(frozen=True)
class Load:
    """Requests: token ids of each prompt, and its parameters."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(param.max_tokens for param in self.params)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, prompt and output."""
        return [len(prompt) + param.max_tokens for prompt, param in zip(self.prompts, self.params, strict=True)]

    @property
    def max_model_len(self) -> int:
        return max(self.lengths)


def random_prompts(vocab_size: int, lengths: list[int], seed: int) -> list[list[int]]:
    """Make one prompt of token ids per length, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def mixed_params(number: int, seed: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of request `number`: every second is sampled with a seed, some have penalties."""
    sampled = number % 2 == 1
    return SamplingParams(
        temperature=0.8 if sampled else 0.0,
        top_p=0.95 if sampled else 1.0,
        presence_penalty=0.3 * (number % 4 == 3),
        frequency_penalty=0.1 * (number % 3 == 2),
        seed=seed + number if sampled else None,
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def measure(
    llm: LLM,
    lengths: list[int],
    output_len: int,
    *,
    seed: int = 0,
    progress: bool = False,
    with_logprobs: bool = False,
    sampling: Mapping[str, Any] | None = None,
    trace: Callable[[LLMEngine], None] | None = None,
) -> Row:
    """Run prompts of `lengths` tokens at once, greedily, `output_len` tokens each. `Row.add_floor` adds the floor.

    Args:
        with_logprobs: to compare them. The times then include what they cost.
        sampling: fields of the requests' SamplingParams beside these, whose cost is wanted. A seed is that of the first
            request, and the others' follow it.
        trace: called to stop a trace of the last prefill chunks and first decode steps; tracing slows these steps down.

    Raises:
        ValueError: a prompt cannot be used in this engine. After this and any other error no request is left running.
    """
    engine, device = llm.engine, llm.engine.runner.runtime.device
    device_of(device).forget_peak()
    fields = dict(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=0 if with_logprobs else None)
    first = SamplingParams(**fields | dict(sampling or {}))
    params = [first if first.seed is None else replace(first, seed=first.seed + i) for i in range(len(lengths))]
    prompts = random_prompts(engine.vocab_size, lengths, seed)
    names = [f"bench-{i}" for i in range(len(prompts))]
    row = Row(mode=llm.mode, batch=len(lengths), context=max(lengths))
    before, stats = engine.meter.snapshot(), llm.stats()
    begin = time.perf_counter()
    try:
        requests = [engine.add_request(*one) for one in zip(names, prompts, params, strict=True)]
        steps, streamed = _run(llm, requests, sum(lengths) + output_len, progress, trace)
        row.total_seconds = time.perf_counter() - begin
    finally:
        for name in names:
            engine.abort(name)  # requests that an exception left behind would run beside the next case
    row.time_to_first_token = max(request.first_token for request in requests) - begin
    row.prefill_tokens_per_second = sum(lengths) / row.time_to_first_token
    row.take_steps(steps)
    row.take_experts(stats, llm.stats())
    if steps:
        row.take_bytes(engine, streamed, [length + output_len // 2 for length in lengths])
    else:
        row.problem = why_no_step(llm, lengths, output_len)
    row.bound = engine.meter.times.since(before).bound
    row.kv_resident_share = engine.meter.resident_share
    row.peak_gpu_bytes = engine.executor.peak_bytes()
    row.host_bytes = engine.runner.offload.host.num_bytes
    row.outputs = [answer_of(request.output().outputs[0]) for request in requests]
    return row


def _run(
    llm: LLM, requests: list[Request], num_tokens: int, progress: bool, trace: Callable[[LLMEngine], None] | None
) -> tuple[list[float], list[tuple[int, int]]]:
    """Return seconds and streamed bytes, as for `Row.take_bytes`, of each decode step that gave every request a token.

    A call of `step` launches a step and reads the one before, so the device keeps working between calls. The time of a
    step is therefore the time from the end of one call to the end of the next.
    """
    steps: list[float] = []
    streamed: list[tuple[int, int]] = []
    engine, before, times = llm.engine, llm.stats(), copy.copy(llm.engine.meter.times)
    lengths = [len(request.prompt_token_ids) for request in requests]
    untraced = sum(lengths) - TRACED_CHUNKS * engine.plan.max_num_batched_tokens  # prompt tokens before the trace
    trace_from = before["num_prefill_tokens"] + untraced
    with tqdm(total=num_tokens, desc=f"{llm.mode}, {len(lengths)} x {max(lengths)}", unit="tok",
              disable=not progress, delay=PROGRESS_DELAY_S) as bar:  # fmt: skip
        last = time.perf_counter()
        while not all(request.is_finished for request in requests):
            if trace is not None and engine.meter.trace is None and before["num_prefill_tokens"] >= trace_from:
                engine.start_trace()
            engine.step()
            begin, last = last, time.perf_counter()
            after, step, times = llm.stats(), engine.meter.times.since(times), copy.copy(engine.meter.times)
            is_decode = after["num_decode_steps"] > before["num_decode_steps"]
            if is_decode and after["num_decode_tokens"] - before["num_decode_tokens"] == len(requests):
                steps.append(last - begin)
                streamed.append((step.streamed_bytes, step.fetched_bytes))
            bar.update(after["num_prefill_tokens"] - before["num_prefill_tokens"] + is_decode)
            if trace is not None and engine.meter.trace is not None and len(steps) >= WARM_UP_STEPS + TRACED_STEPS:
                trace(engine)
                trace = None
            before = after
    return steps, streamed


def why_no_step(llm: LLM, lengths: list[int], output_len: int) -> str:
    """Say what kept the sequences from decoding all at once, and what to do."""
    batch, plan = len(lengths), llm.engine.plan
    if output_len == 1:
        return "no decode step to time: the prefill gives the first token, so give an output length of at least 2"
    if batch > plan.max_running:
        lacks_slots = llm.engine.executor.spec.state_bytes and plan.max_running < plan.max_num_seqs
        name = "state_slots" if lacks_slots else "max_num_seqs"
        return f"{batch} sequences never decode at once: {name} is {plan.max_running}, raise it"
    tier, limit = ("host", "host") if llm.mode == "offload" else ("gpu", "GPU")
    num_blocks, groups = llm.stats()[f"{tier}_blocks_total"], plan.groups
    count = groups.most_full if tier == "host" else groups.most_blocks
    needed = sum(count(length + output_len) for length in lengths)
    if needed > num_blocks:
        return f"{batch} sequences never decode at once: they need {needed} KV blocks, {num_blocks} fit: raise the " \
               f"{limit} memory limit or lower the batch"  # fmt: skip
    return f"{batch} sequences never decode at once: the first had ended when the last one started, raise output_len"


def release(llm: LLM) -> None:
    llm.close()
    free_memory()


def free_memory() -> None:
    """Free memory that is no longer referenced, before something else takes it."""
    gc.collect()
    if (device := accelerator()) is not None:
        device_of(device).give_back()
