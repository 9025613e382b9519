"""Requests that are preempted, aborted, streamed or struck by an error, and the bytes that they move.

`test_engine_requests.py` has the plain cases.
"""

import itertools

import pytest
import torch
from engines import COMMON, VOCAB, assert_pools_as_before, make_engine, outcome, random_prompts, run, some_params
from request_helpers import shrink_gpu_pool
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.execution.read_back import ReadBack
from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import SequenceState
from offload import OffloadEngine

BOTH_MODES = pytest.mark.parametrize("enable_cpu_offload", [False, True], ids=["resident", "offload"])
LAYER_BLOCK_BYTES = 2 * 16 * 2 * 16 * 4  # K and V, 16 tokens, 2 heads of 16, float32
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint with a tokenizer of one word per token: "w17" is token 17."""
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    return path


def make_llm(path, **arguments):
    return LLM(path, **(COMMON | dict(skip_tokenizer_init=False) | arguments))


# Preemption


def test_preempted_requests_lose_neither_tokens_nor_logprobs(path):
    """Several completions of prompts with a common prefix, in a pool that cannot hold what they grow to."""
    prefix = random_prompts(1, 33, 33)[0]
    prompts = [prefix + tail for tail in random_prompts(3, 1, 20, seed=2)]
    common = dict(temperature=1.1, n=2, max_tokens=32, ignore_eos=True, logprobs=3)
    params = [SamplingParams(seed=i, **common) for i in range(3)]
    wanted = run(make_engine(path), prompts, params)
    engine = make_engine(path)
    give_back = shrink_gpu_pool(engine, 16)
    outcomes = run(engine, prompts, params)
    assert engine.scheduler.num_preemptions >= 2
    give_back()
    assert_pools_as_before(engine)
    assert outcomes == wanted


@pytest.mark.parametrize("computed", ["prefill", "decode"])
def test_a_preempted_request_can_be_aborted(path, computed):
    engine = make_engine(path, max_num_batched_tokens=32)
    prompts, params = random_prompts(2, 70, 70), some_params(2)
    wanted = run(make_engine(path, max_num_batched_tokens=32), prompts, params)
    requests = [engine.add_request(f"r{i}", *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    victim = requests[1].sequences[0]
    while victim.state.value != computed or not victim.num_computed:
        engine.step()
    num_generated = victim.num_generated
    engine.scheduler.preempt_youngest()
    assert victim.kept_blocks is not None and victim.state is SequenceState.WAITING and victim.row is None
    assert engine.abort("r1") and victim.kept_blocks is None
    while engine.has_work:
        engine.step()
    assert outcome(requests[1])[0][0] == wanted[1][0][0][:num_generated]
    assert outcome(requests[0])[0][0] == wanted[0][0][0]
    assert_pools_as_before(engine)


# Errors inside a step

# Name: whose method it is, and at which of its calls it fails.
PLACES = {
    "planning": (StepPlanner, "begin_step", (1, 3, 6, 10, 17)),
    "reading the tokens": (ReadBack, "send", (1, 3, 6, 10, 17)),
    "write-through": (OffloadEngine, "_write_through", (1, 2, 4, 7)),
    "a ring fill": (OffloadEngine, "_fill", (1, 2, 7, 30)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sampled("reading the tokens", "a ring fill")  # test_offload_faults.py has all of them, step by step
def test_an_error_anywhere_in_a_step_frees_what_it_held_and_nothing_else(path, place, fuzz, monkeypatch):
    prompts, params = random_prompts(4, 40, 90, seed=9), some_params(4, max_tokens=16)
    arguments = dict(max_num_seqs=3, enable_prefix_caching=False, num_ring_slots=2, ring_slot_bytes=LAYER_BLOCK_BYTES)
    owner, name, calls_to_fail = PLACES[place]
    modes = [True] if owner is OffloadEngine else [False, True]
    for enable_cpu_offload in modes:
        engine = make_engine(path, enable_cpu_offload=enable_cpu_offload, **arguments)
        wanted = run(engine, prompts, params)
        failures = list(zip(calls_to_fail, itertools.cycle([RuntimeError, KeyboardInterrupt, MemoryError])))
        for at_call, error in failures if fuzz else failures[2 - enable_cpu_offload :][:1]:
            original, calls = getattr(owner, name), []

            def broken(self, *args, original=original, calls=calls, at_call=at_call, error=error):
                calls.append(1)
                if len(calls) == at_call:
                    raise error("out of luck")
                return original(self, *args)

            pairs = zip(prompts, params, strict=True)
            requests = [engine.add_request(f"r{i}", *pair) for i, pair in enumerate(pairs)]
            with monkeypatch.context() as patch, pytest.raises(error, match="out of luck"):
                patch.setattr(owner, name, broken)
                while engine.has_work:
                    engine.step()
            failed = {i for i, request in enumerate(requests) if outcome(request)[0][2] == "abort"}
            assert failed, "the requests of the failed step have not ended"
            while engine.has_work:
                engine.step()
            for i, request in enumerate(requests):
                tokens, _, reason = outcome(request)[0]
                if i in failed:
                    assert reason == "abort" and tokens == wanted[i][0][0][: len(tokens)]
                else:
                    assert reason == "length" and tokens == wanted[i][0][0]
            assert_pools_as_before(engine)
        assert run(engine, prompts, params) == wanted, "the engine goes on as if nothing had happened"


def test_preemption_without_host_memory_ends_the_request_that_would_give_way_and_no_other(path, monkeypatch):
    prompts, params = random_prompts(4, 40, 60, seed=7), some_params(4, max_tokens=36)
    with make_llm(path, enable_prefix_caching=False) as llm:
        give_back = shrink_gpu_pool(llm.engine, 14)

        def no_memory(sequence):
            raise MemoryError("no host memory left")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="no host memory left"):
            patch.setattr(llm.engine.mover, "give_way", no_memory)
            found = llm.generate(prompts, params, use_tqdm=False)
        wanted = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["num_preemptions"] > 0
        reasons = [output.outputs[0].finish_reason for output in found]
        assert "error" in reasons and "length" in reasons
        for output, other in zip(found, wanted, strict=True):
            ours, theirs = output.outputs[0].token_ids, other.outputs[0].token_ids
            assert ours == theirs[: len(ours)] and (len(ours) == len(theirs)) == (output.error is None)
        give_back()
        assert_pools_as_before(llm.engine)


# Streams


@BOTH_MODES
def test_streamed_completions_of_one_prompt_join_to_what_generate_returns(path, enable_cpu_offload):
    ends = dict(max_tokens=14, ignore_eos=True, stop=["w9", "w13"])
    params = SamplingParams(temperature=1.3, n=3, seed=5, logprobs=1, **ends)
    prompts = random_prompts(3, 1, 60, seed=8)
    with make_llm(path, enable_cpu_offload=enable_cpu_offload, enable_prefix_caching=False) as llm:
        wanted = llm.generate(prompts, params, use_tqdm=False)
        parts = {}
        for output in llm.generate_stream(prompts, params):
            parts.setdefault((int(output.request_id) - len(prompts), output.index), []).append(output)
        assert len(parts) == 9
        for (number, index), outputs in parts.items():
            completion = wanted[number].outputs[index]
            assert "".join(output.text_delta for output in outputs) == completion.text
            assert [token for output in outputs for token in output.token_ids_delta] == completion.token_ids
            assert [entry for output in outputs for entry in output.logprobs_delta] == completion.logprobs
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].finish_reason == completion.finish_reason
            assert outputs[-1].stop_reason == completion.stop_reason
        reasons = {completion.finish_reason for output in wanted for completion in output.outputs}
        assert reasons == {"stop", "length"}
        assert_pools_as_before(llm.engine)


def test_a_stop_string_over_several_tokens_is_held_back_and_cut(path):
    with make_llm(path) as llm:
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        tokens = llm.generate("w20 w21", free, use_tqdm=False)[0].outputs[0].token_ids
        stop = f"w{tokens[4]} w{tokens[5]}"
        assert stop not in " ".join(f"w{token}" for token in tokens[:5]), "the case shows nothing"
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        completion = llm.generate("w20 w21", params, use_tqdm=False)[0].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == tokens[:6] and f"w{tokens[4]}" not in completion.text.split()[4:]
        text = "".join(output.text_delta for output in llm.generate_stream("w20 w21", params))
        assert text == completion.text, "text that was streamed cannot be taken back"


# Limits, times and bytes


@BOTH_MODES
@pytest.mark.parametrize("length", [31, 32, 33, 47])
def test_output_ends_where_max_model_len_ends(path, enable_cpu_offload, length):
    """Also at and next to a block edge; the last token's KV is never needed."""
    with make_llm(path, max_model_len=48, enable_cpu_offload=enable_cpu_offload) as llm:
        prompt = random_prompts(1, length, length)
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=99, ignore_eos=True, n=2), use_tqdm=False)
        assert [len(completion.token_ids) for completion in output.outputs] == [48 - length] * 2
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 2
        metrics = output.metrics
        assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (length, 2 * (48 - length))
        assert (metrics.time_per_output_token is None) == (length == 47)
        assert_pools_as_before(llm.engine)


