"""Host memory that stops becoming usable at any segment: the engine works with what there is, and no step fails."""

import random
import re
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import pytest
from checksum.answers import check as check_sums
from checksum.oracle import Oracle
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, outcome, random_prompts, run
from refusing_driver import BLOCKS_PER_SEGMENT, refuse_pinning
from simulated import SimulatedRuntime

from nanoinfer import SamplingParams
from nanoinfer.common.errors import RequestError
from offload.memory.pinned import PinError

pytestmark = pytest.mark.usefixtures("checksums")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 192
ARGUMENTS = dict(
    block_size=BLOCK_SIZE,
    max_num_seqs=3,
    max_num_batched_tokens=32,
    max_model_len=MAX_MODEL_LEN,
    ring_slot_bytes=LAYER_BLOCK_BYTES,
    num_ring_slots=2,
    resident_kv_limit=None,
)
# Of 0 to 3 segments, in which all of these happen.
SEEDS = 0, 1, 18, 45, 46, 202
WHAT_MAY_HAPPEN = "no start", "refused", "ended alone", "preempted", "spilled", "short in offload mode"


@pytest.fixture(scope="module")
def path(path_of):
    return path_of("qwen3", **SMALL)


@dataclass(frozen=True)
class Drawn:
    """One engine and what it is asked for. The first `num_early` requests come at once, the others one by one."""

    mode: bool | str
    num_pinned: int
    is_lazy: bool
    lacks_memory: bool
    num_gpu_blocks: int
    caches: bool
    prompts: list[list[int]]
    params: list[SamplingParams]
    num_early: int

    @classmethod
    def from_seed(cls, seed: int) -> "Drawn":
        """The seeds have each mode with each number of segments in turn; the rest is drawn."""
        generator = random.Random(seed)
        prompts = random_prompts(2, 5, 60, seed=seed) + random_prompts(2, 70, 150, seed=seed)
        generator.shuffle(prompts)
        params = [
            SamplingParams(
                temperature=0.9 * generator.randrange(2),
                seed=i,
                max_tokens=min(generator.choice([3, 12, 30]), MAX_MODEL_LEN - len(prompt)),
                ignore_eos=True,
                logprobs=2,
            )
            for i, prompt in enumerate(prompts)
        ]
        return cls(
            mode=("auto", True)[seed % 2],
            num_pinned=seed // 2 % 7,
            is_lazy=generator.random() < 0.5,
            lacks_memory=generator.random() < 0.3,
            num_gpu_blocks=generator.randint(8, 14),
            caches=generator.random() < 0.5,
            prompts=prompts,
            params=params,
            num_early=generator.randint(1, 3),
        )

    def fits(self, place: int) -> bool:
        """Whether a pool that can be used holds the request, however long it grows."""
        num_tokens = len(self.prompts[place]) + self.params[place].max_tokens
        on_host = num_tokens // BLOCK_SIZE <= self.num_pinned * BLOCKS_PER_SEGMENT
        return on_host or (self.mode == "auto" and num_tokens <= (self.num_gpu_blocks - 1) * BLOCK_SIZE)


def play(path, drawn: Drawn, seed: int, monkeypatch) -> tuple[list, Counter]:
    """Return what each request ended with, None for one that was refused, and what happened."""
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        driver = refuse_pinning(patch, drawn.num_pinned, is_lazy=drawn.is_lazy, lacks_memory=drawn.lacks_memory)
        engine = make_engine(
            path,
            SimulatedRuntime(seed),
            **ARGUMENTS,
            enable_cpu_offload=drawn.mode,
            pin_host_memory="auto" if drawn.lacks_memory else "require",
            num_gpu_blocks_override=drawn.num_gpu_blocks,
            enable_prefix_caching=drawn.caches,
        )
        coming = list(enumerate(zip(drawn.prompts, drawn.params, strict=True)))
        requests, num_steps, happened = {}, 0, Counter()
        while coming or engine.has_work:
            while coming and (coming[0][0] < drawn.num_early or num_steps % 9 == 8 or not engine.has_work):
                place, (prompt, params) = coming.pop(0)
                try:
                    requests[place] = engine.add_request(str(place), prompt, params)
                except RequestError:
                    happened["refused"] += 1
            engine.step()
            num_steps += 1
            assert num_steps < 1000, "the engine does not come to an end"
        room, is_offload = engine.kv_cache.tables.lifetimes.host_blocks, engine.mode == "offload"
        happened["preempted"] = engine.scheduler.num_preemptions
        happened["short in offload mode"] = is_offload and room.failure is not None
        happened["spilled"] = drawn.mode == "auto" and is_offload
        assert_pools_as_before(engine)
        engine.close()
        assert not driver.registered
    told = Counter(str(one.message).partition(":")[0].partition(" 0.")[0] for one in caught)
    assert any(told.values()) or not happened["short in offload mode"]
    assert all(count == 1 for count in told.values()), told
    ends = [outcome(requests[i])[0] if i in requests else None for i in range(len(drawn.prompts))]
    happened["ended alone"] = sum(end is not None and end[2] == "error" for end in ends)
    for place, request in requests.items():
        assert request.error is None or f"request '{place}' cannot run: it" in request.error
    return ends, happened


