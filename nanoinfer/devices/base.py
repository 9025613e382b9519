"""The description of a device: what it offers, and how it is asked for what only it knows.

`Device` is what a package brings whose device has no counterpart in torch's modules. `Accelerator` is one that has: a
module such as `torch.cuda`, with streams, events and an allocator that counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import ClassVar

import torch

from nanoinfer.devices.target import INTERPRETER, Target
from offload import Runtime
from offload.memory.pinned import Pinner

# Padding costs most in large batches: head and sampling read every row's logits.
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)


_LACKING = {
    "triton": "a device that Triton compiles for",
    "flash_attn": "a CUDA device of compute capability 8.0 or above",
}
"""What attention backends of ours need that do not run on any device."""


class Device(ABC):
    """What one kind of device offers. An object describes one device of the kind, which torch calls `torch_device`.

    The defaults are those of a device that has memory of its own, plain operations, and neither streams nor graphs.

    Attributes:
        kind: torch's name of it, and the name of its entry point.
        operations: the module with the functions of `nanoinfer.kernels.reference`, by name.
        is_fused: whether these are fused kernels: they read packed weights as they lie, and need none of the
            reference's temporaries.
        pads_rows: whether prefill steps are padded to numbers of rows (`kernels/linear/counts.py`) at which a library's
            products were compared with those of its kernels.
        attention_backends: backends that it brings, as "module:class" by name.
        attention_backend: which one "auto" means, one of these or of `nanoinfer.attention`.
        is_host: whether it is the host's own processor and memory: pages are taken as they are filled, the engine's
            threads compute, nothing passes over a link.
        records_graphs: whether a captured graph is a record, which holds addresses and runs none of the host's code; an
            attention backend that reads on the host can then not be captured.
        is_asynchronous: whether the host goes on while a step runs.
        counts_memory: whether the allocator tells its peak: the largest step is run and measured when an engine starts.
        reads_host_memory: whether kernels read pinned host memory, as experts in slots want it.
        has_nccl: whether NCCL carries what lies on several of them; else what they exchange lies on the host.
        most_step_tokens: of a prefill step that the engine chooses.
        library_bytes: what libraries keep for themselves, with `segment_bytes` of a model's weights (see `ModelSpec`).
    """

    kind: ClassVar[str]
    operations: ClassVar[str] = "nanoinfer.kernels.reference"
    is_fused: ClassVar[bool] = False
    pads_rows: ClassVar[bool] = False
    attention_backends: ClassVar[Mapping[str, str]] = {}
    attention_backend: ClassVar[str] = "torch"
    is_host: ClassVar[bool] = False
    records_graphs: ClassVar[bool] = False
    is_asynchronous: ClassVar[bool] = False
    counts_memory: ClassVar[bool] = False
    reads_host_memory: ClassVar[bool] = False
    has_nccl: ClassVar[bool] = False
    most_step_tokens: ClassVar[int] = 2048
    library_bytes: ClassVar[int] = 0
    segment_bytes: ClassVar[int] = 0

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    # Finding one

    @classmethod
    @abstractmethod
    def find(cls, index: int | None) -> torch.device:
        """Return where the device with this number is; None: no number is given. ValueError says what there is."""

    @classmethod
    def current(cls) -> torch.device:
        """Return where the device is that "auto" means."""
        return cls.find(None)

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether this machine has one, so that "auto" may mean it."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return str(self.torch_device)

    def describe(self) -> tuple[str, str | None]:
        """Return what it is, and what of that makes trouble, for `nanoinfer doctor`."""
        return self.name, None

    # What kernels may count on

    @cached_property
    def target(self) -> Target:
        """What it has for our Triton kernels."""
        return INTERPRETER

    def lacks(self, attention_backend: str) -> str | None:
        """Return what an attention backend of ours that cannot run here needs of a device, or None: it can."""
        return _LACKING.get(attention_backend)

    def lacks_products(self) -> str | None:
        """Return what products in bfloat16 and with packed weights need of a device if it has not got it, or None."""
        return None

    def lacks_float8(self) -> str | None:
        """Return what KV in fp8 needs of a device if it has not got it, or None."""
        return None

    # Several of them

    def count(self) -> int:
        """Return how many there are in this machine."""
        return 1

    def reaches_others(self) -> bool:
        """Whether kernels on each of them can write into the memory of all others."""
        return False

    def own_first(self, number: int) -> dict[str, str]:
        """Return the environment of a process that finds the one with this number first, and all others behind it."""
        return {}

    # Graphs

    def graph_batch_sizes(self, max_num_seqs: int) -> list[int]:
        """Return the padded batch sizes of decode, ascending. Only the last may exceed `max_num_seqs`, to cover it."""
        return [size for i, size in enumerate(_BATCH_SIZES) if i == 0 or _BATCH_SIZES[i - 1] < max_num_seqs]

    def graph_num_tokens(self, limit: int) -> list[int]:
        """Return the padded token counts of small prefill steps, ascending, at most `limit`; none are padded for []."""
        return []

    # Running

    @abstractmethod
    def runtime(self, poison: bool = False) -> Runtime:
        """Return streams, events and graphs on it. poison: as in `CudaRuntime`."""

    @property
    def pinner(self) -> Pinner | None:
        """What pins host memory for its copies; None: they are as fast from any memory, or nothing can pin it."""
        return None

    @property
    def streams(self) -> ModuleType | None:
        """torch's module with its streams and events, if weights are to be read on them; None: no copy runs beside."""
        return None

    # Memory

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of it that are free and that there are; None where they are the host's."""
        return None

    def held_bytes(self) -> int:
        """Give unused caches back; return the bytes that torch's allocator still holds for this process."""
        return 0

    def give_back(self) -> None:
        """Give unused caches of torch's allocator back."""

    def forget_peak(self) -> None:
        """Have `peak_bytes` count from now on."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that torch's allocator has held; None: it does not count."""
        return None

    def synchronize(self) -> None:
        """Wait until it is idle."""


class Accelerator(Device):
    """A device with a module of torch's own interface, `torch.<kind>`."""

    is_asynchronous = True
    counts_memory = True

    @property
    def module(self) -> ModuleType:
        return torch.get_device_module(self.kind)

    @classmethod
    def is_available(cls) -> bool:
        return torch.get_device_module(cls.kind).is_available()

    @property
    def name(self) -> str:
        return self.module.get_device_name(self.torch_device)

    @property
    def streams(self) -> ModuleType | None:
        return self.module

    def count(self) -> int:
        return self.module.device_count()

    def memory(self) -> tuple[int, int] | None:
        return self.module.mem_get_info(self.torch_device)

    def held_bytes(self) -> int:
        self.synchronize()
        self.give_back()
        return self.module.memory_reserved(self.torch_device)

    def give_back(self) -> None:
        self.module.empty_cache()

    def forget_peak(self) -> None:
        self.module.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        return self.module.max_memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        self.module.synchronize(self.torch_device)
