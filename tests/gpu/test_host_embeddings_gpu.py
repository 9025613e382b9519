"""Embeddings in pinned host memory, whose rows the GPU reads: see tests/models/test_host_embeddings.py."""

import json
from contextlib import closing

import pytest
import torch
from engines import random_prompts, run, some_params
from gpu_models import QWEN3

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.kernels.linear.gather import copy_rows, gather_rows
from nanoinfer.memory.setup import Setup
from offload.memory.pinned import HostArena
from offload.runtime.cuda import CudaPinner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMON = dict(load_format="dummy", capture_num_tokens=[64, 128], max_num_seqs=4, progress_bar=False)
COMMON |= dict(max_num_batched_tokens=1024, max_model_len=4096, skip_tokenizer_init=True)
COMMON |= dict(gpu_memory_limit="4GiB", host_memory_limit="4GiB")


@pytest.mark.parametrize("size", [2048, 2880, 4096])
def test_rows_of_pinned_memory(size):
    arena = HostArena(1, 1000 * size * 2, pinner=CudaPinner(torch.device("cuda", 0)), require_pin=True)
    arena.wait()
    table = arena.segment(0)[: 1000 * size * 2].view(torch.bfloat16).view(1000, size).normal_()
    for count in (1, 16, 5000):
        ids = torch.randint(1000, (count,), device="cuda")
        found = gather_rows(table, ids)
        assert found.is_cuda and torch.equal(found.cpu(), table[ids.cpu()])
        assert torch.equal(copy_rows(table, ids), found)
    torch.cuda.synchronize()
    del table
    arena.close()


@pytest.mark.parametrize("quantization, head", [(None, None), ("int4", "int8")])
def test_embeddings_on_the_host_change_no_bit(quantization, head, tmp_path):
    """Decode, prefill and mixed steps, from graphs and eagerly, with streamed weights beside."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | dict(tie_word_embeddings=False)))
    prompts, params = random_prompts(4, 600, 3000) + random_prompts(4, 1, 40), some_params(8, max_tokens=40, logprobs=3)
    options = COMMON | dict(quantization=quantization, head_quantization=head)
    with closing(LLMEngine(EngineConfig(model=tmp_path, **options))) as engine:
        wanted = run(engine, prompts, params)
        assert engine.plan.embedding_bytes == 0
    for more in (dict(resident_weights_limit=0), dict(resident_weights_limit=0, enforce_eager=True)):
        config = EngineConfig(model=tmp_path, **options | more)
        with closing(LLMEngine(config)) as engine:
            assert engine.plan.embedding_bytes == Setup(config, torch.device("cuda", 0)).spec.embedding_bytes
            assert engine.runner.model.streamed.table is not None
            assert not any(one.is_cuda for one in engine.runner.model.embed_tokens.parameters())
            assert run(engine, prompts, params) == wanted, more
