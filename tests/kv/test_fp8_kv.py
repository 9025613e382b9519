"""kv_cache_dtype="fp8": half the bytes, the same bits in every mode, and nothing but the store rounds."""

import pytest
import torch
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params, switching
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig
from nanoinfer.attention.base import AttentionSpec
from nanoinfer.attention.flash_attn_backend import FlashAttnBackend
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.kernels.kv.base import KVPart
from nanoinfer.kernels.kv.plain import Plain, part_of
from nanoinfer.memory.floors import kv_bytes
from nanoinfer.models.base import ModelSpec

PROMPTS, PARAMS = random_prompts(5, 1, 100), some_params(5, max_tokens=9)
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("fp8"), **SMALL)


def make_fp8_engine(path, runtime=None, **arguments):
    return make_engine(path, runtime, kv_cache_dtype="fp8", **arguments)


@pytest.fixture(scope="module")
def wanted(path):
    return run(make_fp8_engine(path), PROMPTS, PARAMS)


def test_a_block_takes_a_byte_per_value(path):
    engine, wide = make_fp8_engine(path), make_engine(path)
    assert wide.runner.layout.block_bytes == BLOCK_BYTES
    assert engine.runner.layout.block_bytes == BLOCK_BYTES // 4  # the model is float32
    assert engine.runner.decode_program.resources.kv_at(0, 0).dtype == FP8
    spec: ModelSpec = engine.runner.spec
    assert kv_bytes(spec, [100]) * 4 == kv_bytes(wide.runner.spec, [100])


def test_every_mode_gives_the_same_bits(path, wanted, fuzz):
    assert wanted != run(make_engine(path), PROMPTS, PARAMS), "the cache was not rounded"
    offload = make_fp8_engine(path, enable_cpu_offload=True)
    assert run(offload, PROMPTS, PARAMS) == wanted and offload.stats()["streamed_bytes"] > 0
    assert_pools_as_before(offload)
    assert run(make_fp8_engine(path, enforce_eager=True), PROMPTS, PARAMS) == wanted
    engine = make_fp8_engine(path)
    assert run(engine, PROMPTS, PARAMS, switching({3: "offload", 7: "resident"})) == wanted
    assert engine.stats()["streamed_bytes"] > 0 and engine.mode == "resident"
    for seed in range(5 if fuzz else 1):
        shuffled = make_fp8_engine(path, SimulatedRuntime(seed), enable_cpu_offload=True)
        assert run(shuffled, PROMPTS, PARAMS) == wanted


def test_only_the_store_rounds(path, wanted, monkeypatch):
    """A wide cache that is given rounded keys and values yields the same bits: nothing else is done in fewer."""
    store = KVPart.store
    rounded = lambda part, k, v, *where: store(part, k.to(FP8).to(k.dtype), v.to(FP8).to(v.dtype), *where)  # noqa: E731
    monkeypatch.setattr(KVPart, "store", rounded)
    assert run(make_engine(path), PROMPTS, PARAMS) == wanted


def test_values_beyond_the_range_are_stored_as_the_largest():
    kv = torch.zeros(1, 2, 16, 1, 16, dtype=FP8)
    k = torch.full((1, 1, 16), 1e6)
    part_of(kv).store(k, -k, kv, torch.tensor([3]))
    assert (kv[0, 0, 3].float() == 448).all() and (kv[0, 1, 3].float() == -448).all()
    assert not kv.float()[0, :, :3].any() and not kv.float()[0, :, 4:].any()


def test_other_types_and_backends_are_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype='int2'.*auto, bfloat16, float16, fp8, int8, k8v4, int4"):
        EngineConfig(model="m", kv_cache_dtype="int2")
    spec = AttentionSpec(
        num_q_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, block_size=256, softcap=None, windows=(None,),
        dtype=torch.bfloat16, kv_format=Plain(FP8),
    )  # fmt: skip
    with pytest.raises(ValueError, match="KV cache is fp8, and .*choose attention backend 'triton'"):
        FlashAttnBackend.check_spec(spec, offload=False)
    TorchBackend.check(spec, "cpu", offload=True)
