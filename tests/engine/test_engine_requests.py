"""What a user sees of requests: alone or in company, one after the other, ended early, preempted, failed."""

import gc
import threading
import weakref
from unittest.mock import Mock

import pytest
from engines import COMMON, VOCAB, assert_pools_as_before, make_engine, outcome, random_prompts, run, some_params
from request_helpers import shrink_gpu_pool
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer import LLM, SamplingParams
from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.requests.sequence import SequenceState

BOTH_MODES = pytest.mark.parametrize("enable_cpu_offload", [False, True], ids=["resident", "offload"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint with a tokenizer of one word per token: "w17" is token 17."""
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=1)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.chat_template = "{% for m in messages %}w5 {{ m['content'] }} {% endfor %}w6"
    fast.save_pretrained(path)
    return path


def make_llm(path, **arguments):
    return LLM(path, **(COMMON | dict(skip_tokenizer_init=False) | arguments))


@BOTH_MODES
def test_many_requests_one_after_the_other_equal_fresh_engines(path, enable_cpu_offload):
    prompts, params = random_prompts(3, 1, 150, seed=4), some_params(3, max_tokens=12)
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)
    in_one_engine = [run(engine, [prompt], [param]) for prompt, param in zip(prompts, params, strict=True)]
    for prompt, param, outcomes in zip(prompts, params, in_one_engine, strict=True):
        fresh = make_engine(path, enable_cpu_offload=enable_cpu_offload)
        assert run(fresh, [prompt], [param]) == outcomes
        fresh.close()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("penalties", [{}, dict(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1)])
@pytest.mark.sampled("penalties1")
def test_preemption_loses_nothing(path, penalties):
    """A pool too small for what the running sequences grow to, against one that is large enough."""
    prompts = random_prompts(6, 30, 60, seed=7)
    params = some_params(6, max_tokens=36, **penalties)
    arguments = dict(max_model_len=128, enable_prefix_caching=False)
    wanted = [[c[0] for c in completions] for completions in run(make_engine(path, **arguments), prompts, params)]
    engine = make_engine(path, **arguments)
    pool = engine.kv_cache.tables.gpu_blocks
    taken = pool.allocate(pool.num_free - 18)
    outcomes = run(engine, prompts, params)
    assert engine.scheduler.num_preemptions > 0
    assert [[c[0] for c in completions] for completions in outcomes] == wanted
    pool.release(taken)
    assert_pools_as_before(engine)


def test_a_preempted_sequence_comes_back_with_the_same_bits(path):
    """Also in another mode than the one in which it was saved."""
    prompts, params = random_prompts(1, 40, 40, seed=8), some_params(1, max_tokens=30)
    wanted = run(make_engine(path), prompts, params)

    def at_step(engine, step):
        if step == 5:
            victim = engine.scheduler.running[0]
            engine.scheduler.preempt_youngest()
            assert victim.kept_blocks is not None and victim.row is None
        if step == 7:
            engine.switch_mode("offload")
        if step == 12:
            engine.switch_mode("resident")
            engine.scheduler.preempt_youngest()
            engine.switch_mode("offload")  # what was saved in one mode comes back in the other

    engine = make_engine(path)
    assert run(engine, prompts, params, at_step) == wanted
    assert_pools_as_before(engine)


@BOTH_MODES
def test_abort_in_every_state_gives_everything_back(path, enable_cpu_offload):
    for wanted_state in (SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE):
        engine = make_engine(path, enable_cpu_offload=enable_cpu_offload, max_num_seqs=1, max_num_batched_tokens=32)
        prompts = random_prompts(2, 100, 100)
        others = engine.add_request("other", prompts[0], SamplingParams(temperature=0, max_tokens=8))
        victim = engine.add_request("victim", prompts[1], SamplingParams(temperature=0, max_tokens=8))
        while victim.sequences[0].state is not wanted_state:
            engine.step()
        assert engine.abort("victim") and not engine.abort("victim")
        assert victim.output().outputs[0].finish_reason == "abort" and victim.is_finished
        while engine.has_work:
            engine.step()
        assert others.is_finished and len(others.output().outputs[0].token_ids) == 8
        assert_pools_as_before(engine)


@BOTH_MODES
def test_an_exception_inside_a_step_ends_its_requests_only(path, enable_cpu_offload, monkeypatch):
    prompts, params = random_prompts(3, 40, 90, seed=9), some_params(3)
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload, max_num_seqs=2)
    wanted = run(engine, prompts[2:], params[2:])
    requests = [engine.add_request(f"r{i}", prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params))]
    model, calls = engine.runner.model, 0
    original = type(model).after_attention

    def broken(self, layer, *others):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("out of luck")
        return original(self, layer, *others)

    monkeypatch.setattr(type(model), "after_attention", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        while engine.has_work:
            engine.step()
    monkeypatch.undo()
    failed = [request for request in requests if request.is_finished]
    assert failed and all(request.output().outputs[0].finish_reason == "abort" for request in failed)
    while engine.has_work:
        engine.step()
    assert requests[2] not in failed and outcome(requests[2])[0][0] == wanted[0][0][0]
    assert_pools_as_before(engine)
    assert run(engine, prompts[2:], params[2:]) == wanted, "the engine goes on as if nothing had happened"


def test_interrupting_generate_leaves_nothing_behind(path, monkeypatch):
    with make_llm(path) as llm:
        steps = 0
        original = llm.engine.step

        def interrupted():
            nonlocal steps
            steps += 1
            if steps == 4:
                raise KeyboardInterrupt
            return original()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(random_prompts(5), SamplingParams(max_tokens=20), use_tqdm=False)
        monkeypatch.undo()
        assert_pools_as_before(llm.engine)
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@BOTH_MODES
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(path, enable_cpu_offload):
    params = SamplingParams(temperature=1.2, seed=1234, max_tokens=12, ignore_eos=True)
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)
    prompt = random_prompts(1, 30, 30)[0]
    (alone,) = run(engine, [prompt], [params])
    neighbours = random_prompts(5, seed=3)
    together = run(engine, [*neighbours[:2], prompt, *neighbours[2:]], [*some_params(2), params, *some_params(3)])
    assert together[2][0][0] == alone[0][0]


def test_completions_of_one_request_differ_and_are_reproducible(path):
    params = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=10, ignore_eos=True)
    with make_llm(path) as llm:
        (first,), (second,) = (llm.generate([[9, 8, 7]], params, use_tqdm=False) for _ in range(2))
        assert [completion.index for completion in first.outputs] == [0, 1, 2, 3]
        tokens = [tuple(completion.token_ids) for completion in first.outputs]
        assert len(set(tokens)) == 4
        assert tokens == [tuple(completion.token_ids) for completion in second.outputs]


def test_text_stop_strings_and_stop_tokens(path):
    with make_llm(path) as llm:
        free = llm.generate("w20 w21", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        completion = free[0].outputs[0]
        assert free[0].prompt == "w20 w21" and free[0].prompt_token_ids == [20, 21]
        assert completion.text.split() == [f"w{token}" for token in completion.token_ids]
        assert completion.finish_reason == "length"
        fourth = completion.token_ids[3]
        first = completion.token_ids.index(fourth)
        stopped = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=f"w{fourth}")
        by_text = llm.generate("w20 w21", stopped, use_tqdm=False)[0].outputs[0]
        assert by_text.finish_reason == "stop" and by_text.stop_reason == f"w{fourth}"
        assert f"w{fourth}" not in by_text.text and len(by_text.token_ids) == first + 1
        stopped = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[fourth])
        by_token = llm.generate("w20 w21", stopped, use_tqdm=False)[0].outputs[0]
        assert by_token.finish_reason == "stop" and by_token.stop_reason == fourth
        assert by_token.token_ids == completion.token_ids[: first + 1]
        late = SamplingParams(temperature=0, max_tokens=12, min_tokens=8, ignore_eos=True, stop_token_ids=[fourth])
        assert len(llm.generate("w20 w21", late, use_tqdm=False)[0].outputs[0].token_ids) >= 8


def test_streamed_deltas_join_to_what_generate_returns(path):
    prompts, params = random_prompts(4, 1, 80, seed=2), some_params(4)
    with make_llm(path, enable_cpu_offload=True, enable_prefix_caching=False) as llm:
        wanted = llm.generate(prompts, params, use_tqdm=False)
        text, tokens, logprobs, ends = {}, {}, {}, {}
        for output in llm.generate_stream(prompts, params):
            text[output.request_id] = text.get(output.request_id, "") + output.text_delta
            tokens.setdefault(output.request_id, []).extend(output.token_ids_delta)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs_delta)
            if output.finished:
                ends[output.request_id] = output
        for request_id, output in zip(sorted(text, key=int), wanted, strict=True):
            completion = output.outputs[0]
            assert text[request_id] == completion.text and tokens[request_id] == completion.token_ids
            assert logprobs[request_id] == completion.logprobs
            assert ends[request_id].finish_reason == completion.finish_reason
            assert ends[request_id].metrics.num_generated_tokens == len(completion.token_ids)


def test_a_stream_can_be_left_and_a_request_in_it_aborted(path):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with make_llm(path) as llm:
        reasons = {}
        for output in llm.generate_stream(random_prompts(3), params):
            if output.request_id == "1" and len(reasons) == 0:
                reasons["1"] = None
                assert llm.abort("1")
            if output.finished:
                reasons[output.request_id] = output.finish_reason
        assert reasons == {"0": "length", "1": "abort", "2": "length"}
        assert_pools_as_before(llm.engine)
        for _ in llm.generate_stream(random_prompts(3), params):
            break
        assert_pools_as_before(llm.engine)


def test_streams_read_in_turns_and_generate_in_between_get_all_of_their_own(path):
    prompts, params = random_prompts(3), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_llm(path) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        streams, found, ends = [llm.generate_stream(prompt, params) for prompt in prompts[:2]], [[], []], []
        for outputs in zip(*streams, strict=True):
            for tokens, output in zip(found, outputs, strict=True):
                tokens += output.token_ids_delta
                ends.append(output.finished)
            if len(ends) == 4:
                third = llm.generate(prompts[2], params, use_tqdm=False)[0].outputs[0].token_ids
        assert [*found, third] == wanted and sum(ends) == 2 and ends[-2:] == [True, True]
        assert_pools_as_before(llm.engine)


def test_chat_uses_the_template(path):
    with make_llm(path) as llm:
        (output,) = llm.chat([{"role": "user", "content": "w30 w31"}], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.prompt_token_ids == [5, 30, 31, 6]


def test_output_ends_at_max_model_len(path):
    with make_llm(path, max_model_len=40) as llm:
        (output,) = llm.generate(random_prompts(1, 30, 30), SamplingParams(max_tokens=50, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 10 and output.outputs[0].finish_reason == "length"


def test_metrics_and_counters_add_up(path):
    with make_llm(path, enable_cpu_offload=True) as llm:
        prompts = random_prompts(3, 20, 50)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        for output in outputs:
            metrics = output.metrics
            assert 0 <= metrics.queue_time <= metrics.time_to_first_token <= metrics.total_time
            assert metrics.time_per_output_token > 0 and metrics.num_generated_tokens == 6
        stats = llm.stats()
        assert stats["mode"] == "offload" and stats["num_prefill_tokens"] == sum(map(len, prompts))
        assert stats["num_decode_tokens"] == 3 * 5 and stats["graph_replays"] > 0 and stats["padded_rows"] > 0
        assert stats["host_blocks_used"] == 0 < stats["host_blocks_cached"]
        assert stats["host_blocks_free"] == stats["host_blocks_total"] and stats["link_gbps"] > 0


def test_a_closed_llm_leaves_its_streams_to_the_next(path, monkeypatch):
    """At once, not when garbage is collected: see `offload.runtime.cuda`."""
    closed = []
    monkeypatch.setattr("offload.runtime.cpu.CpuRuntime.close", lambda self: closed.append(self))
    llm = make_llm(path)
    runtime = llm.engine.runner.runtime
    assert not closed
    llm.close()
    assert closed == [runtime]


def test_a_closed_engine_holds_no_memory_though_somebody_holds_its_runner(path):
    engine = make_engine(path)
    run(engine, random_prompts(1, 20, 30), [SamplingParams(max_tokens=2, prompt_logprobs=1)])
    runner = engine.runner
    decode = runner.decode_program
    held = [weakref.ref(one) for one in (decode.logits, decode.tokens, runner.gpu_kv, runner.ring.bytes)]
    del decode
    engine.close()
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def test_a_closed_engine_says_so_and_may_be_closed_again(path):
    engine = make_engine(path)
    engine.close()
    engine.close()
    # The masks have threads of their own, which end with them.
    for call in (engine.step, engine.stats, lambda: engine.abort("r"), lambda: engine.has_work, lambda: engine.masks):
        with pytest.raises(RuntimeError, match="this engine is closed: make a new one"):
            call()
    with pytest.raises(AttributeError, match="'LLMEngine' object has no attribute 'stop'"):
        engine.stop()


def test_an_engine_whose_close_was_interrupted_is_closed(path, monkeypatch):
    engine = make_engine(path)
    memory = weakref.ref(engine.runner.gpu_kv)
    monkeypatch.setattr(engine.runner.model.streamed, "close", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("call", ["generate", "generate_stream", "stats", "switch_mode", "abort", "close"])
def test_another_thread_is_refused_while_one_generates(path, monkeypatch, call):
    """It would take what is half changed for an interrupted recovery, and end the requests without a word."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    arguments = dict(
        generate=([7], params), generate_stream=([7], params), switch_mode=("offload",), abort=("0",)
    ).get(call, ())  # fmt: skip
    errors = []

    def other():
        try:
            list(getattr(llm, call)(*arguments) or ())
        except Exception as error:
            errors.append(str(error))

    def while_it_steps(*args):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return execute(*args)

    with LLM(path, **COMMON) as llm:
        wanted = [output.outputs for output in llm.generate([[5, 6], [8]], params, use_tqdm=False)]
        execute = llm.engine.runner.execute
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "execute", while_it_steps)
            found = [output.outputs for output in llm.generate([[5, 6], [8]], params, use_tqdm=False)]
        assert found == wanted and len(errors) > 1
        assert all(error.startswith("another thread is in a call of this engine") for error in errors), errors[0]
        assert_pools_as_before(llm.engine)
        num_refused, thread = len(errors), threading.Thread(target=other)  # one after the other is allowed
        thread.start()
        thread.join()
        assert len(errors) == num_refused


