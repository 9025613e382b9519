"""The tests' own formats of KV on a GPU: the same bits in every mode, and the tokens that plain torch gives."""

import json
import random

import pytest
import torch
from gpu_models import COMMON, GEMMA3, LLAMA_GROUP_OF_3, QWEN3

from nanoinfer import LLM, SamplingParams
from nanoinfer.common.kv_formats import KV_FORMATS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OWN = {"one_vector": "kv_one_vector:OneVector"}


def logits_of(llm: LLM, switches: dict[int, str] | None = None) -> list:
    """Token ids and log-probabilities of prompts of unequal lengths, and of one that begins as another does."""
    generator, step = random.Random(3), 0
    prompts = [[generator.randrange(4000) for _ in range(length)] for length in (700, 33, 256, 1)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    requests = [llm.engine.add_request(f"{i}", one, params) for i, one in enumerate([*prompts, prompts[0] + [5] * 40])]
    while not all(request.is_finished for request in requests):
        if switches and step in switches:
            llm.switch_mode(switches[step])
        llm.engine.step()
        step += 1
    return [(request.output().outputs[0].token_ids, request.output().outputs[0].logprobs) for request in requests]


@pytest.mark.parametrize("name", [*OWN, "int8", "k8v4", "int4"])
@pytest.mark.parametrize("config", [QWEN3, GEMMA3, LLAMA_GROUP_OF_3], ids=["qwen3", "gemma3", "llama"])
def test_every_mode_gives_the_same_bits(config, name, tmp_path, monkeypatch):
    if name in OWN:
        monkeypatch.setitem(KV_FORMATS, name, OWN[name])
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = COMMON | dict(model=tmp_path, kv_cache_dtype=name)
    with LLM(**arguments) as llm:
        wanted = logits_of(llm)
        assert logits_of(llm) == wanted, "a prefix hit changes bits"
    for others in (dict(ring_slot_bytes="128KiB"), dict(enforce_eager=True), dict(resident_kv_limit="256KiB")):
        with LLM(**arguments | others, enable_cpu_offload=True) as llm:
            assert logits_of(llm) == wanted and llm.stats()["streamed_bytes"] > 0
            assert logits_of(llm, {6: "resident", 16: "offload"}) == wanted
    with LLM(**arguments, attention_backend="torch", enforce_eager=True) as llm:
        pairs = [(ours, of_torch) for (ours, _), (of_torch, _) in zip(wanted, logits_of(llm))]
    assert sum(ours[0] == of_torch[0] for ours, of_torch in pairs) >= 4, "the kernels read something else"
