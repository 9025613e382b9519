"""What llama.cpp's converter makes of Gated DeltaNet: metadata and tensors of `gguf_models`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from transformers import AutoConfig

from nanoinfer.common import exact


def of_delta(family: str, config: Mapping) -> dict:
    """What the converter says of a config, beside what it says of all."""
    read = AutoConfig.for_model(**config)
    num_pairs = int(read.head_dim * read.rope_parameters["partial_rotary_factor"]) // 2
    found = {
        "ssm.conv_kernel": read.linear_conv_kernel_dim,
        "ssm.state_size": read.linear_key_head_dim,
        "ssm.group_count": read.linear_num_key_heads,
        "ssm.time_step_rank": read.linear_num_value_heads,
        "ssm.inner_size": read.linear_num_value_heads * read.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in read.layer_types],
        "rope.dimension_sections": [*(len(range(axis, num_pairs, 3)) for axis in range(3)), 0],  # which take turns
    }
    if family != "qwen3_5":
        found["expert_shared_feed_forward_length"] = read.shared_expert_intermediate_size
    return found


def delta_tensors(family: str, config: Mapping, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of Gated DeltaNet. Heads of values are tiled in Qwen3.5's files; of Next q, k and v are one tensor, and
    z is another."""
    _, layer, own = re.fullmatch(r"(.*)\.layers\.(\d+)\.linear_attn\.(.+)", name).groups()
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    begin = 2 * num_keys * key_size  # of v

    def tiled(values: torch.Tensor, of_head: int) -> torch.Tensor:
        if family == "qwen3_next":
            return values
        return values.unflatten(0, (num_keys, num_values // num_keys, of_head)).transpose(0, 1).flatten(0, 2)

    found = {}
    if own == "in_proj_qkvz.weight":
        wide = num_values // num_keys * size
        parts = values.unflatten(0, (num_keys, -1)).split((key_size, key_size, wide, wide), 1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        found = {"attn_qkv.weight": torch.cat((q, k, v)), "attn_gate.weight": z}
    elif own == "in_proj_ba.weight":
        found = {"ssm_ba.weight": values}
    elif own in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values.squeeze(1) if own == "conv1d.weight" else values
        found = {
            "attn_qkv.weight" if "qkv" in own else "ssm_conv1d.weight": torch.cat(
                (values[:begin], tiled(values[begin:], size))
            )
        }
    elif own == "out_proj.weight":
        found = {"ssm_out.weight": tiled(values.mT, size).mT}
    elif own == "A_log":
        found = {"ssm_a": -exact.elementwise(torch.exp, tiled(values, 1))}
    else:
        names = {"in_proj_z.weight": ("attn_gate.weight", size), "in_proj_a.weight": ("ssm_alpha.weight", 1)}
        names |= {"in_proj_b.weight": ("ssm_beta.weight", 1), "dt_bias": ("ssm_dt.bias", 1)}
        theirs, of_head = names.get(own, ("ssm_norm.weight", 0))
        found = {theirs: tiled(values, of_head) if of_head else values}
    for theirs, one in found.items():
        yield f"blk.{layer}.{theirs}", one
