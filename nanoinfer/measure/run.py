"""One case: a batch of random prompts through an engine, each step timed."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.memory.floors import Floors, bytes_read_per_step, kv_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.options.measuring import TRACED_STEPS, WARM_UP_STEPS
from nanoinfer.outputs import CompletionOutput
from nanoinfer.requests.request import Request
from nanoinfer.sampling_params import SamplingParams

# Progress bars appear if a case takes longer than this.
PROGRESS_DELAY_S = 2.0
TRACED_CHUNKS = 2  # traced in addition to TRACED_STEPS


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
    streamed_bytes_per_step: float | None = None
    link_gbps: float | None = None
    floor_seconds: float | None = None
    ratio_to_floor: float | None = None
    link_floor_gbps: float | None = None
    link_moved: float | None = None  # relative change of the link's bandwidth during the case
    peak_gpu_bytes: int | None = None
    host_bytes: int | None = None
    kv_resident_share: float | None = None  # share of full KV blocks, in the last step
    bound: str | None = None  # what the steps were bound by
    num_steps: int = 0
    check: str | None = None
    problem: str | None = None
    outputs: list[tuple[list[int], list[float]]] = field(default_factory=list, repr=False)
    steps: list[float] = field(default_factory=list, repr=False)  # the steps that the median is computed from

    def figures(self) -> dict:
        """Return all figures except the tokens and single steps, for JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("outputs", "steps")}

    def take_steps(self, steps: list[float]) -> None:
        """Fill in the figures that follow from `steps`: seconds of the decode steps of the whole batch, in order."""
        self.steps = steps[WARM_UP_STEPS:] or steps
        self.num_steps = len(self.steps)
        if self.steps:
            self.seconds_per_token = statistics.median(self.steps)
            self.tokens_per_second = self.batch / self.seconds_per_token


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
    trace: Callable[[LLMEngine], None] | None = None,
) -> Row:
    """Runs prompts of `lengths` tokens at once, greedily, `output_len` tokens each. `add_floor` fills in the floor.

    Args:
        with_logprobs: for `compare`. Each step is then read before the next is launched, so its times mean nothing.
        trace: called to stop a trace of the last prefill chunks and first decode steps; tracing slows these steps down.

    Raises:
        ValueError: a prompt cannot be used in this engine. After this and any other error no request is left running.
    """
    engine, device = llm.engine, llm.engine.runner.runtime.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    params = SamplingParams(
        temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=0 if with_logprobs else None
    )
    prompts = random_prompts(engine.vocab_size, lengths, seed)
    names = [f"bench-{i}" for i in range(len(prompts))]
    row = Row(mode=llm.mode, batch=len(lengths), context=max(lengths))
    tracer = None if trace is None else _Tracer(llm, sum(lengths), trace)
    before = engine.meter.snapshot()
    begin = time.perf_counter()
    try:
        requests = [engine.add_request(name, prompt, params) for name, prompt in zip(names, prompts, strict=True)]
        steps, streamed = _run(llm, requests, sum(lengths) + output_len, progress, tracer)
        row.total_seconds = time.perf_counter() - begin
    finally:
        for name in names:
            engine.abort(name)  # requests that an exception left behind would run beside the next case
    row.time_to_first_token = max(request.first_token for request in requests) - begin
    row.prefill_tokens_per_second = sum(lengths) / row.time_to_first_token
    row.take_steps(steps)
    if steps:
        row.streamed_bytes_per_step = statistics.median(streamed[WARM_UP_STEPS:] or streamed)
        row.link_gbps = row.streamed_bytes_per_step / row.seconds_per_token / 1e9
    else:
        row.problem = _why_no_step(llm, lengths, output_len)
    row.bound = engine.meter.times.since(before).bound
    row.kv_resident_share = engine.meter.resident_share
    row.peak_gpu_bytes = engine.runner.peak_bytes()
    row.host_bytes = engine.runner.offload.host.num_bytes
    row.outputs = [_tokens_and_logprobs(request.output().outputs[0]) for request in requests]
    return row


def _run(
    llm: LLM, requests: list[Request], num_tokens: int, progress: bool, tracer: _Tracer | None
) -> tuple[list[float], list[int]]:
    """Return seconds and streamed bytes of each decode step in which every request got a token.

    A call of `step` launches a step and reads the one before, so the device keeps working between calls. The time of a
    step is therefore the time from the end of one call to the end of the next.
    """
    steps: list[float] = []
    streamed: list[int] = []
    before = llm.stats()
    lengths = [len(request.prompt_token_ids) for request in requests]
    with tqdm(total=num_tokens, desc=f"{llm.mode}, {len(lengths)} x {max(lengths)}", unit="tok",
              disable=not progress, delay=PROGRESS_DELAY_S) as bar:  # fmt: skip
        last = time.perf_counter()
        while not all(request.is_finished for request in requests):
            llm.engine.step()
            begin, last = last, time.perf_counter()
            after = llm.stats()
            is_decode = after["num_decode_steps"] > before["num_decode_steps"]
            if is_decode and after["num_decode_tokens"] - before["num_decode_tokens"] == len(requests):
                steps.append(last - begin)
                streamed.append(after["decode_streamed_bytes"] - before["decode_streamed_bytes"])
            bar.update(after["num_prefill_tokens"] - before["num_prefill_tokens"] + is_decode)
            if tracer is not None:
                tracer.after_step(after, len(steps))
            before = after
    return steps, streamed


