"""A cut that is no attention, from graphs: see tests/offload/test_cuts.py."""

import pytest
import torch
from cut_model import Brought, Resident
from engines import assert_pools_as_before, random_prompts, run, some_params
from tiny_models import tiny_config

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.models import registry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMON = dict(load_format="dummy", dtype="bfloat16", capture_num_tokens=[64, 128], max_num_seqs=8, progress_bar=False)
COMMON |= dict(max_num_batched_tokens=128, max_model_len=2048, ring_slot_bytes=2**18, skip_tokenizer_init=True)
COMMON |= dict(gpu_memory_limit="4GiB", host_memory_limit="2GiB")
SIZES = dict(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256)


@pytest.mark.parametrize("is_eager", [False, True])
def test_vectors_that_are_brought_change_no_bit(tmp_path, monkeypatch, is_eager):
    registry.supported_architectures()  # has the families register themselves where they stay
    monkeypatch.setattr(registry, "_MODELS", {model.__name__: model for model in (Resident, Brought)})
    monkeypatch.setattr(Resident, "num_rows", (3, 600))
    prompts = random_prompts(5, 300, 1500) + random_prompts(3, 1, 40)
    params, wanted = some_params(8, max_tokens=60, logprobs=3), None
    streamed = dict(enable_cpu_offload=True, resident_kv_limit=0)
    for name, arguments in (("Resident", {}), ("Resident", streamed), ("Brought", {}), ("Brought", streamed)):
        tiny_config("qwen3", architectures=[name], **SIZES).save_pretrained(tmp_path / name)
        engine = LLMEngine(EngineConfig(model=tmp_path / name, enforce_eager=is_eager, **COMMON | arguments))
        found, stats = run(engine, prompts, params), engine.stats()
        assert stats["num_mixed_steps"] and (stats["graph_replays"] > 0) == (not is_eager)
        assert (stats["streamed_bytes"] > 0) == (name == "Brought" or bool(arguments))
        assert_pools_as_before(engine)
        engine.close()
        assert found == (wanted := wanted or found), f"{name} {arguments}"
