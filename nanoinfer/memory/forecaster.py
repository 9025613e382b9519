"""What fits and how fast it can be, from a model's config alone: no weights, no GPU.

The bytes come from `best_plan`, the same function that the engine spends its budget with. The time of a decode step is
its floor: streamed bytes over the link's bandwidth or, if a device bandwidth is stated, bytes read on the device over
that, whichever takes longer; of a sparse model with what its layers take besides.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from nanoinfer.attention.base import check_format
from nanoinfer.common.other_names import takes_also
from nanoinfer.common.speculation import MOST_TOKENS
from nanoinfer.common.units import GIB, format_gib, format_size, parse_count
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.devices.cuda import TESTED
from nanoinfer.devices.registry import accelerator, device_of, planned_device
from nanoinfer.execution.group import MAILBOX_BYTES
from nanoinfer.kernels.kv.registry import make_format
from nanoinfer.memory.budget import gpu_budget
from nanoinfer.memory.cards import card_named
from nanoinfer.memory.floors import bytes_read_per_step, sparse_layers_seconds
from nanoinfer.memory.forecast import Forecast
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.machine import device_memory
from nanoinfer.memory.measure import DEFAULT_CONTEXT
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.proposals import Proposal, Proposer
from nanoinfer.memory.ranks import notes_of_ranks, specs_of_rank
from nanoinfer.memory.rates import DEFAULT_LINK_GBPS, Rates
from nanoinfer.memory.search import best_plan
from nanoinfer.memory.setup import Specs
from nanoinfer.memory.streamed import missed_bytes, num_blocks, num_streamed, streamed_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.shapes import SHAPES, shape_named, write_shape
from nanoinfer.weights.load import read_checkpoint
from offload.memory.host_memory import memory_available_bytes

MAX_BATCH = 4096
HIT_RATES = (0.5, 0.8, 0.9)
MOST_GIB = 2048  # the most memory that is looked for


@takes_also(
    max_model_len="context", gpu_memory_limit="gpu_memory", host_memory_limit="host_memory", batch="max_num_seqs"
)
def plan(
    model: str | Path,
    *,
    gpu: str | None = None,
    gpu_memory_limit: int | float | str | None = None,
    host_memory_limit: int | str | None = None,
    max_model_len: int | str | None = None,
    batch: int | None = None,
    link_gbps: float | None = None,
    device_gbps: float | None = None,
    tokens_per_pass: float = 1,
    **arguments: Any,
) -> Forecast:
    """Work out what an engine with these limits would do: what is not given is as `nanoinfer serve` has it.

    Args:
        model: directory of a checkpoint or hub id, of which only the config is read, or a shape such as "qwen3-4b".
        gpu: a card, such as "RTX 4070": its memory and bandwidths, where they are not given (`memory/cards.toml`).
        gpu_memory_limit, host_memory_limit: limits, such as "12GiB"; None takes this machine's.
        max_model_len: tokens of each sequence, output included; None: the engine's choice, of which a step is forecast
            with 32,768, or with as many as there can be.
        batch: sequences at once; None: the engine's choice, of which a step with one is forecast.
        link_gbps: bandwidth from host to GPU, in GB/s (10^9): about 12 for PCIe 3 x16, 25 for PCIe 4, 52 for PCIe 5;
            None: the card's, or 25.
        device_gbps: bandwidth of the GPU's memory in GB/s; None leaves the device out of the forecast.
        tokens_per_pass: tokens that a sequence is assumed to gain in a step, on average, by drafts (docs/drafts.md).
        arguments: further fields of `EngineConfig`.

    Raises:
        ValueError: an argument is not allowed, or a limit is missing on a machine without a GPU. What merely does not
            fit is no error: see `Forecast.problem`.
    """
    limits = dict(gpu_memory_limit=gpu_memory_limit, host_memory_limit=host_memory_limit, max_model_len=max_model_len)
    limits |= dict(gpu=gpu, batch=batch, link_gbps=link_gbps, device_gbps=device_gbps)
    return forecaster(model, tokens_per_pass=tokens_per_pass, **limits, **arguments).forecast()


def forecaster(
    model: str | Path, *, gpu: str | None, gpu_memory_limit: int | float | str | None,
    host_memory_limit: int | str | None, max_model_len: int | None, batch: int | None, link_gbps: float | None,
    device_gbps: float | None, tokens_per_pass: float = 1, **arguments: Any,
) -> Forecaster:  # fmt: skip
    """Return what forecasts for any context and batch; for the arguments see `plan`."""
    card = None if gpu is None else card_named(gpu)
    if card is not None:
        gpu_memory_limit = card.memory if gpu_memory_limit is None else gpu_memory_limit
        link_gbps, device_gbps = link_gbps or card.link_gbps, device_gbps or card.device_gbps
    link_gbps = DEFAULT_LINK_GBPS if link_gbps is None else link_gbps
    for name, value in (("link_gbps", link_gbps), ("device_gbps", device_gbps)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be a positive number of GB/s")
    if type(tokens_per_pass) not in (int, float) or not 1 <= tokens_per_pass <= 1 + MOST_TOKENS:
        raise ValueError(
            f"tokens_per_pass={tokens_per_pass!r} must be a number from 1, which is without drafts, to "
            f"{1 + MOST_TOKENS}: a draft has at most {MOST_TOKENS} tokens"
        )
    if isinstance(max_model_len, str):
        max_model_len = parse_count(max_model_len, "max_model_len")
    max_model_len = None if max_model_len == -1 else max_model_len  # as in EngineConfig
    for name, value in (("batch", batch), ("max_model_len", max_model_len)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    limits = dict(gpu_memory_limit=gpu_memory_limit, host_memory_limit=host_memory_limit)
    limits |= dict(max_model_len=max_model_len, max_num_seqs=batch)
    config = EngineConfig(**{"model": model, "enable_cpu_offload": "auto", **limits, **arguments})
    shape, num_ranks = shape_named(model), config.tensor_parallel_size
    if shape is not None:
        specs = _specs_of_shape(shape, json.dumps(config.hf_overrides), num_ranks)
    else:
        specs = specs_of_rank(read_checkpoint(model, config.hf_overrides, names=SHAPES), num_ranks)
    is_this_machine = card is None and not isinstance(config.gpu_memory_limit, int)
    here = accelerator() if is_this_machine else None
    lacks_float8 = card.lacks_float8 if card is not None else None if here is None else device_of(here).lacks_float8()
    spec = _spec(specs, config, lacks_float8)
    host_bytes = memory_available_bytes() if host_memory_limit is None else int(config.host_memory_limit)
    if num_ranks > 1:  # all have it together
        host_bytes //= num_ranks
        config = replace(config, host_memory_limit=None if host_memory_limit is None else host_bytes)
    asked = Forecast(
        model=str(model),
        context=max_model_len or min(DEFAULT_CONTEXT, spec.max_position),
        batch=batch or 1,
        tokens_per_pass=tokens_per_pass,
        link_gbps=link_gbps,
        device_gbps=device_gbps,
        budget_bytes=_budget(config, host_bytes) - (0 if num_ranks == 1 else 2 * MAILBOX_BYTES),
        host_budget_bytes=host_bytes,
        notes=(() if card is None else tuple(card.notes)) + notes_of_ranks(spec),
    )
    rates = Rates.of_card(card) if card is not None else Rates() if here is None else Rates.of(device_of(here))
    place = card if here is None else device_of(here)
    is_old = getattr(place, "capability", TESTED) < TESTED
    return Forecaster(specs, config, asked, lacks_float8=lacks_float8, rates=rates, is_old=is_old)


@lru_cache(maxsize=16)
def _specs_of_shape(shape: str, overrides: str, num_ranks: int) -> Specs:
    """overrides: as in `EngineConfig.hf_overrides`, in JSON. A shape is the same each time, and so counted once."""
    with tempfile.TemporaryDirectory() as directory:
        return specs_of_rank(read_checkpoint(write_shape(shape, directory), json.loads(overrides)), num_ranks)


def _spec(specs: Specs, config: EngineConfig, lacks_float8: str | None) -> ModelSpec:
    """Return the model's numbers; ValueError if these settings do not fit it, or a GPU that lacks this for fp8."""
    kv_format = make_format(config.kv_cache_dtype)
    if kv_format is not None and config.attention_backend in ("auto", "triton"):
        check_format(kv_format, lacks_float8)
    return specs.of(config)


