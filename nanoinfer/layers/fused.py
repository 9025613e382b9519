"""The fused kernels that layers take on CUDA."""

from functools import cache
from importlib import import_module


@cache
def fused_kernels():
    """The Triton kernels, imported where a CUDA tensor asks for them: triton comes with CUDA builds of torch only."""
    return import_module("nanoinfer.kernels.layer.fused")
