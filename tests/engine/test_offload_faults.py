"""Errors in the middle of a step, of a switch or of pinning, with part of the blocks on the GPU and a step in flight.

Each time: the requests of the failed step end, the others get what they get alone, and both pools are as before.
"""

import errno
import functools
import itertools
import re
import warnings
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from checksum import LAYER_BLOCK_BYTES
from engines import (
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
)
from refusing_driver import refuse_pinning
from request_helpers import shrink_gpu_pool
from simulated import SimulatedRuntime

import nanoinfer.execution.runner
from nanoinfer import LLMEngine, SamplingParams
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.execution.decode import DecodeProgram
from nanoinfer.execution.read_back import PendingTokens, ReadBack
from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.kv.admission import Admission
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.gpu_copies import GPUCopies
from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.request import Request
from offload import OffloadEngine
from offload.memory.pinned import HostArena, PinError

pytestmark = pytest.mark.usefixtures("checksums")
ARGUMENTS = dict(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=48,
    ring_slot_bytes=LAYER_BLOCK_BYTES,
    num_ring_slots=2,
    enable_prefix_caching=False,
    resident_kv_limit=None,
)
PROMPTS = random_prompts(4, 10, 23, seed=9)
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True)
    for i, max_tokens in enumerate((5, 4, 5, 8))
]


@pytest.fixture(scope="module")
def path(path_of):
    return path_of("qwen3", **SMALL)


@pytest.fixture(scope="module")
def alone(path):
    """The tokens of each request when nothing fails."""
    engine = make_engine(path, **ARGUMENTS)
    return [completions[0][0] for completions in run(engine, PROMPTS, PARAMS)]


def start(path, mode: str, seed: int | None = None, **arguments) -> tuple[LLMEngine, Callable[[], None]]:
    """An engine with a GPU pool too small for what runs, so that blocks move or requests are preempted.

    Returns:
        The engine, and what gives back the rest of its pool.
    """
    mode_arguments = {
        "resident": dict(enable_cpu_offload=False),
        "offload": dict(enable_cpu_offload=True),
        "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=12),
    }[mode]
    engine = make_engine(path, SimulatedRuntime(seed), **(ARGUMENTS | mode_arguments | arguments))
    num_gpu_blocks = {"resident": 11, "offload": 9}.get(mode)
    return engine, shrink_gpu_pool(engine, num_gpu_blocks) if num_gpu_blocks else lambda: None


def add_all(engine: LLMEngine, count: int = len(PROMPTS)) -> list[Request]:
    pairs = enumerate(zip(PROMPTS[:count], PARAMS[:count], strict=True))
    return [engine.add_request(str(i), *pair) for i, pair in pairs]


def finish(engine: LLMEngine) -> None:
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
        assert num_steps < 1000, "the engine does not come to an end"


def fail_at(call: int, method: Callable, error: type[BaseException]) -> Callable:
    """The method, raising at its nth call."""
    calls = itertools.count(1)

    @functools.wraps(method)
    def failing(*args, **kwargs):
        if next(calls) == call:
            raise error("out of luck")
        return method(*args, **kwargs)

    return failing


def assert_only_aborted_ones_differ(requests: list[Request], alone: list[list[int]]) -> set[int]:
    """An aborted request has a beginning of its tokens, every other one all of them; returns the aborted ones."""
    aborted = set()
    for i, (request, wanted) in enumerate(zip(requests, alone, strict=True)):
        ((tokens, _, reason),) = outcome(request)
        if reason in ("abort", "error"):
            aborted.add(i)
            assert tokens == wanted[: len(tokens)], f"request {i}"
        else:
            assert (tokens, reason) == (wanted, "length"), f"request {i}"
    return aborted


def assert_goes_on_as_before(
    engine: LLMEngine, give_back: Callable[[], None], alone: list[list[int]], count: int = len(PROMPTS)
) -> None:
    """With the first `count` of the requests."""
    requests = add_all(engine, count)
    finish(engine)
    assert not assert_only_aborted_ones_differ(requests, alone[:count])
    give_back()
    assert_pools_as_before(engine)


