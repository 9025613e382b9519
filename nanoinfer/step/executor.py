"""Who computes, as the planning side sees it: what crosses between them are numbers, arrays and texts.

The planning side (`engine/`, `kv/`) knows requests, blocks and promises; it holds an `Executor` and no tensor.
`LocalExecutor` (`execution/local.py`) carries everything out in this process. Another one sends each call as a message
to the process that has such a one (`tests/support/remote.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nanoinfer.models.base import ModelSpec
from nanoinfer.models.expert_slots import SlotCounts
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.step.plan import StepPlan
from offload import KVLayout, Timeline
from offload.layout import Pairs, Places

if TYPE_CHECKING:
    import torch

Logprobs = tuple[float, int, list[float], list[int]]  # a token's, its rank, top values and top ids
SampledToken = tuple[int, Logprobs | None, Exception | None]  # the last: why the token is unusable
ChunkLogprobs = tuple[list[list[float]], list[list[int]]]
"""Of each token of a prompt its log-probability, then the top values; and its rank, then the top ids."""
PromptsRead = list[tuple[ChunkLogprobs, Exception | None] | None]


@dataclass(frozen=True)
class ExecutorCounters:
    """What an executor has counted since its start.

    Attributes:
        streamed_bytes, discarded_bytes, written_bytes: as in `OffloadCounters`.
        prefill_graph_steps, prefill_eager_steps, prefill_padded_tokens: as in `PrefillCounters`.
        graph_replays, eager_steps, padded_rows: as in `DecodeCounters`.
        graph_bytes: of device memory that all captures took.
        products_in_own_tiles: shape of a product -> the numbers of rows at which the library has other bits.
        slot_totals: of all layers with slots the numbers of hits, of experts that were brought to slots and to spare
            runs, and of evictions, up to the newest step that was read.
        slots: if they are asked for, the same of each layer with slots.
        has_host_memory: whether the host pool was opened.
    """

    streamed_bytes: int = 0
    discarded_bytes: int = 0
    written_bytes: int = 0
    prefill_graph_steps: int = 0
    prefill_eager_steps: int = 0
    prefill_padded_tokens: int = 0
    graph_replays: int = 0
    eager_steps: int = 0
    padded_rows: int = 0
    graph_bytes: int = 0
    products_in_own_tiles: dict[str, list[int]] = field(default_factory=dict)
    slot_totals: tuple[int, int, int, int] = (0, 0, 0, 0)
    slots: list[SlotCounts] = field(default_factory=list)
    has_host_memory: bool = False


class Executor(ABC):
    """Carries out steps and moves blocks. Each method is one message, and what it returns is the answer.

    Attributes:
        plan, spec, layout: what the memory is spent on, the model's numbers, the sizes of KV blocks.
        num_gpu_blocks, num_host_blocks: of the pools.
        num_graph_tokens: the most tokens of a prefill step that runs from graphs; 0: none does.
        is_host: the CPU computes. is_asynchronous: a step that was launched may not have run.
        expert_link: as in `ModelRunner`.
        link, memory_rate: bytes per second to the device, and of its memory, as plans count them.
    """

    plan: MemoryPlan
    spec: ModelSpec
    layout: KVLayout
    num_gpu_blocks: int
    num_host_blocks: int
    num_graph_tokens: int
    is_host: bool
    is_asynchronous: bool
    expert_link: float | None
    link: float
    memory_rate: float
    looks_s: float | None = None
    """How often `check` is to be called while nothing is asked of the executor; None: never."""

    def check(self) -> None:
        """Raise what has ended the executor, if something has."""

    # Steps

    @abstractmethod
    def execute(self, plan: StepPlan, timeline: Timeline | None = None) -> tuple[np.ndarray | None, int]:
        """Launch the layers of a step. Return the bytes that stream for each member, [members] int64 (None: none do),
        and those that the copy engine brings in all. Steps before the one before are forgotten.

        timeline: as `timeline` returned it.
        """

    @abstractmethod
    def sample(
        self,
        number: int,
        masks: np.ndarray | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Launch the sampling of a launched step.

        masks: as for `TokenMasks.apply`; on_logits: called with the logits of the sampled rows, where they are: no
        other process can do that.
        """

    @abstractmethod
    def is_done(self, number: int) -> bool:
        """Whether a sampled step has run."""

    @abstractmethod
    def read(self, number: int) -> tuple[list[SampledToken], int, int]:
        """Wait for a step; return what it sampled, and of this step and all before it how many experts were read and
        the bytes of those that were brought one by one."""

    @abstractmethod
    def read_prompts(self, number: int) -> PromptsRead:
        """Return what `PendingTokens.read_prompts` does, of a step that was read. Nothing more is known of it then."""

    @abstractmethod
    def timeline(self) -> Timeline | None:
        """Return what a step's streams are timed with, if they can be from here."""

    # Blocks

    @abstractmethod
    def store(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        """Copy (GPU block, host block) pairs to the host, under the number of an operation.

        of_states, places: as for `OffloadEngine.store`.
        """

    @abstractmethod
    def load(self, pairs: Pairs, operation: int, of_states: bool = False, places: Places = None) -> None:
        """Copy what `store` copies to the GPU, under the number of an operation."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all copies of blocks."""

    @abstractmethod
    def recover(self, operation: int) -> None:
        """Take all copies up to this operation for run, after `drain` or `settle`."""

    @abstractmethod
    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        """As `Acknowledgements.has_run`."""

    @abstractmethod
    def wait(self, kind: str, operation: int, rule: str) -> None:
        """As `Acknowledgements.wait`."""

    @abstractmethod
    def drop_prefetch(self, blocks: Iterable[int]) -> None:
        """Drop what was prefetched of host blocks that nobody holds any more."""

    @abstractmethod
    def let_go(self, pool: str, blocks: list[int]) -> None:
        """Have blocks be free, which nobody can reach any more."""

    @abstractmethod
    def borrow(self, num_blocks: int) -> list[int]:
        """Return host blocks in pageable memory; MemoryError: there is none."""

    @abstractmethod
    def give_back_all_but(self, blocks: Iterable[int]) -> None:
        """Give back what was borrowed, but for these blocks."""

    # The host's memory

    @abstractmethod
    def open_host_pool(self, all_at_once: bool) -> None:
        """Open the host pool, if it is not; see `ModelRunner.open_host_pool`."""

    @abstractmethod
    def wait_for(self, num_blocks: int, may_wait: bool = True) -> tuple[int, Exception | None]:
        """As `HostPool.wait_for`."""

    @abstractmethod
    def check_offload(self) -> None:
        """Raise ValueError if the attention backend cannot run offload mode."""

    @abstractmethod
    def capture(self, may_offload: bool) -> None:
        """Capture all graphs that are not captured yet; those of offload mode, too, if `may_offload`."""

    # Its life

    @abstractmethod
    def settle(self) -> None:
        """Wait, after an exception, until nothing is in flight."""

    @abstractmethod
    def forget(self) -> None:
        """Forget all steps, and what the host believes the device holds, after an exception."""

    @abstractmethod
    def counters(self, by_layer: bool = False) -> ExecutorCounters:
        """Return what was counted so far. by_layer: with what takes longer, for each layer."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return what `ModelRunner.peak_bytes` does, the most of any rank."""

    @abstractmethod
    def close(self) -> None:
        """Give back all memory. Nothing can be asked afterwards."""
