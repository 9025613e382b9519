"""Structured outputs in an engine: finished answers have their form, in every mode and batch, and change no other."""

import json
import random
import threading
from collections import Counter, defaultdict

import pytest
import torch
from engines import COMMON, assert_pools_as_before, make_engine, outcome, random_prompts, read_at_once, run
from guessing import Guessing
from interrupts import Tracer
from prefill_graphs import WarmUpRuntime
from request_helpers import Script, play, shrink_gpu_pool
from simulated import RaceError, SimulatedRuntime
from structured import END, VOCAB, is_answer, make_structured_checkpoint, random_schema

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.engine import masks
from nanoinfer.sampling.reference import logprobs_of

ARGUMENTS = dict(
    max_num_batched_tokens=48, max_model_len=128, capture_num_tokens=[4, 24, 40], skip_tokenizer_init=False
)
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True, num_ring_slots=2),
}
PROMPTS = random_prompts(2, 60, 70, seed=3) + random_prompts(7, 3, 35, seed=4)
ARRIVALS = {0: [0, 1], 3: [2, 3, 4], 5: [5, 6], 8: [7, 8]}
PLAIN = (1, 4, 8)  # the requests without a form


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(path):
    return make_engine(path, **ARGUMENTS)


@pytest.fixture(autouse=True)
def _no_mask_is_late(monkeypatch):
    monkeypatch.setattr(masks, "LATE_SECONDS", 1e9)


def form(schema) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def drawn(seed: int) -> tuple[list, list[SamplingParams]]:
    """Schemas of the requests, None where there is none, and their parameters."""
    generator = random.Random(seed)
    schemas = [None if number in PLAIN else random_schema(generator) for number in range(len(PROMPTS))]
    others = [{}, dict(repetition_penalty=1.3, presence_penalty=0.4), dict(top_k=20, top_p=0.9), dict(min_p=0.01)]
    others += [dict(n=2), dict(min_tokens=4, frequency_penalty=0.5), dict(logit_bias={34: 3.0, 91: -2.0}), {}]
    params = []
    for number, schema in enumerate(schemas):
        given = (
            dict(temperature=1.0, seed=number, max_tokens=40, logprobs=[None, 2, 0][number % 3]) | others[number % 8]
        )
        if schema is None:
            params.append(SamplingParams(**given | dict(max_tokens=14 + number, ignore_eos=True)))
        else:
            params.append(SamplingParams(**given, structured_outputs=form(schema)))
    return schemas, params


def text_of(engine, tokens: list[int]) -> str:
    return engine.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def wanted(path):
    """Seed -> schemas, parameters, and outcome of each request alone, one step at a time, each read before the next."""
    found = {}

    def find(seed: int):
        if seed not in found:
            engine = read_at_once(make_engine(path, enforce_eager=True, **ARGUMENTS))
            schemas, params = drawn(seed)
            alone = [run(engine, [prompt], [one])[0] for prompt, one in zip(PROMPTS, params, strict=True)]
            engine.close()
            found[seed] = schemas, params, alone
        return found[seed]

    return find


def played(engine, params):
    pairs = list(zip(PROMPTS, params, strict=True))
    found = play(engine, Script({step: [pairs[i] for i in numbers] for step, numbers in ARRIVALS.items()}))
    assert_pools_as_before(engine)
    return found


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 7])  # without those whose answers end before a step is mixed
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("resident-0", "offload-0")
def test_finished_answers_have_their_form_and_every_mode_gives_the_bits_of_a_request_alone(path, wanted, variant, seed):
    schemas, params, alone = wanted(seed)
    engine = make_engine(path, WarmUpRuntime(seed=seed), **ARGUMENTS | VARIANTS[variant])
    found = played(engine, params)
    assert found.outcomes == alone
    kinds = Counter({int: "decode", list: "prefill", tuple: "mixed"}[type(batch)] for batch in found.batches)
    assert min(kinds["prefill"], kinds["mixed"], kinds["decode"]) > 1, kinds
    assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in variant)
    reasons = Counter()
    for schema, completions in zip(schemas, alone, strict=True):
        for tokens, _, reason in completions if schema is not None else ():
            reasons[reason] += 1
            assert reason != "stop" or is_answer(text_of(engine, tokens), schema), (text_of(engine, tokens), schema)
    assert reasons["stop"] > 4 and set(reasons) <= {"stop", "length"}
    engine.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("variant", ["resident", "offload"])
