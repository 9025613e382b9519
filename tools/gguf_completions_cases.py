"""The models that `gguf_completions.py` compares answers of: what differs within a family, and in what files say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family.

    fields: of `tiny_config`. change: makes other weights, by their names in the file. extra: metadata, by whole keys.
    without: metadata that is left out, by keys behind the architecture's name. merge: q, k and v are one tensor.
    theirs: what llama.cpp does other than transformers, and so than we do. overrides: `hf_overrides` that make ours do
    it too: the answers are identical then, or there is another reason.
    """

    name: str = "plain"
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    merge: bool = False
    theirs: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | fields)


def _longrope(length: int, num_factors: int = 8) -> dict[str, Any]:
    """A context above the length takes the long factors."""
    factors = dict(
        short_factor=[1.0 + number / 7 for number in range(num_factors)],
        long_factor=[1.0 + number / 3 for number in range(num_factors)],
    )
    length = dict(original_max_position_embeddings=length)
    share = dict(partial_rotary_factor=num_factors / 8)
    return _rope("longrope", attention_factor=1.190238, **factors, **length, **share) | length


def _larger_experts(name: str, values: np.ndarray) -> np.ndarray:
    """So that what is clamped behind gate and up is beyond its limits at times."""
    return 4 * values if "ffn_gate_exps" in name or "ffn_up_exps" in name else values


