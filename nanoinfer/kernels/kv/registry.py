"""From the name of a KV format to the format."""

from __future__ import annotations

import importlib

from nanoinfer.common.kv_formats import KV_FORMATS
from nanoinfer.kernels.kv.base import KVFormat


def make_format(name: str) -> KVFormat | None:
    """Return the format that `kv_cache_dtype` names; None: "auto", the model's own."""
    module, _, function = KV_FORMATS[name].partition(":")
    return getattr(importlib.import_module(module), function)()
