"""The numbers of a model as an engine runs it, known before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from nanoinfer.config import EngineConfig
from nanoinfer.layers.formats.registry import formats_of
from nanoinfer.models.base import ModelSpec
from nanoinfer.weights.load import read_spec
from nanoinfer.weights.quantize import quantised_config
from offload import KVLayout

KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


def spec_and_layout(config: EngineConfig, hf_config: PretrainedConfig) -> tuple[ModelSpec, KVLayout]:
    """Return the model's numbers and the shape of its KV blocks.

    Raises:
        ValueError: the model cannot run, or not with these settings.
    """
    hf_config = quantised_config(hf_config, config.quantization, config.head_quantization)
    spec = read_spec(hf_config, config.dtype)
    formats_of(hf_config).check_options(config.quantization, config.kv_cache_dtype)
    if spec.row_bytes and config.enable_prefix_caching:
        raise ValueError(
            f"enable_prefix_caching=True is not supported for {spec.architecture}: some of its layers keep a state of "
            "the whole sequence, which the blocks of an equal beginning do not hold: set enable_prefix_caching=False"
        )
    kv_cache_dtype = KV_DTYPES[config.kv_cache_dtype]
    attention = replace(spec.attention, block_size=config.block_size, kv_cache_dtype=kv_cache_dtype)
    layout = KVLayout(
        num_layers=len(spec.windows),
        block_size=attention.block_size,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=attention.kv_dtype,
    )
    return replace(spec, attention=attention), layout
