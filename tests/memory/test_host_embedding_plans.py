"""When embeddings lie in host memory: where the GPU's is short, it can read it, and no head reads them."""

import re

import pytest
import torch
from described import GPU

from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.devices.cpu import CpuDevice
from nanoinfer.memory.forecaster import plan as forecast
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.search import best_plan

GIB = 2**30


@pytest.fixture
def plan(specs_of):
    def make(shape: str, gib: float, *, device: Device = GPU, may_pin: bool = True, **arguments):
        config, sizes = EngineConfig(model="unused", **arguments), dict(device=device, may_pin=may_pin)
        spec = specs_of(shape).of(config)
        found = best_plan(Planner(config, spec, budget_bytes=int(gib * GIB), host_available_bytes=64 * GIB, **sizes))
        assert found.total_bytes <= found.budget_bytes
        assert found.embedding_bytes in (0, spec.embedding_bytes)
        return found

    return make


def test_they_go_before_anything_is_streamed(plan):
    asked = dict(max_model_len=2048, max_num_seqs=1, max_num_batched_tokens=1024)
    whole, away, streams = (plan("qwen3-8b", gib, **asked) for gib in (17, 15.5, 12))
    assert whole.embedding_bytes == 0 and whole.host_weight_bytes == 0
    assert away.embedding_bytes == 151_936 * 4096 * 2 == away.host_weight_bytes and not away.streamed_pieces
    assert whole.weight_bytes - away.weight_bytes == away.embedding_bytes
    assert streams.streamed_pieces and streams.host_weight_bytes == streams.embedding_bytes + streams.streamed_bytes
    assert re.search("In host memory: .*embeddings 1.16", away.one_line("resident"))


def test_fewer_weights_stream_than_with_embeddings_on_the_gpu(plan):
    asked = dict(max_model_len=2048, max_num_seqs=1, max_num_batched_tokens=2048)
    found, before = (plan("qwen3-8b", 8, **asked, may_pin=may) for may in (True, False))
    assert found.embedding_bytes and not before.embedding_bytes
    assert before.streamed_bytes - found.streamed_bytes > 0.7 * found.embedding_bytes
    asked = dict(quantization="int4", max_model_len=2048, max_num_seqs=1)
    found, other = plan("qwen3-30b-a3b", 8, **asked), plan("qwen3-30b-a3b", 8, **asked, expert_slots=16)
    assert found.num_expert_slots and found.embedding_bytes == other.embedding_bytes > 0


def test_they_stay_where_a_head_reads_them_or_the_gpu_cannot(plan):
    asked = dict(max_model_len=2048, max_num_seqs=1)
    assert plan("qwen3-4b", 6, **asked).streamed_pieces and plan("qwen3-4b", 6, **asked).embedding_bytes == 0
    assert plan("qwen3-8b", 10, **asked, may_pin=False).embedding_bytes == 0
    assert (
        plan("qwen3-8b", 10, **asked, device=CpuDevice(torch.device("cpu")), resident_weights_limit=0).embedding_bytes
        == 0
    )
    with pytest.raises(TooSmall):
        plan("qwen3-8b", 15, **asked, cpu_offload_gb=0)


def test_a_forecast_says_where_they_lie():
    text = forecast("qwen3-8b", gpu_memory_limit="10GiB", host_memory_limit="64GiB", max_model_len=2048).report()
    assert "; embeddings, 1.16 GiB, lie in host memory" in text
