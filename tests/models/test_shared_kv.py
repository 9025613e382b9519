"""Layers that read another layer's keys and values and keep none, as Gemma 3n and 4 have them."""

from types import SimpleNamespace

import pytest
import torch
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import tiny_config

from nanoinfer import SamplingParams
from nanoinfer.models import registry
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Attention

STATES = (AttentionState(), AttentionState(window=40), AttentionState(source=0), AttentionState(window=40, source=1))
KV_HEADS, HEAD_DIM = SMALL["num_kv_heads"], SMALL["head_dim"]
OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
ENGINES = {
    "resident": {},
    "gives way": dict(num_gpu_blocks_override=22, max_model_len=140),
    "streamed": OFFLOAD | dict(resident_kv_limit=0),
    "partly kept": OFFLOAD | dict(num_gpu_blocks_override=18),
    "offload by itself": OFFLOAD | dict(enable_cpu_offload="auto", num_gpu_blocks_override=18, max_model_len=140),
}


class Queries(Attention):
    """Makes keys and values as any layer does, and stores none of them where it is given no place for them."""

    def project(self, normed, rope, q_scales, positions, target):
        if target.kv is None:
            kv, slots = torch.zeros(1, 2, 1, KV_HEADS, HEAD_DIM), torch.full_like(target.slots, -1)
            target = SimpleNamespace(kv=kv, slots=slots, q=target.q, part=None)
        return super().project(normed, rope, q_scales, positions, target)


class Toy(Decoder):
    model_type = "llama"

    @classmethod
    def layer_states(cls, hf_config):
        return STATES


@pytest.fixture
def path(tmp_path, monkeypatch):
    known = {name: registry.find_class([name]) for name in registry.supported_architectures()}
    monkeypatch.setattr(registry, "_MODELS", known)
    monkeypatch.setattr("nanoinfer.models.layer.Attention", Queries)
    registry.register("ToyForCausalLM")(Toy)
    tiny_config("llama", architectures=["ToyForCausalLM"], **SMALL | dict(num_layers=4)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def alone():
    """Seed -> what each of its requests gets in an engine without others."""
    return {}


def toy_engine(path, runtime=None, **arguments):
    return make_engine(
        path, runtime, **(dict(load_format="dummy", max_num_seqs=3, capture_num_tokens=[8, 24]) | arguments)
    )


def reference_logits(model, token_ids):
    """Plain attention over a whole sequence; a layer without keys of its own takes those of its source."""
    positions, made = torch.arange(len(token_ids)), {}
    x, normed = model.embed(torch.tensor(token_ids))
    for layer, state in enumerate(STATES):
        kv = torch.zeros(1, 2, len(token_ids), KV_HEADS, HEAD_DIM)
        q = model.before_attention(layer, normed, positions, SimpleNamespace(kv=kv, slots=positions, q=None, part=None))
        made[layer] = kv
        k, v = (
            one.repeat_interleave(SMALL["num_heads"] // KV_HEADS, 1)
            for one in made[layer if state.source is None else state.source][0]
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= (state.window or len(token_ids)))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        normed = model.after_attention(layer, x, out.contiguous(), torch.tensor([len(token_ids)], dtype=torch.int32))
    return model.logits(normed)


def test_tokens_are_those_of_plain_attention(path):
    engine, prompts = toy_engine(path), random_prompts(3, 20, 90)
    outcomes = run(engine, prompts, [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3)
    for prompt, [(tokens, _, _)] in zip(prompts, outcomes, strict=True):
        with torch.inference_mode():
            logits = reference_logits(engine.runner.model, prompt + list(tokens[:-1]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.sampled("gives way-1", "streamed-1", "partly kept-1", "offload by itself-1")
def test_every_mode_has_the_bits_of_a_request_alone(path, alone, name, seed):
    prompts, params = random_prompts(4, 60, 99, seed) + random_prompts(2, 1, 20, seed), some_params(6, max_tokens=24)
    if seed not in alone:
        lonely = toy_engine(path)
        alone[seed] = [run(lonely, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    engine = toy_engine(path, SimulatedRuntime(seed), **ENGINES[name])
    assert run(engine, prompts, params) == alone[seed]
    stats = engine.stats()
    assert (stats["streamed_bytes"] > 0) == (name not in ("resident", "gives way"))
    assert (stats["num_preemptions"] > 0) == (name == "gives way")
    assert_pools_as_before(engine)


def test_two_of_four_layers_are_kept_and_a_full_one_that_two_read_streams_twice(path):
    engine = toy_engine(path, **ENGINES["streamed"])
    spec = engine.runner.spec
    assert spec.kv_layers == (0, 1) and spec.kv_read == ((0, 0), (1, 0), (0, 0), (1, 0)) and spec.layout.num_places == 1
    run(engine, random_prompts(1, 60, 60), [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)])
    before = engine.stats()["streamed_bytes"], engine.stats()["written_bytes"]
    assert before[1] == 3 * 2 * LAYER_BLOCK_BYTES, "each full block is written once"
