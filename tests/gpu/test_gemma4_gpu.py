"""Gemma 4 on a GPU: heads of 256 and 512, values made of keys, experts beside an MLP, tables in host memory."""

import json
from contextlib import closing

import pytest
import torch
from engines import random_prompts, run, some_params
from gpu_models import COMMON, GEMMA4
from loading import loaded
from tiny_models import make_checkpoint, random_tokens

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.recall.formats import prompt_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODES = {
    "eager": dict(enforce_eager=True),
    "streamed": dict(enable_cpu_offload=True),
    "partly kept": dict(enable_cpu_offload=True, resident_kv_limit=2**20),
    "streamed, with its weights": dict(enable_cpu_offload=True, resident_weights_limit=0),
}


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("kind", GEMMA4)
def test_every_mode_has_the_same_bits(kind, quantization, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4[kind]))
    prompts, params = random_prompts(4, 400, 1500) + random_prompts(4, 1, 40), some_params(8, max_tokens=40, logprobs=3)
    options = COMMON | dict(skip_tokenizer_init=True, capture_num_tokens=[64], quantization=quantization)
    with closing(LLMEngine(EngineConfig(model=tmp_path, **options))) as engine:
        wanted = run(engine, prompts, params)
        alone = [run(engine, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
        assert alone == wanted
        inputs = engine.runner.model.layer_inputs
        assert (inputs is not None) == (engine.plan.table_bytes > 0) == (kind == "inputs of layers")
        assert inputs is None or not any(one.is_cuda for one in inputs.table.parameters())
    for mode, arguments in MODES.items():
        if kind == "experts" and "resident_weights_limit" in arguments:
            arguments = dict(enable_cpu_offload=True, expert_slots=3)
        with closing(LLMEngine(EngineConfig(model=tmp_path, **options | arguments))) as engine:
            assert run(engine, prompts, params) == wanted, mode


FAMILIES = {"one projection": "gemma4", "inputs of layers": "gemma4_inputs", "experts": "gemma4_moe"}


@pytest.mark.parametrize("kind", GEMMA4)
def test_logits_are_as_near_the_exact_ones_as_those_of_a_cpu(kind, tmp_path):
    own = {name: value for name, value in GEMMA4[kind].items() if name not in ("architectures", "model_type", "dtype")}
    sizes = dict(num_heads=own.pop("num_attention_heads"), num_kv_heads=own.pop("num_key_value_heads"))
    sizes |= dict(num_layers=own.pop("num_hidden_layers"), tied=own.pop("tie_word_embeddings"))
    path = make_checkpoint(FAMILIES[kind], tmp_path, dtype=torch.bfloat16, **sizes, **own)
    prompt, exact = random_tokens(300), None
    exact = prompt_logits(loaded(path, "float32"), prompt)
    found = {
        device: prompt_logits(loaded(path, "bfloat16", device=device), prompt).float() for device in ("cuda", "cpu")
    }
    # Where logits of a router nearly tie, a row may take another expert.
    ours, theirs = ((one - exact).norm(dim=1).median() for one in (found["cuda"], found["cpu"]))
    assert ours <= 1.1 * theirs
