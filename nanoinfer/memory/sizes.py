"""The numbers of a model as an engine runs it, known before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from nanoinfer.attention.base import AttentionSpec
from nanoinfer.config import EngineConfig
from nanoinfer.models.base import ModelSpec
from nanoinfer.weights.load import read_spec
from offload import KVLayout

KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


def spec_and_layout(config: EngineConfig, hf_config: PretrainedConfig) -> tuple[ModelSpec, KVLayout]:
    """The model's numbers and the shape of its KV blocks."""
    spec = replace(read_spec(hf_config, config.dtype), kv_cache_dtype=KV_DTYPES[config.kv_cache_dtype])
    layout = KVLayout(
        num_layers=spec.num_layers,
        block_size=config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.kv_dtype,
    )
    return spec, layout


def attention_spec(spec: ModelSpec, block_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        block_size=block_size,
        softcap=spec.softcap,
        windows=tuple(dict.fromkeys(spec.windows)),
        dtype=spec.dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
    )