def test_an_aborted_request_has_the_times_of_what_it_reached(path):
    engine = make_engine(path, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = (engine.add_request(name, [5, 6, 7], params) for name in ("first", "second"))
    for _ in range(4):  # a step's tokens are read one step later
        engine.step()
    for request in (first, second):
        engine.abort(request.request_id)
    metrics = first.output().metrics
    assert metrics.queue_time <= metrics.time_to_first_token < metrics.total_time and metrics.num_generated_tokens == 3
    metrics = second.output().metrics
    assert metrics.queue_time is None and metrics.time_to_first_token is None and metrics.total_time > 0
    assert first.output().outputs[0].finish_reason == second.output().outputs[0].finish_reason == "abort"
    assert_pools_as_before(engine)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(path):
    engine = make_engine(path)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add_request("one", [5, 6], params)
    with pytest.raises(ValueError, match="request id 'one' is in use: give each request an id of its own"):
        engine.add_request("one", [7], params)
    while engine.has_work:
        engine.step()
    assert engine.add_request("one", [7], params).prompt_token_ids == [7] and engine.abort("one")
    assert_pools_as_before(engine)


@pytest.mark.parametrize("num_ring_slots, num_discarded", [(2, 2), (3, 4)])
def test_streamed_and_written_bytes_are_those_counted_by_hand(path, num_ring_slots, num_discarded):
    """A prompt of 40 tokens and 12 generated ones: 11 decode steps, with 41 to 51 tokens.

    Two blocks are full after prefill, the third after the step with 48 tokens. So 8 steps read 2 host blocks in each
    layer and 3 steps read 3. With a ring of 2 slots the prefetch for the next step (layer 0, blocks 0 and 1) always
    fits; with 3 slots it is (layer 0, blocks 0 and 1; layer 1, block 0), of which the step with 49 tokens, whose third
    chunk is layer 0's new block, cannot use the last. What is prefetched after the last step is dropped as well.
    """
    engine = make_engine(
        path,
        enable_cpu_offload=True,
        enable_prefix_caching=False,
        num_ring_slots=num_ring_slots,
        ring_slot_bytes=LAYER_BLOCK_BYTES,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    run(engine, random_prompts(1, 40, 40), [params])
    stats = engine.stats()
    read = (8 * 2 + 3 * 3) * NUM_LAYERS
    assert stats["discarded_prefetch_bytes"] == num_discarded * LAYER_BLOCK_BYTES
    assert stats["streamed_bytes"] == (read + num_discarded) * LAYER_BLOCK_BYTES
    assert stats["decode_streamed_bytes"] == stats["streamed_bytes"], "prefill had no history to stream"
    assert stats["written_bytes"] == 3 * NUM_LAYERS * LAYER_BLOCK_BYTES
    assert (stats["num_prefill_steps"], stats["num_prefill_tokens"]) == (1, 40)
    assert (stats["num_decode_steps"], stats["num_decode_tokens"]) == (11, 11)
    assert_pools_as_before(engine)


# A request that fails by itself


@BOTH_MODES
def test_generate_returns_what_others_got_beside_a_request_that_fails(path, enable_cpu_offload, monkeypatch):
    prompts, params = random_prompts(3, 5, 30), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(path, enable_cpu_offload=enable_cpu_offload) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        append, bad = Detokenizer.append, []

        def failing(detokenizer, token_ids):
            bad.append(detokenizer) if not bad else None
            if detokenizer is bad[0] and token_ids[0] == wanted[0][4]:
                raise KeyError("no such piece")
            return append(detokenizer, token_ids)

        monkeypatch.setattr(Detokenizer, "append", failing)
        with pytest.warns(UserWarning, match="prompt 0 of 3 failed: 'no such piece'"):
            failed, *others = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in others] == wanted[1:]
        assert not any(output.error for output in others)
        assert failed.outputs[0].finish_reason == "error" and failed.error == "'no such piece'" and failed.finished
        place = wanted[0].index(wanted[0][4])
        assert failed.outputs[0].token_ids == wanted[0][: place + 1]
        bad.clear()
        with pytest.raises(KeyError, match="no such piece"):  # nobody else's output would be lost
            llm.generate(prompts[0], params, use_tqdm=False)
        assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_prompt_whose_logits_are_nan_fails_alone(path, dtype):
    """It comes first, and the others share its step."""
    prompts = [[7, 150, 9], [8, 9, 10], [11, 12]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with make_llm(path, dtype=dtype) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts[1:], params, use_tqdm=False)]
    with make_llm(path, dtype=dtype) as llm:
        with torch.inference_mode():
            llm.engine.runner.model.embed_tokens.weight[150] = torch.nan
        with pytest.warns(UserWarning, match="prompt 0 of 3 failed: logits of the request are NaN or infinite"):
            failed, *others = llm.generate(prompts, params, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        assert [output.outputs[0].token_ids for output in others] == wanted
        assert [output.error for output in others] == [None, None]
        assert_pools_as_before(llm.engine)


def test_a_step_does_not_look_at_requests_that_it_gave_nothing(path, monkeypatch):
    """Thousands wait behind the ones that run: counting them in each step took longer than the step."""
    looks, is_finished = [], Request.is_finished.fget
    monkeypatch.setattr(Request, "is_finished", property(lambda self: looks.append(1) or is_finished(self)))
    prompts, params = random_prompts(20, 2, 6), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with make_llm(path, max_num_seqs=2) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    assert len(looks) < 20 * len(prompts), f"{len(looks)} looks at {len(prompts)} requests"
