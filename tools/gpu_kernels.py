"""What the kernels of a decode step take, from a torch.profiler trace, beside the bytes that each must read."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from nanoinfer.memory.floors import kv_bytes
from nanoinfer.models.base import ModelSpec

STEP = "decode step"  # how the trace calls a call of engine.step
SKIPPED_FIRST, SKIPPED_LAST = 2, 1  # steps in which the profiler starts, or whose successor is missing
MIN_SHARE = 0.005  # of a step, for a line in the table
DEFAULT_BLOCK_SIZE = 256

# Part of a kernel's name -> what it computes. The first match counts. None: moves little, or nothing that is worth a
# floor.
LAYER = ("qkv", "o", "gate_up", "down")
LIBRARY_LAYERS = "all library products of the layers"
KERNELS: tuple[tuple[str, str | None], ...] = (
    ("rows_linear_kernel", "products"),
    ("tile_linear_kernel", "products"),
    ("decode_partial_kernel", "attention"),
    ("merge_kernel", "merge"),
    ("splitKreduce", None),
    # The library's: called once per step it is the head. The layers' products share names in ways that depend on the
    # library's version, so they have a floor only together.
    ("nvjet", "library"),
    ("gemm", "library"),
    ("gemv", "library"),
    ("cutlass", "library"),
)


def kernel_floor(
    name: str,
    spec: ModelSpec,
    lengths: list[int],
    device_bandwidth: float,
    *,
    calls: float = 1.0,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> float | None:
    """Seconds below which one call cannot come, from the bytes that it must read; None: no floor is known.

    One kernel may serve several products of a layer, which its name does not tell apart: the mean over them then.

    Args:
        lengths: tokens of each row of the decode batch.
        device_bandwidth: bytes per second of a large copy on the device, read and written.
        calls: per step; tells the head from the layers' products.
        block_size: tokens of one split of the attention. Those of a short row are smaller, and the merge's floor then
            lower than its bytes would have it.
    """
    served, products = _served(name), product_bytes(spec)
    if name == LIBRARY_LAYERS:
        num_bytes = statistics.fmean(products[product] for product in LAYER)
    elif served == "library":
        if calls >= 1.5:
            return None
        num_bytes = products["lm_head"]
    elif served == "products":
        # All of the layers and, where there is one call more, the head.
        num_bytes = len(spec.layers) * sum(products[product] for product in LAYER)
        num_calls = len(spec.layers) * len(LAYER)
        if calls > num_calls:
            num_bytes, num_calls = num_bytes + products["lm_head"], num_calls + 1
        num_bytes /= num_calls
    elif served is None:
        return None
    elif served == "attention":
        num_bytes = kv_bytes(spec, lengths) / len(spec.layers)
    elif served == "merge":
        num_splits = sum(-(-length // block_size) for length in lengths)
        heads = spec.attention
        num_bytes = num_splits * heads.num_q_heads * (heads.head_dim + 1) * 4  # float32: the sum, and one exponent
    return num_bytes / device_bandwidth


def _served(name: str) -> str | None:
    """The entry of `KERNELS` for a kernel's name; None where there is none."""
    return next((served for part, served in KERNELS if part in name), None)


def product_bytes(spec: ModelSpec) -> dict[str, int]:
    """Bytes of the weights of each product of a layer, and of the head."""
    q, kv = spec.attention.q_size, spec.attention.kv_size
    rows = {
        "qkv": q + 2 * kv,
        "o": q,
        "gate_up": 2 * spec.intermediate_size,
        "down": spec.intermediate_size,
        "lm_head": spec.vocab_size,
    }
    return {product: count * spec.hidden_size * spec.dtype.itemsize for product, count in rows.items()}


