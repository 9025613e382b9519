"""Which memory of the host is nearest to a device, where a host has several: one for each socket.

A page comes from the memory of the processor that touches it first, as long as there is some. So who touches pages for
copies to a device runs on processors beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys")


def processors_near(address: str, system: Path = SYSTEM) -> set[int] | None:
    """Return which processors of this process lie beside the memory that is nearest to a PCI device.

    address: of the device, such as "0000:3b:00.0". system: where the kernel says what there is.

    Returns:
        None: no memory is nearer than another, the kernel does not say it, or this process may use none of these
        processors.
    """
    try:
        node = int((system / "bus/pci/devices" / address.lower() / "numa_node").read_text())
        ranges = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        bounds = [[int(bound) for bound in one.split("-")] for one in ranges.split(",") if one]
    except (OSError, ValueError):  # node -1: the kernel does not know it, and there is no such folder
        return None
    own = os.sched_getaffinity(0)
    near = own & {number for begin, *end in bounds for number in range(begin, (end or [begin])[0] + 1)}
    return near if near and near != own else None
