"""Rotations: what metadata and the tensors of factors say, as a config's `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nanoinfer.gguf.keys import Keys
from nanoinfer.gguf.reader import GGUFTensor

_MAX_FACTORS = 4096
# Gemma 4's files divide the frequencies of pairs that are not turned by as much.
_NOT_TURNED = 1e29
# Llama 3.1's rotation, and of those that took it over. Files hold only the factors that follow from it.
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def rotation(keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Return the `rope_parameters` of the layers without a window, as the file has them.

    Raises:
        ValueError: another kind of rotation.
    """
    rope: dict[str, Any] = dict(rope_type="default", rope_theta=keys.number("rope.freq_base", 10000.0))
    num_turned = keys.count("rope.dimension_count", head_dim)
    if num_turned != head_dim:
        rope["partial_rotary_factor"] = _share(num_turned, head_dim)
    kind = keys.take("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", None) if keys.has("rope.scaling.factor") else 0
    factor = factor or keys.number("rope.scale_linear", 0) or 1.0
    length = keys.count("rope.scaling.original_context_length", context)
    keys.take("rope.scaling.finetuned", None)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    tensors = keys.file.tensors
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        if kind not in ("linear", "none", "longrope"):
            keys.refuse("rope.scaling.type", f"is {kind!r} beside rope_factors_long.weight, which is not supported")
        if factor != 1 and kind != "none":
            keys.refuse("rope.scaling.factor", f"is {factor} beside rope_factors_long.weight, which is not supported")
        factors = {
            f"{name}_factor": _factors(keys, f"rope_factors_{name}.weight", num_turned) for name in ("long", "short")
        }
        return rope | dict(
            rope_type="longrope", original_max_position_embeddings=length, attention_factor=attention, **factors
        )
    if attention != 1.0:
        keys.refuse("rope.scaling.attn_factor", f"is {attention}: it is supported beside rope_factors_long alone")
    if "rope_freqs.weight" in tensors:
        if kind not in ("linear", "none") or factor != 1:
            keys.refuse("rope.scaling.type", f"is {kind!r} beside rope_freqs.weight, which is not supported")
        return rope | _divided(keys, num_turned, rope["rope_theta"], context)
    if kind == "yarn":
        return rope | _yarn(keys, factor, length)
    if kind not in ("linear", "none"):
        keys.refuse("rope.scaling.type", f"is {kind!r}: supported are 'none', 'linear', 'yarn' and factors in tensors")
    if kind == "linear" and factor != 1:
        rope |= dict(rope_type="linear", factor=factor)
    return rope


def _share(part: int, whole: int) -> float:
    """Return the factor of which transformers makes `part` again: it rounds the product down."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2)


def _yarn(keys: Keys, factor: float, length: int) -> dict[str, Any]:
    rope = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=length)
    names = dict(yarn_beta_fast="beta_fast", yarn_beta_slow="beta_slow", yarn_attn_factor="attention_factor")
    for name, field in names.items():
        if keys.has(f"rope.scaling.{name}"):
            rope[field] = keys.number(f"rope.scaling.{name}")
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    if log_multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0):
        rope |= dict(mscale=1.0, mscale_all_dim=log_multiplier)  # llama.cpp, too, takes the other for 1
    return rope


def _factors(keys: Keys, name: str, num_turned: int) -> list[float]:
    tensor = keys.file.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{keys.file.path} lacks {name}")
    if tensor.type.name != "F32" or tensor.shape != (num_turned // 2,) or num_turned > 2 * _MAX_FACTORS:
        raise ValueError(
            f"{name} in {keys.file.path} is {tensor.type.name} {list(tensor.shape)}, it must be F32 [{num_turned // 2}]"
        )
    return [float(str(one)) for one in _values(tensor)]


def _values(tensor: GGUFTensor) -> np.ndarray:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        content = file.read(tensor.num_bytes)
    if len(content) < tensor.num_bytes:
        raise ValueError(f"{tensor.path} is cut short: {tensor.name} is not whole")
    return np.frombuffer(content, "<f4")


def _divided(keys: Keys, num_turned: int, theta: float, context: int) -> dict[str, Any]:
    """Return a rotation whose frequencies are divided by `rope_freqs`: Llama 3's if it is that, to the last bits."""
    divisors = np.asarray(_factors(keys, "rope_freqs.weight", num_turned))
    largest, num_left = float(divisors.max()), int((divisors == 1).sum())
    if 0 < num_left < len(divisors) and bool(
        (divisors[:num_left] == 1).all() and (divisors[num_left:] >= _NOT_TURNED).all()
    ):
        return dict(rope_type="proportional", partial_rotary_factor=_share(2 * num_left, num_turned))
    if largest > 1:
        expected = _llama3_factors(num_turned, theta, largest)
        if np.allclose(divisors, expected, rtol=1e-5, atol=0):
            return dict(rope_type="llama3", factor=largest, **_LLAMA3)
    factors = divisors.tolist()
    lengths = dict(original_max_position_embeddings=context, attention_factor=1.0)
    return dict(rope_type="longrope", short_factor=factors, long_factor=factors, **lengths)


def _llama3_factors(num_turned: int, theta: float, factor: float) -> np.ndarray:
    low, high, length = _LLAMA3.values()
    waves = 2 * math.pi * theta ** (np.arange(0, num_turned, 2) / num_turned)
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < length / high, 1.0, np.where(waves > length / low, factor, between))