def _larger_layers(name: str, values: np.ndarray) -> np.ndarray:
    """So that a tied head does not find the last token again."""
    return 6 * values if "post_" in name and "_norm" in name else values


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_YARN = dict(factor=4.0, original_max_position_embeddings=64)
_PLAIN_BY_LAYER = dict.fromkeys(("full_attention", "sliding_attention"), dict(rope_type="default", rope_theta=1e4))
_YARN_BY_LAYER = _PLAIN_BY_LAYER | dict(full_attention=dict(rope_type="yarn", rope_theta=1e4, **_YARN))
_LENGTH = dict(original_max_position_embeddings=64)
_LENGTH_KEY = "rope.scaling.original_context_length"
_MINISTRAL = dict(llama_4_scaling_beta=0.5, mscale_all_dim=0.5, mscale=1.0)
_YARN_KEYS = ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
_HEAD_KEYS = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
_ROUTING_KEYS = (
    *("expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count"),
    *("expert_group_used_count", "leading_dense_block_count"),
)
_PART = _rope("default", partial_rotary_factor=0.25)
_BY_LAYER = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=2e4),
)
_EVERY_FOURTH = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], num_layers=4)
# Whose q, k and v are always one tensor, or never.
_DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_NOT_MERGED = ("phi3", "gemma4", "gemma4_inputs", "gemma4_moe", *_DELTA)
# llama.cpp takes the hidden size to be that of all heads here, and no groups of heads of olmoe.
TAKEN = {
    **dict.fromkeys(("qwen2", "exaone4", "nemotron", "olmo2", "olmo3", "starcoder2"), dict(hidden_size=64)),
    "olmoe": dict(num_kv_heads=4),
    **dict.fromkeys(_DELTA, dict(linear_value_head_dim=16)),  # as large as keys
}
PLAIN = Case()
_BEGIN_KEY = "tokenizer.ggml.add_bos_token"
# What files may leave out, for what llama.cpp takes then.
_ROPE_KEYS = ("rope.freq_base", "rope.dimension_count", "rope.freq_base_swa")
CASES: dict[str, list[Case]] = {
    "llama": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="biases", fields=dict(attention_bias=True, mlp_bias=True)),
        Case(name="linear", fields=_rope("linear", factor=4.0)),
        Case(name="linear, old key", extra={"llama.rope.scale_linear": 4.0}),
        Case(name="unscaled", extra={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        Case(name="llama3", fields=_rope("llama3", **_LLAMA3) | dict(head_dim=64)),
        Case(name="factors", fields=_rope("llama3", **_LLAMA3 | _LENGTH) | dict(head_dim=64)),
        Case(name="yarn", fields=_rope("yarn", **_YARN)),
        Case(name="keys left out", fields=dict(hidden_size=64, num_kv_heads=4), without=(*_ROPE_KEYS, *_HEAD_KEYS)),
        Case(name="begin token", extra={_BEGIN_KEY: True}),
        Case(name="begin token by rule", extra={_BEGIN_KEY: None, "tokenizer.ggml.pre": "llama-bpe"}),
    ],
    "qwen3": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="yarn", fields=_rope("yarn", **_YARN)),
        Case(
            name="yarn, other betas",
            fields=_rope("yarn", beta_fast=4.0, beta_slow=0.5, **_YARN),
            overrides=_rope("yarn", **_YARN),
            theirs="reads yarn_beta_fast and yarn_beta_slow of mistral3 alone",
        ),
        Case(name="yarn without length", fields=_rope("yarn", **_YARN), without=(_LENGTH_KEY,)),
    ],
    "qwen3_moe": [
        PLAIN,
        Case(name="size of all experts", fields=dict(intermediate_size=72), without=("expert_feed_forward_length",)),
        Case(name="size of an expert", without=("feed_forward_length",)),
    ],
    "gemma3": [
        PLAIN,
        Case(name="rotations", fields=dict(rope_parameters=_BY_LAYER)),
        Case(name="tied", fields=dict(tied=True), change=_larger_layers),
        Case(name="softcap", fields=dict(final_logit_softcapping=3.0)),
        Case(name="62 layers", fields=dict(num_layers=62, query_pre_attn_scalar=12)),
        Case(name="no window", without=("attention.sliding_window", "rope.freq_base_swa")),
        Case(name="every third", extra={"gemma3.attention.sliding_window_pattern": 3}),
        Case(name="keys left out", without=_ROPE_KEYS),
    ],
    "gemma4": [
        PLAIN,
        Case(name="two vectors", fields=dict(attention_k_eq_v=False, num_global_key_value_heads=2)),
        Case(name="tied", fields=dict(tied=True), change=_larger_layers),
        Case(name="softcap", fields=dict(final_logit_softcapping=3.0)),
    ],
    "gemma4_inputs": [PLAIN],
    "gemma4_moe": [PLAIN, Case(name="two vectors", fields=dict(attention_k_eq_v=False))],
    "gpt_oss": [
        Case(fields=_rope("default")),
        Case(name="clamped", change=_larger_experts, fields=_rope("default")),
        Case(name="linear", fields=_rope("linear", factor=4.0)),
        Case(
            name="yarn",
            fields=_rope("yarn", truncate=False, **_YARN),
            overrides=_rope("yarn", truncate=True, **_YARN),
            theirs="rounds the two ends of yarn's ramp, which gpt-oss was trained without (truncate: false)",
        ),
    ],
    "phi3": [
        PLAIN,
        Case(name="part of a head", fields=_PART),
        Case(
            name="window",
            fields=dict(sliding_window=8),
            overrides=dict(sliding_window=None),
            theirs="leaves out the window of phi3, and says so",
        ),
        Case(name="longrope", fields=_longrope(64)),
        Case(name="longrope, short", fields=_longrope(1024)),
        Case(name="longrope of a part", fields=_longrope(64, 4)),
    ],
    "granite": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True, embedding_multiplier=0.5, residual_multiplier=1.5)),
        Case(name="biases", fields=dict(attention_bias=True, mlp_bias=True)),
        Case(name="keys left out", without=("residual_scale", "embedding_scale", "attention.scale")),
    ],
    "smollm3": [Case(fields=dict(num_layers=5))],
    "glm4": [PLAIN, Case(name="biases, part of a head", fields=_PART | dict(attention_bias=True))],
    "glm4_moe": [
        PLAIN,
        Case(name="norms of heads", fields=dict(use_qk_norm=True, attention_bias=True)),
        Case(name="no groups", fields=dict(n_group=1, norm_topk_prob=False, routed_scaling_factor=2.5)),
        Case(name="dense first", fields=dict(first_k_dense_replace=2, n_shared_experts=2)),
        Case(name="keys left out", fields=dict(first_k_dense_replace=0), without=_ROUTING_KEYS),
    ],
    "lfm2": [PLAIN, Case(name="four taps", fields=dict(conv_L_cache=4, num_layers=6))],
    "lfm2_moe": [
        PLAIN,
        Case(name="all sparse", fields=dict(num_dense_layers=0), without=("leading_dense_block_count",)),
        Case(
            name="factor",
            extra={"lfm2moe.expert_weights_scale": 2.5},
            overrides=dict(routed_scaling_factor=1.0),
            theirs="does not read expert_weights_scale of lfm2moe",
        ),
    ],
    "qwen3_5": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="three heads of values of each key", fields=dict(linear_num_value_heads=6)),
        Case(name="one head of values of each key", fields=dict(linear_num_value_heads=2)),
        Case(name="by an interval", fields=_EVERY_FOURTH, without=("attention.recurrent_layers",)),
        Case(name="yarn", fields=_rope("yarn", partial_rotary_factor=0.5, **_YARN)),
    ],
    "qwen3_5_moe": [PLAIN, Case(name="three heads of values of each key", fields=dict(linear_num_value_heads=6))],
    "qwen3_next": [PLAIN, Case(name="one key head", fields=dict(linear_num_key_heads=1, linear_num_value_heads=3))],
    "nemotron": [PLAIN, Case(name="part of a head", fields=_PART), Case(name="biases", fields=dict(mlp_bias=True))],
    "exaone4": [
        Case(fields=dict(sliding_window=0)),
        Case(name="factors", fields=_rope("llama3", **_LLAMA3 | _LENGTH) | dict(sliding_window=0)),
        Case(name="64 layers, window", fields=dict(num_layers=64)),
        Case(name="64 layers, linear", fields=_rope("linear", factor=4.0) | dict(num_layers=64)),
        Case(
            name="64 layers, keys left out", fields=dict(num_layers=64), without=("attention.sliding_window_pattern",)
        ),
    ],
    "olmo3": [
        PLAIN,
        Case(name="yarn", fields=dict(rope_parameters=_YARN_BY_LAYER)),
        Case(
            name="theta of windows",
            fields=dict(rope_parameters=_PLAIN_BY_LAYER),
            extra={"olmo2.rope.freq_base_swa": 500.0},
            overrides=dict(rope_parameters=_PLAIN_BY_LAYER),
            theirs="reads rope.freq_base_swa of olmo2, but turns all layers by rope.freq_base",
        ),
        Case(
            name="keys left out", fields=dict(num_layers=5), without=("attention.sliding_window_pattern", *_ROPE_KEYS)
        ),
    ],
    "ministral3": [
        PLAIN,
        Case(name="scaled", fields=_rope("yarn", llama_4_scaling_beta=0.5, mscale_all_dim=1.0, mscale=1.0, **_YARN)),
        Case(name="one temperature", fields=_rope("yarn", **_MINISTRAL | dict(llama_4_scaling_beta=0.0), **_YARN)),
        Case(name="betas", fields=_rope("yarn", beta_fast=8.0, beta_slow=2.0, **_MINISTRAL, **_YARN)),
        Case(name="keys left out", fields=_rope("yarn", **_MINISTRAL, **_YARN), without=_YARN_KEYS),
    ],
}
"""By family; another one has the plain case alone. All but those of `_NOT_MERGED` also have q, k and v merged."""


def cases_of(family: str) -> list[Case]:
    found = CASES.get(family, [PLAIN])
    return found if family in _NOT_MERGED else [*found, replace(found[0], name="q, k and v merged", merge=True)]
