"""What an engine that does not fit would fit with: the planner's proposals, behind the refusal."""

from __future__ import annotations

from nanoinfer.common.units import format_gib
from nanoinfer.memory.forecast import Forecast
from nanoinfer.memory.forecaster import Forecaster
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.measure import DEFAULT_CONTEXT
from nanoinfer.memory.proposals import Proposal
from nanoinfer.memory.rates import DEFAULT_LINK_GBPS, Rates
from nanoinfer.memory.setup import Setup
from offload.memory.host_memory import memory_available_bytes


def with_remedies(error: TooSmall, setup: Setup) -> ValueError:
    """Return the refusal with one list of what would help: settings that fit, if there are any, and then memory."""
    config, spec, available = setup.config, setup.spec, memory_available_bytes()
    asked = Forecast(
        model=str(config.model),
        context=config.max_model_len or min(DEFAULT_CONTEXT, spec.max_position),
        batch=config.max_num_seqs or 1,
        link_gbps=DEFAULT_LINK_GBPS,
        device_gbps=None,
        budget_bytes=setup.budget(config, available),
        host_budget_bytes=available if config.host_memory_limit is None else int(config.host_memory_limit),
    )
    device = setup.device
    of_device = dict(device=device, lacks_float8=device.lacks_float8(), rates=Rates.of(device))
    forecaster = Forecaster(setup.specs, config, asked, **of_device)
    lines = [_line(proposal) for proposal in forecaster.proposer().to_fit()]
    if not lines:
        return error
    return ValueError("\n  - ".join([f"{error.problem}\nWhat would help, cheapest first:", *lines, *error.helps]))


def _line(proposal: Proposal) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in proposal.changes.items())
    streams = "" if proposal.streamed_bytes_per_step else ", nothing streams"
    return f"{settings}: {proposal.what}, {format_gib(proposal.memory_bytes)} GiB{streams}"