class _Tracer:
    """Traces the last prefill chunks of a case and its first decode steps of the whole batch."""

    def __init__(self, llm: LLM, num_prompt_tokens: int, stop: Callable[[LLMEngine], None]) -> None:
        self._engine, self._stop = llm.engine, stop
        tokens = num_prompt_tokens - TRACED_CHUNKS * llm.engine.plan.max_num_batched_tokens
        stats = llm.stats()
        self._first = stats["num_prefill_tokens"] + tokens
        self._is_done = False
        self.after_step(stats, 0)

    def after_step(self, stats: dict, num_steps: int) -> None:
        """Start or end the trace; called after each step of the engine."""
        if self._is_done:
            return
        if self._engine.meter.trace is None:
            if stats["num_prefill_tokens"] >= self._first:
                self._engine.start_trace()
        elif num_steps >= WARM_UP_STEPS + TRACED_STEPS:
            self._stop(self._engine)
            self._is_done = True


def _why_no_step(llm: LLM, lengths: list[int], output_len: int) -> str:
    """Say what kept the sequences from decoding all at once, and what to do."""
    batch, max_num_seqs = len(lengths), llm.engine.plan.max_num_seqs
    if output_len == 1:
        return "no decode step to time: the prefill gives the first token, so give an output length of at least 2"
    if batch > max_num_seqs:
        return f"{batch} sequences never decode at once: max_num_seqs is {max_num_seqs}, raise it"
    place, limit = ("host", "host") if llm.mode == "offload" else ("gpu", "GPU")
    num_blocks, block_size = llm.stats()[f"{place}_blocks_total"], llm.engine.config.block_size
    needed = sum(-(-(length + output_len) // block_size) for length in lengths)
    if needed > num_blocks:
        return f"{batch} sequences never decode at once: they need {needed} KV blocks, {num_blocks} fit: raise the " \
               f"{limit} memory limit or lower the batch"  # fmt: skip
    return f"{batch} sequences never decode at once: the first had ended when the last one started, raise output_len"


def add_floor(
    row: Row, spec: ModelSpec | None, lengths: list[int], output_len: int, floors: tuple[Floors, Floors], *,
    streams_all: bool = False,
) -> None:  # fmt: skip
    """Compares the row with the better of the bandwidths measured before and after it.

    Args:
        streams_all: each step brings all KV over the link, as transformers' offloaded caches do. Else the row says how
            many bytes.
    """
    if row.seconds_per_token is None or spec is None:
        return
    best = Floors(max(f.link for f in floors), max(f.device for f in floors))
    middle = [length + output_len // 2 for length in lengths]
    streamed_bytes = kv_bytes(spec, middle) if streams_all else row.streamed_bytes_per_step
    row.floor_seconds = best.offload_step(streamed_bytes, bytes_read_per_step(spec, middle))
    row.ratio_to_floor = row.seconds_per_token / row.floor_seconds
    row.link_floor_gbps = best.link / 1e9
    row.link_moved = abs(floors[0].link - floors[1].link) / best.link


def _tokens_and_logprobs(completion: CompletionOutput) -> tuple[list[int], list[float]]:
    if completion.logprobs is None:
        return completion.token_ids, []
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return completion.token_ids, [entry[token].logprob for token, entry in pairs]


def compare(rows: list[Row]) -> None:
    """Note for each row of our modes whether its bits equal those of the first row with its batch and context."""
    firsts: dict[tuple[int, int], Row] = {}
    for row in rows:
        if not row.outputs or row.mode.startswith("hf"):
            continue
        first = firsts.setdefault((row.batch, row.context), row)
        if first is not row:
            row.check = _first_difference(row, first) or f"identical to {first.mode}"


def _first_difference(row: Row, first: Row) -> str | None:
    """Return the first place where tokens or log-probabilities differ in any bit; None if there is none."""
    for sequence, pair in enumerate(zip(row.outputs, first.outputs, strict=True)):
        both = (itertools.zip_longest(tokens, logprobs) for tokens, logprobs in pair)
        for place, (found, wanted) in enumerate(itertools.zip_longest(*both)):
            if found != wanted:
                return f"DIFFERS from {first.mode} in sequence {sequence} at token {place}"
    return None


def release(llm: LLM) -> None:
    """Close an LLM and free its memory before the next one is built."""
    llm.close()
    free_memory()


def free_memory() -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