def _budget(config: EngineConfig, host_available: int) -> int:
    if isinstance(config.gpu_memory_limit, int):  # no share
        return int(config.gpu_memory_limit)
    device = accelerator()
    if device is None:
        raise ValueError(
            'this machine has no GPU whose memory could be counted: name the card that it is for, gpu="RTX 4070", or '
            'state gpu_memory_limit="12GiB"'
        )
    return gpu_budget(config, device_memory(device), host_available)


@dataclass(frozen=True)
class Forecaster:
    """One model on one machine, for any context and batch; `asked` has what is given, and no answers.

    device: what the plan is made for.
    lacks_float8: as `Device.lacks_float8`; None also where nothing is known of the GPU.
    rates: by which the engine chooses its plan there; a bandwidth that is stated is not known to it.
    is_old: whether it is a GPU for which kernels of packed weights do not compile, so that none are proposed.
    """

    specs: Specs
    config: EngineConfig
    asked: Forecast
    device: Device = field(default_factory=planned_device)
    lacks_float8: str | None = None
    rates: Rates = Rates()
    is_old: bool = False

    @cached_property
    def spec(self) -> ModelSpec:
        return _spec(self.specs, self.config, self.lacks_float8)

    def forecast(self) -> Forecast:
        step = self.step()
        longest = self._longest(self.fits)
        if not step.fits:
            proposals = self.proposer().to_fit()
            advice = self._advice_to_fit(proposals)
            return replace(step, longest_context=longest or None, proposals=proposals, advice=advice)
        step = replace(
            step,
            longest_context=longest,
            longest_resident_context=self._longest(lambda context: self._streams_nothing(context, step)),
            largest_batch=_largest(lambda n: self.fits(step.context, n), MAX_BATCH),
        )
        if step.bound != "link":
            return step
        return replace(step, proposals=self.proposer().to_be_faster(step), advice=self._advice(step))

    def proposer(self) -> Proposer:
        def other(config: EngineConfig) -> Forecaster:
            return replace(self, config=config)

        planner = self._planner(self.config)
        return Proposer(
            self.config,
            context=self.asked.context,
            packs=not self.is_old,
            step=lambda config: other(config).step(),
            longest=lambda config: other(config)._longest(other(config).fits),
            wide_bytes=planner.spec.weight_bytes if self.config.quantization is None else 0,
            memory_bytes=self.asked.budget_bytes + self.asked.host_budget_bytes,
            experts_bytes=planner.spec.sparse.expert_bytes + planner.embedding_bytes if planner.may_have_slots else 0,
        )

    def _streams_nothing(self, context: int, now: Forecast) -> bool:
        """now: the step that is known; where it streams nothing, no shorter one does."""
        step = now if context <= now.context and not now.streamed_bytes_per_step else self.step(context)
        return step.fits and not step.streamed_bytes_per_step

    def _longest(self, accepts: Callable[[int], bool]) -> int:
        """Return the longest context, in whole blocks or up to the model's limit, that is accepted."""
        size, limit = self.spec.block_size, self.spec.max_position
        blocks = _largest(lambda n: accepts(min(n * size, limit)), -(-limit // size))
        return min(limit, size * blocks)

    def step(self, context: int | None = None, batch: int | None = None) -> Forecast:
        """Forecast a decode step at full context, or why it cannot run; no limits yet, and no advice.

        What is not given is as the config says, and else the engine's choice, as in `plan`.
        """
        if (context, batch) not in self._steps:
            self._steps[context, batch] = self._step(context, batch)
        return self._steps[context, batch]

    @cached_property
    def _steps(self) -> dict[tuple[int | None, int | None], Forecast]:
        return {}

    def _step(self, context: int | None, batch: int | None, is_quick: bool = False) -> Forecast:
        wanted = dict(max_model_len=context, max_num_seqs=batch)
        config = replace(self.config, **{name: value for name, value in wanted.items() if value is not None})
        batch, context = config.max_num_seqs or 1, config.max_model_len
        asked, layout = replace(self.asked, context=context or self.asked.context, batch=batch), self.spec.layout
        try:
            memory = best_plan(self._planner(config, is_quick))
        except TooSmall as error:
            return replace(asked, problem=error.problem)  # how much memory would do is among what helps
        except ValueError as error:
            return replace(asked, problem=str(error))
        context = context or min(asked.context, memory.max_model_len)
        asked = replace(asked, context=context)
        lengths, room = [context] * batch, memory.num_gpu_blocks - 1  # one is scratch
        num_full, num_all = num_blocks(self.spec, lengths)
        is_offload = config.enable_cpu_offload is True or num_all > room
        # Nobody is let in without room for the block more that some windows see on the way there, and for steps.
        steps = memory.step_reserve.resident_beside(context, batch, room)
        most = batch * self.spec.kv_groups.most_blocks(context) + steps
        if most > room:
            if not config.may_offload:
                sizes = [format_size(number * layout.block_bytes) for number in (most, room)]
                needed = f"{batch} x {context} tokens need a KV cache of {sizes[0]}"
                return replace(asked, problem=f"{needed}, {sizes[1]} fit on the GPU")
            steps = memory.step_reserve.on_host_beside(context, batch, memory.num_host_blocks)
            most_full = batch * self.spec.kv_groups.most_full(context) + steps
            if most_full > memory.num_host_blocks:
                gib, limit = format_gib(most_full * layout.block_bytes), format_gib(memory.host_bytes)
                needed = f"{batch} x {context} tokens need {gib} GiB of host memory for their KV cache"
                limit = f"the limit is {limit} GiB"
                if config.host_memory_limit is None:
                    limit += " (of what is available here: state host_memory_limit for another machine)"
                return replace(asked, problem=f"{needed}, {limit}")
        streamed = streamed_bytes(config, self.spec, memory, lengths)
        num_lines = ceil(batch * asked.tokens_per_pass)  # each chooses experts of its own
        read = bytes_read_per_step(self.spec, lengths, num_lines)
        times = {"link": streamed / (asked.link_gbps * 1e9)}
        if asked.device_gbps is not None:
            times["device memory"] = read / (asked.device_gbps * 1e9)

        beside = sparse_layers_seconds(self.spec)

        def floor(hit_rate: float | None) -> float:
            # A missing expert is waited for; KV and layers pass beside what is computed.
            missed = missed_bytes(self.spec, memory, num_lines, hit_rate)
            return max(times.values()) + missed / (asked.link_gbps * 1e9) + beside

        missed = missed_bytes(self.spec, memory, num_lines)
        seconds, waited = floor(None), missed / (asked.link_gbps * 1e9)
        bound = max(times, key=lambda name: times[name] + waited * (name == "link"))
        is_known = seconds > beside
        kv_bytes = num_all * layout.block_bytes
        return replace(
            asked,
            memory=memory,
            kv_bytes=kv_bytes,
            resident_kv_bytes=kv_bytes - num_streamed(config, self.spec, memory, lengths) * layout.block_bytes,
            host_kv_bytes=num_full * layout.block_bytes if is_offload else 0,
            streamed_bytes_per_step=streamed + missed,
            ms_at_hit_rate={rate: 1e3 * floor(rate) for rate in HIT_RATES if memory.num_expert_slots},
            read_bytes_per_step=read,
            ms_per_token=seconds * 1e3 if is_known else None,
            bound=bound if is_known else None,
            is_floor=not beside,
        )

    # More memory, which stands behind all that helps and costs nothing

    def _advice(self, step: Forecast) -> tuple[str, ...]:
        """Say what more GPU memory does: one GiB, and what it takes for nothing to stream."""
        now, advice = step.ms_per_token, []
        missing = -(-(step.kv_bytes - step.resident_kv_bytes + step.memory.passing_bytes) // GIB)
        for gib in sorted({1, missing}):
            more = self._with_gpu(gib * GIB).step(step.context, self.config.max_num_seqs)
            if more.fits and (then := more.ms_per_token or 0.0) < 0.995 * now:
                reached = f"{then:.1f} ms" if more.streamed_bytes_per_step else "nothing streams"
                advice.append(f"{gib} GiB more GPU memory: {reached} instead of {now:.1f} ms")
            if not more.streamed_bytes_per_step:
                break
        return tuple(advice)

    def _advice_to_fit(self, proposals: Sequence[Proposal]) -> tuple[str, ...]:
        """Say how much more memory it takes as it is and, where no proposal has all that is wanted, at the least."""
        context, longest = self.config.max_model_len, self.spec.max_position
        is_longer = context is not None and context > longest
        if is_longer and proposals:  # no memory helps
            return ()
        one = replace(self, config=replace(self.config, max_model_len=longest)) if is_longer else self
        advice = [text] if (text := one._missing()) else []
        if not any({"max_model_len", "max_num_seqs"}.isdisjoint(one.changes) for one in proposals):
            proposer = one.proposer()
            config = proposer.leanest()
            text = replace(one, config=config)._missing()
            if text and text not in advice and (words := proposer.words(config)):
                advice.append(f"at the least {text}, with {words}")
        return tuple(f"{text}, for {longest:,} tokens" for text in advice) if is_longer else tuple(advice)

    def _missing(self) -> str | None:
        """Return how much memory this needs beyond what there is, in tenths of a GiB."""
        context = self.config.max_model_len or self.asked.context

        def fits(gpu: int, host: int) -> bool:
            return self._with_gpu(_tenths(gpu))._with_host(_tenths(host)).fits(context)

        most = range(10 * MOST_GIB)
        if not fits(most[-1], most[-1]):
            return None
        gpu = bisect_left(most, True, key=lambda tenths: fits(tenths, most[-1]))
        host = bisect_left(most, True, key=lambda tenths: fits(gpu, tenths))
        has = {"GPU": (gpu, self.asked.budget_bytes), "host": (host, self.asked.host_budget_bytes)}
        return " and ".join(
            f"{tenths / 10:g} GiB more {tier} memory (in all {format_gib(now + _tenths(tenths))} GiB)"
            for tier, (tenths, now) in has.items()
            if tenths
        )

    def fits(self, context: int | None = None, batch: int | None = None) -> bool:
        """Whether `step` fits, which the smallest prefill step says: others leave less memory."""
        return self._step(context, batch, is_quick=True).fits

    def _planner(self, config: EngineConfig, is_quick: bool = False) -> Planner:
        budget, host_bytes = self.asked.budget_bytes, self.asked.host_budget_bytes
        return Planner(config, self.spec, self.device, budget, host_bytes, rates=self.rates, is_quick=is_quick)

    def _with_gpu(self, num_bytes: int) -> Forecaster:
        return replace(self, asked=replace(self.asked, budget_bytes=self.asked.budget_bytes + num_bytes))

    def _with_host(self, num_bytes: int) -> Forecaster:
        config = self.config
        if config.host_memory_limit is not None:
            config = replace(config, host_memory_limit=config.host_memory_limit + num_bytes)
        asked = replace(self.asked, host_budget_bytes=self.asked.host_budget_bytes + num_bytes)
        return replace(self, asked=asked, config=config)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest n of 1 to `limit` that fits, or 0 if none does. If n fits, all smaller ones must."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def _tenths(count: int) -> int:
    """Return the bytes of so many tenths of a GiB, rounded up."""
    return -(-count * GIB // 10)
