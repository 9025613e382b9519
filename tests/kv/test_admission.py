"""Who is admitted, who waits, and what a step costs while somebody waits."""

import gc
import random
import warnings
import weakref

import pytest
from engines import BLOCK_BYTES, LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run
from hollow import hollow
from request_helpers import record_batches, shrink_gpu_pool
from tiny_models import make_checkpoint

from nanoinfer import LLMEngine, SamplingParams
from nanoinfer.kv import admission
from nanoinfer.kv.admission import Verdict
from offload import BlockPool

ARGUMENTS = dict(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    ring_slot_bytes=2 * LAYER_BLOCK_BYTES,
    num_ring_slots=2,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL | dict(num_layers=1))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def finish(engine: LLMEngine) -> list[int]:
    """Runs to the end; the number of running sequences after each step."""
    running = []
    while engine.has_work:
        engine.step()
        running.append(len(engine.scheduler.running))
        assert len(running) < 2000, "the engine does not come to an end"
    return running


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_the_limit_of_splits_counts_what_sequences_can_grow_to(path, enable_cpu_offload):
    """Two prompts of two blocks that grow to five: together more than eight, one after the other not."""
    engine = hollow(make_engine(path, **ARGUMENTS, enable_cpu_offload=enable_cpu_offload))
    engine.admission.max_splits = 8
    prompts = random_prompts(3, 20, 30)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(80 - len(prompt)))
    assert max(finish(engine)) == 1
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(64 - len(prompt)))
    assert max(finish(engine)) == 2
    assert_pools_as_before(engine)


