"""Sequences that share host blocks share what comes of them: one stream, one copy on the GPU.

Beginnings are drawn from a tree that branches at block edges and inside blocks. Whoever starts, grows, ends, is aborted or
switched: everyone gets the bits of resident mode, and the reference counts are those of the tables.
"""

import random
from collections import Counter

import numpy as np
import pytest
from engines import (
    BLOCK_BYTES,
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
)
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.kv_cache import NO_BLOCK
from offload import SimulatedRuntime

FAMILIES = {"qwen3": SMALL, "gemma3": SMALL | dict(sliding_window=24)}
ARGUMENTS = dict(max_model_len=256, max_num_batched_tokens=64, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name), **FAMILIES[name]) for name in FAMILIES}


def greedy(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | arguments))


def tree_of_prompts(generator: random.Random, count: int) -> list[list[int]]:
    """Each goes on from where another one may be left: at a block edge, inside a block, or at its end."""
    prompts = [random_prompts(1, 40, 90, seed=generator.getrandbits(30))[0]]
    while len(prompts) < count:
        stem = generator.choice(prompts)
        cut = generator.choice([0, len(stem), generator.randint(0, len(stem)), *range(16, len(stem) + 1, 16)])
        prompts.append(stem[: min(cut, 120)] + random_prompts(1, 1, 40, seed=generator.getrandbits(30))[0])
    return prompts


def check_references(engine) -> int:
    """Each block of both pools is held once for each place in the tables; returns how many GPU blocks rows share."""
    kv_cache, offload = engine.runner.kv_cache, engine.runner.offload
    held = Counter(kv_cache.gpu_table[kv_cache.gpu_table != NO_BLOCK].tolist())
    num_shared = sum(count > 1 for count in held.values())
    if offload is not None:
        leaving = [block for deferred in offload._deferred_gpu for block in deferred.blocks]
        assert not set(leaving) & set(held) and len(set(leaving)) == len(leaving), "given back, and in use"
        held.update(leaving)
        on_host = Counter(kv_cache.host_table[kv_cache.host_table != NO_BLOCK].tolist())
        on_host.update(block for deferred in offload._deferred_host for block in deferred.blocks)
        assert on_host == offload.host.blocks._references
    pool, taken = kv_cache.gpu_blocks, getattr(engine, "taken", [])
    assert held + Counter(taken) == pool._references
    assert pool.num_shared == sum(pool._references.values()) - len(pool._references)
    if kv_cache.offload is None:
        return num_shared
    first, full = kv_cache.residency.first, kv_cache.residency.full
    for row in range(len(first)):
        assert np.all(kv_cache.gpu_table[row, : first[row]] == NO_BLOCK)
        assert np.all(kv_cache.gpu_table[row, first[row] : full[row]] != NO_BLOCK)
        assert np.all(kv_cache.host_table[row, : full[row]] != NO_BLOCK)
    places = [(row, block) for row in range(len(first)) for block in range(first[row], full[row])]
    assert kv_cache.num_resident == len({int(kv_cache.gpu_table[place]) for place in places})
    streams = {int(kv_cache.host_table[row, block]) for row in range(len(first)) for block in range(first[row])}
    assert kv_cache.num_streamed == len(streams)
    if engine.plan.max_resident_blocks is not None:
        assert kv_cache.num_resident <= engine.plan.max_resident_blocks
    return num_shared


def tree_engine(generator: random.Random, path, seed: int):
    mode, rows = generator.choice(["auto", True, True, False]), generator.randint(2, 6)
    engine = make_engine(
        path,
        SimulatedRuntime(generator.choice([None, seed, seed])),
        **ARGUMENTS,
        enable_cpu_offload=mode,
        max_num_seqs=rows,
        capture_num_tokens=generator.choice([[], [4, 24, 40]]),
        num_gpu_blocks_override=60,
        host_memory_limit=generator.choice([60, 200]) * BLOCK_BYTES,
        ring_slot_bytes=generator.choice([1, 2, 3, 5]) * LAYER_BLOCK_BYTES,
        num_ring_slots=generator.choice([2, 3]),
        resident_kv_limit=generator.choice([None, None, None, 0, 3 * BLOCK_BYTES, 9 * BLOCK_BYTES]),
    )
    pool = engine.runner.kv_cache.gpu_blocks
    engine.taken = pool.allocate(max(0, pool.num_free - generator.randint(17 if mode else 20, 40)))
    return engine


def play(engine, requests, generator: random.Random):
    """Adds, aborts and switches at random; returns the requests, the aborted ones, and how many blocks were ever shared."""
    added, aborted, num_shared = [], set(), 0
    for _ in range(3000):
        while len(added) < len(requests) and (generator.random() < 0.25 or not engine.has_work):
            added.append(engine.add_request(str(len(added)), *requests[len(added)]))
        if not engine.has_work:
            return added, aborted, num_shared
        running = [i for i, request in enumerate(added) if not request.is_finished]
        if running and generator.random() < 0.02:
            victim = generator.choice(running)
            aborted.add(victim)
            engine.abort(str(victim))
        if generator.random() < 0.04:
            try:
                engine.switch_mode("resident" if engine.mode == "offload" else "offload")
            except ValueError:
                pass  # refused: what runs has no room there
        engine.step()
        shared = check_references(engine)
        num_shared += shared if engine.mode == "offload" else 0
    pytest.fail("the engine does not come to an end")


@pytest.mark.parametrize("first_seed", range(0, 48, 8))
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_beginnings_drawn_from_a_tree(paths, first_seed):
    total_shared = 0
    for seed in range(first_seed, first_seed + 8):
        generator = random.Random(seed)
        path = paths[generator.choice(["qwen3", "qwen3", "gemma3"])]
        prompts = tree_of_prompts(generator, generator.randint(3, 9))
        params = [
            greedy(generator.randint(1, 60), temperature=0.8 * (i % 2), seed=i, n=generator.choice([1, 1, 1, 3]))
            for i in range(len(prompts))
        ]
        wide = make_engine(path, **ARGUMENTS | dict(max_num_seqs=4, enable_prefix_caching=False))
        engine = tree_engine(generator, path, seed)
        added, aborted, num_shared = play(engine, list(zip(prompts, params, strict=True)), generator)
        for i, request in enumerate(added):
            ((*wanted,),) = run(wide, [prompts[i]], [params[i]])
            for (tokens, _, reason), (wanted_tokens, _, wanted_reason) in zip(outcome(request), wanted, strict=True):
                is_whole = (tokens, reason) == (wanted_tokens, wanted_reason)
                is_beginning = i in aborted and tokens == wanted_tokens[: len(tokens)]
                assert is_whole or is_beginning, f"seed {seed}, request {i}"
        engine.runner.kv_cache.gpu_blocks.release(engine.taken)
        assert_pools_as_before(engine)
        total_shared += num_shared
    assert total_shared, "no two rows shared a block of the GPU"
