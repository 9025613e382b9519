"""Layers that keep keys and values of several shapes, or read another layer's, as Gemma 3n and 4 have them."""

from dataclasses import replace

import pytest
from dense_model import dense_logits
from engines import LAYER_BLOCK_BYTES, assert_pools_as_before, make_engine, random_prompts, run, some_params
from kv_models import MODELS, registered, write_model
from simulated import SimulatedRuntime

from nanoinfer import SamplingParams

OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2**15)
ENGINES = {
    "resident": {},
    "gives way": dict(num_gpu_blocks_override=24, max_model_len=180),
    "streamed": OFFLOAD,
    "partly kept": OFFLOAD | dict(num_gpu_blocks_override=24, resident_kv_limit=None),
    "offload by itself": OFFLOAD | dict(enable_cpu_offload="auto", num_gpu_blocks_override=24, max_model_len=180),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    with registered():
        yield {name: write_model(tmp_path_factory.mktemp(name.replace(" ", "-")), name) for name in MODELS}


@pytest.fixture(scope="module")
def alone():
    """Model and seed -> what its requests get where there is room, some of them as each alone."""
    return {}


def engine_of(paths, name, runtime=None, **arguments):
    if "num_gpu_blocks_override" in arguments:  # by how many groups there are, and how small blocks are
        arguments["num_gpu_blocks_override"] += {"wide windows": 12, "odd": -4}.get(name, 0)
    arguments = dict(block_size=MODELS[name].block_size, max_num_seqs=3, capture_num_tokens=[8, 24]) | arguments
    return make_engine(paths[name], runtime, load_format="dummy", **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_attention(paths, name):
    engine, prompts = engine_of(paths, name), random_prompts(3, 20, 90)
    outcomes = run(engine, prompts, [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3)
    for prompt, [(tokens, _, _)] in zip(prompts, outcomes, strict=True):
        logits = dense_logits(engine.runner.model, prompt + list(tokens[:-1]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(
    "shared-partly kept-1",
    "wide windows-gives way-1",
    "wide windows-streamed-1",
    "narrow windows-offload by itself-1",
    "odd-partly kept-1",
)
def test_every_mode_has_the_bits_of_a_request_alone(paths, alone, name, mode, seed):
    prompts, params = random_prompts(4, 60, 99, seed) + random_prompts(2, 1, 20, seed), some_params(6, max_tokens=60)
    if (name, seed) not in alone:
        roomy, lonely = engine_of(paths, name), engine_of(paths, name)
        alone[name, seed] = run(roomy, prompts, params)
        for i in (0, -1):  # the others' would see no more
            assert run(lonely, [prompts[i]], [params[i]])[0] == alone[name, seed][i]
    engine = engine_of(paths, name, SimulatedRuntime(seed), **ENGINES[mode])
    assert run(engine, prompts, params) == alone[name, seed]
    stats = engine.stats()
    assert (stats["streamed_bytes"] > 0) == (mode not in ("resident", "gives way"))
    assert (stats["num_preemptions"] > 0) == (mode == "gives way")
    assert_pools_as_before(engine)


def test_two_of_four_layers_are_kept_and_a_full_one_that_two_read_streams_twice(paths):
    engine = engine_of(paths, "shared", **ENGINES["streamed"])
    spec = engine.runner.spec
    assert spec.kv_layers == (0, 1) and spec.kv_read == ((0, 0), (1, 0), (0, 0), (1, 0)) and spec.layout.num_places == 1
    run(engine, random_prompts(1, 60, 60), [SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)])
    assert engine.stats()["written_bytes"] == 3 * 2 * LAYER_BLOCK_BYTES, "each full block is written once"


def test_tokens_of_a_block_follow_from_the_bytes_of_each_shape(paths):
    found = {}
    for name in MODELS:
        spec = engine_of(paths, name).runner.spec
        sizes = {(group.window, group.block_size) for group in spec.kv_groups}
        found[name] = sizes, spec.layout.part_bytes, [one.part.num_bytes for one in spec.attentions]
    assert found["shared"] == ({(None, 16), (40, 16)}, LAYER_BLOCK_BYTES, [LAYER_BLOCK_BYTES])
    assert found["wide windows"] == ({(None, 32), (40, 16)}, 2 * 32 * 64 * 4, [2 * 32 * 64 * 4] * 2)
    assert found["narrow windows"] == ({(None, 16), (40, 32)}, 2 * 16 * 64 * 4, [2 * 16 * 64 * 4] * 2)
    # padded to whole pages in which both shapes' tokens lie at whole distances: the copy unit counts those
    assert found["odd"] == ({(None, 32), (40, 32)}, 2**13 * 3, [2 * 32 * 48 * 4, 2 * 32 * 64 * 4])


def test_a_size_that_leaves_too_few_tokens_is_refused_and_the_default_leaves_enough(paths):
    spec = engine_of(paths, "wide windows").runner.spec
    with pytest.raises(ValueError, match="block_size is 16 tokens, .* keep 2 times the bytes .* give a multiple of 32"):
        spec.with_kv(16, None)
    assert [one.block_size for one in spec.with_kv(None, None).attentions] == [128, 256]
    wide, narrow = spec.attentions
    eight_times = replace(spec, attentions=(replace(wide, num_q_heads=16, num_kv_heads=16), narrow))
    assert [one.block_size for one in eight_times.with_kv(None, None).attentions] == [64, 512]
