"""nanoinfer: LLM inference for GPUs with too little memory.

>>> from nanoinfer import LLM, SamplingParams
>>> llm = LLM("path/to/checkpoint", enable_cpu_offload=True, gpu_memory_limit="8GiB")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
"""

from nanoinfer.config import EngineConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.llm import LLM
from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamOutput
from nanoinfer.planner import Forecast, plan
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
