"""Gemma 4's kinds of layers in a chat: each turn has the bits of a cold start, and a row holds what it must."""

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.step.plan import NO_BLOCK

WINDOW = 40
TYPES = ["sliding_attention", "full_attention"] * 2
SIZES = dict(layer_types=TYPES, num_layers=4, num_heads=2, num_kv_heads=2, sliding_window=WINDOW)
KINDS = {
    "one projection": ("gemma4", dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "experts": ("gemma4_moe", dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "inputs of layers": ("gemma4_inputs", dict(num_kv_shared_layers=2, use_double_wide_mlp=True)),
}
MODES = {"resident": {}, "streamed": dict(enable_cpu_offload=True), "auto": dict(enable_cpu_offload="auto")}
BLOCKS = dict(block_size=32, max_num_batched_tokens=48)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {
        kind: make_checkpoint(family, tmp_path_factory.mktemp("model"), **SIZES, **own)
        for kind, (family, own) in KINDS.items()
    }


def answered(engine, prompt, **arguments):
    (found,) = run(engine, [prompt], [SamplingParams(max_tokens=3, ignore_eos=True, logprobs=3, **arguments)])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(
    "one projection-streamed-bfloat16", "experts-resident-bfloat16", "inputs of layers-auto-float32",
)  # fmt: skip
def test_ten_turns_of_a_chat_are_those_of_cold_ones_to_the_bit(paths, kind, mode, dtype):
    given = BLOCKS | MODES[mode] | dict(dtype=dtype)
    engine, cold = (make_engine(paths[kind], **given, enable_prefix_caching=it) for it in (True, False))
    prompt, num_found = [], 0
    for turn, message in enumerate(random_prompts(10, 12, 24, seed=3)):
        prompt, sampling = prompt + message, dict(temperature=turn % 2, seed=turn)
        found, wanted = (answered(each, prompt, **sampling) for each in (engine, cold))
        assert found == wanted, turn
        prompt = prompt + found[0][0]
        hits = engine.stats()["prefix_cache_hit_tokens"]
        num_found += hits > 0
    assert num_found >= 8 and hits > 300 and len(prompt) > 4 * WINDOW
    assert_pools_as_before(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_takes_blocks_of_full_layers_and_of_what_windows_see(paths, kind):
    """In decode; the planner counts as many. Layers that read another's keys and values take none."""
    engine = make_engine(paths[kind], **BLOCKS)
    groups, prompt = engine.kv_cache.tables.groups, random_prompts(1, 200, 200)[0]
    most, planned = 0, engine.runner.spec.kv_groups
    bounded = sum(-(-WINDOW // group.block_size) + 1 for group in groups if group.window is not None)
    of_full = [group.block_size for group in groups if group.window is None]
    assert of_full and bounded and sum(len(group.layers) for group in groups) == len(engine.runner.spec.kv_layers)

    def at_step(engine, step):
        nonlocal most
        for sequence in engine.scheduler.running:
            held = int((engine.kv_cache.tables.gpu[:, sequence.row] != NO_BLOCK).sum())
            if sequence.num_sampled:
                length = sequence.num_computed + 1
                assert held <= sum(-(-length // size) for size in of_full) + bounded
                assert abs(held - planned.num_blocks(length)) <= len(groups)
                most = max(most, held)

    run(engine, [prompt], [SamplingParams(max_tokens=60, ignore_eos=True)], at_step)
    assert most >= sum(-(-256 // size) for size in of_full)


def test_plain_numbers_of_a_type_are_two_vectors(paths):
    """Of twice the bytes, and in the model's own type as before: transformers' keys, which one vector rounds twice."""
    found = {}
    for name in ("auto", "bfloat16", "float16", "fp8"):
        engine = make_engine(paths["one projection"], **BLOCKS, kv_cache_dtype=name, dtype="bfloat16")
        (full,) = (one for one in engine.runner.spec.attentions if one.has_one_projection)
        of_token = full.part.num_bytes // full.block_size
        assert of_token == full.kv_size * {"auto": 2, "fp8": 2}.get(name, 4)
        assert full.is_expanded == (name != "bfloat16")
        prompt = random_prompts(1, 150, 150)[0]
        found[name] = answered(engine, prompt, temperature=0)
        streamed = make_engine(paths["one projection"], **BLOCKS, kv_cache_dtype=name, dtype="bfloat16",
                               enable_cpu_offload=True)  # fmt: skip
        assert answered(streamed, prompt, temperature=0) == found[name]
    assert len({str(found[name]) for name in ("auto", "bfloat16", "fp8")}) == 3, "formats make no difference"
    wide = [make_engine(paths["one projection"], **BLOCKS, kv_cache_dtype=name) for name in ("auto", "bfloat16")]
    assert [one.runner.spec.attention.part.format.dtype for one in wide] == [torch.float32, torch.bfloat16]
