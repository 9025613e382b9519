"""Sequences that share host blocks share what comes of them: one stream, one copy on the GPU.

Beginnings are drawn from a tree that branches at block edges and inside blocks. Whoever starts, grows, ends, is aborted
or switched: everyone gets the bits of resident mode, and the reference counts are those of the tables.
"""

import random

import checksum
import numpy as np
import pytest
from checksum.answers import check
from checksum.oracle import Oracle
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
from references import check_references
from request_helpers import Script, play_at_random, shrink_gpu_pool, tree_of_prompts
from request_helpers import play as script_play
from simulated import SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.step.plan import NO_BLOCK

pytestmark = pytest.mark.usefixtures("checksums")
KINDS = {"one kind": {}, "two kinds": dict(sliding_window=6)}  # of layers: those with a window forget what is behind it
ARGUMENTS = dict(max_model_len=64, max_num_batched_tokens=16, enable_prefix_caching=True)  # in blocks of 4 tokens


DOCUMENT = random_prompts(1, 384, 384, seed=1)[0]  # 24 blocks, 3 prefill steps
QUESTIONS = [DOCUMENT + end for end in random_prompts(16, 3, 6, seed=2)]
LENGTHS = dict(block_size=16, max_model_len=448, max_num_seqs=16, max_num_batched_tokens=128)
STREAMED = LENGTHS | dict(enable_cpu_offload=True, ring_slot_bytes=4 * LAYER_BLOCK_BYTES)


@pytest.fixture(scope="module")
def paths(path_of):
    return {name: path_of("qwen3", **SMALL, **fields) for name, fields in KINDS.items()}


@pytest.fixture(scope="module")
def oracles(paths):
    return {name: Oracle(path) for name, path in paths.items()}


def check_all(oracle, requests) -> None:
    for request in requests:
        check(oracle, request.sequences[0].prompt_token_ids, request.params, outcome(request))


def greedy(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0) | arguments))


def tree_engine(generator: random.Random, path, seed: int):
    mode, rows = generator.choice(["auto", True, True, False]), generator.randint(2, 6)
    engine = make_engine(
        path,
        SimulatedRuntime(generator.choice([None, seed, seed])),
        **ARGUMENTS,
        enable_cpu_offload=mode,
        max_num_seqs=rows,
        capture_num_tokens=generator.choice([[], [1, 6, 10]]),
        num_gpu_blocks_override=60,
        host_memory_limit=generator.choice([60, 200]) * checksum.BLOCK_BYTES,
        ring_slot_bytes=generator.choice([1, 2, 3, 5]) * checksum.LAYER_BLOCK_BYTES,
        num_ring_slots=generator.choice([2, 3]),
        resident_kv_limit=generator.choice([None, None, None, 0, 3 * checksum.BLOCK_BYTES, 9 * checksum.BLOCK_BYTES]),
    )
    pool = engine.kv_cache.tables.gpu_blocks
    engine.taken = pool.allocate(max(0, pool.num_free - generator.randint(17 if mode else 20, 40)))
    return engine


def play(engine, requests, generator: random.Random):
    """Plays at random; returns the requests, the aborted ones, and how many blocks were shared."""
    num_shared = 0

    def count(shared: int) -> None:
        nonlocal num_shared
        num_shared += shared if engine.mode == "offload" else 0

    added, aborted = play_at_random(
        engine, requests, generator, comes=0.25, is_aborted=0.02, is_switched=0.04, after_step=count
    )
    return added, aborted, num_shared


@pytest.mark.parametrize("first_seed", range(0, 18, 6))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_beginnings_drawn_from_a_tree(paths, oracles, first_seed, fuzz):
    total_shared = 0
    for seed in range(first_seed, first_seed + (6 if fuzz else 1)):
        generator = random.Random(seed)
        family = generator.choice(["one kind", "one kind", "two kinds"])
        prompts = tree_of_prompts(generator, generator.randint(3, 9))
        params = [
            greedy(generator.randint(1, 12), temperature=0.8 * (i % 2), seed=i, n=generator.choice([1, 1, 1, 3]))
            for i in range(len(prompts))
        ]
        engine = tree_engine(generator, paths[family], seed)
        added, aborted, num_shared = play(engine, list(zip(prompts, params, strict=True)), generator)
        check_all(oracles[family], added)
        assert all(reason == "length" or i in aborted for i, one in enumerate(added) for _, _, reason in outcome(one))
        engine.kv_cache.tables.gpu_blocks.release(engine.taken)
        assert_pools_as_before(engine)
        total_shared += num_shared
    assert total_shared, "no two rows shared a block of the GPU"


