"""From a backend's name to a backend that has been checked against the model, the device and the mode."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from nanoinfer.attention.base import AttentionBackend, AttentionSpec, Backends
from nanoinfer.common.errors import choose
from nanoinfer.devices.registry import device_of

_CLASSES = {
    "triton": "nanoinfer.attention.triton_backend:TritonBackend",
    "torch": "nanoinfer.attention.torch_backend:TorchBackend",
    "flash_attn": "nanoinfer.attention.flash_attn_backend:FlashAttnBackend",
}


def make_backends(name: str, specs: Sequence[AttentionSpec], device: torch.device | str, offload: bool) -> Backends:
    """Build the named backend for each of these shapes; see `make_backend`."""
    return Backends(make_backend(name, spec, device, offload) for spec in specs)


def make_backend(name: str, spec: AttentionSpec, device: torch.device | str, offload: bool) -> AttentionBackend:
    """Build the named backend, one of ours or one that the device brings. "auto" is what the device says.

    Raises ValueError where the name is unknown, its package is missing, or it cannot run this model in this mode.
    """
    device = torch.device(device)
    described = device_of(device)
    classes = _CLASSES | described.attention_backends
    choose("attention backend", name, ("auto", *classes))
    if name == "auto":
        name = described.attention_backend
    module, _, class_name = classes[name].partition(":")
    try:
        backend_class = getattr(importlib.import_module(module), class_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ValueError(
            f"attention backend {name!r} needs the package triton, which is not installed: "
            "pip install triton, or choose attention backend 'torch'"
        ) from error
    backend_class.check(spec, device, offload)
    if not (backend_class.reads_every_format or spec.part.format.is_operand):
        raise ValueError(
            f"attention backend {name!r} does not read a KV cache in {spec.part.format.name}: set kv_cache_dtype="
            "\"auto\", or choose attention backend 'triton' or 'torch'"
        )
    return backend_class(spec, device)
