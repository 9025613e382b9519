"""The executor that carries everything out in this process, with a `ModelRunner`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.execution.runner import ModelRunner, UnsampledStep
from nanoinfer.step.executor import Executor, ExecutorCounters, PromptsRead, SampledToken
from nanoinfer.step.plan import StepPlan
from offload import Timeline
from offload.layout import Pairs, Places


class LocalExecutor(Executor):
    """Carries everything out in this process.

    Args:
        link, memory_rate: as in `Executor`.

    Attributes:
        runner: which does it.
    """

    def __init__(self, runner: ModelRunner, link: float, memory_rate: float) -> None:
        self.runner = runner
        self.plan, self.spec, self.layout = runner.memory_plan, runner.spec, runner.layout
        self.num_gpu_blocks, self.num_host_blocks = runner.num_gpu_blocks, runner.num_host_blocks
        self.num_graph_tokens = max(runner.prefill_program.pieces.capture_num_tokens, default=0)
        self.is_host = runner.device.is_host
        self.expert_link, self.link, self.memory_rate = runner.expert_link, link, memory_rate
        self._steps: dict[int, UnsampledStep | PendingTokens] = {}

    @property
    def is_asynchronous(self) -> bool:
        return self.runner.device.is_asynchronous

    def execute(self, plan: StepPlan, timeline: Timeline | None = None) -> tuple[np.ndarray | None, int]:
        # A step after which nobody is left is never read. Of those before this one, the newest may be yet.
        for number in [number for number in self._steps if number < plan.number - 1]:
            del self._steps[number]
        counters = self.runner.offload.counters
        before = counters.streamed_bytes
        with self.runner.own_threads():
            launched = self._steps[plan.number] = self.runner.execute(plan, timeline)
        return launched.streamed_bytes, counters.streamed_bytes - before

    def sample(
        self,
        number: int,
        masks: np.ndarray | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        with self.runner.own_threads():
            # In its place: the unsampled step has tensors that lie where the next one needs room.
            self._steps[number] = self.runner.sample(self._steps[number], on_logits, masks)

    def is_done(self, number: int) -> bool:
        return self._steps[number].done.query("host.read_after_step")

    def read(self, number: int) -> tuple[list[SampledToken], int, int]:
        step = self._steps[number]
        return step.read(), step.experts_read, step.fetched_bytes

    def read_prompts(self, number: int) -> PromptsRead:
        return self._steps.pop(number).read_prompts()

    def timeline(self) -> Timeline | None:
        return Timeline(self.runner.runtime)

    def counters(self, by_layer: bool = False) -> ExecutorCounters:
        runner = self.runner
        copied, decoded = runner.offload.counters, runner.decode_program.counters
        prefill = runner.prefill_program.pieces.counters
        return ExecutorCounters(
            streamed_bytes=copied.streamed_bytes,
            discarded_bytes=copied.discarded_bytes,
            written_bytes=copied.written_bytes,
            prefill_graph_steps=prefill.graph_steps,
            prefill_eager_steps=prefill.eager_steps,
            prefill_padded_tokens=prefill.padded_tokens,
            graph_replays=decoded.graph_replays,
            eager_steps=decoded.eager_steps,
            padded_rows=decoded.padded_rows,
            graph_bytes=0 if runner.graph_memory is None else runner.graph_memory[1] - runner.graph_memory[0],
            products_in_own_tiles={shape: counts for shape, counts in runner.product_checks.items() if counts},
            slot_totals=runner.read_back.slot_totals,
            slots=runner.model.streamed.slot_counts(runner.read_back.slot_counts) if by_layer else [],
            has_host_memory=runner.offload.host.arena is not None,
        )

    def store(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        self.runner.offload.store(pairs, operation, of_states, places)

    def load(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        self.runner.offload.load(pairs, operation, of_states, places)

    def drain(self) -> None:
        self.runner.offload.drain()

    def recover(self, operation: int) -> None:
        self.runner.offload.recover(operation)

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        return self.runner.offload.has_run(kind, operation, rule)

    def wait(self, kind: str, operation: int, rule: str) -> None:
        self.runner.offload.wait(kind, operation, rule)

    def drop_prefetch(self, blocks: Iterable[int]) -> None:
        self.runner.offload.drop_prefetch(blocks)

    def let_go(self, pool: str, blocks: list[int]) -> None:
        self.runner.block_copies.let_go(pool, blocks)

    def borrow(self, num_blocks: int) -> list[int]:
        return self.runner.block_copies.borrow(num_blocks)

    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        self.runner.block_copies.give_back_all_but(blocks)

    def open_host_pool(self, all_at_once: bool) -> None:
        self.runner.open_host_pool(all_at_once)

    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]:
        return self.runner.offload.host.wait_for(num_blocks, may_wait)

    def check_offload(self) -> None:
        self.runner.check_offload()

    def capture(self, may_offload: bool) -> None:
        with self.runner.compute.current(), self.runner.own_threads():
            self.runner.capture(may_offload)

    def settle(self) -> None:
        self.runner.settle()

    def forget(self) -> None:
        self._steps.clear()
        self.runner.forget()

    def peak_bytes(self) -> int | None:
        return self.runner.peak_bytes()

    def close(self) -> None:
        self._steps.clear()
        self.runner.close()