# The same bits as in resident mode


def tree_script(seed: int, num_requests: int, most_tokens: int) -> Script:
    """Requests of one tree that come while others run, some with log-probabilities."""
    generator = random.Random(seed)
    arrivals, step = {}, 0
    for i, prompt in enumerate(tree_of_prompts(generator, num_requests)):
        arrivals.setdefault(step, []).append(
            (
                prompt,
                greedy(
                    generator.randint(3, most_tokens),
                    temperature=0.8 * (i % 2),
                    seed=i,
                    logprobs=generator.choice([0, 2]),
                    n=generator.choice([1, 1, 2]),
                ),
            )
        )
        step += generator.choice([0, 0, 3, 8])
    return Script(arrivals)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("seed", [1, 2])  # of 0 no two rows share a block
@pytest.mark.sampled("1-two kinds")
def test_every_budget_ring_and_order_of_streams_gives_the_bits_of_resident_mode(paths, family, seed, fuzz):
    script = tree_script(seed, *((9, 13) if fuzz else (6, 8)))
    arguments = ARGUMENTS | dict(max_num_seqs=6, capture_num_tokens=[1, 6, 10])
    wanted = script_play(make_engine(paths[family], **arguments), script)
    generator, num_shared = random.Random(seed), 0
    for limit, pool in ((0, None), (None, 20), (5 * checksum.BLOCK_BYTES, 26)):
        engine = make_engine(
            paths[family],
            SimulatedRuntime(generator.choice([None, seed])),
            **arguments,
            enable_cpu_offload=True,
            resident_kv_limit=limit,
            num_ring_slots=generator.randint(2, 4),
            ring_slot_bytes=generator.randint(1, 5) * checksum.LAYER_BLOCK_BYTES,
        )
        free = engine.kv_cache.tables.gpu_blocks
        engine.taken = free.allocate(free.num_free - pool) if pool else []
        step = engine.step

        def checked_step(engine=engine, step=step):
            nonlocal num_shared
            outputs = step()
            num_shared += check_references(engine)
            return outputs

        engine.step = checked_step
        assert script_play(engine, script) == wanted, (limit, pool)
        assert engine.stats()["streamed_bytes"] > 0
        free.release(engine.taken)
        assert_pools_as_before(engine)
    assert num_shared, "no two rows shared a block of the GPU"


# What crosses the link


class Link:
    """Counts what each step of an engine moves: (kind of step, rows, blocks in all layers, copies)."""

    def __init__(self, engine) -> None:
        self.steps, stream, run_step = [], engine.runner.offload.copy, engine.runner.offload.run
        self.planned_bytes = num_copies = 0
        num_layers, copy = engine.runner.layout.num_places, stream.copy

        def counted_copy(*args):
            nonlocal num_copies
            num_copies += 1
            copy(*args)

        def counted(step, *args):
            before = num_copies
            at = step.stream_plan.at[:num_layers]
            blocks = [[block for transfer in found for block in transfer.host_blocks] for found in at]
            self.planned_bytes += sum(map(len, blocks)) * engine.runner.layout.part_bytes
            result = run_step(step, *args)
            self.steps.append((type(step).__name__, blocks, num_copies - before))
            return result

        engine.runner.offload.run, stream.copy = counted, counted_copy