def test_a_closed_llm_says_so(path):
    llm = make_llm(path)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate([[1]])


def test_two_engines_in_one_process_do_not_disturb_each_other(path):
    prompts, params = random_prompts(3), some_params(3)
    one = make_engine(path, enable_prefix_caching=False)
    other = make_engine(path, enable_prefix_caching=False, enable_cpu_offload=True, num_ring_slots=2)
    wanted = run(one, prompts, params)
    first = [one.add_request(f"a{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params))]
    second = [other.add_request(f"b{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params))]
    while one.has_work or other.has_work:
        one.step()
        other.step()
    assert [outcome(request) for request in first] == wanted
    assert [outcome(request) for request in second] == wanted


def test_what_was_read_before_a_failure_is_returned_by_the_next_step(path, monkeypatch):
    """The last token of one request is read in the step in which the sampling of another's fails."""
    engine = make_engine(path)
    engine.samples_late = True
    engine.add_request("done", [5] * 9, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    engine.step()
    engine.step()
    engine.add_request("fails", [6] * 9, SamplingParams(temperature=0, max_tokens=5))

    def failing(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(engine.runner, "sample", failing)
        engine.step()
    assert engine.has_work
    (output,) = engine.step()
    assert (output.request_id, output.finished, output.finish_reason) == ("done", True, "length")
    assert not engine.has_work
    assert_pools_as_before(engine)


def test_a_failure_ends_no_later_request_of_the_same_name(path, monkeypatch):
    """A step in flight still has the sequence of a request that was aborted, and whose name is in use again."""
    prompts, params = random_prompts(2, 30, 30), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = make_engine(path)
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add_request(name, prompt, params)
    while not engine.live.in_flight:
        engine.step()
    engine.abort("a")
    later = engine.add_request("a", prompts[0], params)

    def fail(*_):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.admission, "admit", lambda sequence: False)
        patch.setattr(PendingTokens, "read", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
    assert list(engine.live.requests) == ["a"]
    while engine.has_work:
        engine.step()
    assert later.sequences[0].finish_reason == "length"
    assert_pools_as_before(engine)


def test_min_tokens_beyond_32_bits_harms_nobody(path):
    engine = make_engine(path, max_model_len=64)
    stops = list(range(0, 160, 3))  # of 160 tokens: one of them is soon the best
    params = [
        SamplingParams(temperature=0, max_tokens=2**40, min_tokens=2**40, stop_token_ids=stops),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    ]
    requests = [engine.add_request(str(i), [7, 8, 9], param) for i, param in enumerate(params)]
    while engine.has_work:
        engine.step()
    assert [request.output().outputs[0].finish_reason for request in requests] == ["length", "length"]
    assert not set(stops).intersection(requests[0].output().outputs[0].token_ids)


def test_a_sequence_that_returns_from_preemption_shares_its_blocks_again(path):
    """Also if it ends with the first token after its return."""
    engine = make_engine(path, max_num_seqs=4)
    (prompt,) = random_prompts(1, 97, 97, seed=3)  # six full blocks and a token
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    first = engine.add_request("first", prompt, params)
    (sequence,) = first.sequences
    while sequence.num_sampled < 2:
        engine.step()
    engine.scheduler.preempt_youngest()
    give_back = shrink_gpu_pool(engine, 0)  # others take the blocks that it had
    engine.step()
    give_back()
    while not first.is_finished:
        engine.step()
    second = engine.add_request("second", prompt + [5, 6, 7], params)
    while not second.is_finished:
        engine.step()
    assert engine.stats()["prefix_cache_hit_tokens"] == 96


@BOTH_MODES
def test_a_prefix_that_lost_a_block_is_still_found_up_to_there(path, enable_cpu_offload):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    arguments = dict(max_num_seqs=2, max_model_len=200, num_gpu_blocks_override=16)
    if enable_cpu_offload:
        arguments |= dict(enable_cpu_offload=True, host_memory_limit=13 * make_engine(path).plan.block_bytes)
    engine = make_engine(path, **arguments)
    stats = engine.stats()
    num_blocks = stats["host_blocks_total" if enable_cpu_offload else "gpu_blocks_total"]
    prefix, other = random_prompts(2, 190, 190, seed=21)
    run(engine, [prefix[:97]], [params])  # 6 full blocks
    # As many blocks as are free, and one more.
    run(engine, [other[: 16 * (num_blocks - 6 + 1) + (1 if enable_cpu_offload else -4)]], [params])
    before = engine.stats()["prefix_cache_hit_tokens"]
    run(engine, [prefix[:97]], [params])
    assert engine.stats()["prefix_cache_hit_tokens"] - before == 5 * 16


@BOTH_MODES
def test_a_completion_goes_on_after_a_failure_although_a_token_of_another_one_was_dropped(path, enable_cpu_offload):
    """A step is launched before the one before is read, so a completion that stops has a token too many."""
    given = dict(temperature=1.0, seed=3, n=2, max_tokens=30, ignore_eos=True)
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)
    ((first, second),) = run(engine, [[5, 6, 7]], [SamplingParams(**given)])
    stop = next(token for place, token in enumerate(first[0]) if place > 3 and token not in second[0])
    request = engine.add_request("stops", [5, 6, 7], SamplingParams(**given, stop_token_ids=[stop]))
    while request.sequences[0].finish_reason is None:
        engine.step()
    assert request.sequences[0].num_pending == 1
    engine.step()
    switch = engine.modes.switch
    engine.modes.switch = lambda *arguments: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.switch_mode("resident" if enable_cpu_offload else "offload")
    engine.modes.switch = switch
    while not request.is_finished:
        engine.step()
    assert outcome(request)[1] == second
    assert_pools_as_before(engine)


def test_steps_that_nobody_reads_are_forgotten(path, monkeypatch):
    """The step behind one in which all stop computes a token too many for everybody, and is dropped."""
    engine, launched = make_engine(path), []
    sample = engine.runner.sample

    def remember(*arguments):
        tokens = sample(*arguments)
        launched.append(weakref.ref(tokens))
        return tokens

    monkeypatch.setattr(engine.runner, "sample", remember)
    for seed in range(6):
        run(engine, random_prompts(1, 5, 9, seed), [SamplingParams(stop_token_ids=[*range(VOCAB)], max_tokens=9)])
    assert len(launched) == 12 and sum(one() is not None for one in launched) <= 1
