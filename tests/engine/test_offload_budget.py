"""Offload mode with part of the KV blocks on the GPU, and with a host that runs one step ahead.

Whatever share of the blocks stays, and in whatever order the streams run: the same bits as in resident mode.
"""

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
from checksum import BLOCK_BYTES, LAYER_BLOCK_BYTES
from engines import (
    MOVE_RULES,
    RULES,
    SMALL,
    VOCAB,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    read_at_once,
    run,
    some_params,
)
from request_helpers import Script, play, shrink_gpu_pool
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer import LLMEngine, SamplingParams

pytestmark = pytest.mark.usefixtures("checksums")
FAMILIES = {"qwen3": {}, "llama": {}, "gemma3": dict(sliding_window=6)}
ARGUMENTS = dict(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=48, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
OFFLOAD = ARGUMENTS | dict(enable_cpu_offload=True, resident_kv_limit=None)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Checkpoints with a tokenizer of one word per token: "w17" is token 17."""

    @functools.cache
    def make(family):
        path = make_checkpoint(family, tmp_path_factory.mktemp("model"), **(SMALL | FAMILIES[family]))
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
        return path

    return make


def greedy(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | arguments))


def random_script(generator: random.Random) -> Script:
    """Eight requests of unequal lengths, some with log-probabilities."""
    arrivals = {}
    for i in range(8):
        prompt = random_prompts(1, 1, 27, seed=generator.getrandbits(30))[0]
        logprobs = generator.choice([None, None, 2])
        params = greedy(generator.randint(1, 15), temperature=0.8 * (i % 2), seed=i, logprobs=logprobs)
        arrivals.setdefault(generator.choice([0, 0, 4, 8]), []).append((prompt, params))
    arrivals = dict(sorted(arrivals.items()))
    # Two that cannot have ended by then.
    arrivals[9] = [(random_prompts(1, length, length, seed=length)[0], greedy(15)) for length in (18, 10)]
    return Script(arrivals, aborts={10: 8, 12: 9})


class Watch:
    """What happens to the blocks of an engine: those that left the GPU, those that came back, those that streamed.

    Attributes:
        promoted: blocks that came back in each decode step.
        dropped: blocks that left at each drop.
        states: (kv_blocks_resident, kv_blocks_streamed, streamed_bytes, graph_replays) before each step.
        filled: (layer, blocks) of each ring fill that was used, by kind of step.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.promoted, self.dropped, self.states = [], [], []
        self.filled = {"PrefillStep": Counter(), "DecodeStep": Counter()}
        residency, offload, step = engine.kv_cache.copies.residency, engine.runner.offload, engine.step
        promote, drop = residency.promote, residency.drop
        residency.promote = lambda *args: self._note(self.promoted, promote(*args))
        residency.drop = lambda *args: self._note(self.dropped, drop(*args))
        run_step = offload.run

        def watched_run(offload_step, *args):
            plan = offload_step.stream_plan.at
            if any(plan) or type(offload_step).__name__ == "DecodeStep":
                for layer, chunks in enumerate(plan[:-1]):
                    self.filled[type(offload_step).__name__][layer] += sum(len(chunk.blocks) for chunk in chunks)
            return run_step(offload_step, *args)

        def watched_step():
            replays = engine.runner.decode_program.counters.graph_replays
            streamed_bytes = offload.counters.streamed_bytes
            self.states.append((residency.num_resident, residency.num_streamed, streamed_bytes, replays))
            return step()

        offload.run, engine.step = watched_run, watched_step

    @staticmethod
    def _note(where: list, blocks: list) -> list:
        where.append(len(blocks))
        return blocks


def counting_runtime(seed: int | None = None) -> tuple[SimulatedRuntime, list]:
    """A runtime, and a list that grows with every graph that is captured."""
    runtime, captured = SimulatedRuntime(seed), []
    capture = runtime.capture
    runtime.capture = lambda *args: captured.append(1) or capture(*args)
    return runtime, captured


# Any budget


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled("gemma3-0")
def test_any_budget_pool_ring_and_order_gives_the_same_batches_and_bits_as_resident_mode(path_of, family, seed, fuzz):
    generator = random.Random(10 * seed + 1)
    script = random_script(generator)
    wanted = play(make_engine(path_of(family), **ARGUMENTS, enable_prefix_caching=False), script)
    num_promoted = num_dropped = 0
    for trial in range(4 if fuzz else 2):
        runtime, captured = counting_runtime(generator.choice([None, generator.getrandbits(20)]))
        limit = generator.choice([None, None, generator.randint(1, 12) * BLOCK_BYTES])
        pool = generator.randint(10, 26)  # with 9, chunks of models with windows are shorter
        arguments = dict(
            resident_kv_limit=limit,
            num_ring_slots=generator.randint(2, 5),
            ring_slot_bytes=generator.randint(1, 4) * LAYER_BLOCK_BYTES,
            enable_prefix_caching=False,
        )
        engine = make_engine(path_of(family), runtime, **(OFFLOAD | arguments))
        num_captured = len(captured)
        give_back = shrink_gpu_pool(engine, pool)
        watch = Watch(engine)
        assert play(engine, script) == wanted, (trial, pool, arguments)
        assert len(captured) == num_captured > 0, "a graph was captured again"
        give_back()
        assert_pools_as_before(engine)
        if limit is not None:
            limit_in_blocks = limit // engine.runner.layout.block_bytes
            assert all(state[0] <= limit_in_blocks for state in watch.states), "the limit does not hold"
        num_promoted, num_dropped = num_promoted + sum(watch.promoted), num_dropped + sum(watch.dropped)
    assert num_promoted > 10 and num_dropped > 10, "hardly a block moved"


def test_blocks_leave_as_sequences_grow_and_come_back_when_others_end(path_of):
    """With everything back, nothing streams and a step is one graph."""
    prompts = random_prompts(3, 15, 15, seed=4)
    params = [greedy(19, logprobs=1), greedy(10, logprobs=1), greedy(10, logprobs=1)]
    wanted = run(make_engine(path_of("qwen3"), **ARGUMENTS), prompts, params)
    runtime, captured = counting_runtime()
    engine = make_engine(path_of("qwen3"), runtime, **OFFLOAD)
    num_captured = len(captured)
    give_back = shrink_gpu_pool(engine, 15)  # 15 + 19 tokens are 9 blocks; all three have 18 when the two end
    watch = Watch(engine)
    num_checked, stated = 0, []

    def check_device_tables(engine, step):
        """Backends that attend to whole rows read the table on the device in steps that stream nothing."""
        nonlocal num_checked
        stats = engine.stats()
        names = ("kv_blocks_resident", "kv_blocks_streamed", "streamed_bytes", "graph_replays")
        stated.append(tuple(stats[name] for name in names))
        kv_cache, rows = engine.kv_cache, engine.runner.decode_program.rows
        for sequence in engine.scheduler.running:
            is_sent = engine.planner.sent_versions[sequence.row] == kv_cache.tables.gpu_versions[sequence.row]
            if watch.promoted and sequence.num_generated and is_sent:
                held = kv_cache.tables.gpu[0, sequence.row]
                assert rows.block_table[sequence.row].numpy()[held >= 0].tolist() == held[held >= 0].tolist()
                num_checked += 1

    assert run(engine, prompts, params, check_device_tables) == wanted
    assert num_checked > 4 and stated == watch.states
    streamed = [state[1] for state in watch.states]
    began = next(step for step, count in enumerate(streamed) if count)
    ended = max(step for step, count in enumerate(streamed) if count) + 1
    assert 4 < began < ended < len(streamed) - 5, "streaming does not begin in the middle and end before the end"
    assert max(streamed) >= 4 and sum(watch.promoted) >= 2 and sum(watch.dropped) >= 4
    assert all(state[2] == 0 for state in watch.states[: began + 1]) and watch.states[ended][2] > 0
    last = watch.states[ended + 1 :]
    assert {state[2] for state in last} == {watch.states[ended + 1][2]}, "something streams although everything fits"
    assert [b[3] - a[3] for a, b in zip(last, last[1:], strict=False)] == [1] * (len(last) - 1)
    assert len(captured) == num_captured
    give_back()
    assert_pools_as_before(engine)


def test_layers_with_a_window_stream_what_it_sees_and_no_more(path_of):
    """Of rows of seven blocks the layer with full attention streams all that are full, the other one the newest two."""
    engine = make_engine(path_of("gemma3"), **OFFLOAD | dict(resident_kv_limit=0))
    watch = Watch(engine)
    run(engine, random_prompts(4, 23, 27, seed=6), [greedy(8)] * 4)
    windowed, full = watch.filled["DecodeStep"][0], watch.filled["DecodeStep"][1]
    assert 0 < windowed < full / 2
    assert_pools_as_before(engine)


@pytest.mark.parametrize("pool", [8, 14])
def test_every_layer_with_full_attention_streams_the_same_bytes(path_of, pool):
    engine = make_engine(path_of("llama"), **OFFLOAD)
    give_back = shrink_gpu_pool(engine, pool)
    watch = Watch(engine)
    run(engine, random_prompts(4, 12, 27, seed=7), some_params(4, max_tokens=14, logprobs=None))
    for filled in watch.filled.values():
        assert filled[0] == filled[1] > 0
    stats = engine.stats()
    used = sum(sum(filled.values()) for filled in watch.filled.values()) * LAYER_BLOCK_BYTES
    assert stats["streamed_bytes"] - stats["discarded_prefetch_bytes"] == used
    give_back()
    assert_pools_as_before(engine)


# Shared prefixes and switches

PREFIX = random_prompts(1, 18, 18, seed=11)[0]
SHARED = [
    (PREFIX + tail, greedy(5 + i, temperature=0.7 * (i % 2), seed=i, n=1 + i % 2, logprobs=[None, 2][i % 2]))
    for i, tail in enumerate(random_prompts(5, 1, 7, seed=12))
]
# The first request's blocks are published before the others come.
SHARED_SCRIPT = {0: SHARED[:1], 4: SHARED[1:3], 7: SHARED[3:]}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    "pool, modes",
    [(38, {1: "offload"}), (62, {9: "resident", 12: "offload"}), (38, {3: "resident", 8: "offload"})],
)
@pytest.mark.sampled("62-modes1-qwen3", "38-modes2-gemma3")
def test_a_shared_prefix_survives_switches_with_any_budget(path_of, family, pool, modes, fuzz):
    """Which blocks are found in the cache depends on the mode, so runs with equal modes are compared.

    Rows that share host blocks get GPU blocks of their own when resident mode comes back, so that takes a larger pool.
    """
    arguments = dict(max_num_seqs=8, max_model_len=40)

    def play_with(seed=None, num_gpu_blocks=None, **budget):
        engine = make_engine(path_of(family), SimulatedRuntime(seed), **(OFFLOAD | arguments | budget))
        played = play(engine, Script(SHARED_SCRIPT, modes=modes, num_gpu_blocks=num_gpu_blocks))
        assert engine.scheduler.num_preemptions == 0
        assert engine.stats()["num_prefill_tokens"] < sum(len(prompt) * params.n for prompt, params in SHARED) - 25
        assert_pools_as_before(engine)
        return played

    wanted = play_with(resident_kv_limit=0)
    pool += 24 * (family == "gemma3")  # three blocks for each row in the group that has a window
    budgets = [dict(num_gpu_blocks=pool), dict(resident_kv_limit=9 * BLOCK_BYTES)]
    for seed in (None, 1) if fuzz else (1,):
        for budget in budgets if fuzz else budgets[pool == 62 :][:1]:
            played = play_with(seed, **budget)
            if family == "gemma3":  # who finds its beginning on the host waits for that to arrive, in any order
                assert played.outcomes == wanted.outcomes
            else:
                assert played == wanted


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.sampled("1")
def test_blocks_that_rows_share_when_offload_mode_begins_can_leave_one_by_one(path_of, seed):
    """In resident mode rows share GPU blocks: dropping one row's share of a block gives the pool nothing back."""
    prompts = [PREFIX + tail for tail in random_prompts(4, 1, 3, seed=2)]
    params = [greedy(10)] * 4
    outcomes = []
    for num_gpu_blocks in (None, 13):
        engine = make_engine(path_of("qwen3"), SimulatedRuntime(seed), **(OFFLOAD | dict(enable_cpu_offload=False)))
        give_back = shrink_gpu_pool(engine, num_gpu_blocks) if num_gpu_blocks else lambda: None
        run(engine, [[*PREFIX, 5]], [greedy(2)])

        def at_step(engine, step):
            if step == 6:
                held = engine.kv_cache.tables.gpu_blocks.num_used
                assert sum(s.num_computed // 4 for s in engine.scheduler.running) > held - 90, "nothing is shared"
                engine.switch_mode("offload")

        outcomes.append(run(engine, prompts, params, at_step))
        assert engine.stats()["streamed_bytes"] > 0 or num_gpu_blocks is None
        give_back()
        assert_pools_as_before(engine)
    assert outcomes[0] == outcomes[1]


def test_host_blocks_that_others_still_hold_are_not_promised_as_soon_as_one_row_ends(path_of):
    """A short request ends while another holds its prefix; the third, which waits, must not be let in for that."""
    prefix = random_prompts(1, 12, 12)[0]
    prompts = [[*prefix, 5], [*prefix, 6, 7], random_prompts(1, 13, 13, seed=4)[0]]
    params = [greedy(2), greedy(11), greedy(10)]
    wanted = [completions[0][0] for completions in run(make_engine(path_of("qwen3"), **ARGUMENTS), prompts, params)]
    arguments = OFFLOAD | dict(resident_kv_limit=0, host_memory_limit=8 * BLOCK_BYTES, max_model_len=28)
    engine = make_engine(path_of("qwen3"), **arguments)
    run(engine, [[*prefix, 3]], [greedy(2)])
    outcomes = run(engine, prompts, params)
    assert [completions[0][0] for completions in outcomes] == wanted
    assert engine.kv_cache.tables.lifetimes.host_blocks.num_cached > 0
    assert_pools_as_before(engine)


def test_host_blocks_that_the_next_row_takes_up_again_are_not_promised_to_it_as_new_room(path_of):
    """A request ends, and the one that waited for its row finds its prefix while copies may still touch the blocks."""
    prefix = random_prompts(1, 12, 12)[0]
    prompts = [[*prefix, 5], random_prompts(1, 5, 5, seed=4)[0], [*prefix, 6, 7]]
    params = [greedy(2), greedy(14), greedy(10)]
    wanted = [completions[0][0] for completions in run(make_engine(path_of("qwen3"), **ARGUMENTS), prompts, params)]
    arguments = OFFLOAD | dict(resident_kv_limit=0, host_memory_limit=8 * BLOCK_BYTES, max_model_len=28)
    engine = make_engine(path_of("qwen3"), **(arguments | dict(max_num_seqs=2)))
    outcomes = run(engine, prompts, params)
    assert [completions[0][0] for completions in outcomes] == wanted
    assert engine.stats()["num_prefill_tokens"] < sum(map(len, prompts)) - 11, "the prefix was not found"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.sampled("1")
def test_blocks_that_came_back_through_the_ring_serve_others_in_resident_mode_with_all_their_layers(path_of, seed):
    """Also those of a window that has moved on since, which one who comes later begins with."""
    first, other = random_prompts(2, 22, 22, seed=16)
    params = [greedy(16), greedy(4)]
    tokens = []
    for num_gpu_blocks in (None, 13):
        engine = make_engine(path_of("gemma3"), SimulatedRuntime(seed), **OFFLOAD)
        give_back = shrink_gpu_pool(engine, num_gpu_blocks) if num_gpu_blocks else lambda: None
        watch = Watch(engine)
        requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip([first, other], params))]
        while requests[0].sequences[0].num_generated < 12:
            engine.step()
        assert requests[1].is_finished and (sum(watch.promoted) > 0) == (num_gpu_blocks is not None)
        engine.switch_mode("resident")
        give_back()
        again = engine.add_request("again", [*first[:13], 7, 8], greedy(4))
        while engine.has_work:
            engine.step()
        assert again.sequences[0].num_cached == 12
        tokens.append([outcome(request)[0][0] for request in (*requests, again)])
        assert_pools_as_before(engine)
    assert tokens[0] == tokens[1]


