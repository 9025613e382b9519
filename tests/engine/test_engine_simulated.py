"""The whole engine on the simulated runtime: any legal order of streams gives the same bits, and each wait counts."""

import functools

import pytest
from engines import (
    RULES,
    RULES_SEEN_BY_AN_ENGINE,
    SMALL,
    assert_pools_as_before,
    make_engine,
    random_prompts,
    read_at_once,
    run,
    some_params,
    switching,
)
from simulated import RaceError, SimulatedRuntime
from tiny_models import make_checkpoint

NUM_SEEDS = 20
# Tight: 12 GPU blocks and a ring of 2 or 3 slots, so blocks and slots come back while copies are in flight.
TIGHT = dict(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128, enable_prefix_caching=False)
PROMPTS = random_prompts(4, 20, 70, seed=3)
PARAMS = some_params(4, max_tokens=14)[::-1]  # the first ends first: its blocks are what is prefetched then
SCENARIOS = {
    "offload": (dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2048), {}),
    "offload, larger ring": (dict(enable_cpu_offload=True, num_ring_slots=3, ring_slot_bytes=2 * 2048), {}),
    "switched": (dict(num_ring_slots=2, ring_slot_bytes=2048), {3: "offload", 9: "resident", 12: "offload"}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def expected(path):
    return run(make_engine(path, **TIGHT), PROMPTS, PARAMS)


def play(path, seed, scenario, dropped_rule=None, is_ahead=True):
    arguments, modes = SCENARIOS[scenario]
    engine = make_engine(path, SimulatedRuntime(seed, dropped_rule), **(TIGHT | arguments))
    if not is_ahead:
        read_at_once(engine)
    if engine.mode == "offload":
        # Leaves the blocks that the step needs and hardly more.
        pool = engine.kv_cache.tables.gpu_blocks
        taken = pool.allocate(max(0, pool.num_free - 6))
    else:
        taken = []
    outcomes = run(engine, PROMPTS, PARAMS, switching(modes))
    engine.kv_cache.tables.gpu_blocks.release(taken)
    assert_pools_as_before(engine)
    return outcomes, engine.runner.runtime.rules_seen


@pytest.fixture(scope="module")
def in_order(path):
    """What a scenario gives where everything runs when it is enqueued."""
    return functools.cache(lambda scenario: play(path, None, scenario)[0])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_legal_order_gives_the_same_bits(path, expected, in_order, scenario, fuzz):
    wanted = in_order(scenario)
    if scenario == "switched":
        assert wanted == expected
    for seed in range(NUM_SEEDS if fuzz else 1):
        assert play(path, seed, scenario)[0] == wanted, f"seed {seed}"


def test_the_engine_enforces_the_rules_that_are_tested(path):
    assert sorted(play(path, 0, "offload")[1]) == RULES


# An order in which it shows, where hardly any of the first does.
NOTICED_BY = {"host_block.reuse_after_copies": 12}


@pytest.mark.parametrize("rule", RULES_SEEN_BY_AN_ENGINE)
def test_each_wait_removed_is_noticed(path, in_order, rule):
    """Blocks come back while the copies of the newest step are in flight where the host has read that step."""
    wanted = in_order("offload")
    for seed in [NOTICED_BY.get(rule, 0), *range(100)]:
        try:
            if play(path, seed, "offload", dropped_rule=rule, is_ahead=seed % 2 > 0)[0] != wanted:
                return
        except (RaceError, AssertionError, IndexError, ValueError, OverflowError):
            return
    pytest.fail(f"100 seeds ran without {rule!r} and nothing went wrong")


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    "arguments", [{}, dict(enable_cpu_offload=True, resident_kv_limit=0)], ids=["resident", "offload"]
)
def test_an_engine_that_is_closed_in_the_middle_leaves_idle_streams_and_uses_them_no_more(path, arguments, seed):
    """The next engine takes them over: see `offload.runtime.cuda`."""
    engine = make_engine(path, SimulatedRuntime(seed), **arguments)
    for number, pair in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), *pair)
    for _ in range(6):
        engine.step()
    runtime, compute = engine.runner.runtime, engine.runner.compute
    engine.close()
    with pytest.raises(RaceError, match="work on 'compute', which another runtime may have by now"):
        compute.run(lambda: None)
    runtime.close()
