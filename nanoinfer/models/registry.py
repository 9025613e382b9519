"""Map architecture names, as checkpoints give them, to model classes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

import nanoinfer.models
from nanoinfer.common.errors import shown
from nanoinfer.models.checkpoints import instead_of
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


def find_class(architectures: list[str] | None) -> type[Decoder]:
    """Return the class of the first supported one of a config's `architectures`; ValueError if there is none."""
    _import_families()
    for name in architectures or ():
        if name in _MODELS:
            return _MODELS[name]
    if not architectures:
        raise ValueError("the config names no architecture: download it again, as the model's authors published it")
    name = architectures[0]
    raise ValueError(f"architecture {shown(name)} is not supported: {instead_of(name, supported_architectures())}")
