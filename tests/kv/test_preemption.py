"""Who gives way when the GPU pool is full, in which order they come back, and that they find what is theirs."""

import random
from contextlib import suppress

import checksum
import pytest
import torch
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run
from request_helpers import Script, play, record_batches, shrink_gpu_pool, tree_of_prompts
from simulated import SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.requests.sequence import SequenceState

pytestmark = pytest.mark.usefixtures("checksums")
PLAIN = dict(block_size=16, enable_prefix_caching=False)
SHARED = dict(block_size=16, max_num_batched_tokens=256)  # nobody's tail becomes full


@pytest.fixture(scope="module")
def path(path_of):
    return path_of("qwen3", **SMALL)


@pytest.fixture(scope="module")
def alone(path):
    """Prompts, and how many tokens -> the tokens of each where all have room and nobody shares. Played once."""
    played = {}

    def play_once(prompts, num_tokens):
        key = str(prompts), num_tokens
        if key not in played:
            engine = make_engine(path, enable_prefix_caching=False)
            played[key] = tokens_of(run(engine, prompts, [greedy(num_tokens)] * len(prompts)))
        return played[key]

    return play_once


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(outcomes):
    return [completions[0][0] for completions in outcomes]


def test_who_came_first_gives_way_last_and_comes_back_first(path):
    """Four run in a pool for about two; a fifth waits, and stays behind all of them."""
    prompts, params = random_prompts(5, 30, 30, seed=1), [greedy(22)] * 5
    engine = make_engine(path, max_num_seqs=4, **PLAIN)
    give_back = shrink_gpu_pool(engine, 9)
    requests = [engine.add_request(str(i), prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params))]
    finished, num_saved = [], 0
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
        queue = [sequence.request_id for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]]
        assert queue == sorted(queue), "who came first stands first"
        num_saved = max(num_saved, sum(sequence.kept_blocks is not None for sequence in engine.scheduler.waiting))
    assert finished == ["0", "1", "2", "3", "4"] and num_saved == 2
    give_back()
    assert_pools_as_before(engine)
    wanted = run(make_engine(path, max_num_seqs=4, **PLAIN), prompts, params)
    assert [request.sequences[0].output_token_ids for request in requests] == tokens_of(wanted)


def test_one_long_row_that_gives_way_makes_room_for_all_who_decode(path):
    """Of a step that prompts could share: nobody else gives way, and no prompt takes up what was freed for others."""
    arguments = dict(max_num_batched_tokens=70, capture_num_tokens=[40], **PLAIN)
    short, (first, second, last) = random_prompts(2, 13, 13, seed=2), random_prompts(3, 135, 135, seed=3)
    # Two that decode, a prompt that has 7 tokens to compute when they begin a block, and one that is far from its end.
    arrivals = {0: [(prompt, greedy(30)) for prompt in short], 2: [(first, greedy(8)), (second, greedy(8))]}
    arrivals[4] = [(last[:20], greedy(8))]
    engine = make_engine(path, **arguments)
    batches, found, schedule = record_batches(engine), [], engine.scheduler.schedule

    def observed():
        scheduler = engine.scheduler
        num_preemptions, running, waiting = scheduler.num_preemptions, list(scheduler.running), list(scheduler.waiting)
        states = [sequence.state for sequence in running]
        batch = schedule()
        if scheduler.num_preemptions > num_preemptions:
            assert scheduler.running == running[:-1], "one gave way"
            assert list(scheduler.waiting) == [running[-1], *waiting], "and is the next to come back"
            found.append((states, batches[-1]))
        return batch

    engine.scheduler.schedule = observed
    played = play(engine, Script(arrivals, num_gpu_blocks=1 + 1 + 9 + 9))
    # The step has a token of each that decodes, and no chunk of a prompt.
    assert found == [([SequenceState.DECODE] * 2 + [SequenceState.PREFILL] * 2, 2)]
    assert_pools_as_before(engine)
    wanted = play(make_engine(path, **arguments), Script(arrivals))
    assert tokens_of(played.outcomes) == tokens_of(wanted.outcomes)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_row_that_is_used_again_at_the_same_length_reads_the_blocks_of_its_new_owner(path, enable_cpu_offload):
    prompts, params = random_prompts(2, 40, 40, seed=4), [greedy(6)]
    arguments = dict(max_num_seqs=1, enable_cpu_offload=enable_cpu_offload, **PLAIN)
    engine = make_engine(path, **arguments)
    held, outcomes = [], []

    def at_step(engine, step):
        (sequence,) = engine.scheduler.running or [None]
        if sequence is not None and step == 3:
            row = engine.kv_cache.tables.gpu[0, sequence.row]
            held.append({int(block) for block in row if block >= 0})

    for prompt in prompts:
        outcomes += run(engine, [prompt], params, at_step)
        pool = engine.kv_cache.tables.gpu_blocks
        taken = pool.allocate(3)  # the next one gets others
    pool.release(taken)
    assert held[0] and held[1] and not held[0] & held[1]
    fresh = [run(make_engine(path, **arguments), [prompt], params)[0] for prompt in prompts]
    assert outcomes == fresh and tokens_of(fresh)[0] != tokens_of(fresh)[1]