@pytest.mark.sampled("resident-0", "offload-1")
def test_drafts_under_a_grammar_give_the_bits_of_none(path, wanted, variant, seed):
    """Right ones, wrong ones, and ones that the grammar forbids in their midst."""
    schemas, params, outcomes = wanted(seed)
    speculation = dict(method="suffix", num_speculative_tokens=4)
    engine = make_engine(path, **ARGUMENTS | VARIANTS[variant], speculative_config=speculation)
    texts = [[*prompt, *tokens] for prompt, found in zip(PROMPTS, outcomes, strict=True) for tokens, *_ in found]
    engine.drafts.drafter = Guessing(random.Random(seed), texts)
    assert played(engine, params).outcomes == outcomes
    with_form = [request for request, schema in enumerate(schemas) if schema is not None]
    assert with_form and 0 < engine.drafts.num_accepted < engine.drafts.num_drafted
    assert_pools_as_before(engine)


def test_rows_beside_keep_their_bits_and_a_batch_without_a_form_is_launched_as_ever(engine, wanted):
    _, params, _ = wanted(0)
    beside = [params[number] for number in PLAIN]
    prompts, calls, sample = [PROMPTS[number] for number in PLAIN], [], engine.runner.sample
    engine.runner.sample = lambda step, on_logits=None, masks=None: (
        calls.append((masks is not None, engine.live.in_flight is not None)) or sample(step, on_logits, masks)
    )
    try:
        plain = run(engine, prompts, beside)
        assert not any(has_masks for has_masks, _ in calls)
        num_ahead = sum(is_open for _, is_open in calls)
        assert num_ahead > 5, "sampled before the step before was read"
        calls.clear()
        others = [SamplingParams(max_tokens=9, seed=9, structured_outputs=dict(regex="[a-f]{40}"))] * 3
        assert run(engine, [*prompts, *PROMPTS[:3]], [*beside, *others])[: len(prompts)] == plain
        assert any(has_masks for has_masks, _ in calls) and not any(both for both in calls if all(both))
    finally:
        engine.runner.sample = sample


def test_log_probabilities_are_those_of_the_masked_distribution(engine):
    kept = defaultdict(list)
    engine.on_logits = lambda sequences, logits: engine.runner.compute.run(
        lambda: [kept[s.request_id].append(line.clone()) for s, line in zip(sequences, logits, strict=True)]
    )
    try:
        letters = engine.tokenizer.convert_tokens_to_ids(["a", "b", "c"])
        params = SamplingParams(seed=1, logprobs=3, max_tokens=6, structured_outputs=dict(regex="[abc]{6}"))
        request = engine.add_request("masked", PROMPTS[3], params)
        while not request.is_finished:
            engine.step()
    finally:
        engine.on_logits = None
    ((tokens, logprobs, reason),) = outcome(request)
    assert len(tokens) == 6 and reason == "length" and set(tokens) <= set(letters)
    for token, logits, entry in zip(tokens, kept["masked"], logprobs, strict=False):
        masked = torch.full_like(logits, -torch.inf)
        masked[letters] = logits[letters]
        chosen, rank, top_values, top_ids = logprobs_of(masked[None].float(), torch.tensor([token]), 3)
        assert entry[token].logprob == chosen.item() and entry[token].rank == rank.item()
        assert {one: entry[one].logprob for one in top_ids[0].tolist()} == dict(
            zip(top_ids[0].tolist(), top_values[0].tolist(), strict=True)
        )
        assert abs(sum(torch.tensor([entry[one].logprob for one in letters]).exp()) - 1) < 1e-5


@pytest.mark.parametrize(
    "given, texts, reason",
    [
        (dict(min_tokens=5), ["yes", "no"], "stop"),  # gives way: nothing but the end is left
        (dict(ignore_eos=True), ["yes", "no"], "stop"),  # a grammar that has ended has nothing else
        (dict(min_tokens=8, ignore_eos=True, n=3), ["yes", "no"], "stop"),
        (dict(stop=["s"]), ["ye", "no"], "stop"),
        (dict(max_tokens=2), ["ye", "no"], "length"),
    ],
)
def test_what_ends_a_completion_goes_with_a_form(engine, given, texts, reason):
    end = engine.tokenizer.convert_tokens_to_ids(END)
    for seed in range(2):
        params = SamplingParams(**dict(seed=seed, structured_outputs=dict(choice=["yes", "no"])) | given)
        for tokens, _, found in run(engine, [PROMPTS[5]], [params])[0]:
            assert found == reason and text_of(engine, tokens).split("s")[0] in [text.split("s")[0] for text in texts]
            if reason == "stop" and "stop" not in given:
                assert tokens[-1] == end and tokens.count(end) == 1