# Orders of the streams


TIGHT = OFFLOAD | dict(
    max_num_seqs=3,
    max_num_batched_tokens=12,
    max_model_len=40,
    num_ring_slots=2,
    ring_slot_bytes=LAYER_BLOCK_BYTES,
    host_memory_limit=15 * BLOCK_BYTES,
    enable_prefix_caching=False,
)
LENGTHS = (10, 6, 5, 10, 6, 15)
PAIRS = [
    (prompt, replace(params, max_tokens=length))
    for prompt, params, length in zip(random_prompts(6, 15, 22, seed=3), some_params(6), LENGTHS, strict=True)
]
TIGHT_SCRIPT = Script({0: PAIRS[:2], 3: PAIRS[2:4], 9: PAIRS[4:]}, aborts={5: 1, 10: 3}, num_gpu_blocks=9)


def play_tight(path_of, seed):
    engine = make_engine(path_of("qwen3"), SimulatedRuntime(seed), **TIGHT)
    watch = Watch(engine)
    played = play(engine, TIGHT_SCRIPT)
    assert_pools_as_before(engine)
    return played, engine, watch


def test_every_order_of_the_streams_gives_the_same_bits_with_a_host_that_runs_ahead(path_of, fuzz):
    wanted, engine, watch = play_tight(path_of, None)
    assert sorted(engine.runner.runtime.rules_seen - MOVE_RULES) == RULES
    assert sum(watch.promoted) and sum(watch.dropped) >= 5
    for seed in range(12 if fuzz else 1):
        assert play_tight(path_of, seed)[0] == wanted, f"seed {seed}"


