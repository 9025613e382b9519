"""Many small arrays in one upload."""

from __future__ import annotations

import numpy as np

from nanoinfer.device_tables import DeviceTable
from offload import Stream


class Packer:
    """Collects int32 arrays for one upload and says where each lies. Each begins at a multiple of 4 elements."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, values: np.ndarray | list[int]) -> slice:
        """The place of `values` (any shape, whole numbers) in the table."""
        array = np.asarray(values, dtype=np.int32).reshape(-1)
        place = slice(self._size, self._size + len(array))
        padding = np.zeros(-len(array) % 4, dtype=np.int32)
        self._arrays += [array, padding]
        self._size += len(array) + len(padding)
        return place

    def upload(self, table: DeviceTable, stream: Stream) -> None:
        """Puts all arrays into the table for work enqueued on `stream` from here on."""
        table.set(stream, np.concatenate(self._arrays))
