"""Map architecture names, as checkpoints give them, to model classes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import psutil

import nanoinfer.models
from nanoinfer.common.errors import shown
from nanoinfer.common.missing import UnsupportedArchitectureError, missing_layers, why_not
from nanoinfer.devices.registry import accelerator, device_of
from nanoinfer.models.checkpoints import Room, instead_of
from nanoinfer.models.decoder import Decoder

_MODELS: dict[str, type[Decoder]] = {}


@cache
def _import_families() -> None:
    """Fill `_MODELS` from the files of this folder."""
    for module in pkgutil.iter_modules(nanoinfer.models.__path__):
        importlib.import_module(f"nanoinfer.models.{module.name}")


def register(architecture: str) -> Callable[[type[Decoder]], type[Decoder]]:
    """Class decorator: this class runs checkpoints whose config names `architecture`; ValueError if it is taken."""

    def add(model: type[Decoder]) -> type[Decoder]:
        if architecture in _MODELS:
            raise ValueError(f"{architecture} is already registered, by {_MODELS[architecture].__name__}")
        _MODELS[architecture] = model
        return model

    return add


def supported_architectures() -> tuple[str, ...]:
    """Return the names that `find_class` knows, sorted."""
    _import_families()
    return tuple(sorted(_MODELS))


def architecture_of(model_type: str) -> str | None:
    """Return the name of the architecture whose configs have this `model_type`; None: it is not supported."""
    return next((name for name in supported_architectures() if _MODELS[name].model_type == model_type), None)


def find_class(architectures: list[str] | None, config: Mapping[str, Any] | None = None) -> type[Decoder]:
    """Return the class of the first supported one of a config's `architectures`.

    config: of the checkpoint, of which not all may run; None: it was asked before.

    Raises:
        UnsupportedArchitectureError (a ValueError): there is none; the message says why, and what runs in its place.
    """
    _import_families()
    for name in architectures or ():
        if name in _MODELS:
            if config is not None and (missing := missing_layers(config, _MODELS[name].layer_types)):
                what = f"architecture {shown(name)} runs, but not this model: it needs {missing}, which is not here yet"
                raise UnsupportedArchitectureError(f"{what}; {instead_of(name, room_here())}", name)
            return _MODELS[name]
    if not architectures:
        raise ValueError("the config names no architecture: download it again, as the model's authors published it")
    name = architectures[0]
    raise UnsupportedArchitectureError(
        f"architecture {shown(name)} is not supported: {why_not(name, config)}; {instead_of(name, room_here())}", name
    )


def room_here() -> Room:
    """Return the memory of this machine."""
    device, host = accelerator(), psutil.virtual_memory().total
    return Room(None if device is None else device_of(device).memory()[1], host)
