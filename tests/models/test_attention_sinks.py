"""A family whose query heads have sinks: the same tokens and bits however its attention is cut, and the right ones."""

import pytest
import torch
from dense_model import dense_logits
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import tiny_config

from nanoinfer import SamplingParams
from nanoinfer.models import registry
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.recall.formats import prompt_logits


class Sunk(Decoder):
    model_type = "llama"

    @classmethod
    def traits(cls, hf_config):
        return super().traits(hf_config, attention_sinks=True)

    @classmethod
    def layer_states(cls, hf_config):
        return AttentionState(window=20), AttentionState()


@pytest.fixture
def path(tmp_path, monkeypatch):
    known = {name: registry.find_class([name]) for name in registry.supported_architectures()}
    monkeypatch.setattr(registry, "_MODELS", known)
    registry.register("SunkForCausalLM")(Sunk)
    tiny_config("llama", architectures=["SunkForCausalLM"], **SMALL).save_pretrained(tmp_path)
    return tmp_path


def sunk_engine(path, runtime=None, **arguments):
    engine = make_engine(path, runtime, load_format="dummy", capture_num_tokens=[8, 24], **arguments)
    for number, layer in enumerate(engine.runner.model.layers):  # attention counts, and each layer has sinks of its own
        with torch.inference_mode():
            layer.self_attn.sinks.copy_(torch.tensor([4.5, 2.0]) + number)
            layer.self_attn.o_proj.weight.mul_(100)
    return engine


ENGINES = {
    "gives way": dict(num_gpu_blocks_override=23, max_model_len=140),
    "offload": dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES),
    "eager": dict(enforce_eager=True, max_num_batched_tokens=24),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.sampled("gives way", "offload")
def test_rows_with_sinks_have_the_bits_that_they_have_alone(path, name):
    beginning = random_prompts(1, 40, 40)[0]
    prompts = [beginning + prompt for prompt in random_prompts(3, 20, 60)] + random_prompts(3, 1, 20, 1)
    params = some_params(6, max_tokens=24)
    alone = sunk_engine(path, enable_prefix_caching=False)
    wanted = [run(alone, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    engine = sunk_engine(path, SimulatedRuntime(3), max_num_seqs=3, **ENGINES[name])
    assert run(engine, prompts, params) == wanted
    stats = engine.stats()
    assert (stats["streamed_bytes"] > 0) == (name == "offload") and stats["num_mixed_steps"] > 0
    assert_pools_as_before(engine)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_tokens_are_those_of_the_whole_sequence_at_once(path, backend):
    if backend == "triton" and not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    engine = sunk_engine(path, attention_backend=backend)
    [prompt] = random_prompts(1, 45, 45)
    [[(tokens, _, _)]] = run(engine, [prompt], [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)])
    model, whole = engine.runner.model, prompt + tokens[:-1]
    with torch.inference_mode():
        want = dense_logits(model, whole)
        assert want[44:].argmax(-1).tolist() == tokens
        assert torch.allclose(prompt_logits(model, whole), want, atol=1e-5)
        for layer in model.layers:
            layer.self_attn.sinks.fill_(-100)
        without = dense_logits(model, whole)
        assert without[44:].argmax(-1).tolist() != tokens and (without - want).abs().max() > 0.05, "sinks matter here"


def test_sinks_are_weights_of_the_checkpoint(path):
    model = sunk_engine(path).runner.model
    view = model.checkpoint_views()["model.layers.1.self_attn.sinks"]
    assert view is model.layers[1].self_attn.sinks and view.shape == (2,) and model.spec.attention.sinks
