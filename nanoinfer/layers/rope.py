"""Rotary position embeddings (Su et al., "RoFormer", arXiv:2104.09864), as transformers has them.

Two elements of a head are one pair, turned by the angle position * inv_freq[d]: d and d + half of what is turned, or
neighbours. What is turned is a whole head or its beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.common.errors import did_you_mean, shown

# transformers warns of a YaRN factor that counts from the training length, as Qwen3's model cards want it: be quiet.
logging.getLogger("transformers.modeling_rope_utils").addFilter(lambda said: "implicit factor" not in said.getMessage())
# Rows made at a time: bounds the float32 temporaries of a long table to 16384 * head_dim * 4 bytes each.
_TABLE_ROWS = 16384


@dataclass(frozen=True)
class Context:
    """The lengths that a rotation may depend on, in tokens.

    limit: the config's max_position_embeddings; length: the most tokens of a sequence. Types "dynamic" and "longrope"
    turn short sequences otherwise than long ones. transformers looks at the length of the moment. Here `length` decides
    for all, once: no token may depend on what comes behind it.
    """

    limit: int
    length: int


def rotary_dim(parameters: Mapping, head_dim: int) -> int:
    """Return the number of elements of a head that are turned, its first ones; ValueError if they are not pairs."""
    factor = parameters.get("partial_rotary_factor")
    if factor is None or parameters.get("rope_type") == "proportional":  # which leaves angles of 0 instead
        return head_dim
    dim = int(head_dim * factor)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(
            f"partial_rotary_factor={factor} turns {dim} of the {head_dim} elements of a head: it must be an even "
            f"number of 2 to {head_dim}"
        )
    return dim


def longest_contexts(parameters: Mapping, limit: int) -> tuple[int, int]:
    """Return up to how many positions a rotation is meant, and up to how many it can be used by whoever asks for them.

    limit: the config's max_position_embeddings. YaRN's factor counts from the length of the training, as on the model
    cards that ask for it; the second number is another one where the length asked for chooses the rotation.
    """
    rope_type, factor = parameters.get("rope_type"), parameters.get("factor") or 1
    if rope_type == "yarn":
        limit = max(limit, int(factor * parameters["original_max_position_embeddings"]))
    return limit, int(factor * limit) if rope_type == "dynamic" else limit


def rope_inv_freq(
    parameters: Mapping, head_dim: int, device: torch.device | str, context: Context | None = None
) -> tuple[Tensor, float]:
    """Return the radians per position of each pair, [rotary_dim / 2] float32 on `device`, and a factor on the cosines.

    Of type "proportional", whose last pairs have angles of 0, only the pairs before them.

    parameters: the config's `rope_parameters` (of one kind of layer): `rope_type` and `rope_theta`, and what the type
    needs. Of type "default", inv_freq[d] = rope_theta ** (-2d / rotary_dim). What other types make of it is
    transformers' code: "linear" is position interpolation (Chen et al., arXiv:2306.15595), "yarn" arXiv:2309.00071,
    "longrope" arXiv:2402.13753, "llama3" the scaling of Llama 3.1. context: read by "dynamic" and "longrope".

    Raises:
        ValueError: another type, a missing parameter, or one that does not fit the heads.
    """
    rope_type, dim = parameters.get("rope_type", "default"), rotary_dim(parameters, head_dim)
    if rope_type not in _NEEDED:
        hint = did_you_mean(rope_type, _NEEDED)
        raise ValueError(f"rope_type {shown(rope_type)} is not supported{hint}. Supported: {', '.join(_NEEDED)}")
    missing = [name for name in ("rope_theta", *_NEEDED[rope_type]) if parameters.get(name) is None]
    if missing:
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)} in the config's rope_parameters")
    if rope_type == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        if len(parameters[name]) != dim // 2:
            raise ValueError(
                f"{name} has {len(parameters[name])} entries, it must have one for each of a head's {dim // 2} pairs"
            )
    context = context or Context(2**30, 0)
    # A config of no family: one of a family imports what models need, which takes a second.
    config = transformers.PretrainedConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=context.limit,
        rope_parameters=dict(parameters),
    )
    found, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](
        config, device, seq_len=context.length
    )
    if rope_type == "proportional":  # an angle of 0 turns nothing, and its cosines would be most of the table
        found = found[: max(1, int((found != 0).sum()))]
    return found, factor


def pair_distance(parameters: Mapping | None, head_dim: int) -> int | None:
    """Return how far apart the elements of a pair lie, as in `HeadSteps`; parameters: None where nothing turns,
    or neighbours are pairs."""
    is_proportional = parameters is not None and parameters.get("rope_type") == "proportional"
    return head_dim // 2 if is_proportional else None


def rope_table(
    parameters: Mapping,
    head_dim: int,
    max_position: int,
    dtype: torch.dtype,
    device: torch.device | str,
    context: Context | None = None,
) -> Tensor:
    """Return the cosines and sines of all positions: [max_position, rotary_dim] in `dtype` on `device`.

    Row p holds cos(p * inv_freq) in its first half and sin(p * inv_freq) in its second, times the factor on both. They
    are computed in float32 and rounded to `dtype` once, as transformers rounds them to the dtype of the activations.
    On the meta device, where torch takes its time for each operation, the table has its shape and nothing is computed.
    """
    is_meta = torch.device(device).type == "meta"
    inv_freq, factor = rope_inv_freq(parameters, head_dim, "cpu" if is_meta else device, context)
    table = torch.empty(max_position, 2 * len(inv_freq), dtype=dtype, device=device)
    if is_meta:
        return table
    for begin in range(0, max_position, _TABLE_ROWS):
        rows = table[begin : begin + _TABLE_ROWS]
        positions = torch.arange(begin, begin + len(rows), dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        rows[:, : len(inv_freq)] = exact.elementwise(torch.cos, angles).mul_(factor)
        rows[:, len(inv_freq) :] = exact.elementwise(torch.sin, angles).mul_(factor)
    return table


def query_scales(beta: float, length: int, max_position: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return what queries are multiplied by at each position, as in Llama 4: [max_position] in `dtype`.

    1 + beta * log(1 + position // length), in float32, rounded once.
    """
    positions = torch.arange(max_position, device=device)
    return (1 + beta * exact.elementwise(torch.log, 1 + torch.floor(positions / length))).to(dtype)


# By type: the parameters that it needs beside `rope_theta`.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}


def distinct(
    ropes: Sequence[Mapping | None], head_dims: Sequence[int]
) -> tuple[list[tuple[Mapping, int]], list[int | None]]:
    """Return the distinct rotations of the layers' heads, each with the size of these, and for each layer the index of
    its rotation, or None."""
    rotations: list[tuple[Mapping, int]] = []
    for pair in zip(ropes, head_dims, strict=True):
        if pair[0] is not None and pair not in rotations:
            rotations.append(pair)
    return rotations, [
        None if rope is None else rotations.index((rope, size)) for rope, size in zip(ropes, head_dims, strict=True)
    ]