# Name: whose function it is, and at which of its calls it fails.
PLACES = {
    "planning": (StepPlanner, "begin_step", (1, 6, 12)),
    "taking promoted blocks": (GPUCopies, "promote", (1, 4, 8)),
    "ring fill": (OffloadEngine, "_fill", (1, 2, 9)),
    "promotion copy": (DecodeProgram, "promote", (1, 2, 5)),
    "write-through": (OffloadEngine, "_write_through", (1, 2, 6, 12)),
    "sampling": (SamplingState, "sample", (1, 2, 8)),
    "read-back": (ReadBack, "send", (1, 6, 12)),
    "behind the read-back": (KVCache, "commit", (1, 6, 16)),
    "waiting for a step": (PendingTokens, "read", (1, 6, 12)),
    "late sampling": (SamplingState, "sample", (1, 2, 8)),
    "waiting for a step while another has layers only": (PendingTokens, "read", (1, 6, 12)),
    "taking a token": (Request, "take", (1, 8, 16)),
}
# An error of one request ends that one alone; only an interrupt there leaves the step.
INTERRUPTS_ONLY = ["taking a token"]
SAMPLES_LATE = ["late sampling", "waiting for a step while another has layers only"]
MODES = {
    "taking promoted blocks": ["offload", "auto"],
    "promotion copy": ["offload"],
    "ring fill": ["offload", "auto"],
    "write-through": ["offload"],
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_a_step_ends_its_requests_and_touches_no_other(path, alone, place, fuzz, monkeypatch):
    """One mode, call and error, the places in turn; `--fuzz`: each with all."""
    owner, name, calls = PLACES[place]
    modes = MODES.get(place, ["resident", "offload", "auto"])
    for number, mode in enumerate(modes):
        if not fuzz and number != list(PLACES).index(place) % len(modes):
            continue
        errors = [KeyboardInterrupt] if place in INTERRUPTS_ONLY else [RuntimeError, KeyboardInterrupt]
        failures = list(zip(calls, itertools.cycle(errors)))
        for call, error in failures if fuzz else [failures[number]]:
            # Where streams are shuffled, what was enqueued fails when it runs: too late to say in which step.
            seed = call if error is RuntimeError and owner is not SamplingState else None
            engine, give_back = start(path, mode, seed)
            engine.samples_late = place in SAMPLES_LATE
            requests = add_all(engine)
            with monkeypatch.context() as patch, pytest.raises(error, match="out of luck"):
                patch.setattr(owner, name, fail_at(call, getattr(owner, name), error))
                finish(engine)
            finish(engine)
            assert assert_only_aborted_ones_differ(requests, alone), f"{mode}, call {call}: nobody was aborted"
            assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("mode", ["resident", "offload", "auto"])
@pytest.mark.parametrize("owner, name", [(Request, "take"), (Detokenizer, "append"), (Request, "stream_output")])
@pytest.mark.sampled("Request-take-offload", "Detokenizer-append-resident", "Request-stream_output-auto")
def test_an_error_of_one_request_ends_that_one_alone(path, alone, owner, name, mode, fuzz, monkeypatch):
    calls = {"resident": 1, "offload": 8, "auto": 12}
    for call in calls.values() if fuzz else [calls[mode]]:
        engine, give_back = start(path, mode, seed=call)
        requests = add_all(engine)
        outputs = []
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_at(call, getattr(owner, name), RuntimeError))
            while engine.has_work:
                outputs += engine.step()
        (failed,) = assert_only_aborted_ones_differ(requests, alone)
        assert requests[failed].output().error == "out of luck"
        (end,) = [output for output in outputs if output.finish_reason == "error"]
        assert (end.request_id, end.error, end.finished) == (str(failed), "out of luck", True)
        assert_goes_on_as_before(engine, give_back, alone, 2)


def test_of_the_completions_of_a_request_one_fails_alone(path, alone, monkeypatch):
    engine, give_back = start(path, "auto")
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
    several, other = engine.add_request("several", PROMPTS[0], params), engine.add_request("0", PROMPTS[1], PARAMS[1])
    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "append", fail_at(5, Detokenizer.append, RuntimeError))
        ends = [output for _ in range(200) if engine.has_work for output in engine.step() if output.finished]
    failed = [reason for _, _, reason in outcome(several)].index("error")
    assert [end.index for end in ends if end.error == "out of luck"] == [failed] and several.error == "out of luck"
    assert sorted(end.index for end in ends if end.request_id == "several") == [0, 1, 2]
    assert [reason for _, _, reason in outcome(several)].count("length") == 2
    assert outcome(other)[0][0] == alone[1]
    assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("mode", ["resident", "offload", "auto"])
@pytest.mark.sampled("resident", "auto")
def test_an_error_before_a_step_is_launched_ends_nobody(path, alone, mode, fuzz, monkeypatch):
    places = (
        (GPUCopies, "take", (1, 3)), (Admission, "admit", (1, 4)), (KVCache, "grow", (1, 4)),
        (KVCache, "without_slot", (1, 6)),
    )  # fmt: skip
    for owner, name, calls in places if fuzz else places[mode != "resident" :: 2]:
        for call in calls if fuzz else [calls[mode != "resident"]]:
            engine, give_back = start(path, mode)
            requests = add_all(engine)
            with monkeypatch.context() as patch, pytest.raises(MemoryError, match="out of luck"):
                patch.setattr(owner, name, fail_at(call, getattr(owner, name), MemoryError))
                finish(engine)
            finish(engine)
            assert not assert_only_aborted_ones_differ(requests, alone)
            assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("name", ["store", "_write_through"])