def test_a_decode_step_moves_each_block_once_in_few_copies(paths):
    engine = make_engine(paths["one kind"], **STREAMED)
    run(engine, [DOCUMENT[:165]], [greedy(2)])  # then all of the document is known
    link = Link(engine)
    prompts = [DOCUMENT[:160] + question[384:] for question in QUESTIONS[:6]]
    requests = [engine.add_request(str(i), prompt, greedy(7)) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
        check_references(engine)
    steps = [step for step in link.steps if step[0] == "DecodeStep"]
    assert len(steps) >= 6
    for _, layers, num_copies in steps[1:-1]:
        for blocks in layers:
            assert sorted(blocks) == list(range(10)), "six rows, 10 blocks"
        # A slot holds 4 blocks: 3 fills in a layer, of neighbours.
        assert num_copies == 2 * 3
    assert sum(request.sequences[0].streamed_bytes for request in requests) == link.planned_bytes


def test_completions_of_one_prompt_stream_it_once(paths):
    engine = make_engine(paths["one kind"], **STREAMED)
    link = Link(engine)
    run(engine, [DOCUMENT[:261]], [greedy(9, n=8, temperature=0.9)])
    steps = [layers for name, layers, _ in link.steps if name == "DecodeStep"]
    assert len(steps) > 6
    for layers in steps:
        assert all(sorted(blocks) == list(range(16)) for blocks in layers)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kept_blocks", [0, 20])
@pytest.mark.sampled("0-two kinds-1", "20-one kind-0")
def test_a_switch_to_resident_mode_brings_each_block_once(paths, oracles, name, kept_blocks, seed):
    """The pool holds what the rows share, and less than each of them by itself."""
    arguments = LENGTHS | dict(max_num_seqs=4, num_gpu_blocks_override=40)
    offload = dict(enable_cpu_offload=True, resident_kv_limit=kept_blocks * BLOCK_BYTES)
    engine = make_engine(paths[name], SimulatedRuntime(seed), **arguments | offload)
    request = engine.add_request("0", DOCUMENT[:261], greedy(24, n=4, temperature=0.9, seed=1))
    while not all(sequence.num_generated > 12 for sequence in request.sequences):
        engine.step()
    engine.switch_mode("resident")
    assert check_references(engine) == 16, "the blocks of the prompt"
    while engine.has_work:
        engine.step()
    check_all(oracles[name], [request])
    assert_pools_as_before(engine)


@pytest.mark.parametrize("max_mixed", [[], [24, 40]])
def test_sixteen_questions_about_one_document_move_the_bytes_of_one(paths, oracles, max_mixed):
    """The whole run, prefill and decode. Nothing may stay on the GPU; no question and answer fill a block."""
    moved = []
    for questions in (QUESTIONS[:1], QUESTIONS):
        engine = make_engine(paths["one kind"], **STREAMED, capture_num_tokens=max_mixed)
        link = Link(engine)
        outcomes = run(engine, questions, [greedy(5)] * len(questions))
        for question, one in zip(questions, outcomes, strict=True):
            check(oracles["one kind"], question, greedy(5), one)
        stats = engine.stats()
        moved.append(stats["streamed_bytes"])
        assert link.planned_bytes == stats["streamed_bytes"] - stats["discarded_prefetch_bytes"] > 0
        assert_pools_as_before(engine)
    assert moved[1] <= 1.1 * moved[0], moved


def test_who_ends_leaves_the_prefetch_of_what_others_read(paths):
    discarded = []
    for count in (1, 8):
        engine = make_engine(paths["one kind"], **STREAMED)
        run(engine, QUESTIONS[:count], [greedy(9 - i) for i in range(count)])
        discarded.append(engine.stats()["discarded_prefetch_bytes"])
        assert_pools_as_before(engine)
    assert discarded[1] == discarded[0]


def test_a_prefetch_of_what_nobody_holds_any_more_is_dropped(paths):
    """Two rows that share all of it end one after the other: the second one's end drops it."""
    engine = make_engine(paths["one kind"], **STREAMED)
    requests = [engine.add_request(str(i), QUESTIONS[i], greedy(9)) for i in range(2)]
    while not requests[1].sequences[0].num_generated:
        engine.step()
    prefetched = {block for _, chunk in engine.runner.offload.prefetched for block in chunk.host_blocks}
    engine.abort("0")
    assert prefetched and not prefetched & engine.kv_cache.tables.lifetimes.gone
    engine.abort("1")
    assert prefetched <= engine.kv_cache.tables.lifetimes.gone
    discarded = engine.runner.offload.counters.discarded_bytes
    while engine.has_work:
        engine.step()
    run(engine, [[5, 6, 7]], [greedy(2)])
    assert engine.runner.offload.counters.discarded_bytes > discarded
    assert_pools_as_before(engine)


def test_a_mixed_step_streams_once_what_its_prompt_and_its_running_rows_share(paths, oracles):
    engine = make_engine(paths["one kind"], **STREAMED, capture_num_tokens=[24, 40])
    link = Link(engine)
    requests = []
    for question in QUESTIONS[:4]:
        requests.append(engine.add_request(str(len(requests)), question, greedy(9)))
        for _ in range(5 if len(requests) == 1 else 1):
            engine.step()
        assert len(requests) == 1 or [chunk.blocks for _, chunk in engine.runner.offload.prefetched] == [
            tuple(range(begin, begin + 4)) for begin in (0, 4, 8)
        ], "the next step's first chunks are on their way"
    while engine.has_work:
        engine.step()
    mixed = [layers for name, layers, _ in link.steps if name == "MixedStep"]
    assert len(mixed) == 3
    for layers in mixed:
        assert all(sorted(blocks) == list(range(24)) for blocks in layers)
    assert sum(request.sequences[0].streamed_bytes for request in requests) == link.planned_bytes
    check_all(oracles["one kind"], requests)


def test_sequences_between_two_that_share_a_history_keep_their_own(paths, oracles, monkeypatch):
    """In one prefill step: a question, another prompt with a history, one without, and a question of another length."""
    engine = make_engine(paths["one kind"], **STREAMED)
    other = random_prompts(1, 70, 70, seed=9)[0]
    run(engine, [DOCUMENT[:165], other], [greedy(2)] * 2)
    prompts = [DOCUMENT[:170], other[:64] + [5, 6], [7, 8, 9], DOCUMENT[:160] + [4] * 20, DOCUMENT[:160] + [3] * 30]
    ranges, prefill = [], engine.runner.backends[0].prefill
    monkeypatch.setattr(engine.runner.backends[0], "prefill", lambda *args: ranges.append(args[2]) or prefill(*args))
    found = run(engine, prompts, [greedy(6)] * 5)
    for prompt, one in zip(prompts, found, strict=True):
        check(oracles["one kind"], prompt, greedy(6), one)
    through_ring = [one for one in ranges if one.store_state]
    assert {tuple(one.cu_seqlens_q.tolist()) for one in through_ring} == {(0, 10), (10, 12), (15, 35, 65)}
    for one in ranges:
        bounds = one.cu_seqlens_q
        assert one.max_query_len == bounds.diff().max() and one.query_rows == (bounds[0], bounds[-1])


def test_with_auto_a_question_about_what_streams_already_is_admitted(paths, oracles):
    """It adds a block to what streams; a prompt of the same length that shares nothing would add 25, and waits."""
    arguments = LENGTHS | dict(enable_cpu_offload="auto", resident_kv_limit=None, num_gpu_blocks_override=20)
    engine = make_engine(paths["one kind"], **arguments)
    prompts = [QUESTIONS[0], QUESTIONS[1], random_prompts(1, 388, 388, seed=8)[0]]
    first = engine.add_request("first", prompts[0], greedy(16))
    while not first.sequences[0].num_generated:
        engine.step()
    assert engine.mode == "offload" and engine.kv_cache.copies.num_streamed > 4
    requests = [first, *(engine.add_request(str(i), prompts[i], greedy(8)) for i in (1, 2))]
    engine.step()
    engine.step()
    assert [request.sequences[0].row is not None for request in requests] == [True, True, False]
    while engine.has_work:
        engine.step()
        check_references(engine)
    check_all(oracles["one kind"], requests)
    assert_pools_as_before(engine)


# What stays on the GPU


def shared_engine(path, num_free: int | None, runtime=None, **arguments):
    """An engine that knows the document, with so many free GPU blocks."""
    engine = make_engine(path, runtime or SimulatedRuntime(), **STREAMED | dict(resident_kv_limit=None) | arguments)
    run(engine, [DOCUMENT[:165]], [greedy(2)])
    engine.runner.offload.drain()
    engine.kv_cache.tables.lifetimes.reclaim()
    pool = engine.kv_cache.tables.gpu_blocks
    for key in [key for key in pool.key_of.values() if isinstance(key, int)]:
        pool.forget(key)  # what the first one left on the GPU
    engine.give_back = (lambda: None) if num_free is None else shrink_gpu_pool(engine, num_free)
    return engine


def add_questions(engine, count: int, max_tokens: int = 7, prefix: str = "q"):
    prompts = [DOCUMENT[:160] + question[384:] for question in QUESTIONS[:count]]
    return [engine.add_request(f"{prefix}{i}", prompt, greedy(max_tokens)) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("limit", [None, 12 * BLOCK_BYTES])
def test_one_gpu_block_comes_back_for_all_rows(paths, limit):
    """10 shared blocks, 6 rows, 20 GPU blocks: all of it comes back, 8 blocks in a step, and streams no more."""
    engine = shared_engine(paths["one kind"], 20, resident_kv_limit=limit)
    kv_cache, link = engine.kv_cache, Link(engine)
    add_questions(engine, 6)
    while engine.has_work:
        engine.step()
        check_references(engine)
        if kv_cache.copies.num_resident == 10 and len(engine.scheduler.running) == 6:
            assert kv_cache.copies.residency.num_resident == 60 and kv_cache.copies.num_streamed == 0
    moved = [sum(map(len, layers)) for name, layers, _ in link.steps if name == "DecodeStep"]
    assert moved[:3] == [20, 4, 0] and not any(moved[3:])
    engine.give_back()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("limit", [None, 12 * BLOCK_BYTES])
def test_who_comes_later_takes_up_the_copies_of_running_rows(paths, limit):
    engine = shared_engine(paths["one kind"], 20, resident_kv_limit=limit)
    kv_cache, link = engine.kv_cache, Link(engine)
    add_questions(engine, 2)
    while kv_cache.copies.num_streamed or not engine.scheduler.running:
        engine.step()
    link.steps.clear()
    (late,) = add_questions(engine, 1, prefix="late")
    engine.step()
    assert kv_cache.copies.residency.first[late.sequences[0].row] == 0 and check_references(engine) == 10
    assert not any(blocks for _, layers, _ in link.steps for blocks in layers), "something streams"
    while engine.has_work:
        engine.step()
        check_references(engine)
    engine.give_back()
    assert_pools_as_before(engine)


def test_a_row_takes_up_what_another_one_has_and_the_next_step_streams_less(paths):
    engine = shared_engine(paths["one kind"], 20)
    kv_cache, offload = engine.kv_cache, engine.runner.offload
    requests = add_questions(engine, 2)
    while kv_cache.copies.num_streamed or not engine.scheduler.running:
        engine.step()
    row = requests[1].sequences[0].row
    kv_cache.tables.gpu_blocks.release(kv_cache.tables.gpu[0, row, :10].tolist())  # as if it had been out of the steps
    kv_cache.tables.gpu[0, row, :10] = NO_BLOCK
    kv_cache.copies.residency.first[row] = 10
    link = Link(engine)
    engine.step()
    assert check_references(engine) == 10 and kv_cache.copies.num_streamed == 0
    ((_, layers, _),) = link.steps
    assert all(len(blocks) == 10 for blocks in layers) and not offload.prefetched, (
        "nothing is to stream in the next step"
    )
    engine.step()
    on_device = engine.runner.decode_program.rows.block_table[row, :10]
    assert on_device.tolist() == kv_cache.tables.gpu[0, row, :10].tolist()
    while engine.has_work:
        engine.step()
        check_references(engine)
    assert offload.counters.discarded_bytes == 0
    engine.give_back()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.sampled("1")
def test_a_dropped_copy_is_free_whoever_shared_it(paths, oracles, seed):
    """Rows that grow want every GPU block that the shared beginning has: what was promised must be there."""
    engine = shared_engine(paths["one kind"], 16, SimulatedRuntime(seed))
    kv_cache = engine.kv_cache
    requests, num_dropped, drop = add_questions(engine, 4, max_tokens=48), 0, kv_cache.copies.drop

    def checked_drop(count):
        nonlocal num_dropped
        before = kv_cache.copies.gpu_room
        drop(count)
        if count > 0:
            assert kv_cache.copies.gpu_room == before + count
            num_dropped += count

    kv_cache.copies.drop = checked_drop
    while engine.has_work:
        engine.step()
        check_references(engine)
    assert num_dropped >= 8, num_dropped
    check_all(oracles["one kind"], requests)
    engine.give_back()
    assert_pools_as_before(engine)


def test_a_step_that_fails_leaves_no_block_without_content_to_rows_outside_of_it(paths, oracles, monkeypatch):
    """One row's prompt is half computed while the others decode: the copies of their step never come."""
    engine = shared_engine(paths["one kind"], 30, max_num_batched_tokens=48)
    kv_cache = engine.kv_cache
    add_questions(engine, 2, max_tokens=12)
    while not all(sequence.num_generated > 2 for sequence in engine.scheduler.running) or not engine.scheduler.running:
        engine.step()
    while kv_cache.copies.num_resident:  # all of the beginning streams again
        kv_cache.copies.drop(1)
    long = DOCUMENT[:160] + random_prompts(1, 100, 100, seed=5)[0]
    request = engine.add_request("long", long, greedy(5))
    engine.step()
    row = request.sequences[0].row
    assert row is not None and request.sequences[0].num_computed < len(long)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.offload, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            while True:
                engine.step()
    assert request.sequences[0].row == row, "the prompt was in the step that failed"
    assert kv_cache.copies.residency.first[row] == 10 or np.all(kv_cache.tables.gpu[0, row, :10] == NO_BLOCK)
    while engine.has_work:
        engine.step()
        check_references(engine)
    check_all(oracles["one kind"], [request])
    engine.give_back()
    assert_pools_as_before(engine)
