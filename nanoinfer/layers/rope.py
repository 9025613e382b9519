"""Rotary position embeddings (Su et al., "RoFormer", arXiv:2104.09864), in the half-split layout of Hugging Face.

Element d of a head and element d + head_dim / 2 are one pair, turned by the angle position * inv_freq[d].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.common.errors import did_you_mean, shown

# Rows made at a time: bounds the float32 temporaries of a long table to 16384 * head_dim * 4 bytes each.
_TABLE_ROWS = 16384


def rope_inv_freq(parameters: Mapping, head_dim: int, device: torch.device | str) -> Tensor:
    """Return the radians per position of each pair: [head_dim / 2] float32 on `device`.

    parameters: the config's `rope_parameters` (of one kind of layer): `rope_type` and `rope_theta`, and what the type
    needs. Of type "default", inv_freq[d] = rope_theta ** (-2d / head_dim). What other types make of it is transformers'
    code: "linear" is position interpolation (Chen et al., arXiv:2306.15595), "llama3" the scaling of Llama 3.1.

    Raises:
        ValueError: another type, a missing parameter, or only a part of each head is rotated.
    """
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _NEEDED:
        hint = did_you_mean(rope_type, _NEEDED)
        raise ValueError(f"rope_type {shown(rope_type)} is not supported{hint}. Supported: {', '.join(_NEEDED)}")
    missing = [name for name in ("rope_theta", *_NEEDED[rope_type]) if parameters.get(name) is None]
    if missing:
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)} in the config's rope_parameters")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1.0 is")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents)
    # Use the full names, so that transformers imports these now and not with this module: it takes seconds.
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=2**30, rope_parameters=dict(parameters)
    )
    return transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, device)[0]


def rope_table(
    parameters: Mapping, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return the cosines and sines of all positions: [max_position, head_dim] in `dtype` on `device`.

    Row p holds cos(p * inv_freq) in its first half and sin(p * inv_freq) in its second. They are computed in float32
    and rounded to `dtype` once, as transformers rounds them to the dtype of the activations.
    """
    inv_freq = rope_inv_freq(parameters, head_dim, device)
    table = torch.empty(max_position, head_dim, dtype=dtype, device=device)
    for begin in range(0, max_position, _TABLE_ROWS):
        rows = table[begin : begin + _TABLE_ROWS]
        positions = torch.arange(begin, begin + len(rows), dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        rows[:, : head_dim // 2] = exact.elementwise(torch.cos, angles)
        rows[:, head_dim // 2 :] = exact.elementwise(torch.sin, angles)
    return table


# By type: the parameters that it needs beside `rope_theta`.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
