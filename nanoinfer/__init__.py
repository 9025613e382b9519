"""nanoinfer: LLM inference for GPUs with too little memory.

>>> from nanoinfer import LLM, SamplingParams
>>> llm = LLM("path/to/checkpoint", enable_cpu_offload=True, gpu_memory_limit="8GiB")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
"""

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

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Forecast",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "plan",
]

# Torch and transformers take seconds to import: they come with the first name that needs them.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "LLM": "nanoinfer.llm",
        "CompletionOutput": "nanoinfer.outputs",
        "EngineConfig": "nanoinfer.config",
        "Forecast": "nanoinfer.memory.forecast",
        "LLMEngine": "nanoinfer.engine.engine",
        "Logprob": "nanoinfer.outputs",
        "RequestMetrics": "nanoinfer.outputs",
        "RequestOutput": "nanoinfer.outputs",
        "SamplingParams": "nanoinfer.sampling_params",
        "StreamOutput": "nanoinfer.outputs",
        "plan": "nanoinfer.memory.forecaster",
    },
)
