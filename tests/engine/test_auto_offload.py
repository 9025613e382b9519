"""`enable_cpu_offload="auto"`: resident while everything fits, offload mode instead of preemption when it does not."""

import json
import re

import pytest
from checksum import BLOCK_BYTES, LAYER_BLOCK_BYTES
from checksum.answers import check
from checksum.oracle import Oracle
from engines import (
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
)
from request_helpers import record_batches
from simulated import SimulatedRuntime

from nanoinfer import LLMEngine, SamplingParams

pytestmark = pytest.mark.usefixtures("checksums")
ARGUMENTS = dict(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=64,
    ring_slot_bytes=2 * LAYER_BLOCK_BYTES,
    num_ring_slots=2,
    resident_kv_limit=None,
)


@pytest.fixture(scope="module", params=["one kind", "two kinds"])
def path(request, path_of):
    """Layers that all see everything, or one that does and one with a window."""
    return path_of("qwen3", **SMALL, sliding_window=6 if request.param == "two kinds" else None)


@pytest.fixture(scope="module")
def oracle(path):
    return Oracle(path)


def check_all(oracle: Oracle, prompts: list[list[int]], params: list[SamplingParams], outcomes: list) -> None:
    for prompt, param, found in zip(prompts, params, outcomes, strict=True):
        check(oracle, prompt, param, found)
        assert all(reason == "length" for _, _, reason in found)


def has_window(path) -> bool:
    return json.loads((path / "config.json").read_text())["use_sliding_window"]


def auto_engine(path, num_gpu_blocks: int, seed: int | None = None, rows: int = 4, **arguments) -> LLMEngine:
    """An engine in resident mode whose GPU pool has `num_gpu_blocks`, one of which is scratch.

    With a window there are three more for each row: what it holds in the group that has it.
    """
    num_gpu_blocks += (3 * rows + (rows > 1)) * has_window(path)
    arguments = dict(enable_cpu_offload="auto", num_gpu_blocks_override=num_gpu_blocks) | arguments
    engine = make_engine(path, SimulatedRuntime(seed), **(ARGUMENTS | arguments))
    assert engine.mode == "resident"
    assert engine.kv_cache.tables.gpu_blocks.num_blocks < num_gpu_blocks, "the pool is not as small as it should be"
    return engine


def greedy(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0) | arguments))


def count_captures(engine: LLMEngine) -> list:
    captured, capture = [], engine.runner.runtime.capture
    engine.runner.runtime.capture = lambda *args: captured.append(1) or capture(*args)
    return captured


# 4 prompts of 2 to 3 blocks that grow to 7 or 8 each: more than twice what the pool of 13 holds.
GROWING = random_prompts(4, 9, 11, seed=1)
GROWING_PARAMS = [greedy(19, logprobs=2), greedy(19), greedy(18, temperature=0.9, seed=5), greedy(21)]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.sampled("two kinds-1")  # others play GROWING with one kind
def test_growth_to_more_than_twice_the_pool_preempts_nobody_and_changes_no_bit(path, oracle, seed):
    wide = make_engine(path, **ARGUMENTS)
    batches = record_batches(wide)
    run(wide, GROWING, GROWING_PARAMS)
    engine = auto_engine(path, 14, seed)
    assert engine.modes.may_spill
    captured, modes = count_captures(engine), []
    ours = record_batches(engine)
    outcomes = run(engine, GROWING, GROWING_PARAMS, lambda engine, step: modes.append(engine.mode))
    check_all(oracle, GROWING, GROWING_PARAMS, outcomes)
    assert ours == batches, "another order of steps than with a pool that fits all"
    assert modes[0] == "resident" and modes[7] == "resident" and modes == sorted(modes, reverse=True)
    stats = engine.stats()
    assert stats["mode"] == "offload" and stats["num_preemptions"] == 0 and stats["streamed_bytes"] > 0
    assert not captured, "the graphs of offload mode exist before it is entered"
    assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_blocks_come_back_when_the_others_have_ended(path):
    params = [greedy(23), *[greedy(9)] * 3]
    engine = auto_engine(path, 13)
    streamed = []
    run(engine, GROWING, params, lambda engine, step: streamed.append(_streams(engine)))
    began = next(step for step, (blocks, _) in enumerate(streamed) if blocks)
    ended = max(step for step, (blocks, _) in enumerate(streamed) if blocks) + 2
    assert began < ended < len(streamed) - 7
    assert streamed[ended][1] > 0 and {total for _, total in streamed[ended:]} == {streamed[ended][1]}
    assert engine.mode == "offload"
    assert_pools_as_before(engine)


def _streams(engine: LLMEngine) -> tuple[int, int]:
    stats = engine.stats()
    return stats["kv_blocks_streamed"], stats["streamed_bytes"]


