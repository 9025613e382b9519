"""What the fields of a checkpoint's config.json may hold.

The fields are checked before transformers reads the file, because transformers uses the values before it checks their
types (a huge `num_hidden_layers` makes a list of that length). They are checked once more afterwards, for the values
that transformers derived. Accepted values can be built, or are refused later by the part that they do not fit: kernels,
weights, or memory. Upper bounds lie far above those of existing models, but low enough that numbers computed from them
stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanoinfer.common.errors import shown
from nanoinfer.common.tables import by_name
from nanoinfer.models.decoder import LAYER_TYPES, Decoder

# Angles are computed in float32, which represents every position up to here exactly.
MAX_POSITIONS = 2**24
MAX_VOCAB_SIZE = 2**24
_LISTED_LAYER_TYPES = " and ".join(LAYER_TYPES)


@dataclass(frozen=True)
class Rule:
    """allowed: the allowed values in words, as they follow "must be" in an error message."""

    allowed: str
    accepts: Callable[[Any], bool]

    def check(self, where: str, name: str, value: Any) -> None:
        """Raise ValueError if the value is not allowed; `where` says whose field it is."""
        if not self.accepts(value):
            raise ValueError(f"{where}: {name} is {shown(value)}, it must be {self.allowed}")


def _count(least: int, most: int) -> Rule:
    # type(), not isinstance(): bool is a subclass of int in Python
    return Rule(
        f"a whole number from {least:,} to {most:,}", lambda value: type(value) is int and least <= value <= most
    )


def _number(least: float, most: float) -> Rule:
    return Rule(
        f"a number from {least:,} to {most:,}", lambda value: type(value) in (int, float) and least <= value <= most
    )


def _optional(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed}, or null", lambda value: value is None or rule.accepts(value))


def _listing(what: str, accepts: Callable[[Any], bool]) -> Rule:
    return Rule(f"a list of {what}", lambda value: isinstance(value, list) and all(map(accepts, value)))


_TEXT = Rule("text", lambda value: isinstance(value, str))
_FLAG = Rule("true or false", lambda value: type(value) is bool)
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
_LABELS = Rule(
    "an object whose names are whole numbers",
    lambda value: isinstance(value, dict) and all(str(name).isdigit() for name in value),
)
_DTYPE = Rule(
    'a dtype of torch, such as "bfloat16"',
    lambda value: isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype),
)
_TOKEN_ID = _count(0, 2**31 - 1)
TOKEN_IDS = Rule(
    "a token id (a whole number of at least 0), a list of them, or null",
    lambda value: value is None or all(map(_TOKEN_ID.accepts, value if isinstance(value, list) else [value])),
)
NAMES = _optional(_listing("names", lambda one: isinstance(one, str)))
_ROPE_THETA = _number(1, 1e15)
_FACTOR = _number(1e-6, 1e6)
_WHOLE_HEADS = _optional(
    Rule("1: heads are rotated as a whole", lambda value: type(value) in (int, float) and value == 1)
)
_FACTORS = _listing("numbers above 0", lambda one: type(one) in (int, float) and 1e-3 <= one <= 1e6)

_FIELDS = by_name({
    "id2label": _optional(_LABELS),
    "label2id rope_parameters rope_scaling quantization_config compression_config": _optional(OBJECT),
    "dtype torch_dtype": _optional(_DTYPE),
    "vocab_size": _count(1, MAX_VOCAB_SIZE),
    "hidden_size": _count(1, 2**17),
    "intermediate_size shared_intermediate_size moe_intermediate_size query_pre_attn_scalar": _count(1, 2**20),
    "num_hidden_layers decoder_sparse_step": _count(1, 1000),
    "num_attention_heads": _count(1, 1024),
    "num_key_value_heads num_global_key_value_heads": _optional(_count(1, 1024)),
    "head_dim global_head_dim n_group topk_group": _optional(_count(1, 2**12)),
    "max_position_embeddings": _count(1, MAX_POSITIONS),
    "original_max_position_embeddings": _optional(_count(1, MAX_POSITIONS)),
    "hidden_act hidden_activation": _TEXT,
    "position_embedding_type": _optional(_TEXT),
    "rms_norm_eps norm_eps norm_epsilon": _number(1e-30, 1),
    "num_local_experts": _optional(_count(0, 2**20)),
    "num_experts n_routed_experts": _count(1, 2**12),
    "num_experts_per_tok top_k_experts": _count(1, 2**10),
    "num_kv_shared_layers num_dense_layers": _count(0, 1000),
    "conv_L_cache linear_conv_kernel_dim": _count(2, 16),
    "linear_num_key_heads linear_num_value_heads": _count(1, 1024),
    "linear_key_head_dim linear_value_head_dim": _count(1, 2**12),
    "full_attention_interval": _count(1, 1000),
    "shared_expert_intermediate_size": _count(0, 2**20),
    "attn_output_gate": Rule("true: attention without gates is another model", lambda value: value is True),
    "block_multiple_of": _count(1, 2**16),
    "block_ffn_dim_multiplier": _FACTOR,
    "full_attn_idxs": _optional(_listing("whole numbers", lambda one: type(one) is int)),
    "hidden_size_per_layer_input": _optional(_count(0, 2**14)),
    "vocab_size_per_layer_input": _count(1, MAX_VOCAB_SIZE),
    "n_shared_experts": _optional(_count(0, 2**10)),
    "first_k_dense_replace": _count(0, 1000),
    "mlp_only_layers": _optional(_listing("whole numbers", lambda one: type(one) is int)),
    "no_rope_layers": _optional(_listing("0 and 1", lambda one: one in (0, 1))),
    "layer_types": NAMES,
    "clip_qkv": _optional(_number(1e-6, 1e6)),
    "swiglu_alpha swiglu_limit": _optional(_FACTOR),
    "embedding_multiplier residual_multiplier attention_multiplier logits_scaling routed_scaling_factor": _FACTOR,
    "attn_logit_softcapping final_logit_softcapping": _optional(_number(1e-3, 1e6)),
    "use_bias attention_bias attention_out_bias mlp_bias tie_word_embeddings use_sliding_window use_qk_norm "
    "norm_topk_prob attention_k_eq_v enable_moe_block use_double_wide_mlp conv_bias "
    "block_auto_adjust_ff_dim use_expert_bias": _FLAG,
    "use_bidirectional_attention": _optional(
        Rule('true, false, "vision" or "all"', lambda value: value in (True, False, "vision", "all"))
    ),
    "no_rope_layer_interval sliding_window_pattern": _count(1, 2**30),
    "sliding_window": _optional(_count(0, 2**30)),
    "max_window_layers": _count(0, 2**30),
    "rope_theta rope_local_base_freq": _ROPE_THETA,
    "partial_rotary_factor": _optional(_number(0, 1)),
    "eos_token_id": TOKEN_IDS,
    "num_labels": _count(0, 2**16),  # transformers makes a list of this length
})  # fmt: skip
_ROPE_FIELDS = by_name({
    "rope_type type": _TEXT,
    "rope_theta": _ROPE_THETA,
    "factor": _number(1, 1e6),
    "attention_factor": _optional(_number(1e-3, 1e3)),
    "beta_fast beta_slow": _optional(_number(1e-3, 1e6)),
    "mscale mscale_all_dim llama_4_scaling_beta": _optional(_number(0, 1e3)),
    "truncate": _FLAG,
    "alpha": _optional(_number(1, 1e6)),
    "short_factor long_factor": _FACTORS,
    "low_freq_factor high_freq_factor": _number(1e-3, 1e6),
    "original_max_position_embeddings": _count(1, MAX_POSITIONS),
    "partial_rotary_factor": _optional(_number(0, 1)),
})  # fmt: skip
FIELD_NAMES = tuple(_FIELDS)
"""The fields that there are rules for."""


def check_fields(path: Path | str, values: Mapping[str, Any], model_class: type[Decoder]) -> None:
    """Raise ValueError, with file, field, value and what is allowed, if a config.json does not fit this class."""
    where = f"{path} is no valid config"
    if values.get("model_type") != model_class.model_type:
        raise ValueError(
            f"{where}: model_type is {shown(values.get('model_type'))}, it must be {model_class.model_type!r}, as the "
            "architecture says"
        )
    for name, rule in _FIELDS.items():
        # transformers reads it only where the types are not given.
        if name in values and (name != "sliding_window_pattern" or not values.get("layer_types")):
            if values[name] is not None or name not in model_class.optional_fields:
                rule.check(where, name, values[name])
    _check_layers(where, values, model_class)
    for name in ("rope_parameters", "rope_scaling"):
        by_layer_type = name == "rope_parameters" and model_class.rotates_by_layer_type
        _check_rope(where, name, values.get(name) or {}, model_class, by_layer_type)
    if not model_class.rotates_in_part:
        _WHOLE_HEADS.check(where, "partial_rotary_factor", values.get("partial_rotary_factor"))
    known = " and ".join(model_class.layer_types)
    of_types = Rule(f"a list of {known}", lambda value: not value or set(value) <= set(model_class.layer_types))
    of_types.check(where, "layer_types", values.get("layer_types"))
    layer_types, num_layers = values.get("layer_types"), values.get("num_hidden_layers")
    if None not in (layer_types, num_layers) and len(layer_types) != num_layers:
        raise ValueError(
            f"{where}: layer_types has {len(layer_types):,} entries, it must have one for each of the "
            f"{num_layers:,} layers of num_hidden_layers"
        )


def _check_layers(where: str, values: Mapping[str, Any], model_class: type[Decoder]) -> None:
    """Check what single layers have of their own."""
    name, fields, num_layers = "per_layer_config", model_class.layer_fields, values.get("num_hidden_layers")
    own = {} if values.get(name) is None else values[name]
    if not fields:
        Rule("left out: all layers have the same sizes here", lambda value: value == {}).check(where, name, own)
    of_layers = Rule(
        f"an object of objects whose names are numbers of layers, below num_hidden_layers={num_layers}",
        lambda value: (
            isinstance(value, dict)
            and all(str(one).isdecimal() and (num_layers is None or int(one) < num_layers) for one in value)
            and all(isinstance(one, dict) for one in value.values())
        ),
    )
    of_layers.check(where, name, own)
    for layer, changed in own.items():
        for field, value in changed.items():
            if field not in fields:
                raise ValueError(
                    f"{where}: {name}.{layer} has {shown(field)}, layers may have their own {' and '.join(fields)}"
                )
            _FIELDS[field].check(where, f"{name}.{layer}.{field}", value)


def check_config(path: Path | str, hf_config: PretrainedConfig, model_class: type[Decoder]) -> None:
    """Check the config that transformers made of the file, like `check_fields`: some values are derived."""
    values = {name: value for name, value in vars(hf_config).items() if name in _FIELDS and name != "dtype"}
    check_fields(path, values | {"model_type": hf_config.model_type}, model_class)


def _check_rope(
    where: str, name: str, parameters: Mapping[str, Any], model_class: type[Decoder], by_layer_type: bool = False
) -> None:
    if by_layer_type:
        for layer_type, own in parameters.items():
            if layer_type not in LAYER_TYPES:
                raise ValueError(f"{where}: {name} has {shown(layer_type)}, it must be keyed by {_LISTED_LAYER_TYPES}")
            _optional(OBJECT).check(where, f"{name}.{layer_type}", own)
            _check_rope(where, f"{name}.{layer_type}", own or {}, model_class)
        return
    for key, value in parameters.items():
        if key in LAYER_TYPES:
            raise ValueError(f"{where}: {name} has {key!r}, it must be the same for all layers of this architecture")
        if key in _ROPE_FIELDS:
            _ROPE_FIELDS[key].check(where, f"{name}.{key}", value)
    if not model_class.rotates_in_part and parameters.get("rope_type") != "proportional":
        _WHOLE_HEADS.check(where, f"{name}.partial_rotary_factor", parameters.get("partial_rotary_factor"))
    length, factor = parameters.get("original_max_position_embeddings"), parameters.get("factor")
    if (
        parameters.get("rope_type", parameters.get("type")) == "yarn"
        and length
        and (factor or 1) * length > MAX_POSITIONS
    ):
        raise ValueError(f"{where}: {name} has {factor} x {length} positions, they must be at most {MAX_POSITIONS:,}")
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if None not in (low, high) and low >= high:
        raise ValueError(f"{where}: {name}.low_freq_factor is {low}, it must be below high_freq_factor, {high}")