def check(path, oracle, seed: int, monkeypatch) -> Counter:
    drawn = Drawn.from_seed(seed)
    if drawn.mode is True and not drawn.num_pinned:
        with pytest.raises(MemoryError if drawn.lacks_memory else PinError, match="refused to pin|no host memory left"):
            play(path, drawn, seed, monkeypatch)
        return Counter(["no start"])
    ends, happened = play(path, drawn, seed, monkeypatch)
    for place, (end, prompt, params) in enumerate(zip(ends, drawn.prompts, drawn.params, strict=True)):
        assert end is not None and end[2] != "error" or not drawn.fits(place), f"request {place} fits"
        if end is not None:
            check_sums(oracle, prompt, params, [end])
    return happened


def test_no_step_fails_wherever_pinning_stops(path, fuzz, monkeypatch):
    oracle, happened = Oracle(path), Counter()
    for seed in range(420) if fuzz else SEEDS:
        happened += check(path, oracle, seed, monkeypatch)
    assert all(happened[what] for what in WHAT_MAY_HAPPEN), happened


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("mode", [True, "auto"])
def test_how_fast_memory_is_pinned_changes_no_answer(path, mode, monkeypatch):
    """Whoever needs more than is pinned yet waits for it where nothing else runs, and for no more."""
    prompts, found = random_prompts(3, 85, 95, seed=3), []  # on the GPU there is room for one
    for is_lazy in (False, True):
        driver = refuse_pinning(monkeypatch, 100, is_lazy=is_lazy)
        arguments = ARGUMENTS | dict(enable_cpu_offload=mode, num_gpu_blocks_override=12, max_num_seqs=4)
        engine = make_engine(path, **arguments)
        try:
            found.append(run(engine, prompts, [greedy(9)] * 3))
            assert engine.mode == "offload" or (is_lazy and mode == "auto")
            if is_lazy:
                assert len(driver.registered) < engine.plan.num_host_blocks // BLOCKS_PER_SEGMENT
                assert engine.stats()["host_blocks_total"] == len(driver.registered) * BLOCKS_PER_SEGMENT
        finally:
            engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", [True, "auto"])