def test_an_error_while_offload_mode_is_entered_leaves_resident_mode_as_it_was(path, alone, name, monkeypatch):
    """The next step tries again."""
    engine, give_back = start(path, "auto", seed=1)
    requests = add_all(engine)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(OffloadEngine, name, fail_at(1, getattr(OffloadEngine, name), RuntimeError))
        finish(engine)
    assert engine.mode == "resident" and engine.kv_cache.tables.lifetimes.host_blocks.num_used == 0
    finish(engine)
    assert engine.mode == "offload"
    assert not assert_only_aborted_ones_differ(requests, alone)
    assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("place", ["planning", "read-back", "behind the read-back"])
def test_a_request_is_preempted_and_that_step_fails(path, alone, place, monkeypatch):
    """Its newest token is on the device only: in a row that is no longer its own, in a buffer that is used again."""
    engine, give_back = start(path, "resident")
    requests = add_all(engine)
    owner, name, _ = PLACES[place]
    original, save, num_pending = getattr(owner, name), engine.mover.give_way, []
    engine.mover.give_way = lambda sequence: num_pending.append(sequence.num_pending) or save(sequence)

    def failing(*args):
        if engine.scheduler.num_preemptions:
            raise RuntimeError("out of luck")
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(owner, name, failing)
        finish(engine)
    assert num_pending == [1], "it was not preempted with a token in flight"
    finish(engine)
    aborted = assert_only_aborted_ones_differ(requests, alone)
    assert 0 < len(aborted) < 3
    assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.sampled("1", "5")
def test_a_host_pool_that_runs_out_in_a_prefill_ends_the_requests_of_that_step(path, alone, call, monkeypatch):
    engine, give_back = start(path, "offload", seed=call)
    requests = add_all(engine)
    host = engine.kv_cache.tables.lifetimes.host_blocks
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="out of luck"):
        patch.setattr(host, "allocate", fail_at(call, host.allocate, MemoryError))
        finish(engine)
    assert engine.stats()["num_decode_steps"] < 8, "the failure came after the prefills"
    finish(engine)
    assert assert_only_aborted_ones_differ(requests, alone)
    assert_goes_on_as_before(engine, give_back, alone, 2)


@pytest.mark.parametrize("mode", ["offload", "auto"])
@pytest.mark.sampled("auto")
def test_requests_are_aborted_while_their_blocks_are_in_flight(path, alone, mode, fuzz):
    """Copies run as late as they may here, and whatever is freed is filled with NaN."""
    num_in_flight = 0
    for seed in range(8) if fuzz else (2, 5):
        engine, give_back = start(path, mode, seed)
        requests = add_all(engine)
        while mode == "auto" and engine.mode == "resident":
            engine.step()
        for _ in range(seed if mode == "auto" else 3 + 2 * seed):
            engine.step()
        queued = {stream.name for stream in engine.runner.runtime.streams if stream.queue}
        num_in_flight += bool(queued & {"copy", "write"})
        victims = [request for request in requests if not request.is_finished][: 1 + seed % 2]
        for victim in victims:
            assert engine.abort(victim.request_id)
        finish(engine)
        aborted = assert_only_aborted_ones_differ(requests, alone)
        assert aborted == {requests.index(victim) for victim in victims}
        assert_goes_on_as_before(engine, give_back, alone, 2)
    assert num_in_flight >= 2, "hardly a copy was in flight at an abort"


# Pinning


@pytest.mark.parametrize("num_pinned", [0, 1])
def test_a_switch_that_finds_no_pinned_memory_changes_nothing(path, alone, num_pinned, monkeypatch):
    driver = refuse_pinning(monkeypatch, num_pinned)
    engine, give_back = start(path, "resident", pin_host_memory="require")
    give_back()
    requests = add_all(engine)
    for _ in range(14):
        engine.step()
    before = engine.stats() | dict(mode="resident")
    with pytest.raises(PinError, match="refused to pin host memory after .*no more.*lower host_memory_limit"):
        engine.switch_mode("offload")
    assert engine.mode == "resident"
    after = engine.stats()
    assert {name: after[name] for name in before if name.startswith("gpu_blocks")} == {
        name: value for name, value in before.items() if name.startswith("gpu_blocks")
    }
    finish(engine)
    assert not assert_only_aborted_ones_differ(requests, alone)
    assert_pools_as_before(engine)
    engine.close()
    assert not driver.registered