# The host runs ahead: tokens are read one step late


def prompts_and_params(**arguments) -> list[tuple[list[int], SamplingParams]]:
    prompts = random_prompts(4, 1, 15, seed=21)
    defaults = [dict(max_tokens=12 + i, temperature=0.9 * (i % 2), seed=i) for i in range(4)]
    return [(prompt, greedy(**(default | arguments))) for prompt, default in zip(prompts, defaults, strict=True)]


BOTH_MODES = pytest.mark.parametrize("budget", [None, 8 * BLOCK_BYTES, "resident"])


def engine_with(path, budget, **arguments) -> LLMEngine:
    mode = dict(enable_cpu_offload=False) if budget == "resident" else dict(resident_kv_limit=budget)
    return make_engine(path, **(OFFLOAD | mode | arguments))


def tokens_and_reasons(engine, pairs, is_ahead=True):
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(pairs)]
    num_ahead = 0
    while engine.has_work:
        engine.step()
        num_ahead += engine.live.in_flight is not None and len(engine.live.in_flight.batch.sampled)
    assert (num_ahead > 0) == is_ahead
    assert_pools_as_before(engine)
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in request.output().outputs]
        for request in requests
    ]


@BOTH_MODES
@pytest.mark.parametrize(
    "arguments",
    [
        dict(repetition_penalty=1.4),
        dict(repetition_penalty=0.7, top_k=20),
        dict(presence_penalty=0.8, frequency_penalty=0.4),
        dict(frequency_penalty=-0.3, n=2),
        dict(min_tokens=9, ignore_eos=False, stop_token_ids=list(range(0, VOCAB, 3))),
        dict(stop_token_ids=list(range(0, VOCAB, 9))),
        dict(n=3, top_p=0.8, stop_token_ids=list(range(0, VOCAB, 20))),
        dict(stop=[f"w{token}" for token in range(10, VOCAB, 12)]),
        dict(max_tokens=1),
    ],
    ids=lambda arguments: " ".join(arguments),
)
@pytest.mark.sampled(
    "repetition_penalty-8192",
    "repetition_penalty top_k-None",
    "presence_penalty frequency_penalty-resident",
    "frequency_penalty n-8192",
    "min_tokens ignore_eos stop_token_ids-None",
    "stop_token_ids-resident",
    "n top_p stop_token_ids-8192",
    "stop-None",
    "max_tokens-resident",
)
def test_running_ahead_gives_the_tokens_of_an_engine_that_reads_every_step_at_once(path_of, budget, arguments):
    pairs = prompts_and_params(**arguments)
    engine = engine_with(path_of("qwen3"), budget, skip_tokenizer_init=False, enable_prefix_caching=False)
    found = tokens_and_reasons(engine, pairs)
    wanted = tokens_and_reasons(read_at_once(engine), pairs, is_ahead=False)
    assert found == wanted
    ends = {reason for completions in wanted for _, _, reason, _ in completions}
    assert ("stop" in ends) == any(name.startswith("stop") for name in arguments)


