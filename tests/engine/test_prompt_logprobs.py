"""Log-probabilities of prompts: those of transformers, to the bit those of what is generated behind each beginning, and
the same ones however the prompt is cut, wherever its KV lies and whatever runs beside it."""

import math

import pytest
import torch
import transformers
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, read_at_once, switching
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.execution import prompt_logprobs
from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.models.logits import Logits
from nanoinfer.requests.detokenizer import TokenTexts

TOP = 4
PROMPTS = random_prompts(3, 130, 180, seed=4) + random_prompts(3, 1, 50, seed=6)
# Every second one wants them, of unequal numbers; the first of two completions makes them for both.
PARAMS = [
    SamplingParams(
        temperature=0.8 * (i % 2), seed=i, max_tokens=6 + i, ignore_eos=True, n=1 + (i == 2), logprobs=1,
        prompt_logprobs=[TOP, None, 1, None, 20, 0][i],
    )
    for i in range(len(PROMPTS))
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def play(engine, prompts=PROMPTS, params=PARAMS, at_step=lambda engine, step: None):
    """Outputs of requests that come one behind the other, two steps apart."""
    requests, step = [], 0
    while len(requests) < len(prompts) or engine.has_work:
        if step % 2 == 0 and len(requests) < len(prompts):
            number = len(requests)
            requests.append(engine.add_request(f"r{number}", prompts[number], params[number]))
        at_step(engine, step)
        engine.step()
        step += 1
    return [request.output() for request in requests]


def bits(outputs):
    return [
        (output.prompt_logprobs, [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs])
        for output in outputs
    ]


def one(engine, prompt, **params):
    params = SamplingParams(**dict(temperature=0, max_tokens=1, ignore_eos=True) | params)
    (output,) = play(engine, [prompt], [params])
    return output


@pytest.fixture(scope="module")
def wanted(path):
    """What each request gets alone, in one chunk."""
    engine = make_engine(path, max_num_batched_tokens=192, enable_prefix_caching=False)
    return [bits(play(engine, [prompt], [params]))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_they_are_those_of_the_first_token_behind_each_beginning(path):
    """Its logits are those of the prompt's last token, of which the others have theirs."""
    engine = make_engine(path)
    found = one(engine, PROMPTS[0], prompt_logprobs=TOP).prompt_logprobs
    assert found[0] is None and len(found) == len(PROMPTS[0])
    for end in [1, 2, 15, 16, 17, 63, 64, 65, 66, len(PROMPTS[0]) - 1]:
        (completion,) = one(engine, PROMPTS[0][:end], logprobs=TOP).outputs
        entry, token = completion.logprobs[0], PROMPTS[0][end]
        assert list(found[end].items())[:TOP] == list(entry.items())[:TOP]
        assert token in found[end] and len(found[end]) in (TOP, TOP + 1)
    # Of a token that was generated behind the prompt it is the one that it was generated with.
    (completion,) = one(engine, PROMPTS[1], logprobs=TOP, temperature=1.0, seed=3).outputs
    again = one(engine, PROMPTS[1] + completion.token_ids, prompt_logprobs=TOP)
    assert again.prompt_logprobs[-1] == completion.logprobs[0]


def test_they_are_those_of_transformers(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = PROMPTS[1]
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    found = one(make_engine(path), prompt, prompt_logprobs=TOP).prompt_logprobs
    for row, token, entry in zip(rows, prompt[1:], found[1:], strict=False):
        assert {token, *row.topk(TOP).indices.tolist()} == entry.keys()
        for one_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[one_id].item(), abs=1e-4)
        assert entry[token].rank == 1 + int((row > row[token]).sum())


VARIANTS = {
    "chunks of 16": dict(max_num_batched_tokens=16),
    "chunks of 48, graphs, mixed steps": dict(max_num_batched_tokens=48, capture_num_tokens=[8, 32, 48]),
    "chunks of 48, mixed steps, eager": dict(
        max_num_batched_tokens=48, capture_num_tokens=[8, 32, 48], enforce_eager=True,
    ),
    "offload": dict(enable_cpu_offload=True, num_gpu_blocks_override=12),
    "offload, mixed steps, shuffled": dict(
        enable_cpu_offload=True, capture_num_tokens=[64], num_gpu_blocks_override=14,
    ),
    "preempted": dict(num_gpu_blocks_override=16, max_model_len=200),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=16, max_model_len=200),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_they_do_not_depend_on_chunks_modes_and_neighbours(path, wanted, variant, fuzz):
    runtime = SimulatedRuntime(5) if "shuffled" in variant else None
    engine = make_engine(path, runtime, **VARIANTS[variant])
    assert bits(play(engine)) == wanted
    stats = engine.stats()
    assert bool(stats["num_mixed_steps"]) == ("mixed" in variant)
    assert bool(stats["num_preemptions"]) == (variant == "preempted")
    assert bool(stats["streamed_bytes"]) == (variant in ("auto", "offload", "offload, mixed steps, shuffled"))
    if not (fuzz or variant in ("chunks of 48, graphs, mixed steps", "offload")):
        assert_pools_as_before(engine)
        return
    # Again, where all of it is in the prefix cache, each step is read before the next one, and they are sampled late.
    engine.samples_late = True
    assert bits(play(read_at_once(engine))) == wanted
    assert_pools_as_before(engine)


def test_a_switch_of_the_mode_and_a_preemption_in_the_middle_of_a_prompt_change_no_bit(path, wanted):
    engine = make_engine(path, max_num_batched_tokens=32, enable_cpu_offload=True)
    modes = switching({3: "resident", 4: "offload", 5: "resident"})

    def at_step(engine, step):
        modes(engine, step)
        running = engine.scheduler.running
        if step == 7 and running[-1].state.value == "prefill" and running[-1].num_computed:
            engine.scheduler.preempt_youngest()

    assert bits(play(engine, at_step=at_step)) == wanted
    assert engine.stats()["num_preemptions"] == 1
    assert_pools_as_before(engine)


def test_such_a_prompt_takes_nothing_from_the_prefix_cache_and_others_take_its_blocks(path):
    engine = make_engine(path)
    prompt = PROMPTS[0][:100]

    def queried_and_found():
        stats = engine.stats()
        return stats["prefix_cache_queried_tokens"], stats["prefix_cache_hit_tokens"]

    first = one(engine, prompt, prompt_logprobs=1)
    assert one(engine, prompt, prompt_logprobs=1).prompt_logprobs == first.prompt_logprobs
    assert first.metrics.num_cached_tokens == 0 and queried_and_found() == (0, 0)
    assert one(engine, prompt).metrics.num_cached_tokens == 96
    # Of several completions the first one computes the prompt, and the others take its blocks.
    several = one(engine, prompt, prompt_logprobs=1, n=3, temperature=1, seed=2)
    assert several.prompt_logprobs == first.prompt_logprobs and len(several.outputs) == 3
    assert queried_and_found() == (300, 288)
    assert_pools_as_before(engine)


def test_without_such_a_request_nothing_of_it_is_launched(path, monkeypatch):
    engine = make_engine(path)
    runtime, pinned = engine.runner.runtime, []
    monkeypatch.setattr(runtime, "staging", lambda *size: pinned.append(size))
    monkeypatch.setattr(prompt_logprobs, "copy_logprobs", None)
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, n=2)]
    assert all(output.prompt_logprobs is None for output in play(engine, PROMPTS[:2], params))
    assert one(engine, [7], prompt_logprobs=2).prompt_logprobs == [None], "a token alone has none"
    assert not pinned


