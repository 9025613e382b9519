"""How the memory budget is spent: worked out from the config alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.execution.memory import MemoryPlan
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.search import best_plan


def plan_of(planner: Planner) -> MemoryPlan:
    """Divide the budget among the parts of the engine. Where a limit is too small, `TooSmall` says what works."""
    plan, spec, device = best_plan(planner), planner.spec, planner.device
    # Without kernels that read packed weights as they lie, their matrices are kept where there is room for all.
    room = plan.budget_bytes - plan.total_bytes
    if device.is_fused or plan.streamed_bytes or not 0 < spec.matrix_bytes <= room:
        return plan
    return replace(plan, matrix_bytes=spec.matrix_bytes)
