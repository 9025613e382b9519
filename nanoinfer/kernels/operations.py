"""The operations that layers and steps ask of a device, as one set."""

from importlib import import_module
from types import ModuleType

import torch

from nanoinfer.kernels import reference


def operations_of(device: torch.device | str) -> ModuleType:
    """Return the operations of a device: our kernels on CUDA, plain torch elsewhere.

    Whoever is built for a device asks once. The kernels are imported here and not at the top, because triton comes with
    CUDA builds of torch only.
    """
    return import_module("nanoinfer.kernels.fused") if torch.device(device).type == "cuda" else reference
