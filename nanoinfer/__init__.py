"""nanoinfer: LLM inference for GPUs with too little memory.

>>> from nanoinfer import LLM, SamplingParams
>>> llm = LLM("path/to/checkpoint", enable_cpu_offload=True, gpu_memory_limit="8GiB")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
"""

import os
import sys
from typing import TYPE_CHECKING

from nanoinfer.common.lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nanoinfer.config import EngineConfig
    from nanoinfer.engine.engine import LLMEngine
    from nanoinfer.llm import LLM
    from nanoinfer.memory.forecast import Forecast
    from nanoinfer.memory.forecaster import plan
    from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
    from nanoinfer.sampling_params import SamplingParams
    from nanoinfer.serve.async_llm import AsyncLLM
    from nanoinfer.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "EngineConfig", "Forecast", "LLMEngine", "Logprob", "RequestMetrics",
    "RequestOutput", "SamplingParams", "StreamOutput", "StructuredOutputsParams", "plan",
]  # fmt: skip

# OpenMP reads it when torch is imported. Threads that wait sleep then. By default they spin for 3 ms, and on a busy
# machine they keep the thread that they wait for from its core.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Torch and transformers take seconds to import: they come with the first name that needs them.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config": ["EngineConfig"],
        "engine.engine": ["LLMEngine"],
        "llm": ["LLM"],
        "memory.forecast": ["Forecast"],
        "memory.forecaster": ["plan"],
        "outputs": ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "StreamOutput"],
        "sampling_params": ["SamplingParams"],
        "serve.async_llm": ["AsyncLLM"],
        "structured_outputs": ["StructuredOutputsParams"],
    },
)
