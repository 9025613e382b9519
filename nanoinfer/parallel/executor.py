"""The executor of several ranks: what this process does, the others are told to do as well."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from nanoinfer.execution.group import Group
from nanoinfer.execution.local import LocalExecutor
from nanoinfer.parallel.processes import RankError, Ranks
from nanoinfer.step.executor import Executor, ExecutorCounters, PromptsRead, SampledToken
from nanoinfer.step.plan import StepPlan
from offload import Timeline
from offload.blocks import HOST
from offload.layout import Pairs, Places


class ParallelExecutor(Executor):
    """Carries everything out on all ranks.

    Ranks do what they are told in the order in which they are told, as this one does. So what they compute, exchange
    and copy is the same on each, and needs no answer. Where the planning side asks how far copies are, or how much
    memory there is, all are asked, and the least counts.

    Args:
        local: of this process, rank 0.
        ranks: the other processes.
        group: what all exchange with.

    Attributes:
        runner: of this process.
        ranks: the other processes.
    """

    looks_s = 1.0

    def __init__(self, local: LocalExecutor, ranks: Ranks, group: Group) -> None:
        self._local, self.ranks, self._group = local, ranks, group
        self.runner, self._borrowed = local.runner, set()
        for name in Executor.__annotations__:
            if name not in ("is_asynchronous", "looks_s"):
                setattr(self, name, getattr(local, name))

    @property
    def is_asynchronous(self) -> bool:
        return self._local.is_asynchronous

    def check(self) -> None:
        if self.ranks.has_ended:
            raise self.ranks.error()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all do at a time. An exception here would leave the others waiting: it ends them."""
        with interrupts_held():
            try:
                yield
            except RankError:
                raise
            except BaseException as error:
                if isinstance(error, RuntimeError) and self.ranks.ends_soon():  # it failed since nobody answers
                    raise self.ranks.error() from None
                raise self.ranks.give_up(error) from error

    def _all(self, name: str, *arguments: Any) -> Any:
        with self._together():
            self.ranks.tell(name, *arguments)
            return getattr(self._local, name)(*arguments)

    def _of_each(self, name: str, *arguments: Any) -> list[Any]:
        """Return what each rank answers, this one first. What one raises is raised when all have answered."""
        with self._together():
            self.ranks.tell(name + "?", *arguments)
            own, raised = None, None
            try:
                own = getattr(self._local, name)(*arguments)
            except Exception as error:
                raised = error
            try:
                others = self.ranks.answers()
            except RankError:
                raise
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised
        return [own, *others]

    def execute(self, plan: StepPlan, timeline: Timeline | None = None) -> tuple[np.ndarray | None, int]:
        with self._together():
            self.ranks.tell("execute", plan)
            return self._local.execute(plan, timeline)

    def sample(
        self,
        number: int,
        masks: np.ndarray | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        def change(logits: torch.Tensor) -> None:
            on_logits(logits)
            self._group.take_of_first(logits)

        with self._together():
            self.ranks.tell("sample", number, masks, on_logits is not None)
            self._local.sample(number, masks, None if on_logits is None else change)

    def is_done(self, number: int) -> bool:
        return self._local.is_done(number)

    def read(self, number: int) -> tuple[list[SampledToken], int, int]:
        found = self._all("read", number)
        self.check()  # kernels that nobody answers give up, and leave no tokens
        return found

    def read_prompts(self, number: int) -> PromptsRead:
        return self._all("read_prompts", number)

    def timeline(self) -> Timeline | None:
        return self._local.timeline()

    def counters(self, by_layer: bool = False) -> ExecutorCounters:
        return self._local.counters(by_layer)

    def store(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        self._all("store", pairs, operation, of_states, places)

    def load(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        self._all("load", pairs, operation, of_states, places)

    def drain(self) -> None:
        self._of_each("drain")

    def recover(self, operation: int) -> None:
        self._all("recover", operation)

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        return self._local.has_run(kind, operation, rule) and all(self._of_each("has_run", kind, operation, rule))

    def wait(self, kind: str, operation: int, rule: str) -> None:
        self._of_each("wait", kind, operation, rule)

    def drop_prefetch(self, blocks: Iterable[int]) -> None:
        self._all("drop_prefetch", [*blocks])

    def let_go(self, pool: str, blocks: list[int]) -> None:
        if pool == HOST:
            self._borrowed -= {*blocks}
        self._all("let_go", pool, blocks)

    def borrow(self, num_blocks: int) -> list[int]:
        try:
            own, *others = self._of_each("borrow", num_blocks)
        except MemoryError:
            self.give_back_all_but(self._borrowed)  # some ranks may have had the memory
            raise
        assert all(one == own for one in others), "ranks have borrowed other blocks"
        self._borrowed |= {*own}
        return own

    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        self._borrowed = {*blocks}
        self._all("give_back_all_but", sorted(self._borrowed))

    def open_host_pool(self, all_at_once: bool) -> None:
        self._of_each("open_host_pool", all_at_once)

    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]:
        found = self._of_each("wait_for", num_blocks, may_wait)
        errors = (error for _, error in found if error is not None)
        return min(usable for usable, _ in found), next(errors, None)

    def check_offload(self) -> None:
        self._local.check_offload()

    def capture(self, may_offload: bool) -> None:
        self._all("capture", may_offload)

    def settle(self) -> None:
        self._of_each("settle")

    def forget(self) -> None:
        self._all("forget")

    def peak_bytes(self) -> int | None:
        found = self._of_each("peak_bytes")
        return None if None in found else max(found)

    def close(self) -> None:
        if not self.ranks.has_ended:
            with suppress(RankError):  # one has just ended
                self.ranks.tell("close")
        self._local.close()
        self.ranks.close()
        self._group.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Have Ctrl-C, and a SIGTERM that the program handles, wait until what all ranks do at a time is done: between two
    exchanges an exception would leave some waiting."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    with _held(signal.SIGTERM), _held(signal.SIGINT):
        yield


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """Have one kind of signal wait."""
    before, held = signal.getsignal(number), []
    if not callable(before):
        yield
        return
    signal.signal(number, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(number, before)
        if held:
            before(*held[-1])