def share_a_document(engine, alone, longest_end=5):
    """Run three requests that share six full blocks for some tokens. Return them, and what each gets alone."""
    (document,) = random_prompts(1, 96, 96, seed=6)
    prompts = [document + end for end in random_prompts(3, 5, longest_end, seed=7)]
    params, wanted = greedy(14), alone(prompts, 14)
    requests = [engine.add_request("0", prompts[0], params)]
    engine.step()
    requests += [engine.add_request(str(i), prompts[i], params) for i in (1, 2)]
    for _ in range(4):
        engine.step()
    assert len(document_blocks(engine)) == 3
    return requests, wanted


def document_blocks(engine):
    """The blocks of the document in each running row, all of them the same: [rows, 6]."""
    table, _ = engine.kv_cache.tables.home
    blocks = table[0, [sequence.row for sequence in engine.scheduler.running], :6]
    assert (blocks == blocks[0]).all() and (blocks >= 0).all()
    return blocks


def two_give_way(engine):
    with torch.inference_mode():
        engine.scheduler.preempt_youngest()
        engine.scheduler.preempt_youngest()


def count_copies(engine):
    """Return a list that gets ("store" or "load", number of blocks) of each move from now on."""
    copied, transfers = [], engine.mover.transfers

    def counted(name, move):
        return lambda pairs, **how: copied.append((name, len(pairs))) or move(pairs, **how)

    for name in ("store", "load"):
        setattr(transfers, name, counted(name, getattr(transfers, name)))
    return copied


def host_blocks(engine):
    """Those of the host, once all is there that was on its way."""
    engine.mover.transfers.finish()
    return engine.kv_cache.tables.lifetimes.host_blocks


def until_all_run(engine):
    while engine.scheduler.waiting:
        engine.step()


def to_the_end(engine, requests):
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)
    return [request.sequences[0].output_token_ids for request in requests]


def test_who_finds_no_room_on_the_host_gives_back_what_was_kept_for_another_one(path, alone):
    """The document is kept already, its own tail finds no room."""
    engine = make_engine(path, **SHARED, host_memory_limit=7 * BLOCK_BYTES)
    requests, wanted = share_a_document(engine, alone)
    two_give_way(engine)
    assert [request.is_finished for request in requests] == [False, True, False]
    pool = host_blocks(engine)
    assert pool.num_used == pool.num_blocks == 7 and not pool.num_shared
    waiting, engine.scheduler.waiting = engine.scheduler.waiting, type(engine.scheduler.waiting)()
    engine.step()  # reads their tokens
    engine.scheduler.waiting = waiting
    found = to_the_end(engine, requests)
    assert found[0] == wanted[0] and found[2] == wanted[2] and "host_memory_limit" in requests[1].error


def test_an_interrupt_between_keeping_kv_and_giving_back_its_row_leaves_one_that_waits(path, alone):
    prompts, params = random_prompts(3, 10, 11, seed=9), [greedy(7)] * 3
    engine = make_engine(path, enable_prefix_caching=False)
    give_back, release, interrupted = shrink_gpu_pool(engine, 9), engine.kv_cache.release, []

    def interrupt(sequence, **arguments):
        if sequence.kept_blocks is not None and not interrupted:
            interrupted.append(sequence)
            raise KeyboardInterrupt
        release(sequence, **arguments)

    engine.kv_cache.release = interrupt
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
        if interrupted:
            assert all(sequence.kept_blocks is None for sequence in engine.scheduler.running)
    assert interrupted
    assert [request.sequences[0].output_token_ids for request in requests] == alone(prompts, 7)
    give_back()
    assert_pools_as_before(engine)


