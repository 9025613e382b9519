"""One case: a batch of random prompts through an engine, each step timed."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass, field

import torch
from tqdm import tqdm

from nanoinfer.bench.floors import Floors, bytes_read_per_step
from nanoinfer.llm import LLM
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

WARM_UP_STEPS = 3


@dataclass
class Row:
    """One line of the table. Times are seconds, sizes bytes; None: does not apply or was not measured."""

    mode: str
    batch: int
    context: int
    prefill_tokens_per_second: float | None = None
    time_to_first_token: float | None = None
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
    num_steps: int = 0
    check: str | None = None
    problem: str | None = None
    outputs: list[tuple[list[int], list[float]]] = field(default_factory=list, repr=False)

    def figures(self) -> dict:
        """Everything but the tokens, for JSON."""
        figures = asdict(self)
        del figures["outputs"]
        return figures


def random_prompts(vocab_size: int, lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def measure(
    llm: LLM, lengths: list[int], output_len: int, seed: int, floors: tuple[Floors, Floors] | None, progress: bool
) -> Row:
    """Runs prompts of `lengths` tokens at once, greedily, `output_len` tokens each.

    Args:
        floors: bandwidths before and after; None leaves the floor out, for the caller to fill in.
    """
    engine, device = llm.engine, llm.engine.runner.runtime.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=0)
    row = Row(mode=llm.mode, batch=len(lengths), context=max(lengths))
    before = llm.stats()
    begin = time.perf_counter()
    requests = [
        engine.add_request(llm._new_id(), prompt, params)
        for prompt in random_prompts(engine.vocab_size, lengths, seed)
    ]
    steps: list[float] = []
    streamed: list[int] = []
    with tqdm(total=sum(lengths) + output_len, desc=f"{llm.mode}, {len(lengths)} x {max(lengths)}", unit="tok",
              disable=not progress, delay=2) as bar:
        while not all(request.is_finished for request in requests):
            step_begin = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - step_begin
            after = llm.stats()
            is_decode = after["num_decode_steps"] > before["num_decode_steps"]
            everyone_decodes = all(request.first_token is not None for request in requests)
            num_tokens = after["num_decode_tokens"] - before["num_decode_tokens"]
            if is_decode and everyone_decodes and num_tokens == len(lengths):
                steps.append(seconds)
                streamed.append(after["streamed_bytes"] - before["streamed_bytes"])
            bar.update(after["num_prefill_tokens"] - before["num_prefill_tokens"] + is_decode)
            before = after
    row.time_to_first_token = max(request.first_token for request in requests) - begin
    row.prefill_tokens_per_second = sum(lengths) / row.time_to_first_token
    steps, streamed = steps[WARM_UP_STEPS:] or steps, streamed[WARM_UP_STEPS:] or streamed
    row.num_steps = len(steps)
    if steps:
        row.seconds_per_token = statistics.median(steps)
        row.tokens_per_second = len(lengths) / row.seconds_per_token
        row.streamed_bytes_per_step = statistics.median(streamed)
        row.link_gbps = row.streamed_bytes_per_step / row.seconds_per_token / 1e9
    row.peak_gpu_bytes = torch.cuda.max_memory_reserved(device) if is_cuda else None
    offload = engine.runner.offload
    row.host_bytes = offload.host.num_bytes if offload is not None else 0
    row.outputs = [_tokens_and_logprobs(request.output()) for request in requests]
    if floors is not None:
        add_floor(row, llm, lengths, output_len, floors)
    return row


def add_floor(row: Row, llm: LLM, lengths: list[int], output_len: int, floors: tuple[Floors, Floors]) -> None:
    """Compares the row with the better of the bandwidths measured before and after it."""
    best = Floors(max(f.link for f in floors), max(f.device for f in floors))
    if row.seconds_per_token is None:
        return
    middle = [length + output_len // 2 for length in lengths]
    read_bytes = bytes_read_per_step(llm.engine.runner.model.spec, middle)
    row.floor_seconds = best.offload_step(row.streamed_bytes_per_step or 0, read_bytes)
    row.ratio_to_floor = row.seconds_per_token / row.floor_seconds
    row.link_floor_gbps = best.link / 1e9
    row.link_moved = abs(floors[0].link - floors[1].link) / best.link


def _tokens_and_logprobs(output: RequestOutput) -> tuple[list[int], list[float]]:
    completion = output.outputs[0]
    return completion.token_ids, [
        entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]


def compare(rows: list[Row]) -> None:
    """Notes for each row of ours after the first of its batch and context whether it gave the same bits."""
    firsts: dict[tuple[int, int], Row] = {}
    for row in rows:
        if not row.outputs or row.mode.startswith("hf"):
            continue
        first = firsts.setdefault((row.batch, row.context), row)
        if first is row:
            continue
        if row.outputs == first.outputs:
            row.check = f"identical to {first.mode}"
            continue
        place = next(i for i, pair in enumerate(zip(row.outputs, first.outputs, strict=True)) if pair[0] != pair[1])
        row.check = f"DIFFERS from {first.mode} in sequence {place}"


def release(llm: LLM) -> None:
    """Closes an LLM and gives its memory back before the next one is built."""
    llm.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
