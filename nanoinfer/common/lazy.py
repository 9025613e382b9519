"""Packages whose public names are imported when they are first used, as PEP 562 allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Give `__getattr__` and `__dir__` for a package's `__init__`, which imports none of its names itself.

    Submodules that nobody has imported yet are found as attributes, too. An unknown name raises an AttributeError;
    Python adds the nearest name to it, which it looks for in `__dir__`.

    Args:
        package: its `__name__`.
        modules: module of the package, such as "memory.forecast" -> the public names that it defines.
    """
    module = sys.modules[package]
    homes = {name: f"{package}.{home}" for home, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in homes:
            value = getattr(import_module(homes[name]), name)
            setattr(module, name, value)  # from now on Python finds it by itself
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*vars(module), *homes})

    return __getattr__, __dir__