def test_the_head_runs_over_a_slice_of_rows_at_a_time(path, monkeypatch):
    engine = make_engine(path, max_num_batched_tokens=192, max_num_seqs=4, cuda_graph_batch_sizes=[4])
    rows = engine.plan.slice_rows
    counts, of_slice = [], Logits.of_slice

    def counted(logits, number, normed, out):
        counts.append(len(normed))
        of_slice(logits, number, normed, out)

    monkeypatch.setattr(Logits, "of_slice", counted)
    one(engine, PROMPTS[0][:100], prompt_logprobs=0)
    # The sampled row, then the others, of which the last one has no token behind.
    assert 1 < rows < 50 and counts == [1, *[rows] * (99 // rows), *[99 % rows] * (99 % rows > 0)]


def test_unsound_logits_in_a_prompt_end_the_request_alone(path):
    with LLM(path, device="cpu", progress_bar=False, skip_tokenizer_init=True, max_model_len=256, block_size=16) as llm:
        (wanted,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=3, temperature=0, logprobs=2), use_tqdm=False)
        engine = llm.engine
        embeddings = engine.runner.model.embed_tokens.weight
        with torch.inference_mode():
            embeddings[1] = math.nan  # no token of the other prompt
        bad = engine.add_request("bad", [5, 1, 6], SamplingParams(max_tokens=2, prompt_logprobs=1))
        engine.add_request("good", PROMPTS[1], SamplingParams(max_tokens=3, temperature=0, logprobs=2))
        good, ended = engine.live.requests["good"], []
        while engine.has_work:
            ended += [output for output in engine.step() if output.finished and output.request_id == "bad"]
        assert [output.finish_reason for output in ended] == ["error"]
        assert ended[0].error.startswith("logits of the request are NaN or infinite")
        assert bad.output().prompt_logprobs is None
        assert bits([good.output()]) == bits([wanted])
        assert_pools_as_before(engine)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_request_whose_prompt_cannot_be_shown_ends_alone_in_the_middle_of_it(path, monkeypatch, chunk):
    """It gives back what it holds at once, although none of its tokens was sampled: nothing more of it is computed."""
    engine = make_engine(path, max_num_batched_tokens=32)
    calls = []

    def text(self, token_id):
        calls.append(token_id)
        if len(calls) == 32 * chunk:
            raise RuntimeError("no text")

    monkeypatch.setattr(TokenTexts, "__missing__", text)
    prompts = [PROMPTS[0][:20], PROMPTS[0]]
    params = [SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), SamplingParams(prompt_logprobs=0, n=2)]
    wanted = one(make_engine(path), prompts[0], max_tokens=9)
    other, failed = play(engine, prompts, params)
    assert failed.error == "no text" and failed.prompt_logprobs is None
    assert [each.finish_reason for each in failed.outputs] == ["error"] * 2
    assert engine.stats()["num_prefill_tokens"] == 20 + 32 * chunk
    assert bits([other]) == bits([wanted])
    assert_pools_as_before(engine)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_request_that_is_aborted_in_the_middle_of_its_prompt_has_none(path, step):
    engine = make_engine(path, max_num_batched_tokens=32)
    request = engine.add_request("r", PROMPTS[0], SamplingParams(prompt_logprobs=1))
    for _ in range(step):
        engine.step()
    engine.abort("r")
    while engine.has_work:
        engine.step()
    assert request.output().prompt_logprobs is None
    assert_pools_as_before(engine)


