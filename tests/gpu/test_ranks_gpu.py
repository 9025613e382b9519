"""Two GPUs that compute one model: the bits of one, in every mode, by each way of exchange."""

import json
from contextlib import closing

import pytest
import torch
from engines import random_prompts, run, some_params
from gpu_models import COMMON, GEMMA3, GEMMA4, QWEN3
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.execution.group import WAY

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

MODELS = {
    "qwen3": dict(QWEN3),
    "gemma3": dict(GEMMA3),
    "gemma4": GEMMA4["one projection"],
    "gemma4 experts": GEMMA4["experts"],
}
SIZES = dict(num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=256, intermediate_size=1024, vocab_size=4000)
MADE = {
    "qwen3_moe": SIZES | dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128),
    "gpt_oss": SIZES,
    "qwen3_5": SIZES,
    "lfm2": SIZES,
    "olmo2": SIZES,
}
MODES = {
    "resident": {},
    "streamed": dict(enable_cpu_offload=True, resident_kv_limit=0),
    "weights": dict(resident_weights_limit=0),
}


def check(path, modes=MODES, **options) -> None:
    prompts, params = random_prompts(4, 400, 1500) + random_prompts(4, 1, 40), some_params(8, max_tokens=40, logprobs=3)
    options = COMMON | dict(skip_tokenizer_init=True, capture_num_tokens=[64], allow_uneven=True) | options
    with closing(LLMEngine(EngineConfig(model=path, **options))) as engine:
        wanted = run(engine, prompts, params)
    for mode in modes:
        config = EngineConfig(model=path, tensor_parallel_size=2, **options | MODES[mode])
        with closing(LLMEngine(config)) as engine:
            assert run(engine, prompts, params) == wanted, mode


@pytest.mark.parametrize("way", ["peers", "host", "nccl"])
def test_two_gpus_have_the_bits_of_one(way, tmp_path, monkeypatch):
    monkeypatch.setenv(WAY, way)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    # NCCL takes most of a gibibyte for itself.
    check(tmp_path, MODES if way != "nccl" else ["resident"], gpu_memory_limit="3GiB")


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_dense_models(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    check(tmp_path, ["resident"])


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_families(name, quantization, tmp_path):
    path = make_checkpoint(name, tmp_path, dtype=torch.bfloat16, **MADE[name])
    modes = ["resident", "streamed"] if quantization is None else ["resident"]
    check(path, modes, load_format="auto", quantization=quantization)
