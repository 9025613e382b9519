"""What a model, the settings and a device come to, known before anything is loaded."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from nanoinfer.attention.registry import make_backends
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.kv.registry import make_format
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.memory.budget import gpu_budget
from nanoinfer.memory.machine import device_memory
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.search import best_plan
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.weights.load import read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read
from offload.memory.host_memory import memory_available_bytes


class Setup:
    """A config on a device.

    Args:
        offload: whether the attention backend must be able to run offload mode; None: as the config says.

    Attributes:
        config: the given one, with the size of KV blocks.
        device: the description of the device that was given.
        agreed: what several ranks have agreed to count on: bytes of host memory that are available, for all of them,
            of the device's memory what is free, and how much their exchange has taken. None: what is there when a plan
            is asked for.

    Raises:
        ValueError: the model is not supported, or the attention backend cannot run it in this mode.
    """

    agreed: tuple[int, int | None, int] | None = None

    def __init__(
        self, config: EngineConfig, device: torch.device, offload: bool | None = None, shard: Shard = WHOLE
    ) -> None:
        checkpoint = replace(read_checkpoint(config.model, config.hf_overrides), shard=shard)
        self.device, self.specs = device_of(device), Specs(checkpoint)
        if (lacks := self.device.lacks_products()) is not None:
            config = _without_these_products(config, self.specs, lacks)
        self._num_ranks = shard.size
        self.spec, self.checkpoint = self.specs.of(config), self.specs.checkpoint(config)
        self.config = replace(config, block_size=self.spec.block_size)
        offload = config.may_offload if offload is None else offload
        self.backends = make_backends(config.attention_backend, self.spec.attentions, device, offload)

    def plan(self, config: EngineConfig | None = None, may_pin: bool = True) -> MemoryPlan:
        """Return the memory plan of an engine with this config, or another; ValueError if the memory is too small.

        may_pin: as in `Planner`.
        """
        config = config or self.config
        available = (memory_available_bytes() if self.agreed is None else self.agreed[0]) // self._num_ranks
        if self._num_ranks > 1 and config.host_memory_limit is not None:  # all ranks share it
            config = replace(config, host_memory_limit=config.host_memory_limit // self._num_ranks)
        budget, rates = self.budget(config, available), Rates.of(self.device)
        return best_plan(Planner(config, self.spec, self.device, budget, available, may_pin, rates))

    def budget(self, config: EngineConfig, host_available: int) -> int:
        """Return the bytes that an engine with this config may take on the device now."""
        memory, taken = device_memory(self.device.torch_device), 0
        if self.agreed is not None and memory is not None:  # a limit counts what the exchange has taken
            _, free, taken = self.agreed
            memory = replace(memory, free_bytes=free + taken)
        return gpu_budget(config, memory, host_available) - taken


def _without_these_products(config: EngineConfig, specs: Specs, lacks: str) -> EngineConfig:
    """Return the config for a device without products in bfloat16: with dtype="auto" float16 takes their place.

    Raises:
        ValueError: the model's weights are packed, or bfloat16 was asked for.
    """
    checkpoint = specs.checkpoint(config)
    if (
        checkpoint.settings
        or checkpoint.quantised_to
        or any(entry.block_type for entry in (checkpoint.tensors or {}).values())
    ):
        raise ValueError(
            f"weights in fewer bits need {lacks}: give a checkpoint in 16 bits, without quantization; what does not "
            "fit on the GPU streams"
        )
    if specs.of(config).dtype != torch.bfloat16:
        return config
    if config.dtype != "auto":
        raise ValueError(f'dtype="bfloat16" needs {lacks}: give dtype="float16"')
    warnings.warn(
        f"the model is computed in float16, since bfloat16 needs {lacks}. Nobody has tried such a GPU: compare with "
        "nanoinfer verify, and with a CPU",
        stacklevel=2,
    )
    return replace(config, dtype="float16")


class Specs:
    """The numbers of one checkpoint in several formats. Weights are counted once for each format of theirs."""

    def __init__(self, checkpoint: CheckpointInfo) -> None:
        self._checkpoint = checkpoint
        self._found: dict[tuple, tuple[CheckpointInfo, ModelSpec]] = {}

    def checkpoint(self, config: EngineConfig) -> CheckpointInfo:
        """Return the checkpoint with what its weights are quantised to; ValueError if they cannot be."""
        return self._in_formats(config)[0]

    def of(self, config: EngineConfig) -> ModelSpec:
        """Return the model's numbers, those of its KV blocks among them; ValueError if these settings do not fit it."""
        checkpoint, spec = self._in_formats(config)
        checkpoint.formats.check_quantization(config.quantization)
        most = config.max_num_batched_tokens
        if most is not None and most < spec.step_unit:
            raise ValueError(
                f"max_num_batched_tokens={most} is too small for {spec.architecture}, whose layers keep states: "
                f"prefill steps end on multiples of {spec.step_unit} tokens: give {spec.step_unit} or more"
            )
        return spec.with_kv(config.block_size, make_format(config.kv_cache_dtype))

    def _in_formats(self, config: EngineConfig) -> tuple[CheckpointInfo, ModelSpec]:
        key = config.quantization, config.head_quantization, config.dtype
        if key not in self._found:
            checkpoint = quantised_while_read(self._checkpoint, config.quantization, config.head_quantization)
            self._found[key] = checkpoint, read_spec(checkpoint, config.dtype)
        return self._found[key]