@pytest.mark.parametrize("fails", ["read", "take_prompt_logprobs"])
def test_whoever_was_to_get_them_of_a_step_that_could_not_be_read_ends_with_it(path, monkeypatch, fails):
    """Without that step some would be missing. What waits, or wants none, goes on."""
    engine = make_engine(path, max_num_batched_tokens=32, host_memory_limit=40 * BLOCK_BYTES)
    victim = engine.add_request("victim", PROMPTS[0], SamplingParams(prompt_logprobs=1))
    other = engine.add_request("other", PROMPTS[1], SamplingParams(max_tokens=3, temperature=0))
    engine.step()
    wanted = one(make_engine(path), PROMPTS[1], max_tokens=3)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owner = PendingTokens if fails == "read" else type(victim)
        patch.setattr(owner, fails, interrupted)
        engine.step()
    assert [one.finish_reason for one in victim.sequences] == ["abort"]
    while engine.has_work:
        engine.step()
    assert other.output().outputs[0].token_ids == wanted.outputs[0].token_ids
    assert_pools_as_before(engine)


@pytest.mark.parametrize("fails", ["read", "launch, then read", "recovery, of one that gave way"])
def test_whoever_lost_some_ends_also_where_the_step_behind_is_of_others(path, monkeypatch, fails):
    """It is in no step that is at risk, and would go on with the next chunk."""
    engine = make_engine(path, max_num_batched_tokens=32)  # without mixed steps the two take turns
    other = engine.add_request("other", PROMPTS[0][:20], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.step()
    victim = engine.add_request("victim", PROMPTS[1], SamplingParams(prompt_logprobs=1))
    while not victim.sequences[0].num_computed:
        engine.step()
    assert [chunk.sequence.request_id for chunk in engine.live.in_flight.batch.chunks] == ["victim"]
    schedule, batches = engine.scheduler.schedule, []

    def given_way():
        engine.scheduler.preempt_youngest()
        raise RuntimeError("before a step is chosen")

    def failing(error):
        def fail(*arguments):
            raise error("out of luck")

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: batches.append(schedule()) or batches[-1])
        patch.setattr(PendingTokens, "read", failing(RuntimeError))
        if fails == "launch, then read":
            patch.setattr(engine.runner, "execute", failing(RuntimeError))
        if fails == "recovery, of one that gave way":
            patch.setattr(engine.scheduler, "schedule", given_way)
            patch.setattr(PendingTokens, "read", failing(KeyboardInterrupt))
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            engine.step()
    assert all(not batch.chunks for batch in batches)
    while engine.has_work:
        engine.step()
    assert [one.finish_reason for one in (*victim.sequences, *other.sequences)] == ["abort"] * 2
    assert_pools_as_before(engine)


def test_a_stream_has_them_with_the_first_output_of_the_first_completion(path):
    with LLM(path, device="cpu", progress_bar=False, skip_tokenizer_init=True, max_model_len=256, block_size=16) as llm:
        params = SamplingParams(max_tokens=3, n=2, prompt_logprobs=2, ignore_eos=True, seed=1)
        (wanted,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
        outputs = list(llm.generate_stream(PROMPTS[0], params))
    found = [(output.index, len(output.token_ids_delta)) for output in outputs if output.prompt_logprobs is not None]
    assert found == [(0, 1)] and outputs[0].prompt_logprobs == wanted.prompt_logprobs