def test_who_runs_goes_on_while_memory_is_pinned_for_a_newcomer(path, mode, monkeypatch):
    """64 GiB take seconds. The newcomer is let in when there is enough, beside the one that runs still."""
    driver = refuse_pinning(monkeypatch, 100, is_lazy=True)
    engine = make_engine(path, **ARGUMENTS, enable_cpu_offload=mode, num_gpu_blocks_override=12)
    try:
        prompts = random_prompts(2, 85, 95, seed=3)
        first = engine.add_request("first", prompts[0], greedy(30)).sequences[0]
        while first.num_sampled < 2:
            engine.step()
        num_wanted = driver.num_wanted
        second = engine.add_request("second", prompts[1], greedy(30)).sequences[0]
        for _ in range(10):
            num_sampled = first.num_sampled
            engine.step()
            assert first.num_sampled == num_sampled + 1
        assert second.row is None and driver.num_wanted == num_wanted, "somebody waits for memory"
        engine.runner.offload.host.wait_for(engine.plan.num_host_blocks // 2)
        while second.row is None:
            engine.step()
        assert engine.mode == "offload" and first.finish_reason is None
        while engine.has_work:
            engine.step()
        assert_pools_as_before(engine)
    finally:
        engine.close()


def test_who_runs_goes_on_while_memory_is_pinned_for_another_mode(path, monkeypatch):
    """The host holds all three, and not yet what one request can have on the GPU."""
    driver = refuse_pinning(monkeypatch, 100, is_lazy=True)
    engine = make_engine(path, **ARGUMENTS, enable_cpu_offload="auto", num_gpu_blocks_override=11)
    try:
        engine.runner.offload.host.wait_for(8)
        prompts = [random_prompts(1, length, length, seed=length)[0] for length in (20, 36, 81)]
        running = [engine.add_request(str(i), prompts[i], greedy(11)).sequences[0] for i in range(2)]
        while min(one.num_sampled for one in running) < 2:
            engine.step()
        newcomer = engine.add_request("newcomer", prompts[2], greedy(14)).sequences[0]
        for _ in range(6):
            num_sampled = [one.num_sampled for one in running]
            engine.step()
            assert [one.num_sampled for one in running] == [count + 1 for count in num_sampled]
        assert newcomer.row is None and driver.num_wanted == 2 and engine.mode == "resident"
        engine.runner.offload.host.wait_for(12)
        engine.step()
        assert newcomer.row is not None and engine.mode == "offload" and not engine.modes.error
        while engine.has_work:
            engine.step()
        assert_pools_as_before(engine)
    finally:
        engine.close()


def test_auto_enters_no_mode_in_which_a_request_would_not_fit_that_fits_the_gpu(path, monkeypatch):
    refuse_pinning(monkeypatch, 1)
    pools = dict(enable_cpu_offload="auto", num_gpu_blocks_override=8, pin_host_memory="require")
    prompts = [[i + 5] * 6 for i in range(8)] + random_prompts(1, 100, 100)
    params = [greedy(9)] * 9
    wanted = run(make_engine(path, **ARGUMENTS | dict(max_num_seqs=8)), prompts, params)
    engine = make_engine(path, **ARGUMENTS | pools | dict(max_num_seqs=8))
    with pytest.warns(UserWarning, match="offload mode cannot be entered, so requests take turns: .*refused to pin"):
        assert run(engine, prompts, params) == wanted
    assert engine.mode == "resident"
    assert_pools_as_before(engine)


def test_a_request_that_no_longer_fits_ends_at_once_and_holds_up_nobody(path, monkeypatch):
    refuse_pinning(monkeypatch, 1)
    prompts = random_prompts(1, 5, 5) + random_prompts(1, 100, 100) + random_prompts(1, 6, 6)
    params = [greedy(40), greedy(20), greedy(3)]
    engine = make_engine(path, **ARGUMENTS, enable_cpu_offload=True, pin_host_memory="require")
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    with pytest.warns(UserWarning, match="the KV pool on the host has .* so fewer requests run at a time: .*refused"):
        while not requests[2].is_finished:
            engine.step()
    assert not requests[0].is_finished
    assert re.match("request '1' cannot run: it can grow to 120 tokens, .* holds 79: .*refused", requests[1].error)
    with pytest.raises(RequestError, match="the KV cache holds 79: lower max_tokens.*host_memory_limit"):
        engine.add_request("late", prompts[1], params[1])
    while engine.has_work:
        engine.step()
    wanted = run(make_engine(path, **ARGUMENTS), prompts, params)
    assert [outcome(requests[i]) for i in (0, 2)] == [wanted[0], wanted[2]]
    assert_pools_as_before(engine)


def test_a_switch_asks_for_what_waits_as_well(path, monkeypatch):
    """What waits could not run afterwards."""
    refuse_pinning(monkeypatch, 2)
    engine = make_engine(path, **ARGUMENTS, pin_host_memory="require")
    prompts, params = random_prompts(5, 100, 130), [greedy(20)] * 5
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    with pytest.raises(PinError, match="refused to pin"):
        engine.switch_mode("offload")  # nothing runs yet
    assert engine.mode == "resident"
    while engine.has_work:
        engine.step()
    assert [outcome(request)[0][2] for request in requests] == ["length"] * 5


def test_no_step_of_several_rows_waits_for_memory_that_is_being_pinned(path, monkeypatch):
    """Who finds no slot pauses, the youngest gives way when all do, and one alone waits, and spills then."""
    prompts = random_prompts(3, 40, 40, seed=4)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (140, 60, 60)]
    wanted = run(make_engine(path, **ARGUMENTS), prompts, params)
    driver, waits = refuse_pinning(monkeypatch, 99, is_lazy=True), []
    how = ARGUMENTS | dict(enable_cpu_offload="auto", num_gpu_blocks_override=12, host_memory_limit=2**20)
    engine, want = make_engine(path, SimulatedRuntime(3), **how), driver.want

    def seen(count: int) -> None:
        if count > len(driver.registered):
            waits.append(len(engine.scheduler.running))
        want(count)

    monkeypatch.setattr(driver, "want", seen)
    with closing(engine):  # or the driver would wait for ever
        assert run(engine, prompts, params) == wanted
        assert set(waits) <= {0, 1} and engine.scheduler.num_preemptions
        assert_pools_as_before(engine)
