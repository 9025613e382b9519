"""What an engine that does not fit would fit with: the planner's proposals, behind the refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.common.units import format_gib
from nanoinfer.devices.registry import device_of
from nanoinfer.memory.budget import gpu_budget
from nanoinfer.memory.forecast import Forecast
from nanoinfer.memory.forecaster import Forecaster
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.machine import device_memory
from nanoinfer.memory.measure import DEFAULT_CONTEXT
from nanoinfer.memory.plan import make_plan
from nanoinfer.memory.proposals import Proposal
from nanoinfer.memory.rates import DEFAULT_LINK_GBPS, Rates
from nanoinfer.memory.setup import Setup
from offload.memory.host_memory import memory_available_bytes


def with_remedies(error: TooSmall, setup: Setup) -> TooSmall:
    """Return the refusal with the settings that fit, if there are any."""
    config, spec, available = setup.config, setup.spec, memory_available_bytes()
    asked = Forecast(
        model=str(config.model),
        context=config.max_model_len or min(DEFAULT_CONTEXT, spec.max_position),
        batch=config.max_num_seqs or 1,
        link_gbps=DEFAULT_LINK_GBPS,
        device_gbps=None,
        budget_bytes=gpu_budget(config, device_memory(setup.device), available),
        host_budget_bytes=available if config.host_memory_limit is None else int(config.host_memory_limit),
    )
    device = device_of(setup.device)
    rates = Rates.of(device)
    memory = dict(budget_bytes=asked.budget_bytes, host_available_bytes=available, device=device, rates=rates)
    lines = []
    of_device = dict(device=device, lacks_float8=device.lacks_float8(), rates=rates, knows_device=True)
    forecaster = Forecaster(setup.specs, config, asked, **of_device)
    for proposal in forecaster.proposer().to_fit():
        changed, changes = replace(config, **proposal.changes), dict(proposal.changes)
        try:
            make_plan(changed, setup.specs.of(changed), **memory)
        except TooSmall:  # it counts on as many sequences as there are
            changes["max_num_seqs"] = asked.batch
        lines.append(_line(changes, proposal))
    if not lines:
        return error
    return TooSmall("\n  - ".join([f"{error}\nWhat fits, from the least loss of quality to the most:", *lines]))


def _line(changes: dict[str, Any], proposal: Proposal) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    streams = "" if proposal.streamed_bytes_per_step else ", nothing streams"
    return f"{settings}: {proposal.what}, {format_gib(proposal.memory_bytes)} GiB{streams}"