def test_a_preempted_sequence_returns_only_where_the_others_can_grow_a_little(path):
    """One block to spare for each running row: else it would give way again when the first of them grows."""
    engine = hollow(make_engine(path, **ARGUMENTS, enable_prefix_caching=False))
    shrink_gpu_pool(engine, 13)
    prompts = random_prompts(4, 33, 46, seed=4)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(30 + 12 * i))
    cache, num_refused = engine.kv_cache, 0
    admit_any = engine.admission.admit

    def admit(sequence, running, *passed):
        nonlocal num_refused
        num_free, is_kept = cache.tables.gpu_blocks.num_free, sequence.kept_blocks is not None
        verdict = admit_any(sequence, running, *passed)
        if is_kept and verdict is admission.Verdict.ADMITTED:
            assert cache.tables.gpu_blocks.num_free >= len(running)
        elif is_kept:
            num_refused += -(-sequence.num_tokens // 16) <= num_free
        return verdict

    engine.admission.admit = admit
    finish(engine)
    assert num_refused, "whoever was refused would not have fitted anyway"
    assert engine.scheduler.num_preemptions <= len(prompts), "they drive each other out again and again"


def step_until_running(engine: LLMEngine, names: str) -> None:
    """Runs until just these requests run."""
    for _ in range(200):
        if sorted(sequence.request_id for sequence in engine.scheduler.running) == sorted(names):
            return
        engine.step()
    pytest.fail(f"{names} never run together")


def test_who_waits_for_one_block_gets_the_first_that_comes_back(path):
    engine = hollow(make_engine(path, **ARGUMENTS, enable_prefix_caching=False))
    shrink_gpu_pool(engine, 6)
    large, small, waiting = random_prompts(3, 49, 49, seed=6)
    engine.add_request("A", large, greedy(14))  # four blocks from the beginning to the end
    engine.add_request("B", small[:10], greedy(3))
    engine.add_request("C", waiting[:20], greedy(3))
    step_until_running(engine, "AB")
    step_until_running(engine, "AC")
    finish(engine)


def test_who_waits_is_looked_up_again_when_more_of_its_prefix_is_known(path):
    """The first one publishes its blocks chunk by chunk; with the second chunk's the second one fits beside it."""
    engine = hollow(make_engine(path, **ARGUMENTS))
    shrink_gpu_pool(engine, 10)
    (prompt,) = random_prompts(1, 100, 100, seed=6)
    engine.add_request("A", prompt, greedy(9))
    engine.add_request("B", prompt[:96] + [7] * 20, greedy(3))
    engine.step()
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["A"]
    assert engine.admission.wanted
    step_until_running(engine, "AB")
    finish(engine)


def test_an_engine_that_refused_a_request_frees_its_pool_when_it_is_closed(path):
    """At once: until garbage is collected, the next engine would find the GPU full."""
    engine = make_engine(path, **ARGUMENTS, enforce_eager=True)  # graphs of a CPU refer to the engine
    shrink_gpu_pool(engine, 10)
    for name, prompt in zip("AB", random_prompts(2, 100, 100, seed=6), strict=True):
        engine.add_request(name, prompt, greedy(3))
    gc.disable()
    try:
        assert max(finish(engine)) == 1, "B did not have to wait"
        pool = weakref.ref(engine.runner.gpu_kv)
        engine.close()
        assert pool() is None
    finally:
        gc.enable()


def test_promises_that_an_ended_sequence_gives_back_are_room_for_who_waits(path):
    engine = hollow(make_engine(path, **ARGUMENTS, enable_cpu_offload=True, host_memory_limit=16 * BLOCK_BYTES // 2))
    prompts = random_prompts(2, 30, 30, seed=6)
    engine.add_request("A", prompts[0], greedy(200))
    engine.add_request("B", prompts[1], greedy(190))
    step_until_running(engine, "A")
    assert len(engine.scheduler.waiting) == 1
    engine.abort("A")
    step_until_running(engine, "B")
    finish(engine)
    assert_pools_as_before(engine)


def lookups_while_waiting(engine: LLMEngine, prompt: list[int], monkeypatch) -> tuple[int, int]:
    """How often blocks are looked up while the last request waits, and in how many steps."""
    calls, lookup = [], BlockPool.lookup
    monkeypatch.setattr(BlockPool, "lookup", lambda pool, key: calls.append(key) or lookup(pool, key))
    engine.add_request("waiting", prompt, greedy(4))
    num_steps = 0
    while engine.scheduler.waiting:
        engine.step()
        num_steps += 1
    return len(calls), num_steps


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_prompt_that_waits_for_room_is_not_looked_up_in_each_step(path, enable_cpu_offload, monkeypatch):
    host = dict(enable_cpu_offload=True, host_memory_limit=24 * BLOCK_BYTES // 2) if enable_cpu_offload else {}
    engine = hollow(make_engine(path, **ARGUMENTS, **host))
    if not enable_cpu_offload:
        shrink_gpu_pool(engine, 24)
    beginning, *others = random_prompts(3, 150, 150, seed=2)
    run(engine, [beginning], [greedy(2)])
    for i, prompt in enumerate(others):
        engine.add_request(str(i), prompt[:90], greedy(50))
    engine.step()
    num_blocks = len(beginning) // 16
    calls, num_steps = lookups_while_waiting(engine, beginning + others[0][90:], monkeypatch)
    assert num_steps > 30, "it did not have to wait"
    assert calls <= 4 * num_blocks, f"{calls} lookups of {num_blocks} blocks in {num_steps} steps"
    finish(engine)
    assert_pools_as_before(engine)


def test_what_is_not_looked_up_again_would_have_been_refused_again(path, fuzz):
    """The same steps with and without remembering what a sequence needs that was refused."""
    generator = random.Random(8)
    num_remembered = 0
    for seed in range(30 if fuzz else 2):
        beginnings = [[], *random_prompts(2, 50, 90, seed=seed)]
        prompts = [generator.choice(beginnings) + end for end in random_prompts(7, 1, 60, seed=50 + seed)]
        params = [greedy(generator.choice([3, 20, 50])) for _ in prompts]
        arguments = generator.choice(
            [dict(), dict(enable_cpu_offload=True, host_memory_limit=generator.choice([17, 22]) * BLOCK_BYTES // 2)]
        )
        batches, num_looks = [], []
        for remembers in (True, False):
            engine = hollow(make_engine(path, **ARGUMENTS, **arguments))
            if not arguments:
                shrink_gpu_pool(engine, 14)
            looks, find = [], engine.kv_cache.prefixes.find
            engine.kv_cache.prefixes.find = lambda *given, looks=looks, find=find: looks.append(1) or find(*given)
            found = record_batches(engine)
            run(engine, prompts, params, lambda engine, step, on=remembers: on or engine.admission.forget())
            batches.append(found)
            num_looks.append(len(looks))
            assert_pools_as_before(engine)
        num_remembered += num_looks[1] - num_looks[0]
        assert batches[0] == batches[1], f"seed {seed}"
    assert num_remembered > 15


def test_who_gave_way_comes_back_in_offload_mode_only_onto_blocks_that_nobody_was_promised(path):
    """Two that fill ten host blocks each, of sixteen: one runs, and is all that the GPU and then the host can hold."""
    engine = hollow(make_engine(path, **ARGUMENTS, enable_cpu_offload="auto", **pools(num_gpu=8, num_host=16)))
    for name, prompt in zip("AB", random_prompts(2, 40, 40), strict=True):
        engine.add_request(name, prompt, greedy(128))
    came_back, bring_back = [], engine.mover.bring_back
    engine.mover.bring_back = lambda sequence: came_back.append((engine.mode, sequence)) or bring_back(sequence)
    while engine.has_work:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # offload mode cannot be entered while both run
            engine.step()
        assert engine.kv_cache.num_unpromised_host >= 0, "promised twice"
    assert [mode for mode, _ in came_back] == ["offload"] and engine.scheduler.num_preemptions == 1
    assert_pools_as_before(engine)


def test_offload_mode_is_not_entered_where_who_gave_way_would_not_come_back(path):
    """Ten host blocks, all of which it can fill; it keeps five full ones there, and one that is not full."""
    arguments = ARGUMENTS | dict(max_model_len=160, enable_cpu_offload="auto")
    engine = hollow(make_engine(path, **arguments, **pools(num_gpu=10, num_host=10)))
    for name, length, most in (("A", 9, 31), ("B", 8, 31), ("C", 3, 15), ("long", 85, 160)):
        engine.add_request(name, [5] * length, greedy(most - length))
    with pytest.warns(UserWarning, match="offload mode cannot be entered"):
        while not engine.mover.away:
            engine.step()
    (away,) = engine.mover.away
    assert (away.request_id, away.num_computed // 16, len(away.kept_blocks)) == ("long", 5, 6)
    with pytest.raises(ValueError, match="switch to offload refused"):
        engine.switch_mode("offload")
    finish(engine)
    assert away.finish_reason == "length"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", ["resident", "offload"])
def test_who_is_let_past_a_held_request_leaves_it_room_to_its_last_token(path, mode):
    """Of 20 host blocks one runs that fills 4; the held one grows from 4 to 12: a third one may have 4, and not 5."""
    arguments = dict(enable_cpu_offload="auto", **pools(num_gpu=8, num_host=20), max_num_batched_tokens=16)
    for num_blocks, is_admitted in ((4, True), (5, False)):
        engine = hollow(make_engine(path, **ARGUMENTS | arguments))
        prompts = random_prompts(3, 70, 70, seed=7)
        engine.add_request("runs", prompts[0][:60], greedy(4))
        while not engine.scheduler.running:
            engine.step()
        if mode == "offload":
            engine.switch_mode("offload")
        for name, length, end in (("held", 70, 16 * 12), ("third", 3, 16 * num_blocks)):
            engine.add_request(name, prompts[1][:length], greedy(end - length))
        held, third = engine.scheduler.waiting
        admission, running = engine.admission, engine.scheduler.running
        assert admission.admit(third, running, [held]) is (Verdict.ADMITTED if is_admitted else Verdict.REFUSED)


def pools(num_gpu: int, num_host: int) -> dict:
    """Arguments for so many blocks, the scratch block not counted."""
    return dict(num_gpu_blocks_override=num_gpu + 1, host_memory_limit=num_host * BLOCK_BYTES // 2)


@pytest.mark.parametrize("num_gpu", [3, 4])
def test_who_gave_way_at_a_block_edge_has_its_gpu_block_again_in_offload_mode(path, num_gpu):
    """However many small prompts stand behind it: each takes one block, and there are three or four."""
    arguments = ARGUMENTS | dict(max_num_batched_tokens=16 * num_gpu - 32, max_num_seqs=6, enable_cpu_offload=True)
    engine = hollow(make_engine(path, **arguments, **pools(num_gpu, num_host=16)))
    engine.switch_mode("resident")
    for name in "AB":
        engine.add_request(name, [5] * 15, greedy(20))
    step_until_running(engine, "AB")
    step_until_running(engine, "A")
    assert engine.scheduler.waiting[0].num_computed % 16 == 0
    engine.switch_mode("offload")
    for i in range(num_gpu):
        engine.add_request(str(i), [7] * 5, greedy(9))
    engine.step()
    assert engine.scheduler.running[1].request_id == "B"
    assert len(engine.scheduler.running) == num_gpu and engine.kv_cache.copies.num_obtainable == 0
    finish(engine)
    assert_pools_as_before(engine)


def test_a_switch_to_resident_mode_at_a_block_edge_takes_the_blocks_for_the_next_tokens_too(path):
    """A pool that just holds both, and a small prompt behind: it waits, and nobody gives way."""
    engine = hollow(make_engine(path, **ARGUMENTS, enable_cpu_offload=True, **pools(num_gpu=8, num_host=32)))
    for name, prompt in zip("AB", random_prompts(2, 32, 32), strict=True):
        engine.add_request(name, prompt, greedy(30))
    while [s.num_tokens for s in engine.scheduler.running] != [49, 49]:
        engine.step()
    assert [s.num_computed for s in engine.scheduler.running] == [48, 48]
    engine.switch_mode("resident")
    assert engine.kv_cache.tables.gpu_blocks.num_free == 0
    engine.add_request("C", [5] * 10, greedy(3))
    finish(engine)
    assert engine.scheduler.num_preemptions == 0
    assert_pools_as_before(engine)


def test_a_promise_to_one_whose_admission_was_interrupted_is_forgotten(path):
    engine = hollow(make_engine(path, enable_cpu_offload=True))
    engine.add_request("a", random_prompts(1, 40, 40)[0], greedy(20))
    copies, find = engine.kv_cache.copies, engine.kv_cache.copies.find

    def interrupted(*_):
        copies.find = find
        raise KeyboardInterrupt

    copies.find = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.switch_mode("resident")
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)
