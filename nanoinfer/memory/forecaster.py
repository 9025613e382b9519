"""What fits and how fast it can be, from a model's config alone: no weights, no GPU.

The bytes come from `make_plan`, the same function that the engine spends its budget with. The time of a decode step is
its floor: streamed bytes over the link's bandwidth or, if a device bandwidth is stated, bytes read on the device over
that, whichever takes longer.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanoinfer.common.units import GIB, format_gib, parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.kv.residency import promotion_margin
from nanoinfer.memory.floors import bytes_read_per_step
from nanoinfer.memory.forecast import Forecast, sequences
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
    config = EngineConfig(**given)
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
        longest = self._longest(batch, lambda step: not isinstance(step, str))
        step = self._step(context, batch)
        if isinstance(step, str):
            advice = self._advice_to_fit(context, batch, longest)
            return Forecast(**known, problem=step, longest_context=longest or None, advice=advice)
        return Forecast(
            **known,
            memory=step.memory,
            kv_bytes=step.kv_bytes,
            resident_kv_bytes=step.kv_bytes - step.num_streamed * self.layout.block_bytes,
            streamed_bytes_per_step=step.streamed,
            read_bytes_per_step=step.read,
            longest_context=longest,
            longest_resident_context=self._longest(batch, lambda s: not isinstance(s, str) and not s.streamed),
            largest_batch=_largest(lambda n: self._fits(context, n), MAX_BATCH),
            ms_per_token=step.seconds * 1e3 if step.seconds else None,
            bound=step.bound,
            advice=self._advice(context, batch, step),
        )

    def _longest(self, batch: int, accepts: Callable[[_Step | str], bool]) -> int:
        """Return the longest context, in whole blocks or up to the model's limit, whose step is accepted."""
        size, limit = self.layout.block_size, self.spec.max_position
        return min(
            limit, size * _largest(lambda n: accepts(self._step(min(n * size, limit), batch)), -(-limit // size))
        )

    def _fits(self, context: int, batch: int) -> bool:
        return not isinstance(self._step(context, batch), str)

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
            consider(self._with_gpu(gib)._step(context, batch), f"{gib} GiB more GPU memory")
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
            found.append(f"at most {longest:,} tokens of context for {sequences(batch)}")
        if context > self.spec.max_position:  # no memory helps
            return tuple(found)
        fewer = _largest(lambda n: self._fits(context, n), batch)
        if fewer:
            found.append(f"a batch of at most {fewer} at {context:,} tokens")
        if not self.config.may_offload:
            offloaded = replace(self, config=replace(self.config, enable_cpu_offload=True))
            if offloaded._fits(context, batch):
                found.append("enable_cpu_offload=True")
        # The most of the GPU's is what another card could have.
        for place, most, with_more in (("host", 256, self._with_host), ("GPU", 32, self._with_gpu)):
            gib = 1 + bisect_left(range(1, most + 1), True, key=lambda gib: with_more(gib)._fits(context, batch))
            if gib <= most:
                found.append(f"{gib} GiB more {place} memory")
        return tuple(found)

    def _with_gpu(self, gib: int) -> _Forecaster:
        return replace(self, budget_bytes=self.budget_bytes + gib * GIB)

    def _with_host(self, gib: int) -> _Forecaster:
        config = self.config
        if config.host_memory_limit is not None:
            limit = parse_bytes(config.host_memory_limit, "host_memory") + gib * GIB
            config = replace(config, host_memory_limit=limit)
        return replace(self, host_bytes=self.host_bytes + gib * GIB, config=config)


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
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))
