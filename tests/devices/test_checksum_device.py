"""The checksum device of the tests: it shows each byte that is read, and none that is not."""

import random
from collections import Counter

import checksum
import checksum.mixing
import numpy as np
import pytest
import torch
from checksum.answers import check
from checksum.oracle import Oracle
from checksum.watch import WatchedRuntime, draws, memory_of
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime

from offload.runtime.staging import Staging

THREE = SMALL | dict(num_layers=3)
SLOTS = dict(expert_slots=3, capture_num_tokens=[8], max_num_seqs=4)


@pytest.fixture(autouse=True)
def checksums(monkeypatch):
    checksum.use(monkeypatch)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("window", [None, 20])
def test_an_engine_gives_the_oracles_sums_in_every_mode(path_of, family, window):
    path = path_of(family, **(THREE if family == "qwen3" else SMALL), sliding_window=window)
    oracle, prompts = Oracle(path), random_prompts(5)
    params = [*some_params(3), *some_params(2, prompt_logprobs=2)]
    options = [dict(enable_cpu_offload=True), dict(enable_cpu_offload="auto", num_gpu_blocks_override=22)]
    options += [SLOTS | dict(enable_cpu_offload=True)] if family == "qwen3_moe" else [dict(cpu_offload_gb=2e-5)]
    for number, one in enumerate(options):
        engine = make_engine(path, SimulatedRuntime(seed=number), **one)
        for prompt, param, outcome in zip(prompts, params, run(engine, prompts, params), strict=True):
            check(oracle, prompt, param, outcome)
        assert_pools_as_before(engine)


@pytest.mark.parametrize("kind", ["resident", "streamed", "weights", "slots"])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in dot:RuntimeWarning")
def test_a_flipped_byte_changes_the_answer_where_it_is_read_and_nowhere_else(path_of, kind, fuzz, monkeypatch):
    """Any byte of blocks, landing places, slots, weights and staging, before any operation of the device."""
    path = path_of("qwen3_moe" if kind == "slots" else "qwen3", **THREE)
    options = {
        "resident": {},
        "streamed": dict(enable_cpu_offload=True),
        "weights": dict(enable_cpu_offload=True, cpu_offload_gb=2e-5),
        "slots": dict(enable_cpu_offload=True, resident_kv_limit="40KiB") | SLOTS,
    }[kind]
    prompts, params = random_prompts(2, 20, 40, seed=1), some_params(2, 6, prompt_logprobs=1)
    acquire, runtimes = Staging.acquire, []

    def acquired(staging):
        buffer = acquire(staging)
        runtimes[-1].filled(buffer)
        return buffer

    monkeypatch.setattr(Staging, "acquire", acquired)

    def play(flip=None):
        runtimes.append(runtime := WatchedRuntime(seed=3))
        engine = make_engine(path, runtime, **options)
        if flip is None:
            runtime.begin(monkeypatch)
        else:
            name, index, byte, number = flip
            runtime.begin(monkeypatch, number, lambda: memory_of(engine)[name][index][byte : byte + 1])
        try:
            return engine, run(engine, prompts, params)
        except Exception as error:
            return engine, error

    engine, wanted = play()
    assert not isinstance(wanted, Exception), wanted
    memory, watched, found = memory_of(engine), runtimes[-1], Counter()
    flips = draws(watched, memory, random.Random(5))
    for _ in range(250 if fuzz else 12):
        flip = next(flips)
        address = memory[flip[0]][flip[1]].data_ptr() + flip[2]
        matters, changes = watched.matters(address, flip[3]), play(flip)[1] != wanted
        assert matters == changes, flip
        found[flip[0], matters] += 1
    if fuzz:
        assert len({name for name, _ in found}) == len(memory) and {True, False} == {matters for _, matters in found}


def test_a_key_of_another_position_is_named_and_poison_is_noticed(path_of):
    engine = make_engine(path_of("qwen3", **SMALL))
    engine.add_request("0", list(range(3, 40)), some_params(1)[0])
    engine.step(), engine.step()
    blocks = engine.kv_cache.tables.gpu[engine.kv_cache.tables.gpu >= 0][:2].tolist()
    with torch.inference_mode():
        engine.runner.gpu_kv[:, blocks[0]].copy_(engine.runner.gpu_kv[:, blocks[1]])
    with pytest.raises(checksum.WrongKey, match=r"reads position 0 of layer \w+, where position 16 of"):
        engine.step()
    with pytest.raises(checksum.ReadPoison):
        checksum.mixing.sums(torch.tensor([[1.0, float("nan")]]))


def test_each_bit_of_a_row_is_in_its_sum():
    generator = np.random.default_rng(0)
    row = generator.random((1, 6), dtype=np.float32) + np.float32(1)
    before = checksum.mixing.sums(row)
    for bit in range(6 * 32):
        row.view(np.uint32)[0, bit // 32] ^= np.uint32(1 << bit % 32)
        if np.isfinite(row).all():
            assert checksum.mixing.sums(row) != before
        row.view(np.uint32)[0, bit // 32] ^= np.uint32(1 << bit % 32)