@pytest.mark.sampled("two kinds")
def test_a_prompt_that_the_gpu_pool_cannot_hold_runs_alone_and_behind_others(path, oracle):
    prompts = [*random_prompts(2, 5, 7, seed=2), random_prompts(1, 50, 50, seed=3)[0], *random_prompts(1, 3, 3)]
    params = [greedy(3), greedy(5), greedy(3), greedy(2)]
    for chosen in ([2], [2, 3], [0, 1, 2, 3]):
        engine = auto_engine(path, 9, rows=1)
        some = [prompts[i] for i in chosen], [params[i] for i in chosen]
        check_all(oracle, *some, run(engine, *some))
        assert engine.mode == "offload" and engine.scheduler.num_preemptions == 0
        assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_where_the_host_is_too_small_requests_are_preempted_and_lose_nothing(path, oracle):
    """17 host blocks: less than two of the four can grow to, so there is no offload mode while two run."""
    engine = auto_engine(path, 15, host_memory_limit=17 * BLOCK_BYTES)
    with pytest.warns(UserWarning, match="so requests take turns: .* the host has 0.02 MiB free"):
        check_all(oracle, GROWING, GROWING_PARAMS, run(engine, GROWING, GROWING_PARAMS))
    assert engine.scheduler.num_preemptions > 0
    assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_a_request_saved_by_a_preemption_comes_back_in_offload_mode(path, oracle):
    """Two of three are preempted for lack of host memory, and lie there; offload mode can begin once fewer run."""
    prompts, params = GROWING[:3], [greedy(18), greedy(30, temperature=1.0, seed=1), greedy(18)]
    limit = 20 * LAYER_BLOCK_BYTES if has_window(path) else 20 * BLOCK_BYTES
    engine = auto_engine(path, 12, rows=1, host_memory_limit=limit)
    saved_in = []
    bring_back = engine.mover.bring_back
    engine.mover.bring_back = lambda sequence: saved_in.append(engine.mode) or bring_back(sequence)
    with pytest.warns(UserWarning, match="so requests take turns: .* the host has 0.0\\d MiB free"):
        check_all(oracle, prompts, params, run(engine, prompts, params))
    assert engine.scheduler.num_preemptions > 0 and saved_in
    if not has_window(path):  # with a window both find room in resident mode once the first has ended
        assert "offload" in saved_in and engine.mode == "offload"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.sampled("one kind-2")
def test_rows_that_share_a_prefix_enter_offload_mode_and_grow(path, oracle, seed):
    """Completions of one prompt and requests with a common beginning share GPU blocks until then."""
    prefix = random_prompts(1, 16, 16, seed=7)[0]
    prompts = [prefix + tail for tail in random_prompts(3, 1, 3, seed=8)]
    params = [greedy(13, temperature=1.0, seed=1, n=2), greedy(14), greedy(11)]

    engine = auto_engine(path, 14, seed)
    run(engine, [[*prefix, 5]], [greedy(1)])
    check_all(oracle, prompts, params, run(engine, prompts, params))
    assert engine.mode == "offload" and engine.scheduler.num_preemptions == 0
    assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_blocks_that_rows_share_are_counted_once_when_offload_mode_is_entered(path):
    """Their store is still running then, so nothing that waits for it may decide who keeps them."""
    prefix = random_prompts(1, 24, 24, seed=7)[0]
    engine = make_engine(path, SimulatedRuntime(0), **ARGUMENTS)
    run(engine, [[*prefix, 5]], [greedy(1)])
    requests = [engine.add_request(str(i), [*prefix, 7 + i], greedy(5)) for i in range(4)]
    while any(request.first_token is None for request in requests):
        engine.step()
    kv_cache, pool = engine.kv_cache, engine.kv_cache.tables.gpu_blocks
    num_free, tables = pool.num_free, kv_cache.tables
    shared = {
        int(block)
        for one in engine.scheduler.running
        for number, full in enumerate(tables.full(one))
        for block in tables.gpu[number, one.row, full.start : full.stop]
    }
    assert len(shared) >= 6
    engine.switch_mode("offload")
    assert engine.kv_cache.tables.lifetimes.num_deferred_gpu == 0 and pool.num_free == num_free
    assert kv_cache.copies.num_resident == len(shared), "each counts once"
    assert kv_cache.copies.num_obtainable == num_free + len(shared)
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_a_block_below_shared_ones_is_not_reused_while_it_is_stored(path, oracle, fuzz):
    """D computes its first block itself, beside A, and shares the next two with E: at the switch it leaves all
    three."""
    first, second, third, other = random_prompts(4, 8, 8, seed=11)
    prompts = {
        "A": [*first[:4], *other[:5]],
        "D": [*first, *second, 5],
        "E": [*first, *second, *third[:9]],
        "F": third,
    }
    for seed in range(12 if fuzz else 5):
        arguments = ARGUMENTS | dict(max_num_batched_tokens=32, enable_cpu_offload="auto", resident_kv_limit=0)
        engine = make_engine(path, SimulatedRuntime(seed), **arguments)
        requests = {name: engine.add_request(name, prompts[name], greedy(3)) for name in "AD"}
        while requests["D"].first_token is None:
            engine.step()
        requests["E"] = engine.add_request("E", prompts["E"], greedy(3))
        while requests["E"].first_token is None:
            engine.step()  # the next step is F's: no row that runs waits for the host's copies before it
        kv_cache, (d,) = engine.kv_cache, requests["D"].sequences
        references = [
            kv_cache.tables.gpu_blocks.references(block) for block in kv_cache.tables.gpu[0, d.row, :3].tolist()
        ]
        assert references == [1, 2, 2], "D's first block is its own, the next two are E's as well"
        engine.switch_mode("offload")
        requests["F"] = engine.add_request("F", prompts["F"], greedy(3))
        while engine.has_work:
            engine.step()
        for name, request in requests.items():
            check(oracle, prompts[name], request.params, outcome(request))
        assert_pools_as_before(engine)


