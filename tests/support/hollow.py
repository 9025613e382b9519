"""An engine that schedules, plans and moves blocks, and computes nothing: thousands of steps in seconds."""

from __future__ import annotations

from types import SimpleNamespace

from nanoinfer import LLMEngine
from nanoinfer.step.plan import StepPlan
from offload import CpuRuntime


class SameTokens:
    """What a step samples: the same token for each row, at once."""

    def __init__(self, count: int) -> None:
        self._count, self.done = count, CpuRuntime().event()
        self.made, self.experts_read, self.fetched_bytes = None, 0, 0

    def read(self) -> list:
        return [(5, None, None)] * self._count

    def read_prompts(self) -> list:
        return []


class AllHaveRun:
    """No step copies anything, so nobody waits for its copies."""

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        return True

    def wait(self, kind: str, operation: int, rule: str) -> None:
        pass


def hollow(engine: LLMEngine) -> LLMEngine:
    """Return the engine, whose steps compute nothing from now on."""

    def execute(plan: StepPlan, *_) -> SimpleNamespace:
        return SimpleNamespace(plan=plan, streamed_bytes=None)

    engine.runner.execute = execute
    engine.runner.sample = lambda launched, *_: SameTokens(len(launched.plan.sampled_rows))
    engine.kv_cache.tables.lifetimes.acknowledgements = AllHaveRun()
    return engine