def test_stop_token_ids_and_min_tokens_hold_where_more_may_come(engine):
    a, b = engine.tokenizer.convert_tokens_to_ids(["a", "b"])
    for seed in range(5):
        params = SamplingParams(
            seed=seed, min_tokens=4, stop_token_ids=[b], max_tokens=40, structured_outputs=dict(regex="[ab]*")
        )
        ((tokens, _, reason),) = run(engine, [PROMPTS[5]], [params])[0]
        assert reason == "stop" and len(tokens) >= 4 and tokens[:3] == [a] * 3


def test_what_leaves_nothing_ends_that_request_with_the_reason(engine):
    a, end = engine.tokenizer.convert_tokens_to_ids(["a", END])
    regex = dict(structured_outputs=dict(regex="ab"), max_tokens=5)
    for given in (dict(allowed_token_ids=[a, end]), dict(bad_words=["b"])):
        requests = [
            engine.add_request("none", PROMPTS[4], SamplingParams(**regex | given)),
            engine.add_request("other", PROMPTS[4], SamplingParams(**regex)),
        ]
        while engine.has_work:
            engine.step()
        assert "no token is left to go on with: " in requests[0].error and "structured_outputs" in requests[0].error
        assert outcome(requests[1])[0][2] == "stop"
        assert_pools_as_before(engine)


@pytest.mark.parametrize("all_are_late", [False, True], ids=["in time", "late"])
def test_a_grammar_that_meets_a_limit_ends_its_request_only(engine, all_are_late, monkeypatch):
    monkeypatch.setattr(masks, "LATE_SECONDS", -1 if all_are_late else 1e9)
    params = SamplingParams(max_tokens=20, seed=1, structured_outputs=dict(regex="[a-f]{40}"))
    (expected,) = run(engine, [PROMPTS[4]], [params])
    for method in ("read", "narrow"):
        broken = engine.add_request("broken", PROMPTS[4], params)
        other = engine.add_request("other", PROMPTS[4], params)
        for _ in range(5):
            engine.step()
        matcher = broken.sequences[0].matcher
        real = getattr(matcher, method)
        setattr(
            matcher,
            method,
            lambda *given, real=real: real(*given) and None or (_ for _ in ()).throw(ValueError("limit")),
        )
        outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
        assert broken.error == "limit" and outcome(broken)[0][2] == "error" and outcome(other) == expected
        assert [output.error for output in outputs if output.request_id == "broken" and output.finished] == ["limit"]
        assert_pools_as_before(engine)


def test_unsound_logits_are_noticed_where_the_mask_would_hide_them(engine):
    params = SamplingParams(max_tokens=5, structured_outputs=dict(regex="a{9}"))

    def spoil(sequences, logits):
        engine.runner.compute.run(lambda: logits[:, VOCAB - 1].fill_(torch.nan))

    engine.on_logits = spoil
    try:
        request = engine.add_request("unsound", PROMPTS[4], params)
        while engine.has_work:
            engine.step()
    finally:
        engine.on_logits = None
    assert "logits of the request are NaN or infinite" in request.error


@pytest.mark.parametrize("mode", ["resident", "offload", "switching"])
@pytest.mark.parametrize("all_are_late", [False, True], ids=["in time", "late"])
@pytest.mark.sampled("in time-resident", "late-switching")
def test_preemption_aborts_and_switches_change_no_bit(path, wanted, mode, all_are_late, monkeypatch):
    monkeypatch.setattr(masks, "LATE_SECONDS", -1 if all_are_late else 1e9)
    _, params, alone = wanted(0)
    how = dict(enable_cpu_offload=mode == "offload" or "auto" if mode != "resident" else False)
    engine = make_engine(path, SimulatedRuntime(3), **ARGUMENTS | how)
    give_back = shrink_gpu_pool(engine, dict(resident=10, offload=20, switching=60)[mode])
    pairs = list(zip(PROMPTS, params, strict=True))
    arrivals = {step: [pairs[i] for i in numbers] for step, numbers in ARRIVALS.items()}
    modes = {4: "offload", 9: "resident", 13: "offload", 20: "resident"} if mode == "switching" else {}
    found = play(engine, Script(arrivals, aborts={10: 6}, modes=modes)).outcomes
    for number, (completions, expected) in enumerate(zip(found, alone, strict=True)):
        if number == 6:
            assert completions[0][2] == "abort" and completions[0][0] == expected[0][0][: len(completions[0][0])]
        else:
            assert completions == expected, number
    assert mode != "resident" or engine.scheduler.num_preemptions > 0
    give_back()
    assert_pools_as_before(engine)
    engine.close()