def profile_steps(step: Callable[[], object], num_steps: int) -> list[dict]:
    """Trace events of `num_steps` calls of `step` and of those that `step_summary` leaves out. Needs CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(SKIPPED_FIRST + num_steps + SKIPPED_LAST):
            with record_function(STEP):
                step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


@dataclass(frozen=True)
class Work:
    """One kernel or copy on the device. Times in microseconds, as in the trace.

    Attributes:
        own: time in which it ran and no kernel before it did any more. Kernels of programmatic dependent launches start
            early and wait for the one before, so their durations overlap.
    """

    name: str
    is_kernel: bool
    begin: float
    end: float
    own: float


def steps_of(events: list[dict]) -> list[list[Work]]:
    """What ran on the device for each step that counts, in the order of its begin.

    Work belongs to the step whose call launched it; what a graph holds, to the step that launched the graph.

    Raises:
        RuntimeError: the trace has no kernels, or no steps.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if _is(e, "user_annotation") and e["name"] == STEP)
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if _is(e, "cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    device = sorted((e for e in events if _is(e, "kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    if not spans or not any(_is(e, "kernel") for e in device):
        raise RuntimeError(
            f"the profiler saw {len(spans)} steps and {len(device)} kernels and copies: is CUPTI usable?"
        )
    steps: list[list[Work]] = [[] for _ in spans]
    number, kernel_end = -1, device[0]["ts"]
    for event in device:
        launched = launches.get(event.get("args", {}).get("correlation"))
        if launched is not None:
            number = next((i for i, (begin, end) in enumerate(spans) if begin <= launched <= end), -1)
        begin, end = event["ts"], event["ts"] + event["dur"]
        own = max(0.0, end - max(begin, kernel_end))
        if event["cat"] == "kernel":
            kernel_end = max(kernel_end, end)
        if number >= 0:
            steps[number].append(Work(event["name"], event["cat"] == "kernel", begin, end, own))
    kept = [step for step in steps[SKIPPED_FIRST:] if any(work.is_kernel for work in step)]
    if len(kept) < 2:
        raise RuntimeError(
            f"kernels were found for {len(kept)} of {len(spans)} steps: their launches are not in the trace"
        )
    return kept


def _is(event: dict, *categories: str) -> bool:
    return event.get("ph") == "X" and event.get("cat") in categories


def step_summary(events: list[dict]) -> dict:
    """Medians over the steps of a trace, in seconds.

    `gap_between_steps_seconds`: from the end of a step's last kernel to the next one's first;
    `gaps_within_step_seconds`: the sum of the times between kernels of one step; both as a share of the step, too.
    Copies do not count as work there.
    """
    periods, between, within, busy = [], [], [], []
    kernels = [[work for work in step if work.is_kernel] for step in steps_of(events)]
    for step, following in pairwise(kernels):
        periods.append(following[0].begin - step[0].begin)
        end = max(work.end for work in step)
        between.append(max(0.0, following[0].begin - end))
        within.append(sum(_gaps(step)))
        busy.append(end - step[0].begin - within[-1])
    period = statistics.median(periods)
    return {
        "num_profiled_steps": len(periods),
        "profiled_step_seconds": period / 1e6,
        "busy_seconds_per_step": statistics.median(busy) / 1e6,
        "gap_between_steps_seconds": statistics.median(between) / 1e6,
        "gap_between_steps_share": statistics.median(between) / period,
        "gaps_within_step_seconds": statistics.median(within) / 1e6,
        "gaps_within_step_share": statistics.median(within) / period,
        "num_kernels_per_step": statistics.median(map(len, kernels)),
    }


def _gaps(step: list[Work]) -> Iterator[float]:
    """Times in which none of the step's kernels ran, from its first one to its last."""
    latest_end = step[0].end
    for work in step[1:]:
        yield max(0.0, work.begin - latest_end)
        latest_end = max(latest_end, work.end)


def kernel_table(
    events: list[dict],
    spec: ModelSpec,
    lengths: list[int],
    device_bandwidth: float,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> list[dict]:
    """One line per name that takes more than `MIN_SHARE` of a step, the longest first.

    `seconds_per_call` leaves out the time in which an earlier kernel still ran, so the kernels' shares add up to at
    most 1; `traced_seconds_per_call` is from begin to end. Where the library computes every product of the layers, a
    last line has them all together.
    """
    steps = steps_of(events)
    firsts = [next(work.begin for work in step if work.is_kernel) for step in steps]
    total = firsts[-1] - firsts[0]
    found: dict[str, list[Work]] = defaultdict(list)
    for step in steps[:-1]:
        for name, group in groupby(sorted(step, key=lambda work: work.name), key=lambda work: work.name):
            found[name] += group
    lines = []
    library = [
        work
        for name, calls in found.items()
        if _served(name) == "library" and len(calls) > 1.5 * (len(steps) - 1)
        for work in calls
    ]
    if round(len(library) / (len(steps) - 1)) == len(LAYER) * len(spec.layers):
        found[LIBRARY_LAYERS] = library
    for name, calls in found.items():
        own = sum(work.own for work in calls)
        per_step = len(calls) / (len(steps) - 1)
        if own < MIN_SHARE * total:
            continue
        floor = kernel_floor(name, spec, lengths, device_bandwidth, calls=per_step, block_size=block_size)
        seconds = own / len(calls) / 1e6
        line = {
            "name": name,
            "calls_per_step": per_step,
            "seconds_per_call": seconds,
            "traced_seconds_per_call": sum(work.end - work.begin for work in calls) / len(calls) / 1e6,
            "share": own / total,
        }
        if floor is not None:
            line |= {"floor_seconds": floor, "ratio_to_floor": seconds / floor}
        lines.append(line)
    return sorted(lines, key=lambda line: (line["name"] == LIBRARY_LAYERS, -line["share"]))