def test_a_beginning_that_several_share_is_kept_once_and_shared_again(path, alone):
    """Each of its blocks lies once on the host, however many gave way, and once on the GPU when they come back."""
    engine = make_engine(path, **SHARED)
    requests, wanted = share_a_document(engine, alone, longest_end=12)
    two_give_way(engine)
    waiting = [sequence.kept_blocks for sequence in engine.scheduler.waiting]
    assert waiting[0][:6] == waiting[1][:6] and not set(waiting[0][6:]) & set(waiting[1][6:])
    num_kept, pool, stats = len({*waiting[0], *waiting[1]}), host_blocks(engine), engine.stats()
    assert pool.num_used == stats["host_blocks_used"] == num_kept and not pool.borrowed
    assert stats["host_blocks_free"] == stats["host_blocks_total"] - num_kept and not stats["host_blocks_cached"]
    until_all_run(engine)
    assert len(document_blocks(engine)) == 3
    assert to_the_end(engine, requests) == wanted


def test_two_that_gave_way_share_new_blocks_when_nobody_has_the_old_ones(path, alone):
    """Each shared block is copied once, to the host and back."""
    engine = make_engine(path, **SHARED)
    requests, wanted = share_a_document(engine, alone)
    copied = count_copies(engine)
    two_give_way(engine)
    waiting, engine.scheduler.waiting = engine.scheduler.waiting, type(engine.scheduler.waiting)()
    engine.step()  # reads their tokens
    engine.abort("0")
    pool = engine.kv_cache.tables.gpu_blocks
    pool.release(pool.allocate(pool.num_free))  # what it left is gone
    engine.scheduler.waiting = waiting
    until_all_run(engine)
    assert len(document_blocks(engine)) == 2
    assert copied == [("store", 7), ("store", 1), ("load", 7), ("load", 1)]
    assert to_the_end(engine, requests[1:]) == wanted[1:]
    assert engine.stats()["host_blocks_used"] == 0