@BOTH_MODES
@pytest.mark.sampled("resident", "8192")
def test_a_stop_token_ends_a_request_with_itself_although_one_more_step_was_launched(path_of, budget):
    """At every place in the output, block edges included; the row and the blocks serve the next request at once."""
    prompt = random_prompts(1, 5, 5, seed=5)[0]
    engine = engine_with(path_of("qwen3"), budget, max_num_seqs=1)
    drawn = functools.partial(greedy, 12, temperature=1.0, seed=1)  # hardly a token twice
    (((free, _, _),),) = run(engine, [prompt], [drawn()])
    places = [place for place, token in enumerate(free) if token not in free[:place]]
    assert len(places) > 8
    assert {(len(prompt) + place) % 4 for place in places} == {0, 1, 2, 3}
    requests = [engine.add_request(f"stop at {place}", prompt, drawn(stop_token_ids=[free[place]])) for place in places]
    while engine.has_work:
        engine.step()
    for place, request in zip(places, requests, strict=True):
        ((tokens, _, reason),) = outcome(request)
        assert (tokens, reason) == (free[: place + 1], "stop")
        assert request.output().outputs[0].stop_reason == free[place]
    assert engine.scheduler.num_preemptions == 0
    assert_pools_as_before(engine)


@BOTH_MODES
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.sampled("None-resident", "3-8192")
def test_an_abort_between_steps_touches_nobody_else_and_its_id_and_row_serve_again(path_of, budget, seed, fuzz):
    """The step in flight still writes to the row when another sequence has it already."""
    prompts = random_prompts(3, 5, 12, seed=8)
    params = greedy(10)
    runtime = SimulatedRuntime(seed)
    engine = engine_with(path_of("qwen3"), budget, runtime=runtime, max_num_seqs=2, enable_prefix_caching=False)
    wanted = [completions[0][0] for completions in run(engine, prompts, [params] * 3)]
    for num_steps in range(3, 10) if fuzz else (3, 5) if seed is None else (3, 8):
        victim = engine.add_request("same id", prompts[0], params)
        other = engine.add_request("other", prompts[1], params)
        for _ in range(num_steps):
            engine.step()
        row = victim.sequences[0].row
        assert engine.abort("same id")
        again = engine.add_request("same id", prompts[2], params)
        rows = set()
        while engine.has_work:
            engine.step()
            rows.add(again.sequences[0].row)
        assert row in rows
        assert outcome(victim)[0][0] == wanted[0][: len(outcome(victim)[0][0])]
        assert (outcome(other)[0][0], outcome(again)[0][0]) == (wanted[1], wanted[2])
        assert_pools_as_before(engine)


def test_a_sequence_preempted_with_a_token_that_was_not_read_goes_on_with_that_token(path_of):
    prompts = random_prompts(4, 7, 9, seed=9)
    params = [greedy(10, temperature=0.8 * (i % 2), seed=i, frequency_penalty=0.2) for i in range(4)]
    plain = engine_with(path_of("qwen3"), "resident", enable_prefix_caching=False)
    wanted = [completions[0][0] for completions in run(plain, prompts, params)]
    engine = engine_with(path_of("qwen3"), "resident", enable_prefix_caching=False)
    give_back = shrink_gpu_pool(engine, 12)
    save, pending = engine.mover.give_way, []
    engine.mover.give_way = lambda sequence: pending.append(sequence.num_pending) or save(sequence)
    assert [completions[0][0] for completions in run(engine, prompts, params)] == wanted
    assert 1 in pending, "nobody was preempted with a token in flight"
    give_back()
    assert_pools_as_before(engine)
