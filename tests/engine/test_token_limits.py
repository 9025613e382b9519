"""logit_bias, allowed_token_ids and bad_words: the same bits in every mode and batch; log-probabilities of before."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from engines import COMMON, assert_pools_as_before, make_engine, outcome, random_prompts, read_at_once, run
from guessing import check_alone
from prefill_graphs import WarmUpRuntime
from request_helpers import Script, play, shrink_gpu_pool
from sampling_cases import naive_limits
from serving import make_served_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.common.errors import RequestError
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.reference import logprobs_of

FIELDS = ("logit_bias", "allowed_token_ids", "bad_words")
PROMPTS = random_prompts(2, 70, 90, seed=32) + random_prompts(5, 5, 35, seed=31)
PLAIN = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=14 + i, ignore_eos=True, logprobs=2) for i in range(7)
]
ARRIVALS = {0: [0, 1], 5: [2], 7: [3], 9: [4], 10: [5], 11: [6]}
ARGUMENTS = dict(
    max_num_batched_tokens=48, max_model_len=128, capture_num_tokens=[4, 24, 40], skip_tokenizer_init=False
)
VARIANTS = {
    "resident": {},
    "resident, eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True, num_ring_slots=2),
}


def text(tokens) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def params(path):
    """Of each request, made of what it says without limits."""
    engine = make_engine(path, **ARGUMENTS)
    said = [tokens for ((tokens, *_),) in run(engine, PROMPTS, PLAIN)]
    generator = random.Random(0)
    asked = [
        dict(logit_bias={token: -3.5 for token in said[0]} | {7: 2.0}),
        dict(bad_words=[text(said[1][:3]), text(said[1][4:6]), text(said[1][6:7]), text(said[1][7:10])]),
        {},
        dict(allowed_token_ids=range(1, 160, 3), n=2),
        dict(
            bad_words=[text(said[4][1:3]), text(said[4][5:6])], allowed_token_ids=sorted({*said[4], *range(40)}),
            logit_bias={said[4][0]: 4.0, 9: -2.0}, min_tokens=5, stop_token_ids=[said[4][3]], ignore_eos=False,
            repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        ),
        # Many pairs: whatever comes, it begins some.
        dict(
            bad_words=[text(said[5][2:4]), *(text(generator.choices(range(160), k=2)) for _ in range(900))],
            top_k=150, top_p=0.99,
        ),
        dict(bad_words=[text((said[6][0],))], n=2, stop=[text(said[6][3:4])], seed=None, temperature=0.0),
    ]  # fmt: skip
    return [replace(plain, **fields) for plain, fields in zip(PLAIN, asked, strict=True)]


@pytest.fixture(scope="module")
def wanted(path, params):
    """The outcome of each request: alone, one step at a time, each read before the next is planned."""
    engine = read_at_once(make_engine(path, enforce_eager=True, **ARGUMENTS))
    return [run(engine, [prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]


def test_drafts_under_limits_and_penalties_give_the_bits_of_none(path, params, wanted):
    engine = make_engine(path, **ARGUMENTS | VARIANTS["offload"], speculative_config=dict(method="suffix"))
    counts = check_alone(engine, list(zip(PROMPTS, params, strict=True)), wanted, seed=1)
    assert sum(map(bool, counts)) >= 5, counts
    assert_pools_as_before(engine)


def naive_runs(path, params):
    """What an engine without limits says if each step's logits are changed as vLLM says, and its logits before that."""
    engine, raw = make_engine(path, **ARGUMENTS), defaultdict(list)

    def on_logits(sequences, logits):
        for row, sequence in zip(logits, sequences, strict=True):
            asked = params[int(sequence.request_id)]
            words = tuple(tuple(int(word[1:]) for word in words.split()) for words in asked.bad_words)
            limits = TokenLimits(
                bias=tuple((asked.logit_bias or {}).items()), allowed=asked.allowed_token_ids, words=words
            )
            raw[sequence.request_id, sequence.index].append(row.clone())
            row.copy_(naive_limits(row, limits, sequence.output_token_ids))

    engine.on_logits, engine.samples_late = on_logits, True
    requests = []
    for i, (prompt, param) in enumerate(zip(PROMPTS, params, strict=True)):
        requests.append(engine.add_request(str(i), prompt, replace(param, **dict.fromkeys(FIELDS))))
    while engine.has_work:
        engine.step()
    return [outcome(request) for request in requests], raw


def test_limits_are_those_of_vllm_and_logprobs_those_of_before(path, params, wanted):
    naive, raw = naive_runs(path, params)
    assert [[c[0] for c in one] for one in naive] == [[c[0] for c in one] for one in wanted]
    plain = run(make_engine(path, **ARGUMENTS), PROMPTS, [replace(one, **dict.fromkeys(FIELDS)) for one in params])
    for i, (one, without) in enumerate(zip(wanted, plain, strict=True)):
        assert (one == without) == (i == 2), f"the limits of request {i} change nothing"
        for index, (tokens, logprobs, _) in enumerate(one):
            logits = torch.stack(raw[str(i), index][: len(tokens)])
            values, ranks, *_ = logprobs_of(logits, torch.tensor(tokens), 2)
            found = [entry[token] for entry, token in zip(logprobs, tokens, strict=True)]
            assert [(x.logprob, x.rank) for x in found] == list(zip(values.tolist(), ranks.tolist(), strict=True))


