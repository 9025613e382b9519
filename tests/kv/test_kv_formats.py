"""Formats of KV that are written in the tests run in every mode, with and without windows, and give the same bits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params, switching
from kv_models import MODELS, registered, write_model
from request_helpers import shrink_gpu_pool
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

triton = pytest.importorskip("triton")

from kv_int8 import Int8Heads

from nanoinfer.attention.flash_attn_backend import FlashAttnBackend
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.common.kv_formats import KV_FORMATS
from nanoinfer.kernels.kv.base import KVPart

OWN = {"int8_heads": "kv_int8:Int8Heads", "one_vector": "kv_one_vector:OneVector"}
NAMES = [*OWN, "bfloat16", "float16", "int8", "k8v4", "int4"]
PROMPTS, PARAMS = random_prompts(5, 1, 100), some_params(5, max_tokens=9)
WINDOWED = SMALL | dict(sliding_window=40)
WAYS = {
    "streamed": dict(enable_cpu_offload=True),
    "some on the GPU": dict(enable_cpu_offload=True, resident_kv_limit=2**12),
    "eager": dict(enforce_eager=True, enable_cpu_offload=True),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=11, max_model_len=140),
    "small steps": dict(max_num_batched_tokens=16),
    "no prefixes": dict(enable_prefix_caching=False),
}


@pytest.fixture(autouse=True)
def formats(monkeypatch):
    for name, maker in OWN.items():
        monkeypatch.setitem(KV_FORMATS, name, maker)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = {"qwen3": SMALL, "gemma3": WINDOWED, "gemma4": SMALL | dict(attention_k_eq_v=True)}
    found = {name: make_checkpoint(name, tmp_path_factory.mktemp(name), **sizes) for name, sizes in made.items()}
    with registered():
        yield found | {name: write_model(tmp_path_factory.mktemp("shapes"), name) for name in MODELS}


def engines_of(paths, family, name):
    """Return what makes an engine of a model with its KV in this format."""
    own = dict(load_format="dummy", block_size=MODELS[family].block_size) if family in MODELS else {}
    own |= dict(block_size=32) if family == "gemma4" else {}
    return partial(make_engine, paths[family], kv_cache_dtype=name, **own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "wide windows", "odd"])
@pytest.mark.sampled(
    "qwen3-int8", "qwen3-one_vector", "gemma3-int8_heads", "wide windows-one_vector", "odd-k8v4", "gemma3-bfloat16",
    "gemma4-int8",
)  # fmt: skip
def test_every_mode_gives_the_same_bits(paths, family, name, fuzz):
    engine_of = engines_of(paths, family, name)
    wanted = run(engine_of(), PROMPTS, PARAMS)
    assert wanted != run(engines_of(paths, family, "auto")(), PROMPTS, PARAMS), "nothing was stored in the format"
    for way, arguments in WAYS.items():
        if family != "qwen3" and way == "auto":  # several groups of layers
            few = {"wide windows": 30, "gemma4": 10}.get(family, 16)
            arguments = arguments | dict(num_gpu_blocks_override=few)
        engine = engine_of(**arguments)
        assert run(engine, PROMPTS, PARAMS) == wanted, way
        assert engine.stats()["streamed_bytes"] > 0 or not arguments.get("enable_cpu_offload"), way
        assert_pools_as_before(engine)
    engine = engine_of()
    assert run(engine, PROMPTS, PARAMS, switching({3: "offload", 7: "resident"})) == wanted
    assert engine.stats()["streamed_bytes"] > 0 and engine.mode == "resident"
    for seed in range(5 if fuzz else 1):
        assert run(engine_of(SimulatedRuntime(seed), enable_cpu_offload=True), PROMPTS, PARAMS) == wanted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["qwen3", "narrow windows"])
@pytest.mark.sampled("qwen3-int8_heads", "qwen3-k8v4", "narrow windows-int4")
def test_who_gives_way_and_who_finds_a_prefix_has_the_same_bits(paths, family, name):
    prompts = [PROMPTS[0] + [7] * 64, PROMPTS[0] + [7] * 64 + [9] * 30, PROMPTS[2], PROMPTS[1]]
    params = some_params(4, max_tokens=24 if family == "qwen3" else 60)
    engine_of = engines_of(paths, family, name)
    wanted = run(engine_of(enable_prefix_caching=False), prompts, params)
    engine = engine_of(SimulatedRuntime(2))
    give_back = shrink_gpu_pool(engine, 14 if family == "qwen3" else 24)
    assert run(engine, prompts, params) == wanted
    assert engine.stats()["num_preemptions"] > 0
    give_back()
    again = run(engine, prompts, params)
    assert again == wanted and engine.stats()["prefix_cache_hit_tokens"] > 0
    assert_pools_as_before(engine)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_only_the_store_rounds(paths, family, monkeypatch):
    """A plain cache that is given what the format makes of keys and values yields the same bits."""
    wanted = run(make_engine(paths[family], kv_cache_dtype="int8_heads"), PROMPTS, PARAMS)
    store, codes = KVPart.store, Int8Heads()

    def rounded(part, k, v, *where):
        store(part, *(one.to(k.dtype) for one in codes.decode(codes.encode(k, v), None, ())), *where)

    monkeypatch.setattr(KVPart, "store", rounded)
    assert run(make_engine(paths[family]), PROMPTS, PARAMS) == wanted


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported without TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma3", "int8_heads"),
        ("gemma3", "int4"),
        ("odd", "one_vector"),
        ("odd", "auto"),
        ("odd", "k8v4"),
        ("odd", "float16"),
    ],
)
def test_kernels_in_the_interpreter_give_equal_bits_in_both_modes(paths, family, name):
    prompts, params = [PROMPTS[1][:40], PROMPTS[2][:5]], some_params(2, max_tokens=3)
    engine_of = engines_of(paths, family, name)
    found = [run(engine_of(attention_backend="triton", enable_cpu_offload=it), prompts, params) for it in (False, True)]
    assert found[0] == found[1]
    of_torch = run(engine_of(), prompts, params)
    assert [[one[0] for one in each] for each in of_torch] == [[one[0] for one in each] for each in found[0]]


def test_what_cannot_be_is_refused_by_name(paths, monkeypatch):
    with pytest.raises(
        ValueError,
        match="kv_cache_dtype='int8_head' is not one of auto, bfloat16, float16, fp8, int8, k8v4, int4, int8_heads",
    ):
        make_engine(paths["qwen3"], kv_cache_dtype="int8_head")
    spec = make_engine(paths["qwen3"], kv_cache_dtype="int8_heads").runner.spec.attention
    spec = replace(spec, dtype=torch.bfloat16, block_size=256)
    with pytest.raises(ValueError, match="KV cache is int8_heads, and it takes the model's own dtype; choose"):
        FlashAttnBackend.check_spec(spec, offload=False)
    monkeypatch.setattr(TorchBackend, "reads_every_format", False)  # as of one that a package brings
    with pytest.raises(ValueError, match="backend 'torch' does not read a KV cache in int8_heads: set kv_cache_dtype"):
        make_engine(paths["qwen3"], kv_cache_dtype="int8_heads")


def test_a_block_takes_the_bytes_of_its_format(paths):
    of_tokens = dict(int8_heads=2 * 16 + 2 * 2, one_vector=2 * 16, int8=2 * 16 + 2 * 2, k8v4=16 + 8 + 4, int4=2 * 8 + 4)
    for name, of_token in (of_tokens | dict(bfloat16=2 * 2 * 16, float16=2 * 2 * 16)).items():
        runner = make_engine(paths["qwen3"], kv_cache_dtype=name).runner
        assert runner.layout.part_bytes == 16 * of_token and (
            name not in of_tokens or runner.gpu_kv.dtype == torch.uint8
        )
        assert runner.spec.kv_bytes(1) == of_token * len(runner.spec.layers)


def test_a_small_model_in_4_bits_is_warned_of(paths):
    with pytest.warns(
        UserWarning, match="this small model loses much accuracy with a KV cache in 4 bits.*'int8' loses little"
    ):
        make_engine(paths["qwen3"], kv_cache_dtype="int4")
