"""Start-up: from the config to a runner, checking everything that can be checked before memory is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nanoinfer.attention.base import AttentionSpec
from nanoinfer.attention.registry import make_backend
from nanoinfer.config import EngineConfig
from nanoinfer.generation_config import end_token_ids, sampling_defaults
from nanoinfer.loader import check_safetensors, find_model, load_config, load_model, read_spec
from nanoinfer.memory import MemoryPlan, gpu_budget, make_plan
from nanoinfer.models import ModelSpec
from nanoinfer.runner import ModelRunner, reserved_bytes
from nanoinfer.tokenizer_files import load_tokenizer
from offload import CudaRuntime, KVLayout, Runtime, SimulatedRuntime
from offload.host_memory import memory_available_bytes

KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class BuiltEngine:
    plan: MemoryPlan
    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]


def build(
    config: EngineConfig,
    runtime: Runtime | None,
) -> BuiltEngine:
    """Loads the model and lays out the memory.

    Raises:
        ValueError: something in the config, the checkpoint or the machine does not fit; says what and what to do.
    """
    device = resolve_device(config.device) if runtime is None else runtime.device
    hf_config = load_config(config.model)
    model_dir = find_model(config.model, weights=config.load_format != "dummy")
    if config.load_format != "dummy":
        check_safetensors(model_dir)
    spec, layout = spec_and_layout(config, hf_config)
    backend = make_backend(
        config.attention_backend, attention_spec(spec, config.block_size), device, config.enable_cpu_offload
    )
    host_available = memory_available_bytes()
    is_cuda = device.type == "cuda"
    plan = make_plan(
        config,
        spec,
        layout,
        budget_bytes=gpu_budget(config, device, host_available),
        host_available_bytes=host_available,
        is_cuda=is_cuda,
    )
    tokenizer = load_tokenizer(config, model_dir)
    end_ids = end_token_ids(model_dir, hf_config)
    defaults = sampling_defaults(model_dir) if config.generation_config == "auto" else {}
    memory_before = reserved_bytes(device)
    if runtime is None:
        runtime = CudaRuntime(device) if is_cuda else SimulatedRuntime()
    model = load_model(
        model_dir,
        hf_config,
        spec.dtype,
        device,
        load_format=config.load_format,
        seed=config.seed,
        max_position=plan.max_model_len,
        progress=config.progress_bar,
    )
    model.spec = spec  # with the KV cache's dtype, which the checkpoint does not know
    runner = ModelRunner(config, plan, runtime, model, backend, layout, end_ids, memory_before)
    return BuiltEngine(plan, runner, tokenizer, end_ids, defaults)


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


def resolve_device(name: str) -> torch.device:
    """The torch device that `name` asks for.

    Raises:
        ValueError: the name is no device, or CUDA is asked for where there is none.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device={name!r} is no device: give "auto", "cuda", "cuda:1" or "cpu"') from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f'device={name!r} is not supported: give "auto", "cuda", "cuda:1" or "cpu"')
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"device={name!r}, but torch sees {count} CUDA devices: give "
                + (f'"cuda:0" to "cuda:{count - 1}"' if count else '"cpu" or "auto", or install a CUDA build of torch')
            )
        device = torch.device("cuda", device.index or 0)
    return device


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