@pytest.mark.parametrize("back_in", ["offload", "resident"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled("0-offload", "1-resident")
def test_who_gave_way_shares_blocks_after_a_switch_of_the_mode(path, alone, seed, back_in):
    """Whatever the modes in which they come back, nothing but their tails is copied."""
    engine = make_engine(path, SimulatedRuntime(seed), **SHARED, enable_cpu_offload="auto")
    requests, wanted = share_a_document(engine, alone)
    two_give_way(engine)
    copied = count_copies(engine)
    engine.switch_mode("offload")
    last = engine.scheduler.waiting.pop()
    until_all_run(engine)
    if engine.mode != back_in:
        engine.switch_mode(back_in)
    engine.scheduler.waiting.append(last)
    until_all_run(engine)
    assert len(document_blocks(engine)) == 3
    assert sum(count for *_, count in copied) == 2, "their tails"
    assert to_the_end(engine, requests) == wanted


def test_a_block_that_was_handed_out_again_is_no_copy_of_what_is_kept(path):
    """The one who shared it has ended, and another one has written to it."""
    engine = make_engine(path, **SHARED)
    (document,) = random_prompts(1, 96, 96, seed=8)
    wanted = run(make_engine(path, enable_prefix_caching=False), [document + [5], document + [6]], [greedy(8)] * 2)
    first = engine.add_request("first", document + [5], greedy(8))
    engine.step()
    second = engine.add_request("second", document + [6], greedy(8))
    while len(engine.scheduler.running) < 2:
        engine.step()
    with torch.inference_mode():
        engine.scheduler.preempt_youngest()
    assert host_blocks(engine).key_of
    waiting, engine.scheduler.waiting = engine.scheduler.waiting, type(engine.scheduler.waiting)()
    while not first.is_finished:
        engine.step()
    engine.kv_cache.tables.gpu_blocks.allocate(engine.kv_cache.tables.gpu_blocks.num_free)  # every cached block goes
    held = list(engine.kv_cache.tables.gpu_blocks.holders)
    with torch.inference_mode():
        engine.runner.gpu_kv[:, held] = 255  # bytes that read as NaN
    (sequence,) = waiting
    assert engine.mover.num_missing(sequence) == 7, "none of its blocks is there"
    engine.kv_cache.tables.gpu_blocks.release(held)
    engine.scheduler.waiting = waiting
    while engine.has_work:
        engine.step()
    found = [request.sequences[0].output_token_ids for request in (first, second)]
    assert found == tokens_of(wanted)
    assert_pools_as_before(engine)


def test_sequences_give_way_within_host_memory_limit(path, alone):
    """Who finds no room on the host fails alone and says what to raise; all others go on."""
    engine = make_engine(path, host_memory_limit=6 * checksum.BLOCK_BYTES, enable_prefix_caching=False)
    assert engine.runner.offload.host.max_bytes == 6 * checksum.BLOCK_BYTES
    give_back = shrink_gpu_pool(engine, 9)
    prompts, params = random_prompts(3, 10, 11, seed=9), [greedy(7)] * 3
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    errors = [output.error for _ in range(300) if engine.has_work for output in engine.step() if output.error]
    assert errors and all("host_memory_limit" in error and "raise it" in error for error in errors)
    assert all(request.is_finished for request in requests) and engine.runner.offload.host.borrowed_bytes == 0
    found = [request.sequences[0] for request in requests]
    are_whole = [s.output_token_ids == w for s, w in zip(found, alone(prompts, 7))]
    assert are_whole == [s.finish_reason == "length" for s in found]
    assert sum(s.finish_reason == "length" for s in found) == 3 - len(errors) > 0
    give_back()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("num_gpu_blocks, length", [(15, 20), (16, 40)])
@pytest.mark.sampled("16-40")
def test_a_kept_block_that_was_given_back_is_no_copy_while_another_one_is_kept(path, num_gpu_blocks, length):
    """Of two that share a document one gives way, comes back and gives way again, and a third is kept all the while."""
    (document,) = random_prompts(1, 96, 96, seed=6)
    first, last = random_prompts(1, length, length, seed=3) + random_prompts(1, 60, 60, seed=4)
    prompts = [first, *(document + end for end in random_prompts(2, 5, 5, seed=7)), last]
    params = [greedy(70), greedy(50), greedy(50), greedy(20)]
    wanted = tokens_of(run(make_engine(path, **PLAIN), prompts, params))
    engine = make_engine(path, **SHARED)
    give_back, requests = shrink_gpu_pool(engine, num_gpu_blocks), []
    gave_way, give_way = [], engine.mover.give_way

    def recorded(sequence):
        kept = [waiting.request_id for waiting in engine.scheduler.waiting if waiting.kept_blocks is not None]
        gave_way.append((sequence.request_id, kept))
        give_way(sequence)

    engine.mover.give_way = recorded
    for i, pair in enumerate(zip(prompts, params, strict=True)):
        requests.append(engine.add_request(str(i), *pair))
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    assert gave_way == [("3", []), ("2", ["3"]), ("2", ["3"])]
    assert [request.sequences[0].output_token_ids for request in requests] == wanted
    give_back()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.sampled("64", "17")
def test_many_that_share_and_give_way_get_what_they_get_alone(path, seed):
    """Prompts from a tree, a pool for two or three of them, arrivals and aborts: whoever else is kept meanwhile.

    Odd seeds switch the mode now and then, too.
    """
    generator = random.Random(seed)
    prompts = tree_of_prompts(generator, 7)
    params = [greedy(generator.choice([2, 8, 15, 23])) for _ in prompts]
    wanted = tokens_of(run(make_engine(path, enable_prefix_caching=False), prompts, params))
    arguments = dict(max_num_batched_tokens=generator.choice([16, 64]))
    if seed % 2:  # the host holds one or two that run, so there are some that wait with what is kept of them
        limit = generator.randint(34, 60) * checksum.BLOCK_BYTES
        arguments |= dict(enable_cpu_offload="auto", max_model_len=68, host_memory_limit=limit)
    engine = make_engine(path, SimulatedRuntime(seed), **arguments)
    give_back = shrink_gpu_pool(engine, generator.randint(16, 24))
    requests, waiting = {}, list(range(len(prompts)))
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or generator.random() < 0.3):
            number = waiting.pop(generator.randrange(len(waiting)))
            requests[number] = engine.add_request(str(number), prompts[number], params[number])
        engine.step()
        if generator.random() < 0.01:
            engine.abort(str(generator.choice(list(requests))))
        if seed % 2 and generator.random() < 0.1:
            with suppress(ValueError):
                engine.switch_mode("resident" if engine.mode == "offload" else "offload")
    for number, request in requests.items():
        found, is_whole = request.sequences[0].output_token_ids, request.sequences[0].finish_reason == "length"
        assert found == wanted[number] if is_whole else found == wanted[number][: len(found)], f"request {number}"
    give_back()
    assert_pools_as_before(engine)
