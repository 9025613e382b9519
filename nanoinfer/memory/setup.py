"""What a model, the settings and a device come to, known before anything is loaded."""

from __future__ import annotations

import torch

from nanoinfer.attention.registry import make_backend
from nanoinfer.config import EngineConfig
from nanoinfer.memory.plan import MemoryPlan, gpu_budget, make_plan
from nanoinfer.memory.sizes import spec_and_layout
from nanoinfer.weights.load import load_config
from nanoinfer.weights.quantize import quantised_config
from offload.memory.host_memory import memory_available_bytes


class Setup:
    """A config on a device.

    Args:
        offload: whether the attention backend must be able to run offload mode; None: as the config says.

    Raises:
        ValueError: the model is not supported, or the attention backend cannot run it in this mode.
    """

    def __init__(self, config: EngineConfig, device: torch.device, offload: bool | None = None) -> None:
        self.config, self.device = config, device
        self.hf_config = quantised_config(load_config(config.model), config.quantization, config.head_quantization)
        self.spec, self.layout = spec_and_layout(config, self.hf_config)
        offload = config.may_offload if offload is None else offload
        self.backend = make_backend(config.attention_backend, self.spec.attention, device, offload)

    def plan(self, config: EngineConfig | None = None) -> MemoryPlan:
        """Return the memory plan of an engine with this config, or with another one for the same model.

        Raises:
            ValueError: the memory is too small.
        """
        config, available = config or self.config, memory_available_bytes()
        return make_plan(
            config,
            self.spec,
            self.layout,
            budget_bytes=gpu_budget(config, self.device, available),
            host_available_bytes=available,
            is_cuda=self.device.type == "cuda",
        )