def test_auto_without_pinned_memory_preempts_and_says_so(path, alone, monkeypatch):
    driver = refuse_pinning(monkeypatch, 0)
    engine, give_back = start(path, "auto", pin_host_memory="require")
    with pytest.warns(UserWarning, match="offload mode cannot be entered, so requests take turns: .*refused to pin"):
        assert_goes_on_as_before(engine, give_back, alone)
    assert engine.mode == "resident" and engine.scheduler.num_preemptions > 0
    engine.close()
    assert not driver.registered


def refuse_mapping(monkeypatch) -> None:
    """The host pool cannot be mapped; the buffers that weights are read through can."""

    def arena(*args, **kwargs) -> HostArena:
        with monkeypatch.context() as patch:
            error = OSError(errno.ENOMEM, "Cannot allocate memory")
            patch.setattr("offload.memory.pinned.mmap.mmap", Mock(side_effect=error))
            return HostArena(*args, **kwargs)

    monkeypatch.setattr(nanoinfer.execution.runner, "HostArena", arena)


def test_auto_without_memory_for_the_host_pool_starts_resident_says_so_and_tries_again(path, alone, monkeypatch):
    with monkeypatch.context() as patch:
        refuse_mapping(patch)
        with pytest.warns(UserWarning, match="offload mode cannot be entered, .*GiB of host memory wanted.*allocate"):
            engine, give_back = start(path, "auto")
        assert engine.mode == "resident" and not engine.runner.offload.host.num_bytes
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it was said
            assert_goes_on_as_before(engine, give_back, alone)
        assert engine.mode == "resident" and engine.scheduler.num_preemptions > 0
    assert_goes_on_as_before(engine, give_back, alone)
    assert engine.mode == "offload", "there is memory now"


def test_offload_mode_without_memory_for_the_host_pool_says_what_to_change(path, monkeypatch):
    with monkeypatch.context() as patch:
        refuse_mapping(patch)
        with pytest.raises(MemoryError, match="GiB of host memory wanted, .* are available.*: lower host_memory_limit"):
            start(path, "offload")
        engine, _ = start(path, "resident")
        with pytest.raises(MemoryError, match="GiB of host memory wanted"):
            engine.switch_mode("offload")
        assert engine.mode == "resident"


@pytest.mark.parametrize("num_prompt_tokens, max_tokens", [(45, 2), (15, 33)], ids=["prompt", "growth"])
def test_auto_refuses_what_only_an_unusable_host_could_hold(path, num_prompt_tokens, max_tokens, monkeypatch):
    """That the host cannot be used is known only once it is needed; the requests behind must not wait for ever."""
    driver = refuse_pinning(monkeypatch, 0)
    engine, _ = start(path, "auto", pin_host_memory="require", num_gpu_blocks_override=10)
    (prompt,) = random_prompts(1, num_prompt_tokens, num_prompt_tokens)
    small = PROMPTS[0][:7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    big = engine.add_request("big", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    behind = engine.add_request("behind", *small)
    with pytest.warns(UserWarning, match="offload mode cannot be entered"):
        finish(engine)
    assert outcome(big)[0][2] == "error" and isinstance(big.failure, MemoryError)
    assert re.match(r"request 'big' cannot run: it has \d\d tokens.* 36: lower max.*The host's cannot", big.error)
    assert outcome(behind)[0] == run(engine, [small[0]], [small[1]])[0][0]
    assert_pools_as_before(engine)
    engine.close()
    assert not driver.registered


@pytest.mark.parametrize("mode", ["offload", "auto"])
def test_pageable_memory_serves_where_pinning_stops_half_way(path, alone, mode, monkeypatch):
    driver = refuse_pinning(monkeypatch, 1)
    with pytest.warns(UserWarning, match="refused to pin"):
        engine, give_back = start(path, mode)
        assert_goes_on_as_before(engine, give_back, alone)
    assert engine.mode == "offload"
    engine.close()
    assert not driver.registered


def test_a_switch_to_resident_mode_that_fails_in_its_copies_ends_in_a_mode_that_goes_on(path, alone, monkeypatch):
    engine, give_back = start(path, "offload")
    give_back()
    requests = add_all(engine)
    for _ in range(12):
        engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(OffloadEngine, "load", fail_at(1, OffloadEngine.load, RuntimeError))
        engine.switch_mode("resident")
    finish(engine)
    assert not assert_only_aborted_ones_differ(requests, alone)
    assert_pools_as_before(engine)
