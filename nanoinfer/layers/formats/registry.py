"""Map the `quant_method` of a config's quantization_config to a weight format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.layers.formats.base import WeightFormat
from nanoinfer.layers.formats.dense import DENSE

_FORMATS: dict[str, type[WeightFormat]] = {}


def register_format(weight_format: type[WeightFormat]) -> type[WeightFormat]:
    """Class decorator: this format reads checkpoints whose quantization_config names it.

    Raises:
        ValueError: the name is taken.
    """
    if weight_format.name in _FORMATS:
        taken = _FORMATS[weight_format.name].__name__
        raise ValueError(f"{weight_format.name} is already registered, by {taken}")
    _FORMATS[weight_format.name] = weight_format
    return weight_format


def format_of(quantization: Mapping[str, Any] | None) -> WeightFormat:
    """The format of a model's projections, from its config's quantization_config.

    Raises:
        ValueError: it names a method that is not supported, or none.
    """
    if not quantization:
        return DENSE
    method = quantization.get("quant_method")
    if isinstance(method, str) and method in _FORMATS:
        return _FORMATS[method](dict(quantization))
    raise ValueError(
        f"the config has a quantization_config with quant_method={shown(method)}, and quantized checkpoints are not "
        f"supported{did_you_mean(str(method), _FORMATS)}: take one in bfloat16, float16 or float32"
    )
