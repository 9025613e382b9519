"""What the GPU evicts in resident mode is on the host by then, and comes back when a prompt begins with it."""

import random

import pytest
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run
from request_helpers import tree_of_prompts
from simulated import RaceError, SimulatedRuntime

from nanoinfer import SamplingParams

ARGUMENTS = dict(enable_cpu_offload="auto", num_gpu_blocks_override=14, max_num_seqs=3, max_model_len=160)


@pytest.fixture(scope="module")
def path(path_of):
    return path_of("qwen3", **SMALL)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_beginning_that_was_evicted_is_found_on_the_host(path, seed):
    """Three documents of seven blocks each in a pool of thirteen, one after the other, twice."""
    documents = random_prompts(3, 118, 118, seed=1)
    cold = [run(make_engine(path), [document], [greedy(6)])[0] for document in documents]
    engine, cached = make_engine(path, SimulatedRuntime(seed), **ARGUMENTS), []
    for document in documents * 2:
        request = engine.add_request(str(engine.intake.num_sequences), document, greedy(6))
        while engine.has_work:
            engine.step()
        engine.scheduler.schedule()  # an idle moment
        engine.mover.transfers.finish()
        cached.append(request.sequences[0].num_cached)
        found = request.output().outputs[0]
        assert (found.token_ids, found.logprobs) == cold[documents.index(document)][0][:2]
    assert cached == [0, 0, 0, 112, 112, 112] and engine.mode == "resident"
    assert engine.stats()["streamed_bytes"] == 0, "nothing streams"
    assert_pools_as_before(engine)


def test_the_host_keeps_what_is_only_there_until_something_newer_comes(path):
    """Its four blocks take what the GPU evicts next; a block that both have is not put out for one that both would."""
    engine = make_engine(path, SimulatedRuntime(), **ARGUMENTS | dict(enable_cpu_offload=False))
    host, gpu = engine.kv_cache.tables.lifetimes.host_blocks, engine.kv_cache.tables.gpu_blocks
    run(engine, random_prompts(1, 118, 118, seed=2), [greedy(2)])
    engine.scheduler.schedule()
    assert not host.num_cached, "without offloading nobody takes memory for that"
    engine.runner.open_host_pool(False)
    engine.runner.offload.host.num_blocks = host.num_planned = 4
    host.wait_for(4)
    run(engine, random_prompts(1, 3, 3), [greedy(1)])  # who comes and goes
    for _ in range(4):
        engine.scheduler.schedule()
    assert {host.key_of[block] for block in host.next_evicted(9)} == {gpu.key(b) for b in gpu.next_evicted(4)}
    before = engine.runner.offload.counters.written_bytes
    for _ in range(4):
        engine.scheduler.schedule()
    assert engine.runner.offload.counters.written_bytes == before, "copied again and again"
    run(engine, random_prompts(1, 118, 118, seed=3), [greedy(2)])
    for _ in range(4):
        engine.scheduler.schedule()
    assert {host.key_of[block] for block in host.next_evicted(9)} >= {gpu.key(b) for b in gpu.next_evicted(1)}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled("3", "11")
def test_trees_of_prompts_get_the_bits_that_they_get_cold(path, seed):
    generator = random.Random(seed)
    prompts = [prompt for prompt in tree_of_prompts(generator, 9) for _ in range(2)]
    generator.shuffle(prompts)
    params = [greedy(generator.choice([2, 9, 20])) for _ in prompts]
    cold = run(make_engine(path, enable_prefix_caching=False), prompts, params)
    engine = make_engine(path, SimulatedRuntime(seed), **ARGUMENTS)
    assert run(engine, prompts, params) == cold
    assert_pools_as_before(engine)


def test_what_comes_back_is_read_only_when_it_is_there(path):
    """Without that wait some prompt begins with what was there before."""
    documents = random_prompts(3, 118, 118, seed=1)
    cold = run(make_engine(path), documents, [greedy(6)] * 3)
    for seed in range(12):
        engine = make_engine(path, SimulatedRuntime(seed, dropped_rule="moved_blocks.read_after_load"), **ARGUMENTS)
        try:
            found = [run(engine, [document], [greedy(6)])[0] for document in documents * 2]
        except RaceError:
            return
        if found != cold * 2:
            return
    pytest.fail("nothing went wrong")
