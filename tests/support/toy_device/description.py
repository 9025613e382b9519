"""What the toy offers: the class that the entry point `toy = "toy_device.description:ToyDevice"` names."""

from __future__ import annotations

import torch

from nanoinfer.devices.base import Device
from offload import CpuRuntime
from toy_device.tensors import TOY

MEMORY = 2**30


class ToyRuntime(CpuRuntime):
    """Streams on which work runs at once, as on the CPU."""

    def __init__(self, poison: bool = False) -> None:
        super().__init__(poison)
        self.device = TOY


class ToyDevice(Device):
    """Memory of its own, of a GiB; decode in steps of 3, 6, 12 rows, prompts of 20 or 50 tokens."""

    kind = "toy"
    operations = "toy_device.operations"
    attention_backends = {"by length": "toy_device.attention:ToyAttention"}
    attention_backend = "by length"
    most_step_tokens = 256

    @classmethod
    def find(cls, index: int | None) -> torch.device:
        if index not in (None, 0):
            raise ValueError(f'device="toy:{index}", but there is one toy: give "toy"')
        return TOY

    @classmethod
    def is_available(cls) -> bool:
        return False  # only who asks for it gets it

    @property
    def name(self) -> str:
        return "a toy"

    def graph_batch_sizes(self, max_num_seqs: int) -> list[int]:
        sizes = [3]
        while sizes[-1] < max_num_seqs:
            sizes.append(2 * sizes[-1])
        return sizes

    def graph_num_tokens(self, limit: int) -> list[int]:
        return [count for count in (20, 50) if count <= limit]

    def runtime(self, poison: bool = False) -> ToyRuntime:
        return ToyRuntime(poison)

    def memory(self) -> tuple[int, int]:
        return MEMORY, MEMORY
