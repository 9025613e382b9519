"""Resident and offload mode: which one is current, what each can hold, and the switch between them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from nanoinfer.engine.start import BuiltEngine, most_resident_blocks
from nanoinfer.requests.sequence import Sequence
from offload.memory.pinned import PinError

MODES = ("resident", "offload")


class Modes:
    """The engine's modes.

    Attributes:
        may_spill: whether the engine may enter offload mode by itself (see `nanoinfer.engine.start.may_spill`).
        error: why "auto" could not enter offload mode.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self.error: Exception | None = None
        self._config, self._executor, self._tables = built.config, built.executor, built.kv_cache.tables
        self._admission, self._mover, self._switch = built.admission, built.mover, built.switch
        self._host_blocks = self._tables.lifetimes.host_blocks
        self.may_spill = built.admission.may_spill

    def close(self) -> None:
        """Let go of everything that holds memory. The modes cannot be used afterwards."""
        del self._executor, self._admission, self._mover, self._switch, self._tables

    @property
    def current(self) -> str:
        return "offload" if self._tables.is_offload else "resident"

    @property
    def possible(self) -> list[str]:
        """The current mode, and the one that the engine may enter by itself."""
        may_spill = self.may_spill and not self._is_unusable
        return list(dict.fromkeys([self.current, *["offload"] * may_spill]))

    @property
    def _is_unusable(self) -> bool:
        """Whether the host pool could not be mapped or pinned when it was needed last."""
        return isinstance(self.error, MemoryError | PinError)

    def max_sequence_tokens(self, mode: str) -> int:
        """Return the most tokens that one sequence can have in `mode`. A longer sequence would wait for ever."""
        if mode == "offload":  # tails lie on the GPU
            return self._tables.groups.most_tokens(self._host_blocks.num_possible, full_alone=True)
        return self._tables.groups.most_tokens(self._tables.gpu_blocks.num_blocks)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether a pool that can be used holds a waiting sequence.

        A request that only the host pool can hold is accepted before it is known how much of that pool can be used.
        """
        if self._tables.is_offload:
            return sequence.max_num_tokens <= self.max_sequence_tokens("offload")
        return not self._is_unusable or sequence.num_tokens <= self.max_sequence_tokens("resident")

    def refusal(self, sequence: Sequence) -> MemoryError:
        """Return why a waiting sequence, which no pool that can be used can hold, cannot run."""
        if self._tables.is_offload:
            return MemoryError(
                f"request {sequence.request_id!r} cannot run: it can grow to {sequence.max_num_tokens} tokens, the "
                f"host's KV pool holds {self.max_sequence_tokens('offload')}: lower max_tokens or shorten the prompt "
                f"({self._host_blocks.failure})"
            )
        return MemoryError(
            f"request {sequence.request_id!r} cannot run: it has {sequence.num_tokens} tokens, the GPU's KV pool holds "
            f"{self.max_sequence_tokens('resident')}: lower max_tokens, shorten the prompt or raise gpu_memory_limit. "
            f"The host's cannot be used: {self.error}"
        )

    def start(self) -> None:
        """Enter the first mode, and capture the graphs of every mode that the engine may enter by itself."""
        if self._config.enable_cpu_offload is True:
            self.switch("offload", [])
            return
        if self.may_spill:
            try:
                self._require_host_pool([])
            except (MemoryError, PinError) as error:
                self._note(error)
        elif self._config.enable_cpu_offload == "auto" and not self._tables.all_sequences_fit:
            held = self.max_sequence_tokens("offload")
            self._note(
                ValueError(
                    f"the host's KV pool holds {held} tokens of a request, and the GPU's more: raise "
                    f"host_memory_limit, or lower max_model_len to {held}"
                )
            )
        self._mover.prepare_snapshots()
        self._executor.capture(self.may_spill)

    def check(self, mode: str, running: list[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise ValueError if the mode cannot be entered: there is no such mode, or a sequence does not fit."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if mode == self.current:
            return
        capacity = self.max_sequence_tokens(mode)
        longest = max((sequence.max_num_tokens for sequence in (*running, *waiting)), default=0)
        if longest > capacity:
            raise ValueError(
                f"switch to {mode} refused: a sequence that runs or waits can grow to {longest} tokens, the {mode} "
                f"mode's pool holds {capacity}: raise "
                f"{'host_memory_limit' if mode == 'offload' else 'gpu_memory_limit'} or wait until it has ended"
            )
        if mode == "offload":
            self._require_host_pool(running)
            most = self._tables.groups.most_full(longest)
            self._host_blocks.require(max(self._mover.num_host_blocks(running), most))
            self._switch.check_offload(running)
        else:
            self._switch.check_resident(running)

    def switch(self, mode: str, running: list[Sequence]) -> None:
        """Move the blocks of the running sequences and go on in `mode`, which is another one.

        Raises:
            ValueError, MemoryError, PinError: the other pool cannot hold or be used for them; nothing changes.
        """
        if mode == "offload":
            self._require_host_pool(running)
        if mode == "offload":
            self._switch.switch_to_offload(running)
        else:
            self._switch.switch_to_resident(running)
        self._admission.forget()
        self._executor.capture(mode == "offload" or self.may_spill)
        if mode == "offload":
            self.error = None
            self._switch.tell()

    def enter_offload(self, running: list[Sequence], may_wait: bool) -> bool | None:
        """For "auto": enter offload mode if the host pool can hold the running requests; return whether it did.

        None: it may soon, as its memory is being pinned.

        It must hold whatever resident mode holds, or a request might wait for a mode that does not come back.

        Args:
            may_wait: whether the running requests may stand still until enough of the pool can be used.
        """
        blocks, num_wanted = self._host_blocks, most_resident_blocks(self._executor.plan, self._tables)
        try:
            self._require_host_pool(running)
            num_now = blocks.num_used + blocks.num_cached + self._mover.num_host_blocks(running)
            if not may_wait and self._host_blocks.is_coming(max(num_wanted, num_now)):
                return None
            self._host_blocks.require(num_wanted)
            self.switch("offload", running)
        except (ValueError, MemoryError, PinError) as error:
            self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> None:
        """Warn once that offload mode cannot be entered, not in every step that finds the GPU pool full."""
        if self.error is None:
            warnings.warn(f"offload mode cannot be entered, so requests take turns: {error}", stacklevel=2)
        self.error = error

    def _require_host_pool(self, running: list[Sequence]) -> None:
        """Map the host pool, if it is needed for the first time and has room for these sequences."""
        self._switch.check_host_room(running)  # first: a switch that is refused takes no memory
        self._executor.check_offload()
        self._executor.open_host_pool(self._config.pins_at_start)
        self._host_blocks.wait_for(0)
