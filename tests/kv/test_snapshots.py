"""States of beginnings are kept on the host, found with their blocks, and change no bit; nobody waits where a slot is
spare, and else their sequence alone."""

import random

import pytest
import state_family
from engines import BLOCK_BYTES, LAYER_BLOCK_BYTES, assert_pools_as_before, make_engine, outcome, random_prompts, run
from guessing import Guessing
from references import check_references
from request_helpers import play_at_random
from simulated import RaceError, SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.kv import snapshots
from nanoinfer.kv.snapshots import StateKey

UNIT = 64
STATE_BYTES = 5 * BLOCK_BYTES // 2  # three blocks, of which the last is not full
OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
COMMON = dict(max_num_seqs=3, capture_num_tokens=[8, 24], max_model_len=352, max_num_batched_tokens=200)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with state_family.registered(STATE_BYTES):
        yield state_family.write_model(tmp_path_factory.mktemp("model"))


def engine_of(path, runtime=None, **arguments):
    return make_engine(path, runtime, load_format="dummy", **COMMON | arguments)


@pytest.fixture(scope="module")
def alone(path):
    """What a request gets in an engine that finds nothing."""
    known, engine = {}, engine_of(path, enable_prefix_caching=False, max_num_seqs=1)

    def of(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            (known[key],) = run(engine, [prompt], [params])
        return known[key]

    return of


def add(engine, prompt, params=GREEDY):
    """Run one request to its end; return what it got, and how many of its tokens were found."""
    request = engine.add_request(str(engine.intake.num_sequences), prompt, params)
    while not request.is_finished:
        engine.step()
    return outcome(request), request.sequences[0].num_cached


def kept(engine):
    """The digests of the snapshots of which something is left."""
    return {
        key.digest for key in engine.kv_cache.tables.lifetimes.host_blocks.key_of.values() if isinstance(key, StateKey)
    }


def watched(engine):
    """The chunks that an engine computes from now on."""
    chunks, execute = [], engine.runner.execute
    engine.runner.execute = lambda plan, *more: (chunks.extend(plan.chunks), execute(plan, *more))[1]
    return chunks


MODES = pytest.mark.parametrize("arguments", [{}, OFFLOAD], ids=["resident", "offload"])


@MODES
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_second_turn_takes_one_step_where_a_slot_is_spare_and_the_third_goes_on_behind_it(
    path, alone, arguments, num_slots
):
    engine = engine_of(path, max_num_batched_tokens=352, state_slots=num_slots, **arguments)
    chunks, history, said = watched(engine), [], random_prompts(3, 300, 300, seed=6)
    for turn, (length, num_found) in enumerate([(UNIT + 6, 0), (4 * UNIT + 5, UNIT), (5 * UNIT + 5, 4 * UNIT)]):
        prompt, before = (history + said[turn])[:length], len(chunks)
        assert (last := add(engine, prompt)) == (alone(prompt, GREEDY), num_found)
        of_turn, end = [(one.begin, one.end) for one in chunks[before:]], length // UNIT * UNIT
        assert of_turn == ([(num_found, length)] if num_slots > 1 else [(num_found, end), (end, length)])
        history = prompt + last[0][0][0]
    assert [end for chunk in chunks for end, _ in chunk.passed] == [UNIT, 4 * UNIT, 5 * UNIT] * (num_slots > 1)
    assert_pools_as_before(engine)


@MODES
def test_turns_of_a_chat_go_on_from_the_end_of_the_turn_before(path, alone, arguments):
    engine, history, last = engine_of(path, **arguments), [], 0
    for turn, said in enumerate(random_prompts(6, 20, 75, seed=1)):
        history = history + said
        found, num_cached = add(engine, history)
        assert found == alone(history, GREEDY), f"turn {turn}"
        assert num_cached == last // UNIT * UNIT
        last, history = len(history), history + found[0][0]
    assert last > 4 * UNIT
    assert_pools_as_before(engine)


@pytest.mark.parametrize("num_spare", [0, 2])
def test_a_turn_that_fits_but_not_beside_the_state_that_was_found_is_computed_anew(path, alone, num_spare):
    """Nobody runs who would make room, and the request would fail although the pool holds it."""
    num_blocks = 22 + num_spare  # 352 tokens; the state behind a beginning takes three beside
    engine, history = engine_of(path, host_memory_limit=num_blocks * BLOCK_BYTES, **OFFLOAD), []
    found_by_turn = 0, UNIT, 2 * UNIT, 3 * UNIT * (num_spare > 0)
    for said, num_found in zip(random_prompts(4, 76, 79, seed=1), found_by_turn, strict=True):
        history = history + said
        found, num_cached = add(engine, history)
        assert found == alone(history, GREEDY) and num_cached == num_found
        history = history + found[0][0]
    assert len(history) > 330
    assert_pools_as_before(engine)


@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_5", "qwen3_next"])
@MODES
@pytest.mark.sampled("resident-lfm2_moe", "offload-lfm2_moe", "resident-qwen3_5", "offload-qwen3_next")
def test_ten_turns_of_a_family_are_those_of_cold_chats(path_of, arguments, family):
    path = path_of(family)
    engine, cold = engine_of(path, **arguments), engine_of(path, enable_prefix_caching=False)
    history, num_cached = [], []
    for said in random_prompts(10, 5, 40, seed=2):
        history = history + said
        found, cached = add(engine, history)
        assert (found, 0) == add(cold, history)
        history, num_cached = history + found[0][0], [*num_cached, cached]
    assert num_cached[-1] >= 3 * UNIT
    assert_pools_as_before(engine)


@pytest.mark.parametrize("length", [UNIT - 1, UNIT, UNIT + 1, 2 * UNIT - 1, 2 * UNIT, 2 * UNIT + 1, 3 * UNIT + 17])
def test_the_same_prompt_computes_at_least_one_token(path, alone, length):
    engine, (prompt,) = engine_of(path), random_prompts(1, length, length, seed=length)
    for num_found in (0, (length - 1) // UNIT * UNIT):
        assert add(engine, prompt) == (alone(prompt, GREEDY), num_found)


def test_where_prompts_part_a_snapshot_is_kept_by_the_second_and_found_by_the_third(path, alone):
    engine, (common,), ends = engine_of(path), random_prompts(1, 150, 150), random_prompts(3, 100, 100, seed=1)
    found = [add(engine, common + end) for end in ends]
    assert found == [(alone(common + end, GREEDY), num) for end, num in zip(ends, (0, 0, 2 * UNIT), strict=True)]


def test_ends_of_messages_and_one_in_so_many_tokens_are_kept(path, monkeypatch):
    monkeypatch.setattr(snapshots, "SPACING", 128)
    engine = engine_of(path, max_model_len=1024, max_num_batched_tokens=1024)
    cache, end_token = engine.kv_cache.prefixes.snapshots, 7
    cache.end_token_ids = [end_token]
    (prompt,) = random_prompts(1, 900, 900)
    prompt = [one + (one == end_token) for one in prompt]
    for place in (70, 330, 600, 630):  # the last three count, two of which lie in one unit
        prompt[place] = end_token
    request = engine.add_request("0", prompt, GREEDY)
    while engine.has_work:
        engine.step()
    spaced, of_messages, of_prompt = range(128, 900, 128), (320, 576), (896,)
    ends = {*spaced, *of_messages, *of_prompt}
    digests = request.sequences[0].digests  # of each block
    assert kept(engine) == {digests[end // engine.kv_cache.tables.block_size - 1] for end in ends}


@pytest.mark.parametrize("max_num_seqs", [3, 5])  # with and without a slot to spare
def test_completions_of_one_prompt_compute_it_once(path, alone, max_num_seqs):
    (prompt,), engine = (
        random_prompts(1, 150, 150),
        engine_of(path, max_num_seqs=max_num_seqs, state_slots=max_num_seqs),
    )
    chunks = watched(engine)
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=9, logprobs=1, ignore_eos=True)
    found, _ = add(engine, prompt, params)
    each = [SamplingParams(temperature=1, seed=3 + i, max_tokens=9, logprobs=1, ignore_eos=True) for i in range(3)]
    assert found == [alone(prompt, one)[0] for one in each]
    assert sum(chunk.end - chunk.begin for chunk in chunks) == 150 + 2 * (150 - 2 * UNIT)
    assert any(chunk.passed for chunk in chunks) == (max_num_seqs > 3)


def test_snapshots_take_no_more_than_their_share_and_those_found_last_stay(path, alone):
    engine = engine_of(path, **OFFLOAD, host_memory_limit=80 * BLOCK_BYTES, resident_kv_limit=None)
    prompts = random_prompts(9, 2 * UNIT + 3, 3 * UNIT, seed=4)
    for prompt in prompts:
        add(engine, prompts[0])
        add(engine, prompt)
        assert len(kept(engine)) <= 80 // snapshots.SHARE // 3
    assert add(engine, prompts[0]) == (alone(prompts[0], GREEDY), 2 * UNIT)
    assert_pools_as_before(engine)


def test_memory_for_the_first_snapshot_is_asked_for_when_the_engine_starts(path):
    """Pinned later, it would not be there when the first prompt's is to be kept."""
    with_cache, without = engine_of(path), engine_of(path, enable_prefix_caching=False)
    assert with_cache.kv_cache.tables.lifetimes.host_blocks.num_free >= 3
    assert without.kv_cache.tables.lifetimes.host_blocks.num_blocks == 0


def test_without_host_memory_nothing_is_kept_and_nothing_fails(path, alone):
    engine, (prompt,) = engine_of(path, host_memory_limit=2 * BLOCK_BYTES), random_prompts(1, 200, 200)
    assert [add(engine, prompt) for _ in range(2)] == [(alone(prompt, GREEDY), 0)] * 2
    assert not kept(engine)


def test_others_go_on_while_a_snapshot_is_made(path, alone):
    """Its copy takes as long as it likes: only the sequence waits whose next step would change the state."""
    engine = engine_of(path, SimulatedRuntime(3), state_slots=2)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    (short,), (long,) = random_prompts(1, 10, 10), random_prompts(1, 250, 250, seed=1)
    first = engine.add_request("first", short, params)
    while not first.sequences[0].num_generated:
        engine.step()
    have_run, engine.executor.has_run = engine.executor.has_run, lambda *_: False  # no copy has run, as far as is known
    second = engine.add_request("second", long, GREEDY)
    for _ in range(20):
        engine.step()
    assert first.sequences[0].num_generated >= 18 and second.sequences[0].num_computed == UNIT * 3
    engine.executor.has_run = have_run
    while engine.has_work:
        engine.step()
    assert (outcome(first), outcome(second)) == (alone(short, params), alone(long, GREEDY))
    assert_pools_as_before(engine)


def test_a_slot_that_is_copied_is_nobody_elses_and_steps_end_where_none_is_spare(path, alone):
    engine, prompts = engine_of(path, SimulatedRuntime(3), max_num_seqs=2), random_prompts(2, 150, 150, seed=3)
    have_run, engine.executor.has_run = engine.executor.has_run, lambda *_: False  # no copy has run, as far as is known
    first = engine.add_request("first", prompts[0], GREEDY)
    while not first.is_finished:  # it waits for nothing
        engine.step()
    assert engine.kv_cache.slots.num_free == 1
    second = engine.add_request("second", prompts[1], GREEDY)
    for _ in range(20):
        engine.step()
        assert check_references(engine) == 0
    assert second.sequences[0].num_computed == 2 * UNIT and engine.stats()["state_slots_used"] == 1
    engine.executor.has_run = have_run
    while engine.has_work:
        engine.step()
    assert [outcome(first), outcome(second)] == [alone(prompt, GREEDY) for prompt in prompts]
    assert [add(engine, prompt) for prompt in prompts] == [(alone(prompt, GREEDY), 2 * UNIT) for prompt in prompts]
    assert_pools_as_before(engine)


def test_an_abort_leaves_the_slot_to_the_copy_and_the_snapshot_to_others(path, alone):
    engine = engine_of(path, SimulatedRuntime(5), max_num_seqs=1)
    (first,), (second,) = random_prompts(1, 150, 150), random_prompts(1, 40, 40, seed=1)
    request = engine.add_request("first", first, GREEDY)
    while not engine.mover.transfers.groups:
        engine.step()
    engine.abort(request.request_id)
    assert engine.kv_cache.slots.num_free == 0
    assert add(engine, second) == (alone(second, GREEDY), 0)
    assert add(engine, first) == (alone(first, GREEDY), 2 * UNIT)
    assert_pools_as_before(engine)


def test_who_was_let_in_when_a_recovery_was_interrupted_does_not_go_on_without_its_state(path, alone, monkeypatch):
    engine, (prompt,) = engine_of(path), random_prompts(1, 150, 150)
    add(engine, prompt)

    def interrupted(*_):
        raise KeyboardInterrupt

    request = engine.add_request("again", prompt, GREEDY)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.mover, "forget", interrupted)
        patch.setattr(engine.executor, "settle", interrupted)
        engine.step()
    while engine.has_work:
        engine.step()
    (found,) = outcome(request)
    assert found in alone(prompt, GREEDY) or found[2] == "abort"
    assert_pools_as_before(engine)


def draw_requests(generator, seed):
    """Prompts of a tree that branches anywhere, some of whose nodes come again and again."""
    beginnings = [[]]
    for i in range(generator.randint(2, 5)):
        length = generator.choice([UNIT, 2 * UNIT, 40, 90, 16])
        beginnings.append(generator.choice(beginnings) + random_prompts(1, length, length, seed=seed * 11 + i)[0])
    requests = []
    for i in range(generator.randint(3, 8)):
        end = random_prompts(1, 1, generator.choice([2, 30, 90]), seed=seed * 7 + i)[0]
        params = SamplingParams(
            temperature=generator.choice([0, 0.9]), seed=i, max_tokens=generator.choice([1, 20, 90]), ignore_eos=True,
            n=generator.choice([1, 1, 1, 2]), logprobs=1,
        )  # fmt: skip
        requests.append(((generator.choice(beginnings) + end)[:320], params))
    return requests


def draw_engine(generator, path, seed, runtime, **arguments):
    is_tight, mode, rows = generator.random() < 0.4, generator.choice(["auto", True, False]), generator.randint(1, 4)
    tight = dict(enable_cpu_offload=False, max_num_seqs=6, state_slots=6, num_gpu_blocks_override=26)
    num_tokens = generator.choice([70, 200, 330])
    drawn = dict(
        enable_cpu_offload=mode,
        max_num_seqs=rows,
        max_num_batched_tokens=num_tokens,
        state_slots=generator.choice([None, 1, 2]),
        capture_num_tokens=generator.choice([[], [8, num_tokens]]),
        num_gpu_blocks_override=generator.choice([26, 27, 29, 50]),
        host_memory_limit=generator.choice([30, 60, 200]) * BLOCK_BYTES,
        ring_slot_bytes=generator.choice([1, 2, 3]) * LAYER_BLOCK_BYTES,
        num_ring_slots=generator.choice([2, 3]),
        resident_kv_limit=generator.choice([None, 0, 9 * BLOCK_BYTES]),
    )
    drafts = dict(speculative_config=dict(method="suffix", num_speculative_tokens=4)) if seed % 2 else {}
    return engine_of(path, runtime, **drafts | drawn | (tight if is_tight else {}) | arguments)


def play_random(path, alone, seed, dropped_rule=None, **arguments):
    """Play a random workload; return how many tokens were found, how many sequences gave way, how many requests failed
    as the host had no room for what they would have given way, how many drafted tokens were right, and how many ends
    steps passed. With odd seeds tokens are drafted."""
    generator = random.Random(seed)
    requests = draw_requests(generator, seed)
    runtime = SimulatedRuntime(generator.choice([None, seed, seed]), dropped_rule)
    engine = draw_engine(generator, path, seed, runtime, **arguments)
    if engine.drafts:
        answers = [(prompt, alone(prompt, one)[0][0]) for prompt, params in requests for one in completions(params)]
        engine.drafts.drafter = Guessing(random.Random(seed), [prompt + tokens for prompt, tokens in answers])
    chunks = watched(engine)
    added, aborted = play_at_random(engine, requests, generator, comes=0.3, is_aborted=0.02, is_switched=0.03)
    num_failed, is_short = 0, not engine.config.may_offload and engine.plan.num_host_blocks < 100
    for number, (request, pair) in enumerate(zip(added, requests, strict=True)):
        is_failed = is_short and any(one.finish_reason == "error" for one in request.sequences)  # it could not give way
        num_failed += is_failed
        if number not in aborted and not is_failed:
            wanted = [alone(pair[0], one)[0] for one in completions(pair[1])]
            assert outcome(request) == wanted, f"seed {seed}, request {number}"
    assert_pools_as_before(engine)
    num_accepted = engine.drafts.num_accepted if engine.drafts else 0
    num_passed = sum(len(chunk.passed) for chunk in chunks)
    num_found, num_preempted = engine.kv_cache.prefixes.num_hit_tokens, engine.scheduler.num_preemptions
    return num_found, num_preempted, num_failed, num_accepted, num_passed


def completions(params):
    fields = dict(temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=True, logprobs=1)
    return [SamplingParams(seed=params.seed + i, **fields) for i in range(params.n)]


NUM_GROUPS = 6
SOME = {0: (6, 36), 3: (33, 81)}  # without drafts, and with them


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("0", "3")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_random_workloads_get_what_each_request_gets_alone(path, alone, group, fuzz):
    seeds = range(group, 1000, NUM_GROUPS) if fuzz else SOME[group]
    found = [play_random(path, alone, seed) for seed in seeds]
    num_found, num_preempted, _, num_accepted, num_passed = map(sum, zip(*found, strict=True))
    assert num_found and num_preempted and num_passed and bool(num_accepted) == group % 2


def test_who_cannot_give_way_fails_alone_where_another_comes_in_its_place(path, alone):
    assert play_random(path, alone, seed=34, host_memory_limit=20 * BLOCK_BYTES)[2]


# A workload in which each shows: it is tried first.
NOTICED_BY = {
    "moved_blocks.reuse_after_store": 11,
    "moved_blocks.read_after_load": 2,
    "load.fill_after_store": 16,
    "load.fill_after_compute": 15,
    "write_through.after_kv_is_written": 9,
}


@pytest.mark.parametrize("rule", NOTICED_BY)
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_each_wait_removed_is_noticed(path, alone, rule):
    for seed in [NOTICED_BY[rule], *range(200)]:
        try:
            play_random(path, alone, seed, rule)
        except (RaceError, AssertionError, IndexError, ValueError, OverflowError):
            return
    pytest.fail(f"200 workloads ran without {rule!r} and nothing went wrong")


def found_again(path, alone, runtime):
    """Have prompts computed in one step each, side by side, and again: of states only those are copied that steps left
    behind ends that they passed."""
    engine = engine_of(path, runtime, max_num_seqs=8, state_slots=8, max_num_batched_tokens=1024)
    prompts = random_prompts(4, 70, 190, seed=8)
    chunks, wanted = watched(engine), [alone(prompt, GREEDY) for prompt in prompts]
    for _ in range(2):
        assert run(engine, prompts, [GREEDY] * len(prompts)) == wanted
    assert all(chunk.is_last for chunk in chunks) and any(chunk.passed for chunk in chunks)
    assert engine.kv_cache.prefixes.num_hit_tokens > 4 * UNIT


def test_each_wait_of_a_state_that_was_passed_is_noticed(path, alone):
    for seed in range(3):
        found_again(path, alone, SimulatedRuntime(seed))
    for rule in ("write_through.after_kv_is_written", "moved_blocks.reuse_after_store"):
        with pytest.raises((RaceError, AssertionError, IndexError, ValueError, OverflowError)):
            for seed in range(20):
                found_again(path, alone, SimulatedRuntime(seed, rule))
