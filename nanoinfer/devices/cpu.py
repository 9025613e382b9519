"""The host itself: its processor computes, and its memory is all there is."""

from __future__ import annotations

import torch

from nanoinfer.devices.base import Device
from offload import CpuRuntime


class CpuDevice(Device):
    kind = "cpu"
    is_host = True

    @classmethod
    def find(cls, index: int | None) -> torch.device:
        if index is not None:
            raise ValueError(f"device='cpu:{index}', but there is one CPU: give \"cpu\", without a number")
        return torch.device("cpu")

    @classmethod
    def is_available(cls) -> bool:
        return True

    @property
    def name(self) -> str:
        return "CPU"

    def runtime(self, poison: bool = False) -> CpuRuntime:
        return CpuRuntime(poison=poison)


class MetaDevice(CpuDevice):
    """Where modules and buffers are counted that will lie on another device: as large as they are on any."""

    kind = "meta"
    pads_rows = True