def test_a_released_host_block_that_is_taken_up_again_is_not_promised_to_others(path):
    engine = make_engine(path, SimulatedRuntime(0), **ARGUMENTS, enable_cpu_offload=True)
    prompt = random_prompts(1, 16, 16, seed=7)[0]
    run(engine, [[*prompt, 5]], [greedy(1)])
    lifetimes = engine.kv_cache.tables.lifetimes
    num_groups = len(engine.kv_cache.tables.groups)
    assert lifetimes.num_deferred_host == 4 * num_groups, "the copies that read them have run"
    first = engine.add_request("0", [*prompt, 6], greedy(3))
    engine.step()
    assert lifetimes.num_deferred_host < num_groups, "they are held again, but for what lies behind a window"
    second = engine.add_request("1", [*prompt, 7], greedy(3))
    engine.step()
    while not (first.is_finished or second.is_finished):
        engine.step()
    assert lifetimes.num_deferred_host < num_groups or second.is_finished, "one row still holds the blocks"
    while engine.has_work:
        engine.step()
    free, deferred = lifetimes.host_blocks.num_free, lifetimes.num_deferred_host
    lifetimes.wait_for_host(free + deferred)
    assert lifetimes.host_blocks.num_free == free + deferred
    assert_pools_as_before(engine)


@pytest.mark.sampled("two kinds")
def test_nothing_is_prepared_where_everything_fits(path, oracle):
    engine = make_engine(path, **ARGUMENTS, enable_cpu_offload="auto")
    captured = count_captures(engine)
    assert not engine.modes.may_spill and not engine.runner.offload.host.num_bytes
    outcomes = run(engine, GROWING, GROWING_PARAMS)
    check_all(oracle, GROWING, GROWING_PARAMS, outcomes)
    assert engine.mode == "resident" and not captured
    assert not engine.runner.offload.host.num_bytes
    engine.switch_mode("offload")
    assert run(engine, GROWING[:2], GROWING_PARAMS[:2]) == outcomes[:2], "it can be asked for all the same"
    assert_pools_as_before(engine)


@pytest.mark.sampled("one kind")
def test_it_can_be_switched_back_and_enters_offload_mode_again(path, oracle):
    engine = auto_engine(path, 14)
    captured = count_captures(engine)
    for _ in range(2):
        check_all(oracle, GROWING, GROWING_PARAMS, run(engine, GROWING, GROWING_PARAMS))
        assert engine.mode == "offload"
        engine.switch_mode("resident")
        assert_pools_as_before(engine)
    assert not captured and engine.scheduler.num_preemptions == 0


@pytest.mark.sampled("two kinds")
def test_an_abort_in_the_step_that_enters_offload_mode_and_after_it(path, oracle):
    for steps_later in (0, 3):
        engine = auto_engine(path, 14, seed=steps_later)
        requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(GROWING, GROWING_PARAMS))]
        while engine.mode == "resident":
            engine.step()
        for _ in range(steps_later):
            engine.step()
        assert engine.abort("1") and engine.abort("3")
        while engine.has_work:
            engine.step()
        for i, request in enumerate(requests):
            check(oracle, GROWING[i], GROWING_PARAMS[i], outcome(request))
            assert outcome(request)[0][2] == ("abort" if i in (1, 3) else "length")
        assert_pools_as_before(engine)


def test_a_request_may_grow_to_what_the_host_holds_and_no_further(path):
    engine = auto_engine(path, 9, rows=1, host_memory_limit=20 * BLOCK_BYTES, max_model_len=None)
    limit = engine.plan.max_model_len
    assert limit >= 20 * 4 > engine.kv_cache.tables.gpu_blocks.num_blocks * 4
    before = engine.stats()
    with pytest.raises(ValueError, match=f"the prompt is too long: {limit} tokens, and max_model_len={limit}"):
        engine.add_request("too long", [5] * limit, greedy(3))
    assert engine.stats() == before and not engine.has_work
    (((tokens, _, reason),),) = run(engine, [[5] * (20 * 4 - 10)], [greedy(10)])
    assert len(tokens) == 10 and reason == "length" and engine.mode == "offload"
    assert_pools_as_before(engine)


def test_a_value_that_is_no_mode_is_refused(path):
    with pytest.raises(ValueError, match=re.escape("enable_cpu_offload='always' must be True, False or \"auto\"")):
        make_engine(path, enable_cpu_offload="always")
