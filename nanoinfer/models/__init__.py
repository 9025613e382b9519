"""The models. Adding one is adding a file here: every module of this folder is imported, and registers its classes."""

import importlib
import pkgutil

from nanoinfer.models.base import DecoderModel, ModelSpec
from nanoinfer.models.registry import find_class, register, resolve, supported_architectures

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DecoderModel", "ModelSpec", "find_class", "register", "resolve", "supported_architectures"]
