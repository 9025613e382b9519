"""Streams of an LLM that are read in turns, beside `generate`, and while steps fail."""

import gc
import json
import shutil
import threading

import pytest
from engines import COMMON, SMALL, assert_pools_as_before, random_prompts
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = random_prompts(4, 5, 30, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture
def llm(path):
    with LLM(path, **COMMON) as llm:
        yield llm
        assert_pools_as_before(llm.engine)


def tokens_of(llm, prompts, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def read(stream):
    """Request -> (tokens, reason of the end, error)."""
    found = {}
    for output in stream:
        tokens, _, _ = found.get(output.request_id, ([], None, None))
        found[output.request_id] = (tokens + output.token_ids_delta, output.finish_reason, output.error)
    return found


def test_a_refused_prompt_does_not_hide_the_others_while_something_else_runs(llm):
    wanted = tokens_of(llm, PROMPTS[:2])
    stream = llm.generate_stream([PROMPTS[0], [], PROMPTS[1]], GREEDY)
    first = next(stream)
    tokens_of(llm, PROMPTS[2:3])
    assert first.finish_reason == "error" and "empty" in first.error
    assert list(read(stream).values()) == [(tokens, "length", None) for tokens in wanted]


def test_a_request_can_be_aborted_before_its_first_token(llm):
    stream = llm.generate_stream([PROMPTS[0], [], PROMPTS[1]], GREEDY)
    refused = next(stream)
    (other,) = {str(int(refused.request_id) - 1)}
    assert llm.abort(other)
    found = read(stream)
    assert found[other] == ([], "abort", None) and len(found) == 2


def test_a_failing_step_ends_its_requests_only_and_each_reader_is_told(llm, monkeypatch):
    """Two streams in one batch; the one whose turn it is meets the error, a third begins afterwards."""
    one, two = llm.generate_stream(PROMPTS[0], GREEDY), llm.generate_stream(PROMPTS[1], GREEDY)
    next(one), next(two)

    def broken(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", broken)
        ((_, *end),) = read(one).values()
    ((_, *other_end),) = read(two).values()
    assert end == other_end == ["error", "out of luck"]
    assert [tokens for tokens, _, _ in read(llm.generate_stream(PROMPTS[2], GREEDY)).values()] == tokens_of(
        llm, PROMPTS[2]
    )


def test_tokens_read_before_a_step_failed_are_not_lost(llm, monkeypatch):
    (wanted,) = tokens_of(llm, PROMPTS[1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    long = llm.generate_stream(PROMPTS[0], GREEDY)
    short = llm.generate_stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    next(long)
    begin = next(short).token_ids_delta
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
        assert next(reversed(list(long))).finish_reason == "error"
    ((rest, reason, _),) = read(short).values()
    assert begin + rest == wanted and reason == "length"


def test_generate_is_not_harmed_by_a_request_of_a_stream_that_can_never_run(path):
    """With "auto" a prompt is taken that only the host can hold, and then the host cannot be used."""
    with LLM(path, **COMMON | dict(enable_cpu_offload="auto", num_gpu_blocks_override=12)) as llm:

        def refuse(*_):
            raise MemoryError("cannot pin")

        llm.engine.modes.switch = refuse
        wanted = tokens_of(llm, PROMPTS[:1])
        stream = llm.generate_stream([PROMPTS[1], random_prompts(1, 300, 300)[0]], GREEDY)
        next(stream)
        with pytest.warns(UserWarning, match="cannot pin"):
            assert tokens_of(llm, PROMPTS[0]) == wanted
            found = list(read(stream).values())
        assert found[0][1] == "length" and found[1][1] == "error" and "cannot be used: cannot pin" in found[1][2]
        assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("place", range(3))
def test_an_interrupt_behind_a_request_that_was_added_leaves_none_of_the_stream(llm, monkeypatch, place):
    """Ctrl-C may come when `add_request` has returned and nobody has noted the request yet."""
    added = []

    def interrupted(*arguments):
        added.append(add_request(*arguments))
        if len(added) > place:
            raise KeyboardInterrupt
        return added[-1]

    add_request = llm.engine.add_request
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "add_request", interrupted)
        list(llm.generate_stream(PROMPTS[:3], GREEDY))
    assert all(request.is_finished for request in added) and not llm._streams
    assert_pools_as_before(llm.engine)


def test_an_interrupt_before_a_stream_knows_its_request_is_no_other_error(llm, monkeypatch):
    class Interrupted(dict):
        def __setitem__(self, *_):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "_streams", Interrupted())
        list(llm.generate_stream(PROMPTS[:2], GREEDY))
    assert_pools_as_before(llm.engine)


def on_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("where", ["another thread", "this thread"])
def test_a_stream_that_is_left_while_a_step_runs_ends_before_the_next_one(llm, monkeypatch, where):
    """The garbage collector closes generators on any thread, also on the one that is in the midst of a step."""
    wanted = tokens_of(llm, PROMPTS[:1])
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    streams = [llm.generate_stream(PROMPTS[1:3], long)]
    next(streams[0])
    requests = list(llm.engine.live.requests.values())
    unread, execute = next(iter(llm._streams.values())).unread, llm.engine.runner.execute
    lengths = []

    def leave():
        streams.clear()
        gc.collect()

    def while_it_steps(*arguments):
        if streams:
            leave() if where == "this thread" else on_another_thread(leave)
        else:
            lengths.append((len(unread), len(llm.engine.live.requests)))
        return execute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", while_it_steps)
        assert tokens_of(llm, PROMPTS[:1]) == wanted, "a step of others was harmed"
    assert lengths and set(lengths) == {(len(unread), 1)}, "requests that nobody reads go on"
    assert [request.sequences[0].finish_reason for request in requests] == ["abort", "abort"]
    assert max(request.sequences[0].num_generated for request in requests) < 5 and not llm._streams


def test_a_stream_that_is_left_in_the_last_call_ends_with_it(llm):
    stream = llm.generate_stream(PROMPTS[:2], GREEDY)
    next(stream)
    with llm.engine.alone():
        on_another_thread(stream.close)
        assert len(llm.engine.live.requests) == 2, "another thread changes an engine that is in use"
    assert_pools_as_before(llm.engine)


def test_an_error_that_ends_nobody_is_raised(llm, monkeypatch):
    stream = llm.generate_stream(PROMPTS[0], GREEDY)
    next(stream)

    def broken():
        raise RuntimeError("no plan")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no plan"):
        patch.setattr(llm.engine.scheduler, "schedule", broken)
        list(stream)


def test_a_stream_may_be_left_after_close(path):
    llm = LLM(path, **COMMON)
    stream = llm.generate_stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.close()
    stream.close()


def test_what_the_checkpoint_recommends_is_cut_to_the_pool_and_what_was_asked_for_is_refused(path, tmp_path):
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 300, "temperature": 0}))
    arguments = COMMON | dict(num_gpu_blocks_override=10, enable_cpu_offload=True)
    with LLM(tmp_path / "model", **arguments) as llm:
        llm.switch_mode("resident")  # whose pool is smaller than a sequence may be
        capacity = llm.engine.modes.max_sequence_tokens("resident")
        (tokens,) = tokens_of(llm, [5] * 20, None)
        assert len(tokens) <= capacity - 20 < 300
        with pytest.raises(ValueError, match="may grow by 301"):
            tokens_of(llm, [5] * 20, SamplingParams(max_tokens=301))