def played(engine, params, modes=None, **more):
    pairs = list(zip(PROMPTS, params, strict=True))
    arrivals = {step: [pairs[i] for i in numbers] for step, numbers in ARRIVALS.items()}
    found = play(engine, Script(arrivals, modes=modes or {}, **more))
    assert_pools_as_before(engine)
    return found.outcomes


@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("resident-1", "offload-0", "offload, eager-None")
def test_a_request_gets_in_a_crowd_what_it_gets_alone(path, params, wanted, variant, seed):
    engine = make_engine(path, WarmUpRuntime(seed=seed), **ARGUMENTS | VARIANTS[variant])
    assert played(engine, params) == wanted
    assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in variant)


def test_switches_of_the_mode_and_preemptions_change_nothing(path, params, wanted):
    engine = make_engine(path, WarmUpRuntime(seed=3), **ARGUMENTS)
    assert played(engine, params, {4: "offload", 9: "resident", 13: "offload"}) == wanted
    engine = make_engine(path, WarmUpRuntime(seed=4), **ARGUMENTS | dict(enable_prefix_caching=False))
    give_back = shrink_gpu_pool(engine, 12)
    assert run(engine, PROMPTS, params) == wanted
    assert engine.scheduler.num_preemptions > 1
    give_back()
    assert_pools_as_before(engine)


def test_what_is_uploaded_anew_before_any_step_is_what_the_device_had(path, params, wanted):
    """As for a sequence that comes back to a row in which another one has been."""
    engine = read_at_once(make_engine(path, **ARGUMENTS))
    assert run(engine, PROMPTS, params, lambda engine, step: engine.planner.forget()) == wanted


def test_a_row_without_limits_uploads_and_launches_what_it_did(path, params, monkeypatch):
    engine = make_engine(path, **ARGUMENTS)
    monkeypatch.setattr(TokenLimits, "line", lambda *_: pytest.fail("nobody asked for limits"))
    sampling = engine.runner.decode_program.sampling
    run(engine, PROMPTS, PLAIN)
    assert not sampling.limits.words.any()


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_what_forbids_every_token_ends_that_request_only(path, enable_cpu_offload):
    engine = make_engine(path, **ARGUMENTS, enable_cpu_offload=enable_cpu_offload)
    alone = run(engine, PROMPTS[:1], PLAIN[:1])
    # Token 5 may come once, and then only what is banned behind it.
    hopeless = SamplingParams(allowed_token_ids=[5], bad_words=["w5 w5"], max_tokens=9, ignore_eos=True)
    requests = [engine.add_request("a", PROMPTS[0], PLAIN[0]), engine.add_request("b", PROMPTS[1], hopeless)]
    while engine.has_work:
        engine.step()
    assert [outcome(requests[0])] == alone
    ((tokens, _, reason),) = outcome(requests[1])
    assert tokens == [5] and reason == "error" and isinstance(requests[1].failure, RequestError)
    assert requests[1].error.startswith("no token is left to go on with: allowed_token_ids, bad_words, min_tokens")
    assert_pools_as_before(engine)


REFUSED = {
    "logit_bias has [160, 900] outside the vocabulary: token ids are whole numbers from 0 to 159": dict(
        logit_bias={900: 1, 3: 2, 160: 1}
    ),
    "allowed_token_ids has [160] outside the vocabulary": dict(allowed_token_ids=[1, 160]),
    "bad_words that have several tokens have 2050 in all, 2048 are possible": dict(
        bad_words=[f"w{i % 160} w{i // 160}" for i in range(1025)]
    ),
    "leave no token to begin with: allow more tokens": dict(allowed_token_ids=[4, 5], bad_words=["w4", "w5"]),
    "leave no token to begin with": dict(allowed_token_ids=[4], min_tokens=1, stop_token_ids=[4]),
}


def test_what_cannot_be_is_refused_by_name_and_nothing_runs(path):
    engine = make_engine(path, **ARGUMENTS)
    for message, fields in REFUSED.items():
        with pytest.raises(RequestError) as error:
            engine.add_request("x", [5], SamplingParams(**fields))
        assert message in str(error.value) and error.value.field == next(iter(fields))
    assert not engine.has_work
    engine = make_engine(path, **COMMON | dict(max_model_len=128))
    with pytest.raises(RequestError, match="there is no tokenizer: give logit_bias={id: -100}"):
        engine.add_request("x", [5], SamplingParams(bad_words=["w4"]))
    assert run(engine, [[5]], [SamplingParams(allowed_token_ids=[9], max_tokens=2)])[0][0][0] == [9, 9]


def test_generate_takes_the_fields_and_reads_equal_ones_once(path, monkeypatch):
    with LLM(path, **COMMON | ARGUMENTS) as llm:
        calls, encode = [], llm.engine.tokenizer.encode
        monkeypatch.setattr(
            llm.engine.tokenizer, "encode", lambda text, **how: calls.append(text) or encode(text, **how)
        )
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (plain,) = llm.generate([[20, 21]], params, use_tqdm=False)
        word = text(plain.outputs[0].token_ids[:2])
        params.bad_words = [word]
        limited = llm.generate([[20, 21]] * 3, params, use_tqdm=False)
        assert calls == [word, f" {word}"], "alone, and behind a space"
        for one in limited:
            assert one.outputs[0].token_ids[0] == plain.outputs[0].token_ids[0]
            assert one.outputs[0].token_ids[1] != plain.outputs[0].token_ids[1]
