"""What a user puts in the place of a config's fields."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

import transformers

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.weights.checkpoint import FIELD_NAMES

_ROTATIONS = ("rope_scaling", "rope_parameters")
_OF_ROTATION = ("rope_theta", "partial_rotary_factor")


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values: an object is laid over the one that is there, all else takes its place.

    A config says the rotation as `rope_parameters` or, if it is older, as `rope_scaling`, and its base in there or
    beside it: either name means what the file has. A rotation of another type keeps the base, and nothing else.

    Raises:
        ValueError: neither the file nor transformers has a field of that name (the message gives the nearest one), or
            it would have no effect.
    """
    config = deepcopy(dict(raw))
    model_type, known = raw.get("model_type"), {*raw, *FIELD_NAMES}
    if isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING:
        known |= {field.name for field in fields(transformers.CONFIG_MAPPING[model_type])}
    for name, value in overrides.items():
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise ValueError(f"hf_overrides has {shown(name)}, and the config has no such field{hint}")
        held = {}
        for other in _ROTATIONS:
            held = config[other] if isinstance(config.get(other), Mapping) and config[other] else held
        if name in _ROTATIONS and isinstance(value, Mapping | None):
            config = {other: one for other, one in config.items() if other not in _ROTATIONS}
            config["rope_parameters"] = _rotation(held, {"rope_type": "default"} if value is None else value)
        elif name in _OF_ROTATION and name in held:
            held[name] = value
        elif name in _OF_ROTATION and _is_by_layer_type(held):  # beside these, it would have no effect
            example = {"rope_parameters": {next(iter(held)): {name: value}}}
            raise ValueError(f"hf_overrides has {name}, and the config one for each type of layer: give {example}")
        else:
            config[name] = _laid_over(config.get(name), value)
    return config


def _rotation(held: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if _is_by_layer_type(value):
        return {**held, **{name: _rotation(held.get(name) or {}, own) for name, own in value.items()}}
    types = [rope.get("rope_type", rope.get("type")) for rope in (held, value)]
    if types[1] not in (None, types[0]):
        held = {name: held[name] for name in _OF_ROTATION if name in held}
    return {**held, **value}


def _is_by_layer_type(rope: Mapping[str, Any]) -> bool:
    return bool(rope) and all(isinstance(own, Mapping) for own in rope.values())


def _laid_over(held: Any, value: Any) -> Any:
    if not (isinstance(held, Mapping) and isinstance(value, Mapping)):
        return value
    return {**held, **{name: _laid_over(held.get(name), own) for name, own in value.items()}}
