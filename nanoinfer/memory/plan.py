"""How the memory budget is spent: worked out from the config alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.search import best_plan
from nanoinfer.models.base import ModelSpec


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    budget_bytes: int,
    host_available_bytes: int,
    device: Device,
    may_pin: bool = True,
    rates: Rates | None = None,
) -> MemoryPlan:
    """Divide the budget among the parts of the engine. Where a limit is too small, `TooSmall` says what works.

    may_pin: whether host memory can be pinned, as far as it is known. Experts in slots need it.
    rates: of device and link, by which plans are compared; None: those of a GPU of which nothing is known.
    """
    rates = Rates() if rates is None else rates
    return plan_of(Planner(config, spec, device, budget_bytes, host_available_bytes, may_pin, rates))


def plan_of(planner: Planner) -> MemoryPlan:
    """As `make_plan`."""
    plan, spec, device = best_plan(planner), planner.spec, planner.device
    # Without kernels that read packed weights as they lie, their matrices are kept where there is room for all.
    room = plan.budget_bytes - plan.total_bytes
    if device.is_fused or plan.streamed_bytes or not 0 < spec.matrix_bytes <= room:
        return plan
    return replace(plan, matrix_bytes=spec.matrix_bytes)
