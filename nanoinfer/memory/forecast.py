"""What fits and how fast it can be, from a model's config alone: no weights, no GPU.

The bytes come from `make_plan`, the same function that the engine spends its budget with. The time of a decode step is
its floor: streamed bytes over the link's bandwidth or, if a device bandwidth is stated, bytes read on the device over
that, whichever takes longer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanoinfer.common.units import GIB, format_gib, parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.kv.residency import promotion_margin
from nanoinfer.memory.floors import bytes_read_per_step
from nanoinfer.memory.plan import MemoryPlan, gpu_budget, make_plan
from nanoinfer.memory.sizes import spec_and_layout
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.shapes import SHAPES, write_shape
from nanoinfer.weights.load import load_config
from offload import KVLayout
from offload.memory.host_memory import memory_available_bytes

DEFAULT_LINK_GBPS = 25.0  # PCIe 4 x16
DEFAULT_CONTEXT = 32_768
MAX_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What an engine will take, hold and reach. Sizes in bytes, lengths in tokens.

    Attributes:
        problem: why it does not fit and what to do; None where it fits. Where it does not, of the figures below only
            `longest_context` may be given.
        memory: the engine's plan.
        kv_bytes: KV cache of `batch` sequences of `context` tokens, in whole blocks.
        resident_kv_bytes: the part of it that stays on the GPU.
        streamed_bytes_per_step: what each decode step moves over the link.
        longest_context: the longest that fits with this batch.
        longest_resident_context: the longest at which nothing streams.
        largest_batch: the largest that fits with this context.
        ms_per_token: floor of a decode step, which gives each sequence a token. None where nothing streams and no
            device bandwidth was stated.
        bound: what sets this floor: "link" or "device memory".
        advice: what would help most, best first.
    """

    model: str
    context: int
    batch: int
    link_gbps: float
    device_gbps: float | None
    budget_bytes: int
    host_budget_bytes: int
    problem: str | None = None
    memory: MemoryPlan | None = None
    kv_bytes: int | None = None
    resident_kv_bytes: int | None = None
    streamed_bytes_per_step: int | None = None
    read_bytes_per_step: int | None = None
    longest_context: int | None = None
    longest_resident_context: int | None = None
    largest_batch: int | None = None
    ms_per_token: float | None = None
    bound: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def resident_share(self) -> float:
        """Share of the KV cache that stays on the GPU."""
        return self.resident_kv_bytes / self.kv_bytes if self.kv_bytes else 1.0

    def one_line(self) -> str:
        if not self.fits:
            return f"{self.model}, {self.batch} x {self.context} tokens: does not fit: {self.problem}"
        return (
            f"{self.model}, {self.batch} x {self.context} tokens: {self.memory.total_bytes / GIB:.2f} of "
            f"{self.budget_bytes / GIB:.2f} GiB on the GPU, {self.resident_share:.0%} of {self.kv_bytes / GIB:.2f} GiB "
            f"of KV stays there, {self.streamed_bytes_per_step / GIB:.2f} GiB stream in each step: {self._speed()}"
        )

    def _speed(self) -> str:
        if self.ms_per_token is None:
            return "nothing streams; state device_gbps for the time of a step"
        rate = self.batch / self.ms_per_token * 1e3
        return f"at least {self.ms_per_token:.1f} ms per step, at most {rate:.1f} tokens/s ({self.bound})"

    def report(self) -> str:
        """Return a table, or what to do if the model does not fit."""
        lines = [f"{self.model}, {self.batch} x {self.context:,} tokens"]
        if self.fits:
            lines += [""] + self._table()
        else:
            lines += ["", f"does not fit: {self.problem}"]
        if self.advice:
            lines += ["", "what would help:"] + [f"  - {text}" for text in self.advice]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        memory = self.memory
        streams = self.streamed_bytes_per_step
        buffers = memory.workspace_bytes + memory.library_bytes
        device = f", {self.device_gbps:g} GB/s on the device" if self.device_gbps else ""
        rows = [
            ("GPU memory", f"{format_gib(memory.total_bytes)} of {format_gib(self.budget_bytes)} GiB"),
            ("  weights", f"{format_gib(memory.weight_bytes)} GiB"),
            ("  activations", f"{format_gib(memory.activation_bytes)} GiB, "
                              f"{memory.max_num_batched_tokens} tokens at a time"),
            ("  buffers", f"{format_gib(buffers)} GiB, workspaces of libraries included"),
            ("  graphs", f"{format_gib(memory.graph_bytes)} GiB"),
            ("  ring", f"{format_gib(memory.ring_bytes)} GiB, whatever the context"),
            ("  KV pool", f"{format_gib(memory.pool_bytes)} GiB, {memory.num_gpu_blocks - 1} blocks"),
            ("host memory", f"{format_gib(memory.host_bytes)} of {format_gib(self.host_budget_bytes)} GiB"),
            ("KV cache", f"{format_gib(self.kv_bytes)} GiB, {self.resident_share:.1%} of it stays on the GPU"),
            ("streamed per step", f"{format_gib(streams)} GiB" if streams else "nothing"),
            ("longest context", f"{_count(self.longest_context)} tokens for {_sequences(self.batch)}, "
                                f"{_count(self.longest_resident_context)} with nothing to stream"),
            ("largest batch", f"{_count(self.largest_batch)} of {self.context:,} tokens"),
            ("decode step", f"{self._speed()}, at {self.link_gbps:g} GB/s over the link{device}"),
        ]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        return [f"{name:{width}}  {value}" for name, value in rows]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def plan(
    model: str | Path,
    *,
    gpu_memory: int | float | str | None = None,
    host_memory: int | str | None = None,
    context: int | None = None,
    batch: int = 1,
    link_gbps: float = DEFAULT_LINK_GBPS,
    device_gbps: float | None = None,
    **arguments: Any,
) -> Forecast:
    """Works out what an engine with these limits would do.

    Args:
        model: directory of a checkpoint or hub id, of which only the config is read, or a shape such as "qwen3-4b".
        gpu_memory, host_memory: limits, such as "12GiB"; None takes this machine's.
        context: tokens of each sequence, output included; None: 32,768 or the model's limit.
        batch: sequences at once.
        link_gbps: bandwidth from host to GPU, in GB/s (10^9): about 12 for PCIe 3 x16, 25 for PCIe 4, 52 for PCIe 5.
        device_gbps: bandwidth of the GPU's memory in GB/s; None leaves the device out of the forecast.
        arguments: further fields of `EngineConfig`.

    Raises:
        ValueError: an argument is not allowed, or a limit is missing on a machine without a GPU. What merely does not
            fit is no error: see `Forecast.problem`.
    """
    for name, value in (("link_gbps", link_gbps), ("device_gbps", device_gbps)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be a positive number of GB/s")
    for name, value in (("batch", batch), ("context", context)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    arguments = {"enable_cpu_offload": True, **arguments}
    given = {"model": model, "gpu_memory_limit": gpu_memory, "host_memory_limit": host_memory, **arguments}
    config = EngineConfig.from_arguments(given)
    with tempfile.TemporaryDirectory() as directory:
        path = write_shape(str(model), directory) if model in SHAPES else model
        hf_config = load_config(path, names=SHAPES)
    spec, layout = spec_and_layout(config, hf_config)
    host_available = memory_available_bytes()
    if host_memory is not None:
        host_available = parse_bytes(host_memory, "host_memory")
    forecaster = _Forecaster(
        spec=spec,
        layout=layout,
        config=config,
        name=str(model),
        budget_bytes=_budget(config, host_available),
        host_bytes=host_available,
        link_gbps=link_gbps,
        device_gbps=device_gbps,
    )
    return forecaster.forecast(context or min(DEFAULT_CONTEXT, spec.max_position), batch)


def _budget(config: EngineConfig, host_available: int) -> int:
    if config.gpu_memory_limit is not None and not isinstance(config.gpu_memory_limit, float):
        return parse_bytes(config.gpu_memory_limit, "gpu_memory")
    if not torch.cuda.is_available():
        raise ValueError('this machine has no GPU whose memory could be taken: state it, such as gpu_memory="12GiB"')
    return gpu_budget(config, torch.device("cuda", torch.cuda.current_device()), host_available)


@dataclass(frozen=True, kw_only=True)
class _Forecaster:
    """One model on one machine, for any context and batch."""

    spec: ModelSpec
    layout: KVLayout
    config: EngineConfig
    name: str
    budget_bytes: int
    host_bytes: int
    link_gbps: float
    device_gbps: float | None

    def forecast(self, context: int, batch: int) -> Forecast:
        known = dict(
            model=self.name,
            context=context,
            batch=batch,
            link_gbps=self.link_gbps,
            device_gbps=self.device_gbps,
            budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_bytes,
        )
        fits = self._fits
        longest = _largest(lambda n: fits(n * self.layout.block_size, batch), self._max_blocks) * self.layout.block_size
        step = self._step(context, batch)
        if isinstance(step, str):
            longest = min(longest, self.spec.max_position)
            known["longest_context"] = longest or None
            return Forecast(**known, problem=step, advice=self._advice_to_fit(context, batch, longest))
        resident = _largest(
            lambda n: (
                (s := self._step(n * self.layout.block_size, batch)) and not isinstance(s, str) and not s.streamed
            ),
            self._max_blocks,
        )
        return Forecast(
            **known,
            memory=step.memory,
            kv_bytes=step.kv_bytes,
            resident_kv_bytes=step.kv_bytes - step.num_streamed * self.layout.block_bytes,
            streamed_bytes_per_step=step.streamed,
            read_bytes_per_step=step.read,
            longest_context=min(longest, self.spec.max_position),
            longest_resident_context=min(resident * self.layout.block_size, self.spec.max_position),
            largest_batch=_largest(lambda n: fits(context, n), MAX_BATCH),
            ms_per_token=step.seconds * 1e3 if step.seconds else None,
            bound=step.bound,
            advice=self._advice(context, batch, step),
        )

    @property
    def _max_blocks(self) -> int:
        return -(-self.spec.max_position // self.layout.block_size)

    def _fits(self, context: int, batch: int) -> bool:
        return not isinstance(self._step(min(context, self.spec.max_position), batch), str)

    def _step(self, context: int, batch: int) -> _Step | str:
        """A decode step at full context, or why it cannot run."""
        config = replace(self.config, max_model_len=context, max_num_seqs=batch)
        try:
            memory = make_plan(
                config,
                self.spec,
                self.layout,
                budget_bytes=self.budget_bytes,
                host_available_bytes=self.host_bytes,
                is_cuda=True,
            )
        except ValueError as error:
            return str(error)
        num_full, num_blocks = context // self.layout.block_size, -(-context // self.layout.block_size)
        room = memory.num_gpu_blocks - 1  # without scratch
        num_streamed = 0
        if batch * num_blocks > room:
            if not config.may_offload:
                return f"{batch} x {context} tokens need {batch * num_blocks} KV blocks, {room} fit on the GPU"
            if batch * num_full > memory.num_host_blocks:
                needed = batch * num_full * self.layout.block_bytes
                return f"{batch} x {context} tokens need {format_gib(needed)} GiB of host memory for KV blocks, " + (
                    f"the limit is {format_gib(memory.host_bytes)} GiB"
                )
            resident = max(0, room - batch - promotion_margin(batch))
            if memory.max_resident_blocks is not None:
                resident = min(resident, memory.max_resident_blocks)
            num_streamed = max(0, batch * num_full - resident)
        elif config.enable_cpu_offload is True and memory.max_resident_blocks is not None:
            num_streamed = max(0, batch * num_full - memory.max_resident_blocks)
        full_layers = sum(window is None for window in self.spec.windows)
        return _Step(
            memory=memory,
            kv_bytes=batch * num_blocks * self.layout.block_bytes,
            num_streamed=num_streamed,
            streamed=num_streamed * full_layers * self.layout.layer_block_bytes,
            read=int(bytes_read_per_step(self.spec, [context] * batch)),
            link_bytes_per_second=self.link_gbps * 1e9,
            device_bytes_per_second=self.device_gbps * 1e9 if self.device_gbps else None,
        )

    # What would help: each answer is the forecast of a changed setting

    def _advice(self, context: int, batch: int, step: _Step) -> tuple[str, ...]:
        if step.bound != "link":
            return ()
        found: list[tuple[float, str]] = []

        def consider(changed: _Step | str, what: str) -> None:
            if not isinstance(changed, str) and changed.seconds < 0.995 * step.seconds:
                reached = f"{changed.seconds * 1e3:.1f} ms" if changed.streamed else "nothing streams"
                found.append(
                    (step.seconds - changed.seconds, f"{what}: {reached} instead of {step.seconds * 1e3:.1f} ms")
                )

        missing = -(-step.num_streamed * self.layout.block_bytes // GIB)
        for gib in sorted({1, missing}):
            more = replace(self, budget_bytes=self.budget_bytes + gib * GIB)
            consider(more._step(context, batch), f"{gib} GiB more GPU memory")
        chunk = step.memory.max_num_batched_tokens
        if chunk > 2048:
            smaller = replace(self, config=replace(self.config, max_num_batched_tokens=chunk // 4))
            consider(smaller._step(context, batch), f"max_num_batched_tokens={chunk // 4}, which slows prefill")
        if batch > 1:
            half = self._step(context, batch // 2)
            if not isinstance(half, str) and half.seconds and batch // 2 / half.seconds > 1.005 * batch / step.seconds:
                found.append((0.0, f"max_num_seqs={batch // 2}: {batch // 2 / half.seconds:.1f} instead of "
                                   f"{batch / step.seconds:.1f} tokens/s in all"))  # fmt: skip
        return tuple(text for _, text in sorted(found, reverse=True))

    def _advice_to_fit(self, context: int, batch: int, longest: int) -> tuple[str, ...]:
        found = []
        if longest:
            found.append(f"at most {longest:,} tokens of context for {_sequences(batch)}")
        if context > self.spec.max_position:  # no memory helps
            return tuple(found)
        fewer = _largest(lambda n: self._fits(context, n), batch)
        if fewer:
            found.append(f"a batch of at most {fewer} at {context:,} tokens")
        if not self.config.may_offload:
            offloaded = replace(self, config=replace(self.config, enable_cpu_offload=True))
            if offloaded._fits(context, batch):
                found.append("enable_cpu_offload=True")
        for gib in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if replace(self, host_bytes=self.host_bytes + gib * GIB, config=self._with_host(gib))._fits(context, batch):
                found.append(f"{gib} GiB more host memory")
                break
        for gib in (1, 2, 4, 8, 16, 32):  # what another card could have
            if replace(self, budget_bytes=self.budget_bytes + gib * GIB)._fits(context, batch):
                found.append(f"{gib} GiB more GPU memory")
                break
        return tuple(found)

    def _with_host(self, gib: int) -> EngineConfig:
        if self.config.host_memory_limit is None:
            return self.config
        limit = parse_bytes(self.config.host_memory_limit, "host_memory") + gib * GIB
        return replace(self.config, host_memory_limit=limit)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One decode step: what it holds and what it moves."""

    memory: MemoryPlan
    kv_bytes: int
    num_streamed: int  # blocks
    streamed: int  # bytes over the link
    read: int  # bytes on the device
    link_bytes_per_second: float
    device_bytes_per_second: float | None

    @property
    def _times(self) -> dict[str, float]:
        times = {"link": self.streamed / self.link_bytes_per_second}
        if self.device_bytes_per_second is not None:
            times["device memory"] = self.read / self.device_bytes_per_second
        return times

    @property
    def seconds(self) -> float:
        return max(self._times.values())

    @property
    def bound(self) -> str | None:
        return max(self._times, key=self._times.get) if self.seconds else None


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest n of 1 to `limit` that fits, or 0 if none does. If n fits, all smaller ones must."""
    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "none"


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"
