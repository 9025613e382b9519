"""The operations that layers and steps ask of a device, as one set."""

from importlib import import_module
from types import ModuleType

import torch

from nanoinfer.devices.registry import device_of


def operations_of(device: torch.device | str) -> ModuleType:
    """Return the operations of a device: our kernels, a package's, or plain torch.

    Whoever is built for a device asks once. They are imported here and not at the top, because triton comes with some
    builds of torch only.
    """
    return import_module(device_of(torch.device(device)).operations)
