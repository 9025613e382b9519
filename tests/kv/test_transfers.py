"""Blocks on their way between the tiers: order, groups, and who waits for whom, on streams in any order."""

from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, outcome, random_prompts, run
from references import check_references
from refusing_driver import refuse_pinning
from request_helpers import shrink_gpu_pool
from simulated import RaceError, SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.kv import transfers
from nanoinfer.requests.sequence import SequenceState

RULES = (
    "moved_blocks.reuse_after_store",
    "moved_blocks.read_after_load",
    "load.fill_after_compute",
)  # and "load.fill_after_store", see tests/offload/test_offload_streams.py: here the store has always run by then
SEEDS = range(12)


@pytest.fixture(scope="module")
def path(path_of):
    return path_of("qwen3", **SMALL)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


PROMPTS, PARAMS = random_prompts(5, 30, 60, seed=5), [greedy(length) for length in (40, 33, 47, 25, 38)]


@pytest.fixture(scope="module")
def wanted(path):
    return run(make_engine(path), PROMPTS, PARAMS)


def crowded(path, runtime=None, **arguments):
    """An engine in which some give way again and again, and come back while others leave."""
    return make_engine(path, runtime, num_gpu_blocks_override=12, max_num_seqs=4, max_model_len=112, **arguments)


@pytest.fixture
def small_groups(monkeypatch):
    """Of one block, one in each step: a sequence gives way and comes back in many steps."""
    monkeypatch.setattr(transfers, "MAX_GROUP", 1)
    monkeypatch.setattr(transfers, "MAX_COPIES", SMALL["num_layers"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled("0", "7")
def test_sequences_give_way_and_come_back_block_by_block(path, wanted, seed, small_groups):
    engine = crowded(path, SimulatedRuntime(seed))
    assert run(engine, PROMPTS, PARAMS) == wanted
    assert engine.scheduler.num_preemptions > 1
    assert_pools_as_before(engine)


@pytest.mark.parametrize("rule", RULES)
def test_every_wait_of_a_move_is_needed(path, wanted, rule, small_groups):
    for seed in SEEDS:
        try:
            if run(crowded(path, SimulatedRuntime(seed, dropped_rule=rule)), PROMPTS, PARAMS) != wanted:
                return
        except RaceError:
            return
    pytest.fail(f"nothing went wrong without {rule}")


def test_others_run_on_while_blocks_leave_and_arrive(path, wanted, small_groups):
    """Whoever has a block gets a token in each step, and whoever comes back is in none before its KV is there."""
    engine, num_alone = crowded(path, SimulatedRuntime(4)), 0
    schedule = engine.scheduler.schedule

    def seen():
        nonlocal num_alone
        batch = schedule()
        if batch is not None:
            assert all(engine.mover.has_arrived(sequence) for sequence in batch.sequences)
            num_alone += not engine.mover.transfers.is_idle
        return batch

    engine.scheduler.schedule = seen
    assert run(engine, PROMPTS, PARAMS) == wanted
    assert num_alone > 10, "steps while something was on its way"


@pytest.mark.parametrize("state, mode", [("WAITING", "resident"), ("MOVING", "resident"), ("MOVING", "offload")])
def test_who_ends_while_its_kv_is_on_its_way_leaves_nothing_behind(path, wanted, small_groups, state, mode):
    engine, aborted = crowded(path, SimulatedRuntime(1)), []
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    while engine.has_work:
        engine.step()
        if mode != engine.mode and engine.mover.away:
            engine.switch_mode(mode)
        for request in requests if engine.mode == mode and not engine.mover.transfers.is_idle else ():
            (sequence,) = request.sequences
            was_moved = sequence.kept_blocks is not None or state == "MOVING"
            if sequence.state is SequenceState[state] and was_moved and not aborted:
                aborted.append(request)
                engine.abort(request.request_id)
        check_references(engine)
    assert aborted
    assert all(one in aborted or outcome(one) == other for one, other in zip(requests, wanted, strict=True))
    assert_pools_as_before(engine)


def test_all_rows_at_a_blocks_edge_with_no_room_on_the_host_end(path):
    """Those that find no room fail alone, by name, and the others go on."""
    engine = make_engine(path, SimulatedRuntime(2), host_memory_limit=BLOCK_BYTES - 1, enable_prefix_caching=False)
    give_back = shrink_gpu_pool(engine, 8)
    prompts = random_prompts(4, 30, 30, seed=8)
    wanted = run(make_engine(path), prompts, [greedy(30)] * 4)
    requests = [engine.add_request(str(i), prompt, greedy(30)) for i, prompt in enumerate(prompts)]
    for _ in range(400):
        if engine.has_work:
            engine.step()
    assert not engine.has_work
    for request, (other,) in zip(requests, wanted, strict=True):
        if request.sequences[0].finish_reason == "error":
            assert "host_memory_limit" in request.error
        else:
            assert request.sequences[0].output_token_ids == other[0]
    assert {request.sequences[0].finish_reason for request in requests} == {"length", "error"}
    give_back()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("num_pinned, limit", [(99, None), (0, None)])
def test_no_row_stands_still_while_memory_is_pinned_for_one_that_gives_way(
    path, wanted, num_pinned, limit, monkeypatch
):
    """Nobody waits for the driver. When all pause, the youngest takes pageable memory, as where pinning is refused."""
    monkeypatch.setattr(transfers, "PAGEABLE_BYTES", 1)  # a layer of a block in a step
    driver = refuse_pinning(monkeypatch, num_pinned, is_lazy=num_pinned > 0)
    engine, waits = crowded(path, SimulatedRuntime(3), host_memory_limit=limit, pin_host_memory="require"), []
    want, borrow, borrowed = driver.want, engine.runner.offload.host.borrow, []
    monkeypatch.setattr(driver, "want", lambda count: (waits.append(count > len(driver.registered)), want(count)))
    monkeypatch.setattr(engine.runner.offload.host, "borrow", lambda count: borrowed.append(count) or borrow(count))
    with closing(engine):
        assert run(engine, PROMPTS, PARAMS) == wanted
        assert not any(waits) or not num_pinned
        assert borrowed and engine.scheduler.num_preemptions
        assert_pools_as_before(engine)


def test_memory_is_pinned_only_when_somebody_wants_it(path, wanted, monkeypatch):
    driver = refuse_pinning(monkeypatch, 99)
    engine = crowded(path, host_memory_limit=40 * BLOCK_BYTES)
    with closing(engine):
        run(engine, PROMPTS[:1], PARAMS[:1])
        assert engine.runner.offload.host.arena is None and not driver.registered
        assert run(engine, PROMPTS, PARAMS) == wanted
        assert 0 < len(driver.registered) < engine.runner.offload.host.arena.num_segments


def test_an_interrupt_while_blocks_are_let_go_of_gives_none_back_twice(path, wanted, small_groups, monkeypatch):
    engine = crowded(path, SimulatedRuntime(5))
    lifetimes, let_go, interrupted = engine.kv_cache.tables.lifetimes, engine.mover.transfers.let_go, []

    def interrupted_once():
        with monkeypatch.context() as patch:
            if not interrupted:
                patch.setattr(lifetimes, "release_host", interrupt)  # the GPU's are given back by then
            let_go()

    def interrupt(blocks):
        interrupted.append(blocks)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.mover.transfers, "let_go", interrupted_once)
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
    assert interrupted and [outcome(request) for request in requests] == wanted
    assert_pools_as_before(engine)


def test_memory_is_asked_for_before_all_rows_pause(path, wanted, monkeypatch):
    """Once not every row finds another block the youngest's memory is pinned: so it need not be when it gives way."""
    driver, engine, events = refuse_pinning(monkeypatch, 99), crowded(path, SimulatedRuntime(1)), []
    want, give_way, step = driver.want, engine.mover.give_way, engine.step
    monkeypatch.setattr(driver, "want", lambda count: (events.append("asked"), want(count)))
    monkeypatch.setattr(engine.mover, "give_way", lambda sequence: (events.append("gives way"), give_way(sequence)))
    monkeypatch.setattr(engine, "step", lambda: (events.append("step"), step())[1])
    with closing(engine):
        assert run(engine, PROMPTS, PARAMS) == wanted
    before = events[: events.index("gives way")]
    assert "step" in before[before.index("asked") :]


@pytest.mark.parametrize("moved", [range(8), (4, 0, 5, 1)])
def test_a_step_waits_for_a_part_of_a_block_that_the_host_copies_itself(moved):
    """To pageable memory (blocks 4 to 7) go two of a block's four layers a step, and none beside others, which it would
    wait for."""
    tables, taken, in_steps = _no_tables(borrowed=range(4, 8)), [], []
    tables.lifetimes.begin = lambda: len(taken) + 1
    tables.lifetimes.acknowledgements.has_run = lambda kind, operation, rule: operation <= run_so_far
    layout = SimpleNamespace(block_bytes=2 * transfers.PAGEABLE_BYTES, num_places=4)

    def store(pairs, operation, of_states, places):
        taken.append(([block for _, block in pairs], places))

    moves, run_so_far = transfers.Transfers(tables, SimpleNamespace(layout=layout, store=store)), 0
    moves.store([(block, block) for block in moved])
    while moves.groups:
        moves.end_step()
        begin = len(taken)
        moves.advance()
        in_steps.append(taken[begin:])
        run_so_far = len(taken)
    halves = lambda block: [[([block], (0, 2))], [([block], (2, 4))]]  # noqa: E731
    whole = lambda *blocks: [[([*blocks], (0, 4))]]  # noqa: E731
    wanted = {8: [*whole(0, 1, 2, 3), *halves(4), *halves(5), *halves(6), *halves(7)]}
    assert [one for one in in_steps if one] == wanted.get(len(moved), [*halves(4), *whole(0), *halves(5), *whole(1)])


def _no_tables(borrowed=()) -> SimpleNamespace:
    return SimpleNamespace(
        gpu_blocks=SimpleNamespace(hold=lambda block: None),
        lifetimes=SimpleNamespace(
            host_blocks=SimpleNamespace(hold=lambda block: None, borrowed=set(borrowed)),
            acknowledgements=SimpleNamespace(), release_gpu=lambda blocks: None, release_host=lambda blocks: None,
            reclaim=lambda: None,
        ),
    )  # fmt: skip


def test_as_much_is_on_its_way_as_runs_within_a_step():
    """Of 40 blocks of 64 MiB, over a link that moves so many in a step: others' tokens wait for no more than that."""
    most, taken, tables = [], [], _no_tables()
    tables.lifetimes.begin = lambda: len(taken) + 1
    tables.lifetimes.acknowledgements.has_run = lambda kind, operation, rule: operation <= run_so_far
    layout = SimpleNamespace(block_bytes=transfers.GROUP_BYTES, num_places=36)
    executor = SimpleNamespace(layout=layout, store=lambda pairs, operation, *_: taken.append(operation))
    for blocks_in_a_step in (1, 3):
        moves, run_so_far = transfers.Transfers(tables, executor), len(taken)
        moves.store([(block, block) for block in range(0, 80, 2)])
        while moves.groups:
            moves.end_step()
            moves.advance()
            most.append(len(taken) - run_so_far)
            run_so_far = min(run_so_far + blocks_in_a_step, len(taken))
        assert max(most[4:]) <= 2 * blocks_in_a_step and sum(count >= blocks_in_a_step for count in most) >= 6
        most.clear()
