"""What readers of quantised checkpoints share: settings of a config, checked, and patterns of names."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.config import QUANTISED
from nanoinfer.layers.formats.base import CheckpointTensors, Formats

ACTIVATIONS = (
    "the checkpoint was made for quantised activations. Here its weights stay quantised, and activations keep the "
    "model's dtype"
)
"""What users are told of a checkpoint whose activations are to be quantised, too."""


class Quantization(Formats):
    """The formats of a quantised checkpoint. What its config excludes is dense.

    Attributes:
        name: the `quant_method` of the config's quantization_config.
        other_names: what users of vLLM call it besides.
        kv_cache_dtype: what the checkpoint says about the KV cache, as an engine's option; None: nothing.
    """

    name: str
    other_names: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        """settings: the config's quantization_config. Raises ValueError for those that are not supported."""
        self.settings, self.tensors = settings, tensors

    def scheme_names(self) -> tuple[str, ...]:
        """Return what weights are quantised to, in the words for wide checkpoints ("int4"), where that is known."""
        return ()

    def check_options(self, quantization: str | None, kv_cache_dtype: str) -> None:
        if quantization not in (None, self.name, *self.other_names) and self.scheme_names() != (quantization,):
            known = [self.name, *self.scheme_names()] if len(self.scheme_names()) == 1 else [self.name]
            only = " (only wide weights are quantised while they are read)" if quantization in QUANTISED else ""
            raise ValueError(
                f"quantization={quantization!r} does not fit this checkpoint, which is quantised with {self.name}: "
                f"give quantization={' or '.join(map(repr, known))}, or leave it out{only}"
            )
        if self.kv_cache_dtype is not None and kv_cache_dtype != self.kv_cache_dtype:
            raise ValueError(
                f"the quantization_config says that the KV cache is {self.kv_cache_dtype}, and "
                f"kv_cache_dtype={kv_cache_dtype!r}: give kv_cache_dtype={self.kv_cache_dtype!r}, or remove its "
                "kv_cache_scheme from config.json"
            )

    def setting(self, name: str, kind: type, default: Any = None, settings: dict[str, Any] | None = None) -> Any:
        """Return a setting, or the default where the config does not give it.

        Raises:
            ValueError: it is of another type.
        """
        value = (self.settings if settings is None else settings).get(name)
        if value is None:
            return default
        if type(value) is not kind:
            raise ValueError(f"{name} is {shown(value)} in the quantization_config of {self.name}, not {kind.__name__}")
        return value

    def one_of(self, name: str, allowed: Collection[Any], default: Any, settings: dict[str, Any] | None = None) -> Any:
        """Return a setting, or the default.

        Raises:
            ValueError: it is not one of those that are allowed.
        """
        value = (self.settings if settings is None else settings).get(name)
        value = default if value is None else value
        if not any(type(value) is type(one) and value == one for one in allowed):
            listed = ", ".join(map(str, allowed))
            where = f"{name} is {shown(value)} in the quantization_config of {self.name}"
            raise ValueError(f"{where}: supported are {listed}")
        return value

    def names(self, name: str, settings: dict[str, Any] | None = None) -> list[str]:
        """Return a setting that lists names.

        Raises:
            ValueError: it is no list of text.
        """
        value = self.setting(name, list, [], settings)
        if not all(isinstance(one, str) for one in value):
            raise ValueError(f"{name} is {shown(value)} in the quantization_config of {self.name}, not a list of names")
        return value

    def group_size(self, settings: dict[str, Any] | None = None, default: int | None = 128) -> int | None:
        """Return `group_size`; None: a group is a whole row.

        Raises:
            ValueError: it is no size.
        """
        settings = self.settings if settings is None else settings
        value = settings.get("group_size", default)
        if value in (None, -1, 0) and not isinstance(value, bool):
            return None
        if type(value) is not int or value < 1:
            raise ValueError(f"group_size is {shown(value)} in the quantization_config of {self.name}, not a size")
        return value


def searches(pattern: str, name: str) -> bool:
    """Whether a regular expression of a config matches the beginning of a name.

    Raises:
        ValueError: it is no regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{shown(pattern)} in the quantization_config is no regular expression: {error}") from error


def kv_cache_dtype_of(scheme: dict[str, Any]) -> str:
    """Return what a kv_cache_scheme is as an engine's `kv_cache_dtype`.

    Raises:
        ValueError: the engine has no such KV cache.
    """
    is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
    if not is_fp8 or scheme.get("strategy", "tensor") != "tensor" or not scheme.get("symmetric", True):
        raise ValueError(
            f"kv_cache_scheme is {shown(scheme)} in the quantization_config: supported are 8 bits of type float, one "
            "scale for a tensor, or none"
        )
    return "fp8"
