"""What becomes of a model on this machine: whether it runs and how fast, and in which format it is best read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanoinfer.common.units import format_size
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.memory.cards import card_named
from nanoinfer.memory.forecaster import forecaster
from nanoinfer.memory.proposals import fastest_format
from nanoinfer.weights.load import read_checkpoint, read_spec
from offload.memory.host_memory import memory_available_bytes

_ASKED = dict.fromkeys(
    ("gpu", "gpu_memory_limit", "host_memory_limit", "max_model_len", "batch", "link_gbps", "device_gbps")
)
_KNOWN = ("gpu_memory_limit", "host_memory_limit", "max_model_len")


def best_format(model: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what is to change in these arguments of an engine, and the same in words; nothing where the weights are
    best as they are, or where the model runs on the host.

    Of all that the plan proposes the fastest counts, and of equally fast ones the one that loses least.
    """
    others = dict(arguments)
    if device_of(resolve_device(others.pop("device", "auto"))).is_host:
        return {}, ""
    named = {name: others.pop(name, None) for name in _KNOWN}
    named |= dict(batch=others.pop("max_num_seqs", None))
    forecast = forecaster(model, **_ASKED | named, **others).forecast()
    best = fastest_format(forecast.proposals)
    return ({}, "") if best is None else (best.changes, best.what)


def what_becomes_of(model: str | Path, device: str) -> str:
    """Return whether a model runs on this device, and how fast, in words; ValueError: its kind does not run."""
    described = device_of(resolve_device(device))
    if described.is_host:
        spec, available = read_spec(read_checkpoint(model), "auto"), memory_available_bytes()
        if spec.weight_bytes > available:
            return f"needs {format_size(spec.weight_bytes)} of memory, {format_size(available)} are free"
        return "runs on the CPU"
    asked = _ASKED | dict(batch=1, device_gbps=_device_gbps(described.torch_device))
    step = forecaster(model, **asked).step()
    if not step.fits:
        raise ValueError(step.problem)
    streams = ", streams" if step.streamed_bytes_per_step else ""
    if step.ms_per_token is None:
        return "runs, nothing streams"
    return f"{'at most' if step.is_floor else 'about'} {step.tokens_per_second:.0f} tokens/s{streams}"


def _device_gbps(device: torch.device) -> float | None:
    """Return the bandwidth of this GPU's memory by its data sheet; None: it is in no table."""
    try:
        return card_named(device_of(device).name).device_gbps
    except ValueError:
        return None
