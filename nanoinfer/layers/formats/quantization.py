"""What readers of quantised checkpoints share: settings of a config, checked, and patterns of names."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

from nanoinfer.common.errors import shown
from nanoinfer.config import QUANTISED
from nanoinfer.layers.formats.base import CheckpointTensors, Formats

ACTIVATIONS = (
    "the checkpoint was made for quantised activations. Here its weights stay quantised, and activations keep the "
    "model's dtype"
)
"""What users are told of a checkpoint whose activations are to be quantised, too."""
# Settings that say that weights were rotated, of compressed-tensors and of AutoRound.
_ROTATIONS = ("transform_config", "rotation_config", "spinquant_config", "hadamard_config")


class Quantization(Formats):
    """The formats of a quantised checkpoint. What its config excludes is dense.

    A setting that is not what it must be is refused with a ValueError, which names the setting and its value.

    Attributes:
        name: the `quant_method` of the config's quantization_config.
        other_names: what users of vLLM call it besides.
    """

    name: str
    other_names: tuple[str, ...] = ()

    def __init__(self, settings: dict[str, Any], tensors: CheckpointTensors) -> None:
        """settings: the config's quantization_config."""
        self.settings, self.tensors = settings, tensors
        self.of = cache(self.of)  # models are built several times, and may have thousands of experts
        self.has_kv_scheme = settings.get("kv_cache_scheme") is not None
        for name in _ROTATIONS:
            rotation = settings.get(name)
            if any(rotation.values()) if isinstance(rotation, dict) else rotation:
                raise ValueError(
                    f"{name} is not supported in the quantization_config: it has {shown(rotation)}, and rotated "
                    "weights need rotated activations"
                )

    def scheme_names(self) -> tuple[str, ...]:
        """Return what all weights are quantised to, in the words for wide checkpoints ("int4"), where that is known."""
        return ()

    def check_quantization(self, quantization: str | None) -> None:
        known = (self.name, *self.scheme_names())
        if quantization not in (None, *known, *self.other_names):
            only = (
                " (only weights in 16 or 32 bits are quantised while they are read)"
                if quantization in QUANTISED
                else ""
            )
            raise ValueError(
                f"quantization={quantization!r} does not fit this checkpoint, which is quantised with {self.name}: "
                f"give quantization={' or '.join(map(repr, known))}, or leave it out{only}"
            )

    def setting(
        self, name: str, allowed: type | Collection[Any], default: Any = None, settings: dict[str, Any] | None = None
    ) -> Any:
        """Return a setting, or the default where the config does not give it.

        allowed: its type, or the values that it may have: then the default must be one of them, too.
        """
        value = (self.settings if settings is None else settings).get(name)
        value = default if value is None else value
        if isinstance(allowed, type):
            return self.checked(name, value, value is default or type(value) is allowed, f", not {allowed.__name__}")
        is_allowed = any(type(value) is type(one) and value == one for one in allowed)
        return self.checked(name, value, is_allowed, f": supported are {', '.join(map(str, allowed))}")

    def names(self, name: str, settings: dict[str, Any] | None = None) -> list[str]:
        """Return a setting that lists names."""
        value = self.setting(name, list, [], settings)
        return self.checked(name, value, all(isinstance(one, str) for one in value), ", not a list of names")

    def group_size(self, settings: dict[str, Any] | None = None, default: int | None = 128) -> int | None:
        """Return `group_size`; None: a group is a whole row."""
        value = (self.settings if settings is None else settings).get("group_size", default)
        if value in (None, -1, 0) and not isinstance(value, bool):
            return None
        return self.checked("group_size", value, type(value) is int and value > 0, ", not a size")

    def block(self, name: str, value: Any) -> tuple[int, int]:
        """Return the rows and columns of a block."""
        is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
        return tuple(self.checked(name, value, is_pair, ", not two sizes"))

    def checked(self, name: str, value: Any, is_allowed: bool, expected: str) -> Any:
        """Return a setting's value, or raise ValueError: it is not what is expected."""
        if not is_allowed:
            raise ValueError(f"{name} is {shown(value)} in the quantization_config of {self.name}{expected}")
        return value


def searches(pattern: str, name: str) -> bool:
    """Whether a regular expression of a config matches the beginning of a name; ValueError if it is none."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{shown(pattern)} in the quantization_config is no regular expression: {error}") from error
