"""From a backend's name to a backend that has been checked against the model, the device and the mode."""

from __future__ import annotations

import importlib

import torch

from nanoinfer.attention.base import AttentionBackend, AttentionSpec
from nanoinfer.common.errors import choose

_CLASSES = {"triton": "TritonBackend", "torch": "TorchBackend", "flash_attn": "FlashAttnBackend"}


def make_backend(name: str, spec: AttentionSpec, device: torch.device | str, offload: bool) -> AttentionBackend:
    """Build the named backend. "auto" is triton on a CUDA device and torch elsewhere.

    Raises ValueError where the name is unknown, its package is missing, or it cannot run this model in this mode.
    """
    device = torch.device(device)
    choose("attention backend", name, ("auto", *_CLASSES))
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    try:
        backend_class = getattr(importlib.import_module(f"nanoinfer.attention.{name}_backend"), _CLASSES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ValueError(
            f"attention backend {name!r} needs the package triton, which is not installed: "
            "pip install triton, or choose attention backend 'torch'"
        ) from error
    backend_class.check(spec, device, offload)
    return backend_class(spec, device)
