"""Drafts change no token and no log-probability, whatever is guessed, and leave no trace where they are wrong."""

import random
from itertools import pairwise

import pytest
from engines import (
    LAYER_BLOCK_BYTES,
    SMALL,
    VOCAB,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
    switching,
)
from guessing import Right, guess
from simulated import RaceError, SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.engine.drafts import KEPT, MOST_UNASKED, MOST_UNKNOWN, Balance
from nanoinfer.engine.figures import FACTS, Reading, values
from nanoinfer.engine.suffixes import LONG, SHORT, SuffixIndex
from nanoinfer.kv.cache import KVCache
from nanoinfer.serve.served_requests import ServedRequests

SUFFIX = dict(method="suffix", num_speculative_tokens=5)
OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
ENGINES = {
    "resident": dict(resident_kv_limit=None),
    "offload": OFFLOAD,
    "some blocks stay": OFFLOAD | dict(resident_kv_limit=None, num_gpu_blocks_override=20),
    "gives way": dict(num_gpu_blocks_override=20, max_model_len=160),
    "weights stream": OFFLOAD | dict(resident_weights_limit=0, block_size=32, ring_slot_bytes=2**15),
}
FAMILIES = {
    "qwen3": SMALL,
    "gemma3": dict(sliding_window=24),
    "gpt_oss": dict(sliding_window=24),
    "qwen3_moe": {},
    "gemma4_moe": {},
    "lfm2": {},
    "lfm2_moe": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {},
}