def test_who_has_a_late_mask_waits_for_it_alone(path, wanted, monkeypatch):
    _, params, alone = wanted(0)
    engine, may_go_on = make_engine(path, **ARGUMENTS), threading.Event()
    monkeypatch.setattr(masks, "LATE_SECONDS", -1)
    late = engine.add_request("late", PROMPTS[0], params[0])
    (sequence,) = late.sequences
    while not sequence.is_masked_aside:
        engine.step()
    narrow = sequence.matcher.narrow
    sequence.matcher.narrow = lambda words: (may_go_on.wait(60), narrow(words))[1]
    monkeypatch.setattr(masks, "LATE_SECONDS", 1e9)
    others = [engine.add_request(str(i), PROMPTS[i], params[i]) for i in (2, 3, 4)]
    while not all(request.is_finished for request in others):
        engine.step()
    assert sequence.num_generated == 1, "the one whose mask was made in time"
    assert [outcome(request) for request in others] == [alone[i] for i in (2, 3, 4)]
    may_go_on.set()
    while engine.has_work:
        engine.step()
    assert outcome(late) == alone[0] and not sequence.is_masked_aside
    assert_pools_as_before(engine)
    engine.close()


def test_a_removed_wait_is_noticed(path, wanted):
    rule, (_, params, alone) = "host.read_after_step", wanted(0)
    for seed in range(40):
        engine = make_engine(path, SimulatedRuntime(seed, rule), **ARGUMENTS | dict(enforce_eager=True))
        try:
            if played(engine, params).outcomes != alone:
                return
        except (RaceError, AssertionError, IndexError, ValueError, OverflowError):
            return
    pytest.fail(f"40 seeds ran without {rule!r} and nothing went wrong")


FILES = ("engine/masks.py", "execution/token_masks.py", "structured/matcher.py")


def interrupted(engine, params, line=None, nth=1) -> tuple[dict, list]:
    """Lines of the masks that ran, and outcomes, of a run that is interrupted at one of them."""
    tracer = Tracer()
    if line is not None:
        tracer.raise_at((line, nth, None), error=KeyboardInterrupt)
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(PROMPTS, params, strict=True))]
    while engine.has_work:
        try:
            with tracer.tracing():
                engine.step()
        except KeyboardInterrupt:
            pass
    lines = {one: count for one, count in tracer.counts.items() if one[0].endswith(FILES)}
    return lines, [outcome(request) for request in requests]


def test_an_interrupt_at_lines_of_masks_ends_the_requests_of_that_step_only(engine, wanted, fuzz):
    _, params, alone = wanted(0)
    interrupted(engine, params)  # makes what is made once
    lines, found = interrupted(engine, params)
    assert found == alone and {file for file, _ in lines} == {file for file, _ in lines if file.endswith(FILES)}
    chosen = sorted(lines) if fuzz else random.Random(1).sample(sorted(lines), 1)
    for line in chosen:
        _, found = interrupted(engine, params, line, 1 + lines[line] // 2)
        assert_pools_as_before(engine)
        reasons = Counter()
        for completions, expected in zip(found, alone, strict=True):
            for (tokens, logprobs, reason), one in zip(completions, expected, strict=True):
                reasons[reason] += 1
                if reason == "abort":
                    assert tokens == one[0][: len(tokens)]
                else:
                    assert (tokens, logprobs, reason) == one
        assert reasons["abort"] > 0 and reasons["stop"] > 0, (line, reasons)
    assert interrupted(engine, params)[1] == alone, "as if nothing had happened"


def test_llm_takes_it_and_refuses_what_cannot_be_before_anything_runs(path):
    with LLM(path, **COMMON | ARGUMENTS) as llm:
        params = SamplingParams(temperature=1, seed=1, max_tokens=40, structured_outputs=form({"enum": ["x", 10]}))
        outputs = llm.generate(["one", "two"], params)
        assert all(json.loads(output.outputs[0].text) in ("x", 10) for output in outputs)
        with pytest.raises(ValueError, match="structured_outputs.json cannot be generated at #/items: Invalid type"):
            llm.generate("one", SamplingParams(structured_outputs=dict(json={"items": {"type": "nothing"}})))
        assert llm.stats()["num_running"] == 0
    with LLM(path, **COMMON) as llm:
        with pytest.raises(ValueError, match="structured_outputs is about text, but there is no tokenizer"):
            llm.generate([[1, 2]], params)
