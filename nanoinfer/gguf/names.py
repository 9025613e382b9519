"""The tensors of a file by the names that the same model has in a checkpoint of Hugging Face.

llama.cpp's converter changes some of them: rows of q and k lie in another order where its own rotation turns
neighbours, norms hold 1 + w, and the experts of a layer are one tensor. `Part` says what is to be put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.common.tables import by_name
from nanoinfer.gguf.reader import GGUFFile, GGUFTensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of the model: a tensor of the file, or rows of one.

    Attributes:
        shape: of its values. offset: of its first byte in the tensor.
        turned: numbers of heads, and of the rows of one: these first rows lie as llama.cpp turns them, the two of a
            pair beside each other; (0, 0): none do.
        added: what the file has added to each value.
    """

    tensor: GGUFTensor
    shape: tuple[int, ...]
    offset: int = 0
    turned: tuple[int, int] = (0, 0)
    added: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How an architecture differs.

    Attributes:
        own: names of a layer's tensors, by their names in files, in place of `_LAYER`'s; with what these end with,
            they are names of parameters.
        is_permuted: whether rows of q and k lie in llama.cpp's order.
        added: what all norms have in addition, but for those of `plain_norms`.
        experts: the name of all experts of a layer; expert: those of gate, up and down of one.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    added: float = 0.0
    plain_norms: tuple[str, ...] = ()
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # LFM2's last norm
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CONVOLUTIONS = ("linear_attn.conv1d", "conv.conv")
_NORM_BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
NAMINGS: dict[str, Naming] = by_name({
    "llama mistral3 granite smollm3": Naming(is_permuted=True),
    "mixtral": Naming(
        is_permuted=True,
        experts="block_sparse_moe.experts",
        expert=("w1", "w3", "w2"),
        own={"ffn_gate_inp": "block_sparse_moe.gate"},
    ),
    "gemma3": Naming(added=1.0, own={**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}),
    "gemma4": Naming(
        experts="experts",
        own={
            **_NORMS_BEHIND,
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
        },
    ),
    "gpt-oss": Naming(own={**_NORM_BEFORE_MLP, "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}),
    "phi3": Naming(own={"ffn_up": "mlp.gate_up_proj"}),
    "glm4": Naming(
        own={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "glm4moe": Naming(own={**_NORM_BEFORE_MLP, "exp_probs_b": "mlp.gate.e_score_correction_bias"}),
    "exaone4 olmo2": Naming(own=_NORMS_BEHIND),
    "hunyuan-dense": Naming(own={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
    "lfm2 lfm2moe": Naming(
        experts="feed_forward.experts",
        expert=("w1", "w3", "w2"),
        own={
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": _CONVOLUTIONS[1],
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
        },
    ),
    "nemotron": Naming(added=1.0),
    "qwen3next qwen35 qwen35moe": Naming(
        added=1.0,
        plain_norms=("ssm_norm",),
        own={
            **_NORM_BEFORE_MLP,
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_conv1d": _CONVOLUTIONS[0],
            "ssm_a.weight": "linear_attn.rates.weight",  # -exp(A_log)
            "ssm_dt.bias": "linear_attn.dt_bias",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
    "seed_oss": Naming(own=_NORM_BEFORE_MLP),
    "starcoder2": Naming(own={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
})  # fmt: skip
"""By the name of an architecture; another one has the common names. Mixtral's files say that they are of `llama`."""


def naming_of(architecture: str, config: Mapping[str, Any]) -> Naming:
    """Return how a file of an architecture names its tensors. config: what `raw_config` says."""
    return NAMINGS.get("mixtral" if config["model_type"] == "mixtral" else architecture, Naming())


# Parameters that are no weight or bias of a module.
_BARE = ("self_attn.sinks", "mlp.gate.e_score_correction_bias", "feed_forward.expert_bias")
_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)\.(weight|bias|scale)")
_OF_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
_ALL_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
# Tensors that the config has read.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_VISION = ("v.", "mm.")


def named_parts(file: GGUFFile, naming: Naming, config: Mapping[str, Any]) -> dict[str, Part]:
    """Return the tensors of the model. One that has no place in it keeps its name in the file.

    config: what `raw_config` says. What does not run is left out.
    """
    parts: dict[str, Part] = {}
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads, "attn_qkv": num_heads + num_kv_heads}
    for name, tensor in file.tensors.items():
        if name in _FACTORS or skipped_part(name, config["num_hidden_layers"]):
            continue
        whole = Part(tensor=tensor, shape=tensor.shape)
        match = _IN_LAYER.fullmatch(f"{name}.weight" if name.endswith(".ssm_a") else name)
        if match is None:
            is_norm = name == "output_norm.weight"
            parts[_WHOLE.get(name, name)] = replace(whole, added=naming.added if is_norm else 0.0)
            continue
        layer, kind, ending = f"model.layers.{match[1]}.", match[2], match[3]
        if experts := dict(_experts(naming, whole, kind, ending)):
            parts |= {layer + own: part for own, part in experts.items()}
            continue
        if (own := naming.own.get(f"{kind}.{ending}")) is not None:
            parts[layer + own] = whole
            continue
        own = naming.own.get(kind, _LAYER.get(kind))
        if kind == "attn_qkv" and _attends(config, int(match[1])):
            own = _LAYER[kind]
        if own is None or ending == "scale":
            parts[name] = whole
            continue
        if naming.is_permuted and kind in heads:
            whole = replace(whole, turned=(heads[kind], config["head_dim"]))
        if own in _CONVOLUTIONS and len(tensor.shape) == 2:  # [channels, taps], of one input each
            whole = replace(whole, shape=(tensor.shape[0], 1, tensor.shape[1]))
        if own == "mlp.shared_expert_gate" and len(tensor.shape) == 1:  # one row
            whole = replace(whole, shape=(1, *tensor.shape))
        if kind.endswith("_norm") and ending == "weight" and kind not in naming.plain_norms:
            whole = replace(whole, added=naming.added)
        parts[layer + own + ("" if own in _BARE else f".{ending}")] = whole
    return parts


def _attends(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has attention, so that it has what attention projects."""
    types = config.get("layer_types") or ()
    return layer < len(types) and types[layer] == "full_attention"


def skipped_part(name: str, num_layers: int) -> str | None:
    """Return what a tensor of a file belongs to that does not run; None: it runs. num_layers: those of the model."""
    if name.startswith(_VISION):
        return "weights of vision"
    match = _OF_LAYER.match(name)
    return "layers that guess tokens ahead" if match and int(match[1]) >= num_layers else None


def _experts(naming: Naming, whole: Part, kind: str, ending: str) -> Iterator[tuple[str, Part]]:
    """Yield what a tensor has of experts, by its name in a layer; nothing, if it is none of experts."""
    names = dict(zip(("gate", "up", "down"), naming.expert, strict=True))
    if match := _ONE_EXPERT.fullmatch(kind):
        yield f"{naming.experts}.{match[2]}.{names[match[1]]}.{ending}", whole
        return
    match = _ALL_EXPERTS.fullmatch(kind)
    if match is None or len(whole.shape) < 2:
        return
    held = ("gate", "up") if match[1] == "gate_up" else (match[1],)
    num_experts, num_rows, *rest = whole.shape
    if num_rows % len(held):
        return
    shape = (num_rows // len(held), *rest)
    num_bytes = whole.tensor.num_bytes // (num_experts * len(held))
    for number in range(num_experts * len(held)):
        expert, part = divmod(number, len(held))
        part = f"{naming.experts}.{expert}.{names[held[part]]}.{ending}"
        yield part, replace(whole, shape=shape, offset=number * num_bytes)