def requests_of(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, with all that may differ between rows that draft and those that do not."""
    kinds = [
        dict(temperature=0),
        dict(temperature=0.9, top_p=0.9, logprobs=None),
        dict(temperature=0.7, min_tokens=20, stop_token_ids=[5, 9]),
        dict(temperature=0.9, n=2),
        dict(temperature=0, presence_penalty=0.7),
        dict(temperature=0.9, logit_bias={7: 3.0}),
    ]
    prompts = random_prompts(len(kinds), 40, 90, seed)
    common = dict(seed=seed, max_tokens=26, ignore_eos=True, logprobs=2)
    return [(prompt, SamplingParams(**common | kind)) for prompt, kind in zip(prompts, kinds, strict=True)]


def check(path, seed: int, runtime=None, at_step=None, **arguments):
    """Compare an engine that drafts from what comes, right and wrong, with one that does not."""
    requests = requests_of(seed)
    common = dict(max_num_seqs=4) | {
        name: arguments[name] for name in ("max_model_len", "kv_cache_dtype", "block_size") if name in arguments
    }
    engine = make_engine(path, runtime, speculative_config=SUFFIX, **common | arguments)
    wanted = guess(engine, make_engine(path, **common), requests, random.Random(seed))
    assert run(engine, *map(list, zip(*requests, strict=True)), at_step) == wanted
    assert_pools_as_before(engine)
    return engine


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(
    "qwen3-resident", "gemma3-offload", "qwen3_moe-gives way", "gemma4_moe-weights stream", "gemma3-gives way",
    "lfm2-gives way", "qwen3_next-weights stream",
)  # fmt: skip
def test_any_draft_gives_the_bits_of_none(path_of, family, name):
    # Layers of two shapes have no smaller blocks.
    large = dict(block_size=32, ring_slot_bytes=2**15) if family == "gemma4_moe" else {}
    engine = check(path_of(family, **FAMILIES[family]), 1, **ENGINES[name] | large)
    drafts, stats = engine.drafts, engine.stats()
    assert 0 < drafts.num_accepted < drafts.num_drafted
    assert (stats["num_preemptions"] > 0) == (name == "gives way") and (stats["streamed_bytes"] > 0) == (
        name not in ("resident", "gives way")
    )


def test_who_comes_back_to_its_row_samples_on_though_drafted_tokens_had_it_meanwhile(path_of, monkeypatch):
    """Where as many are drafted as there are rows: in offload mode nobody has to end before it comes back."""
    for user in "nanoinfer.memory.sized", "nanoinfer.engine.drafts":
        monkeypatch.setattr(f"{user}.MAX_LINES", 6)
    row_of, left, back, drafted = {}, [], [], []

    def at_step(engine, step):
        if not left and engine.mover.away:
            (sequence,), begin_step = engine.mover.away, engine.planner.begin_step
            left.append((sequence, row_of[sequence]))
            engine.planner.begin_step = lambda batch: drafted.append(begin_step(batch)) or drafted[-1]
        elif left and engine.mode == "resident" and any(left[0][1] in plan.rows for plan in drafted):
            engine.switch_mode("offload")
        elif left and not back and left[0][0].row is not None:
            back.append(left[0][0].row)
        row_of.update((one, one.row) for one in engine.scheduler.running)

    check(path_of("qwen3", **SMALL), 1, at_step=at_step, **ENGINES["gives way"])
    assert back == [left[0][1]] and left[0][0].params.temperature


def test_whose_state_is_not_that_behind_its_last_token_answers_otherwise(path_of, monkeypatch):
    monkeypatch.setattr(KVCache, "take_state", lambda *_: None)
    with pytest.raises(AssertionError):
        check(path_of("lfm2", **SMALL), 1)


@pytest.mark.parametrize("name", [*ENGINES, "auto"])
def test_drafts_that_nobody_asked_for_come_where_something_streams(path_of, name):
    arguments = dict(max_num_seqs=4) | ENGINES.get(name, dict(enable_cpu_offload="auto", resident_kv_limit=None))
    path, requests = path_of("qwen3", **SMALL), requests_of(6)[:3]
    engine = make_engine(path, speculative_config="auto", **arguments)
    streams = name not in ("resident", "gives way", "auto")
    if engine.drafts is None:
        assert not streams
        return
    common = {key: arguments[key] for key in ("max_model_len", "block_size") if key in arguments}
    wanted = guess(engine, make_engine(path, max_num_seqs=4, **common), requests, random.Random(6))
    assert run(engine, *map(list, zip(*requests, strict=True))) == wanted
    assert (engine.drafts.num_accepted > 0) == streams
    assert_pools_as_before(engine)


def test_many_sequences_draft_only_where_that_was_asked_for(path_of):
    path, requests, seen = path_of("qwen3", **SMALL), requests_of(7), set()
    engine = make_engine(path, speculative_config="auto", **OFFLOAD)
    wanted = guess(engine, make_engine(path), requests, random.Random(7))
    add = engine.drafts.add

    def noting(batch):
        found = add(batch)
        seen.add((len(found.decoding) > MOST_UNASKED, bool(found.drafts)))
        return found

    engine.drafts.add = noting
    assert run(engine, *map(list, zip(*requests, strict=True))) == wanted
    assert {(True, False), (False, True)} <= seen and (True, True) not in seen


def test_who_changes_logits_sees_drafts_only_where_they_were_asked_for(path_of):
    path, requests = path_of("qwen3", **SMALL), requests_of(8)[:2]
    for config in ("auto", SUFFIX):
        engine = make_engine(path, speculative_config=config, **OFFLOAD)
        guess(engine, make_engine(path), requests, random.Random(8))
        engine.on_logits = lambda sequences, logits: None
        run(engine, *map(list, zip(*requests, strict=True)))
        assert (engine.drafts.num_drafted > 0) == (config is SUFFIX)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "k8v4", "int4"])
@pytest.mark.sampled("k8v4")  # its keys have codes of the first kind, its values of the last
@pytest.mark.filterwarnings("ignore:this small model loses much")
def test_codes_of_what_was_wrong_leave_no_trace(path_of, kv_cache_dtype):
    check(path_of("qwen3", head_dim=32), 2, kv_cache_dtype=kv_cache_dtype, **OFFLOAD)


@pytest.mark.parametrize("family", ["qwen3", "lfm2", "qwen3_5"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled("3-qwen3", "4-lfm2", "5-qwen3_5")
def test_every_order_of_streams_and_switches_give_the_same_bits(path_of, seed, family):
    modes = {7: "resident", 15: "offload", 22: "resident", 30: "offload"}
    arguments = OFFLOAD | dict(num_gpu_blocks_override=90, resident_kv_limit=None)
    check(path_of(family, **SMALL), seed, SimulatedRuntime(seed), switching(modes), **arguments)


def test_a_block_that_drafts_have_filled_is_read_when_it_was_written(path_of, monkeypatch):
    """It is copied behind the step that filled it, and the next one reads it from the host."""
    dropped = {"ring.fill_after_write_through": 0, "write_through.after_kv_is_written": 0}
    for rule in dropped:
        for seed in range(40):
            try:
                check(path_of("qwen3", **SMALL), seed, SimulatedRuntime(seed, rule), **OFFLOAD)
            except (RaceError, AssertionError, ValueError, IndexError, OverflowError):
                dropped[rule] += 1
                break
    assert all(dropped.values()), dropped


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_an_exception_in_a_step_with_drafts_harms_no_other_request(path_of, family, monkeypatch):
    path, requests = path_of(family, **SMALL), requests_of(4)[:3]
    engine = make_engine(path, speculative_config=SUFFIX, max_num_seqs=2, **OFFLOAD)
    wanted = guess(engine, make_engine(path), requests, random.Random(4))
    added = [engine.add_request(str(i), *request) for i, request in enumerate(requests)]
    while not engine.drafts.num_accepted:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.planner, "accept", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.step()
    while engine.has_work:
        engine.step()
    found = [outcome(request) for request in added]
    for one, other in zip(found, wanted, strict=True):
        assert one == other or {reason for _, _, reason in one} == {"abort"}
    assert found[2] == wanted[2]
    assert_pools_as_before(engine)


@pytest.mark.parametrize("name", ["resident", "offload"])
def test_a_block_that_a_wrong_draft_has_taken_is_begun_without_one(path_of, name, monkeypatch):
    """The row then begins a block and has gained none: its last plan is not that of the next step all the same."""
    path, (prompt,) = path_of("qwen3", **SMALL), random_prompts(1, 40, 40)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    engine = make_engine(path, speculative_config=SUFFIX, max_num_seqs=1, **ENGINES[name])
    drafted = []

    def propose(_, token_ids, most):
        drafted.append(len(token_ids) % 16 in (12, 13))
        return [-token_ids[-1] % VOCAB] * most if drafted[-1] else []

    monkeypatch.setattr(engine.drafts.drafter, "propose", propose)
    monkeypatch.setattr("nanoinfer.engine.drafts.MAX_PAUSE", 1)
    assert run(engine, [prompt], [params]) == run(make_engine(path), [prompt], [params])
    assert any(drafted) and engine.drafts.num_accepted == 0


def test_what_fails_while_a_drafted_token_is_taken_is_not_of_its_request_alone(path_of, monkeypatch):
    """Blocks were taken that nobody knows of: all is made whole again."""
    engine, takes = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX, max_num_seqs=2, **OFFLOAD), []
    guess(engine, make_engine(path_of("qwen3", **SMALL)), requests_of(4)[:2], Right())
    take_host, accept = engine.kv_cache.take_host, engine.planner.accept

    def broken(*arguments):
        taken = take_host(*arguments)
        if takes:
            raise MemoryError("out of luck")
        return taken

    def accepting(sequence):
        takes.append(sequence)
        accept(sequence)
        takes.clear()

    for i, request in enumerate(requests_of(4)[:2]):
        engine.add_request(str(i), *request)
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="out of luck"):
        patch.setattr(engine.kv_cache, "take_host", broken)
        patch.setattr(engine.planner, "accept", accepting)
        while engine.has_work:
            engine.step()
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_switch_that_is_interrupted_while_drafts_are_in_flight_loses_no_block(path_of, family, monkeypatch):
    """Nor a state: what was sampled behind drafted tokens is dropped, and each goes on behind its own token."""
    path, requests = path_of(family, **SMALL), requests_of(4)[:3]
    engine = make_engine(path, speculative_config=SUFFIX, max_num_seqs=4, **OFFLOAD)
    wanted = guess(engine, make_engine(path), requests, Right())
    added = [engine.add_request(str(i), *request) for i, request in enumerate(requests)]
    num_interrupted, lifetimes = 0, engine.kv_cache.tables.lifetimes
    while engine.has_work:
        engine.step()
        if engine.mode == "offload" and engine.live.in_flight is not None and engine.live.in_flight.batch.drafts:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(lifetimes, "release_host", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
                engine.switch_mode("resident")
            assert engine.mode == "resident"
            engine.switch_mode("offload")
            num_interrupted += 1
    assert [outcome(request) for request in added] == wanted and num_interrupted > 5
    assert_pools_as_before(engine)


def test_text_that_repeats_itself_takes_fewer_steps(path_of):
    """The suffix drafter by itself: tiny models repeat what they say."""
    path, (prompt,) = path_of("qwen3", **SMALL), random_prompts(1, 40, 40)
    params, steps = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=1), []
    plain, engine = make_engine(path), make_engine(path, speculative_config=SUFFIX, max_num_seqs=1)
    outcomes = [run(one, [prompt], [params], lambda *_: steps.append(one)) for one in (plain, engine)]
    assert outcomes[0] == outcomes[1] and steps.count(engine) < steps.count(plain)
    assert engine.drafts.num_accepted > 5 and engine.drafts.drafter.num_bytes == 0


def launches_of(engine, prompts, params) -> list:
    """The steps that are launched while requests run."""
    found = []
    run(engine, prompts, params, lambda *_: found.append(engine.live.in_flight))
    return [step for step in found if step is not None]


@pytest.mark.parametrize("name", ["offload", "weights stream"])
def test_who_finds_nothing_to_guess_waits_for_no_token(path_of, name):
    """Each step is planned while the one before runs, as without drafts."""
    path, (prompt,) = path_of("qwen3", **SMALL), random_prompts(1, 40, 40)
    engine = make_engine(path, speculative_config=SUFFIX, max_num_seqs=1, **ENGINES[name])
    engine.drafts.drafter.propose = lambda *_: []
    launched = launches_of(engine, [prompt], [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)])
    assert len(launched) >= 29 and not any(step.is_apart for step in launched) and not engine.drafts.num_passes


def test_the_last_token_is_waited_for_by_nobody(path_of):
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX, max_num_seqs=1, **OFFLOAD)
    engine.drafts.drafter.propose = lambda _, tokens, most: [-1] * most
    launched = launches_of(engine, random_prompts(1, 40, 40), [SamplingParams(temperature=0, max_tokens=2)])
    assert [step.is_apart for step in launched] == [False, False]


def test_where_no_row_is_left_for_a_draft_nobody_waits_for_tokens(path_of, monkeypatch):
    for user in "nanoinfer.memory.sized", "nanoinfer.engine.drafts":
        monkeypatch.setattr(f"{user}.MAX_LINES", 4)
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX, max_num_seqs=6, **OFFLOAD)
    engine.drafts.drafter.propose = lambda _, tokens, most: most * [tokens[-1]]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (20, 40)]
    launched = launches_of(engine, random_prompts(6, 20, 40), 3 * params)
    full = [step.is_apart for step in launched if len(step.batch.decoding) > 4]
    assert len(full) > 10 and not any(full) and engine.drafts.num_passes


@pytest.mark.parametrize("seed", range(8))
def test_drafts_that_do_not_pay_cost_a_hundredth_and_those_that_do_are_not_held_back(seed):
    generator = random.Random(seed)
    plain, num_rows = generator.uniform(0.001, 0.1), generator.randint(1, 4)
    longer, most_right = generator.choice([0.02, 0.2, 2.0]), generator.choice([0, 1, 8])
    balance, seconds, tokens, num_tried = Balance(), 0.0, 0, 0
    balance.note_plain(plain, num_rows)
    for _ in range(20_000):
        if balance.allows:
            step, num_right = plain * (1 + longer), generator.randint(0, most_right)
            balance.note_tried(step, num_rows, 8, num_right)
            num_tried += 1
        else:
            step, num_right = plain * generator.uniform(0.9, 1.1), 0
            balance.note_plain(step, num_rows)
        seconds, tokens = seconds + step, tokens + num_rows + num_right
    of_plain = tokens / num_rows * plain
    assert seconds <= 1.02 * of_plain + (KEPT + longer) * plain
    if most_right / 2 / num_rows > 2 * longer:
        assert num_tried > 19_000 and seconds < of_plain
    elif not most_right:
        assert 0.6 * 0.01 / longer < num_tried / 20_000 < 0.01 / longer + 0.2


def test_another_ones_delay_rests_no_draft_for_long():
    balance = Balance()
    balance.note_plain(0.01, 1)
    balance.note_tried(3600, 1, 2, 0)  # the machine slept
    steps = 0
    while not balance.allows:
        balance.note_plain(0.01, 1)
        steps += 1
    assert 0 < steps <= 301


def test_how_long_steps_take_is_forgotten_when_the_mode_changes(path_of):
    arguments = OFFLOAD | dict(num_gpu_blocks_override=90, resident_kv_limit=None)
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX, max_num_seqs=1, **arguments)
    engine.drafts.drafter.propose = lambda *_: []
    noted, balance = [], engine.drafts.balance
    balance.note_plain = lambda *_: noted.append(engine.mode)
    balance.forget_steps = lambda: noted.append("forgotten")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    run(engine, random_prompts(1, 40, 40), [params], switching({12: "resident", 24: "offload"}))
    changes = [now for before, now in pairwise(noted) if now != before]
    assert changes == ["offload", "forgotten", "resident", "forgotten", "offload"]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_drafts_rest_where_there_is_no_plain_step_to_compare_theirs_with(num_rows):
    """Some bring a token each time and cost more than that: there is never a plain step by itself."""
    balance = Balance()
    for _ in range(MOST_UNKNOWN):
        assert balance.allows
        balance.note_tried(0.03, num_rows, 8, 1)
    assert not balance.allows
    balance.note_plain(0.01, num_rows)
    assert balance.allows
    balance.note_tried(0.03, num_rows, 8, 1)
    assert not balance.allows


def test_rows_for_drafts_are_no_places_for_sequences(path_of):
    common = dict(enable_cpu_offload="auto", max_num_seqs=2, num_gpu_blocks_override=49)
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX, **common)
    assert engine.kv_cache.tables.num_rows == 12 and engine.kv_cache.tables.all_sequences_fit
    assert values(FACTS, Reading(engine))["max_num_seqs"] == -ServedRequests(engine, max_queue=3).num_queued == 2


def test_a_request_says_what_was_drafted_and_taken(path_of):
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=SUFFIX)
    (prompt,) = random_prompts(1, 40, 40)
    request = engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    while engine.has_work:
        engine.step()
    metrics = request.output().metrics
    assert (metrics.num_drafted_tokens, metrics.num_accepted_tokens) == (
        engine.drafts.num_drafted, engine.drafts.num_accepted,
    )  # fmt: skip
    assert metrics.num_accepted_tokens > 0 and metrics.num_generated_tokens == 150


@pytest.mark.parametrize(
    "given, message",
    [
        ("suffix", "speculative_config='suffix' is not valid: give"),
        (dict(method="eagle"), "has method='eagle', and there are suffix, ngram"),
        (dict(method="suffix", model="x"), "names 'model', and no second model drafts here"),
        (dict(method="suffix", num_speculative_token=3), "has 'num_speculative_token' .did you mean 'num_spec"),
        (dict(method="suffix", num_speculative_tokens=0), "has num_speculative_tokens=0: give 1 to 16"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(path_of, given, message):
    with pytest.raises(ValueError, match=message):
        make_engine(path_of("qwen3", **SMALL), speculative_config=given)


def test_vllms_ngram_is_taken(path_of):
    given = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2)
    engine = make_engine(path_of("qwen3", **SMALL), speculative_config=given)
    assert engine.config.speculative_config == dict(method="suffix", num_speculative_tokens=3)


# The index


def naive(tokens: list[int], length: int) -> int | None:
    """The newest place behind the last `length` tokens, before the end."""
    end = len(tokens)
    return next((at for at in range(end - 1, length - 1, -1) if tokens[at - length : at] == tokens[-length:]), None)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled("0", "1", "2")
def test_what_is_guessed_stood_behind_the_longest_stretch(seed):
    """Or nothing is guessed, where another stretch has taken the place in the table: that is seldom."""
    generator, index, tokens, num_found, num_missed = random.Random(seed), SuffixIndex(), [], 0, 0
    for _ in range(60):
        begin = generator.randrange(len(tokens) + 1)
        again, few = tokens[begin : begin + generator.randint(1, 40)], [generator.randrange(4)]
        tokens += generator.choice([again, few, 3 * [generator.randrange(50_000)]])
        most = generator.randint(1, 8)
        found = index.guess(tokens, most)
        assert index.num_bytes <= 32 * (len(tokens) + 120)
        place = naive(tokens, LONG) or naive(tokens, SHORT)
        if place is None:
            assert not found
        elif not found:
            num_missed += 1
        else:
            num_found += 1
            assert len(found) <= most
            places = [at for at in range(SHORT, len(tokens)) if tokens[at - SHORT : at] == tokens[-SHORT:]]
            ends = [(tokens[at:] * most)[: len(found)] for at in places]
            assert found in ends
    assert num_found > 5 * num_missed


def test_a_long_prompt_is_taken_in_slices(monkeypatch):
    monkeypatch.setattr("nanoinfer.engine.suffixes.SLICE", 100)
    generator, index = random.Random(0), SuffixIndex()
    tokens = [generator.randrange(1000) for _ in range(350)]
    tokens += tokens[40:80]
    found = [index.guess(tokens, 4) for _ in range(4)]
    assert found == [[], [], [], tokens[80:84]]
