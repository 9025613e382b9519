"""Blocks behind a window are given back, on both tiers, and what the next turn wants of them is found."""

import random
from functools import partial

import pytest
from engines import (
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    random_prompts,
    run,
    some_params,
    switching,
)
from hollow import hollow
from kv_models import MODELS, KVModel, registered, write_model
from references import check_references
from request_helpers import play_at_random
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.tables import present
from nanoinfer.models.base import AttentionState
from offload import HostBlocks
from offload.layout import runs

WINDOW = 40
MODEL = SMALL | dict(num_layers=4, sliding_window=WINDOW)  # three of four layers have the window, and three groups
MODES = {
    "resident": {},
    "streamed": dict(enable_cpu_offload=True),
    "partly kept": dict(enable_cpu_offload=True, resident_kv_limit=2**16),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=52),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("gemma3", tmp_path_factory.mktemp("model"), **MODEL)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def held(path):
    """Prompts that outgrow their windows, and what each gets alone."""
    prompts = random_prompts(3, 60, 200, seed=4)
    return prompts, [run(make_engine(path), [prompt], [greedy(40)])[0] for prompt in prompts]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_holds_what_its_windows_see_and_no_more(path, mode, held):
    """In decode: all blocks of the group without a window, ceil(window / tokens) + 1 of each with one."""
    engine, most = make_engine(path, **MODES[mode]), 0
    kv_cache, groups = engine.kv_cache, engine.kv_cache.tables.groups

    def at_step(engine, step):
        nonlocal most
        tables = kv_cache.tables
        for sequence in engine.scheduler.running:
            for number, group in enumerate(groups):
                held = {
                    place
                    for table in (tables.gpu, tables.host)
                    for place, block in enumerate(table[number, sequence.row])
                    if block >= 0
                }
                first = group.first_needed(sequence.num_computed)
                assert not held or min(held) >= first, "a block behind the window is held"
                if sequence.num_sampled and group.window is not None:
                    assert len(held) <= -(-WINDOW // 16) + 1
                    most = max(most, len(held))
            for table, pool in ((tables.gpu, tables.gpu_blocks), (tables.host, tables.lifetimes.host_blocks)):
                assert len(set(present(table))) <= pool.num_used

    assert [len(group.layers) for group in groups] == [1] * 4 and groups[0].window is None
    prompts, wanted = held
    assert run(engine, prompts, [greedy(40)] * 3, at_step) == wanted
    assert most == -(-WINDOW // 16) + 1
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_chats_next_turn_finds_its_last_prompt(path, mode):
    engine, prompt, last_end = make_engine(path, **MODES[mode]), [], 0
    for message in random_prompts(5, 20, 90, seed=6):
        before = engine.stats()["prefix_cache_hit_tokens"]
        prompt = prompt + message
        (outcome,) = run(engine, [prompt], [greedy(12)])
        assert engine.stats()["prefix_cache_hit_tokens"] - before == last_end
        assert outcome == run(make_engine(path, **MODES[mode]), [prompt], [greedy(12)])[0]
        last_end = len(prompt) // 16 * 16
        prompt = prompt + outcome[0][0]
    assert_pools_as_before(engine)


def test_questions_about_one_document_find_it(path):
    (document,) = random_prompts(1, 150, 150, seed=8)
    engine = make_engine(path)
    for question in random_prompts(4, 3, 9, seed=9):
        (outcome,) = run(engine, [document + question], [greedy(3)])
    assert engine.stats()["prefix_cache_hit_tokens"] == 3 * 144 and outcome


def test_a_long_prompts_given_back_blocks_go_before_anothers_conversation(path):
    chat, long = random_prompts(1, 60, 60, seed=10)[0], random_prompts(1, 300, 300, seed=11)[0]
    engine = make_engine(path, num_gpu_blocks_override=63)
    run(engine, [chat, long], [greedy(4), greedy(4)])  # 19 blocks of the long prompt in each of four groups: 76
    before = engine.stats()["prefix_cache_hit_tokens"]
    run(engine, [chat + [5] * 20], [greedy(4)])
    assert engine.stats()["prefix_cache_hit_tokens"] - before == 48


def test_what_goes_down_a_tier_leaves_rows_the_blocks_that_they_were_promised(path):
    """It is held on its way: a row that goes on within its promise found no block then, and the step failed."""
    engine = make_engine(path, SimulatedRuntime(2), enable_cpu_offload="auto", num_gpu_blocks_override=60)
    run(engine, random_prompts(2, 200, 200, seed=1), [greedy(2)] * 2)  # of which blocks are cached
    least = []

    def at_step(engine, step):
        engine.mover.send_down()
        least.append(engine.kv_cache.copies.gpu_room)

    run(engine, random_prompts(3, 60, 120, seed=2), [greedy(40)] * 3, at_step)
    assert min(least) >= 0 and engine.runner.offload.counters.written_bytes > 0
    assert_pools_as_before(engine)


def test_a_step_takes_no_more_of_the_host_than_was_promised_where_windows_have_blocks_of_a_fourth(
    tmp_path, monkeypatch
):
    """What the next turn sees ends at a multiple of the largest blocks, and may be more than a row is promised."""
    states = AttentionState(window=WINDOW), AttentionState(shape=1)
    monkeypatch.setitem(MODELS, "fourth", KVModel(states * 2, ((4, 4, 32), (4, 1, 32)), 64))
    with registered():
        engine_of = partial(make_engine, write_model(tmp_path, "fourth"), load_format="dummy", block_size=64)
        engine = engine_of()
        groups, (prompt,) = engine.kv_cache.tables.groups, random_prompts(1, 316, 316, seed=1)
        assert [(group.window, group.block_size) for group in groups] == [(None, 64), (WINDOW, 16)]
        wanted = run(engine, [prompt], [greedy(4)])
        for num_more in (0, 1, 4):
            limit = (groups.most_full(320) + num_more) * engine.plan.block_bytes
            arguments = dict(enable_cpu_offload=True, host_memory_limit=limit, max_model_len=320)
            small = engine_of(**arguments, max_num_batched_tokens=128)
            assert run(small, [prompt], [greedy(4)]) == wanted
            assert_pools_as_before(small)


def test_rows_have_room_on_the_host_for_when_they_share_no_more_what_their_windows_have_left(path):
    """Each fills 22 blocks; they share 15, of which they leave 9 behind. So 30 are too few."""
    limits = dict(host_memory_limit=30 * LAYER_BLOCK_BYTES, max_model_len=160)
    engine = hollow(make_engine(path, enable_cpu_offload=True, **limits))
    assert engine.kv_cache.tables.groups.most_full(160) == 22
    engine.switch_mode("resident")
    (document,) = random_prompts(1, 96, 96, seed=3)
    for name in "AB":
        request = engine.add_request(name, document + [5] * 4, greedy(60))
        while request.sequences[0].num_computed < 100:
            engine.step()
    assert engine.kv_cache.tables.gpu_blocks.num_shared == 6 + 3 * 3
    engine.mover.transfers.finish()  # what may be evicted next is on its way down
    with pytest.raises(ValueError, match="switch to offload refused"):
        engine.switch_mode("offload")
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", [False, "auto", True])
@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sampled("14-False", "78-False", "1-True")
def test_no_step_is_shorter_than_was_planned_where_pools_have_a_reserve(path, seed, mode):
    """Whoever is let in leaves it to others' steps, and rows that grow do not use it up while prompts are computed."""
    generator, short = random.Random(seed), []
    limits = dict(num_gpu_blocks_override=generator.choice([360, 420]))
    limits |= dict(host_memory_limit=generator.choice([300, 400]) * LAYER_BLOCK_BYTES, max_model_len=320)
    sizes = dict(max_num_batched_tokens=generator.choice([128, 160]), max_num_seqs=24, capture_num_tokens=[])
    engine, params = hollow(make_engine(path, enable_cpu_offload=mode, **limits, **sizes)), random.Random(seed)
    max_chunk, requests = engine.kv_cache.max_chunk, random_prompts(24, 30, 300, seed=seed)
    requests = [(prompt, SamplingParams(max_tokens=params.randint(1, 60), ignore_eos=True)) for prompt in requests]

    def seen(sequence, wanted):
        found = max_chunk(sequence, wanted)
        if found < wanted and sequence.num_computed < len(sequence.prompt_token_ids):
            short.append((engine.mode, wanted, found))
        return found

    engine.kv_cache.max_chunk = seen
    play_at_random(engine, requests, generator, comes=generator.choice([0.3, 1.0]), is_aborted=0.02, is_switched=0)
    assert not short
    assert_pools_as_before(engine)


def test_prompts_of_one_step_do_not_count_on_the_same_host_blocks(path):
    """Each wants nine that it was not promised, and there are fewer than for both: a step failed."""
    documents = [prompt + [5] for prompt in random_prompts(2, 112, 112, seed=1)]
    prompts = [document[:112] + end for document, end in zip(documents, random_prompts(2, 88, 88, seed=2), strict=True)]
    for num_more in (4, 6, 8):
        limits = dict(host_memory_limit=(48 + num_more) * LAYER_BLOCK_BYTES, max_model_len=208)
        engine = hollow(make_engine(path, enable_cpu_offload=True, max_num_batched_tokens=192, **limits))
        assert 2 * engine.kv_cache.tables.groups.most_full(202) == 48
        for batch in (documents[:1], documents[1:], prompts):
            requests = [
                engine.add_request(str(len(prompt) + batch.index(prompt)), prompt, greedy(2)) for prompt in batch
            ]
            while engine.has_work:
                engine.step()
                check_references(engine)
        assert all(request.sequences[0].num_cached == 112 and request.error is None for request in requests)
        assert_pools_as_before(engine)


class Late:
    """Copies that are acknowledged so many steps after somebody has first asked for them, or waits."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.step, self.asked = num_steps, 0, {}

    def has_run(self, kind: str, operation: int, rule: str) -> bool:
        return self.step - self.asked.setdefault((kind, operation), self.step) >= self.num_steps

    def wait(self, kind: str, operation: int, rule: str) -> None:
        self.asked[kind, operation] = -self.num_steps


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sampled("5", "20", "35")
def test_rows_count_nothing_that_a_copy_on_its_way_holds_too(path, seed):
    """Of who gave way: the block is not free when the last row leaves it, so what was promised would not be there."""
    generator = random.Random(seed)
    pools = dict(num_gpu_blocks_override=generator.choice([70, 80, 90, 110, 130]), max_num_seqs=12, max_model_len=320)
    engine = hollow(make_engine(path, enable_cpu_offload=False, capture_num_tokens=[], **pools))
    late = engine.kv_cache.tables.lifetimes.acknowledgements = Late(generator.choice([10, 20, 40, 80]))
    documents = random_prompts(3, 64, 160, seed=seed)
    for late.step in range(400):
        if engine.intake.num_sequences < 40 and generator.random() < 0.5:
            document, count = generator.choice(documents), generator.choice([1, 2, 3])
            params = SamplingParams(n=count, max_tokens=generator.randint(20, 100), ignore_eos=True)
            engine.add_request(str(late.step), document, params)
        engine.step()
        assert engine.kv_cache.copies.gpu_room >= 0, "promised twice"
    assert engine.scheduler.num_preemptions


def test_a_row_does_not_count_a_block_that_something_else_holds(path):
    """It is not free when the row leaves it, so the row is promised another one beside it."""
    engine = hollow(make_engine(path))
    engine.add_request("0", [5] * 100, greedy(30))
    engine.step()
    (sequence,), tables = engine.scheduler.running, engine.kv_cache.tables
    number = tables.windowed[0]
    before, block = tables.promised[number, sequence.row], present(tables.gpu[number, sequence.row])[0]
    for is_held in (True, False):
        tables.owners.clear()
        if is_held:
            tables.gpu_blocks.hold(block)
        else:
            tables.gpu_blocks.release([block])
        engine.kv_cache.promise_windows(sequence)
        assert tables.promised[number, sequence.row] == before + is_held
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", [False, True])
def test_what_a_prompt_leaves_behind_takes_the_place_of_what_older_ones_left(path, mode):
    """So one that parts from it in the middle finds that, however much is cached already; and ends are kept."""
    limits = dict(num_gpu_blocks_override=61 if mode else 141, host_memory_limit=140 * LAYER_BLOCK_BYTES)
    engine = hollow(make_engine(path, enable_cpu_offload=mode, max_model_len=320, **limits))
    prompts = random_prompts(3, 290, 290, seed=12)
    for prompt in prompts:
        run(engine, [prompt], [greedy(4)])
    pool = engine.kv_cache.tables.home[1]
    assert pool.num_free - pool.num_cached <= len(engine.kv_cache.tables.groups), "it is not full"
    before = engine.stats()["prefix_cache_hit_tokens"]
    run(engine, [prompts[-1][:150] + [5] * 9], [greedy(4)])
    assert engine.stats()["prefix_cache_hit_tokens"] - before == 144
    run(engine, [prompts[-2] + [5] * 9], [greedy(4)])
    assert engine.stats()["prefix_cache_hit_tokens"] - before == 144 + 288
    assert_pools_as_before(engine)


@pytest.fixture(scope="module")
def paths(path, tmp_path_factory):
    """Model -> its path: one shape, and two with blocks of other sizes, whose layers without a window have the larger
    blocks or the smaller ones."""
    with registered():
        names = "wide windows", "narrow windows"
        yield {"gemma3": path} | {name: write_model(tmp_path_factory.mktemp("shapes"), name) for name in names}


@pytest.mark.parametrize("stretch", [True, False])
def test_blocks_that_decode_fills_stream_in_runs(path, stretch, monkeypatch):
    """A group has stretches of the host's blocks: without them, groups would take numbers in turn."""
    if not stretch:
        monkeypatch.setattr(
            "nanoinfer.engine.start.HostBlocks", lambda memory, count, stretch: HostBlocks(memory, count)
        )
    engine, lengths = hollow(make_engine(path, enable_cpu_offload=True, host_memory_limit="1MiB")), []

    def at_step(engine, step):
        numbers = sorted(present(engine.kv_cache.tables.host[0]))  # of the group without a window
        if len(numbers) >= 40:
            lengths.append(len(numbers) / len(runs(list(enumerate(numbers)))))

    run(engine, random_prompts(4, 20, 40, seed=3), [greedy(200)] * 4, at_step)
    assert len(lengths) > 10 and (min(lengths) > 4) == stretch


def workload(paths, seed: int) -> None:
    """A tree of prompts with shared beginnings, in some mode, with switches, preemption and small pools."""
    generator = random.Random(seed)
    model, mode = generator.choice(list(paths)), generator.choice(list(MODES))
    engine_of = partial(make_engine, paths[model])
    if model in MODELS:
        engine_of = partial(engine_of, load_format="dummy", block_size=MODELS[model].block_size)
    arguments = MODES[mode] | dict(
        max_num_batched_tokens=generator.choice([16, 48, 64]), capture_num_tokens=[], max_model_len=320,
        max_num_seqs=generator.choice([2, 4]),
    )  # fmt: skip
    if mode != "auto" and generator.random() < 0.5:
        arguments["num_gpu_blocks_override"] = generator.choice([44, 52])
    trunk = random_prompts(1, 160, 160, seed=seed)[0]
    prompts = []
    for _ in range(6):
        cut = generator.choice([0, 16, 64, 100, 130, 160])
        prompts.append(trunk[:cut] + random_prompts(1, 1, 60, seed=generator.randrange(99))[0])
    params = some_params(6, 40)
    engine = engine_of(SimulatedRuntime(generator.choice([None, seed])), **arguments)
    switches = switching({step: generator.choice(["offload", "resident"]) for step in (9, 21, 33)})

    def at_step(engine, step):
        check_references(engine)
        if mode != "resident" and mode != "auto":
            try:
                switches(engine, step)
            except ValueError:
                pass  # no room

    got = run(engine, prompts, params, at_step)
    again = run(engine, prompts[::-1], params[::-1])[::-1]
    cold = engine_of(enable_prefix_caching=False)
    wanted = run(cold, prompts, params)
    assert got == wanted and again == wanted
    assert run(cold, prompts[:1], params[:1]) == wanted[:1], "a request alone has other bits"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", [True, "auto"])
def test_what_the_last_one_is_giving_back_is_no_room_twice(tmp_path, mode):
    """Whoever begins as the one did that has just ended finds its windows' blocks, which that one gives back later."""
    path = make_checkpoint("gemma3", tmp_path, **SMALL | dict(num_layers=4, sliding_window=40))
    arguments = dict(num_gpu_blocks_override=36, max_model_len=None, max_num_seqs=2, host_memory_limit=70 * 2048)
    arguments |= dict(resident_kv_limit=None, ring_slot_bytes=8192, num_ring_slots=2)
    engine = hollow(make_engine(path, enable_cpu_offload=mode, **arguments))
    if mode == "auto":
        engine.switch_mode("offload")
    (prompt,) = random_prompts(1, 62, 62, seed=1)
    engine.add_request("first", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=840, ignore_eos=True)
    second = engine.add_request("second", prompt[:52] + [7] * 6, params)
    while engine.has_work:
        engine.step()
    assert second.sequences[0].finish_reason == "length", second.error


@pytest.mark.sampled("0", "1", "3", "70")  # in each mode one
@pytest.mark.parametrize("seed", range(1000))
def test_trees_of_prompts_with_windows_have_the_bits_of_each_alone(paths, seed):
    workload(paths, seed)


def test_a_block_that_is_given_back_too_early_is_seen(path, monkeypatch):
    """The proof of the tests above: a window that moves one block too far changes an answer, or is refused."""
    leave = KVCache.leave_windows

    def too_early(self, sequence):
        computed = sequence.num_computed
        sequence.num_computed += 16
        try:
            return leave(self, sequence)
        finally:
            sequence.num_computed = computed

    prompts = random_prompts(2, 60, 200, seed=4)
    wanted = [run(make_engine(path), [prompt], [greedy(30)])[0] for prompt in prompts]
    monkeypatch.setattr(KVCache, "leave_windows", too_early)
    with pytest.raises(AssertionError):
        assert run(make_engine(path), prompts, [greedy(30)] * 2) == wanted
