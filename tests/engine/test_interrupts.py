"""An exception at every line of a step: nothing is left behind, and whoever goes on gets what it gets alone.

`make fuzz` takes every line; a test run takes some of them, drawn at random but always the same.
"""

import functools
import gc
import inspect
import itertools
import operator
import random
import sys
from collections import Counter, deque
from collections.abc import Callable

import pytest
from checksum import BLOCK_BYTES, LAYER_BLOCK_BYTES
from engines import (
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
)
from interrupts import Line, Tracer, name
from request_helpers import shrink_gpu_pool
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import LLMEngine, SamplingParams
from nanoinfer.execution.runner import ModelRunner
from offload import ring_schedule

pytestmark = pytest.mark.usefixtures("checksums")
BEGINNING, *OTHERS = random_prompts(4, 9, 13, seed=9)
PROMPTS = [BEGINNING[:9] + OTHERS[0][:1], OTHERS[1], BEGINNING[:9] + OTHERS[2][:3], OTHERS[2], BEGINNING[:5]]
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, ignore_eos=True, **extra)
    for i, extra in enumerate(
        [
            dict(max_tokens=6),
            dict(max_tokens=5, n=2, logprobs=2, prompt_logprobs=1),
            dict(max_tokens=4, logprobs=1),
            dict(max_tokens=5, repetition_penalty=1.3, presence_penalty=0.3, min_tokens=3),
            dict(max_tokens=8),
        ]
    )
]
ARGUMENTS = dict(
    max_num_seqs=4,
    max_num_batched_tokens=12,
    max_model_len=24,
    ring_slot_bytes=2 * LAYER_BLOCK_BYTES,
    num_ring_slots=2,
    resident_kv_limit=None,
    host_memory_limit=40 * BLOCK_BYTES,
    capture_num_tokens=[4, 8],
)
# Pools so small that sequences are preempted, that blocks stream and come back, that the engine spills.
MODES = {
    "resident": (dict(enable_cpu_offload=False), 8),
    "offload": (dict(enable_cpu_offload=True), 9),
    "auto": (dict(enable_cpu_offload="auto", num_gpu_blocks_override=9), None),
}
NUM_SAMPLED = 2  # lines of each mode in a test run
NUM_SHARES = 8  # of all lines of a mode, so that several processes take them


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL | dict(num_layers=1))


@pytest.fixture(scope="module")
def alone(path):
    """The completions of each request when nothing fails."""
    engine = make_engine(path, **ARGUMENTS)
    return [run(engine, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


class Player:
    """An engine that plays the same requests again and again, with an exception at some line.

    Args:
        seed: of the order of the streams; None: in order.
    """

    def __init__(self, path, mode: str, seed: int | None) -> None:
        gc.collect()  # what an earlier engine left is no line of this one
        arguments, num_gpu_blocks = MODES[mode]
        self.mode, self.seed = mode, seed
        self.engine: LLMEngine = make_engine(path, SimulatedRuntime(seed), **(ARGUMENTS | arguments))
        self.give_back = lambda: None
        if num_gpu_blocks is not None:
            self.give_back = shrink_gpu_pool(self.engine, num_gpu_blocks)
        self._tracer = Tracer()
        self.engine.live.recover = functools.partial(self._recover, self.engine.live.recover)
        self.engine.on_logits = lambda sequences, logits: None

    def _recover(self, recover: Callable[[], None]) -> None:
        """Python stops tracing when a trace function raises."""
        with self._tracer.tracing():
            recover()

    def play(self, tracer: Tracer) -> dict[int, list]:
        """Completions of each request that could be added. An exception is met wherever it leaves the engine."""
        ring_schedule.cache_clear()  # else its lines run or not by what has run before, in this process
        engine, requests, self._tracer = self.engine, {}, tracer
        begun = set(engine.live.requests)
        if self.mode == "auto" and engine.mode == "offload":
            engine.switch_mode("resident")
        for step in range(400):
            if step % 2 == 0 and len(begun) < len(PROMPTS):
                number = len(begun)
                begun.add(number)
                try:
                    with tracer.tracing():
                        requests[number] = engine.add_request(str(number), PROMPTS[number], PARAMS[number])
                except (KeyboardInterrupt, RuntimeError, MemoryError):
                    engine.abort(str(number))  # nobody knows whether it was added
            if not engine.has_work and len(begun) == len(PROMPTS):
                return {number: outcome(request) for number, request in requests.items()}
            engine.samples_late = step % 4 > 1
            try:
                with tracer.tracing():
                    if step == 10:
                        engine.abort("4")
                    engine.step()
            except (KeyboardInterrupt, RuntimeError, MemoryError):
                pass
        pytest.fail("the engine does not come to an end")

    def check(self, tracer: Tracer, alone: list) -> None:
        """Plays, and compares each request with what it gets alone."""
        found = self.play(tracer)
        for number, completions in found.items():
            for (tokens, logprobs, reason), wanted in zip(completions, alone[number], strict=True):
                if reason == "abort" or reason == "error":
                    wanted_tokens, wanted_logprobs, _ = wanted
                    assert tokens == wanted_tokens[: len(tokens)], f"request {number}"
                    if logprobs is not None:
                        # The prompt's may be missing: another completion that found the prompt was ahead of them.
                        own = wanted_logprobs[len(wanted_logprobs) - len(wanted_tokens) :]
                        beginnings = wanted_logprobs[: len(logprobs)], own[: len(logprobs)]
                        assert logprobs in beginnings, f"request {number}"
                else:
                    assert (tokens, logprobs, reason) == wanted, f"request {number}"

    def assert_nothing_left(self) -> None:
        engine = self.engine
        assert_pools_as_before(engine)


def lines_of(player: Player, alone: list) -> tuple[dict[Line, int], set[Line]]:
    """How often each line runs at least while all requests are played, and the lines that run for the first time only.

    With shuffled streams some run more often in one play than in another, and in the first one no beginning is known.
    """
    first, *others = counts = [Counter() for _ in range(3)]
    for found in counts:
        tracer = Tracer()
        player.check(tracer, alone)
        found.update(tracer.counts)
    always = functools.reduce(operator.and_, others)
    always = always & first | Counter({line: count for line, count in always.items() if line not in first})
    once = {line for line in first if not any(line in found for found in others)}
    return {line: always[line] or count for line, count in functools.reduce(operator.or_, counts).items()}, once


@pytest.fixture(scope="module")
def found_in(path, alone):
    """Mode, and seed of the streams -> a player that has played, and its `lines_of`."""

    @functools.cache
    def find(mode: str, seed: int | None) -> tuple[Player, dict[Line, int], set[Line]]:
        player = Player(path, mode, seed)
        return player, *lines_of(player, alone)

    return find


def lines_of_recovery(player: Player, alone: list, causes: list[Line]) -> dict[Line, list[Line]]:
    """The lines that run in a recovery, each with those of `causes` that it recovered from."""
    lines: dict[Line, list[Line]] = {}
    for cause in causes:
        tracer = Tracer()
        tracer.raise_at((cause, 1, None), (("", 0), 1, "recover"), error=KeyboardInterrupt)
        player.check(tracer, alone)
        if not tracer.raised:
            continue  # the cause was not met, so what was counted is no recovery
        for line in tracer.counts:
            lines.setdefault(line, []).append(cause)
    return lines


def draw(lines: dict[Line, int], num_drawn: int | None, seed: int) -> list[tuple[Line, int]]:
    """Lines, all for None, each with the time at which it is to raise: any of those at which it ran.

    Whether a line is drawn depends on that line alone, not on which others there are.
    """
    found = []
    for line, count in lines.items():
        generator = random.Random(f"{seed} {name(line)}")
        found.append((generator.random(), line, generator.randint(1, count)))
    return [(line, times) for _, line, times in sorted(found)[:num_drawn]]


def of_share(lines: list[tuple[Line, int]], share: int) -> list[tuple[Line, int]]:
    """Every line belongs to one share, whichever other lines there are."""
    return [(line, times) for line, times in lines if random.Random(name(line)).randrange(NUM_SHARES) == share]


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("seed", [None, 3], ids=["in order", "shuffled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("offload-in order-0", "auto-shuffled-0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_an_exception_at_any_line_leaves_nothing_behind(path, alone, found_in, mode, seed, share, fuzz):
    _, found, once = found_in(mode, seed)
    lines = draw(found, None if fuzz else NUM_SAMPLED, seed=len(mode))
    lines = of_share(lines, share) if fuzz else lines
    errors = itertools.cycle([KeyboardInterrupt, KeyboardInterrupt, lambda: RuntimeError("out of luck")])
    attempts = [([(line, times, None)], error) for (line, times), error in zip(lines, errors, strict=False)]
    num_raised = attempt_all(path, alone, mode, seed, attempts, once)
    assert num_raised > 0.8 * len(lines), f"{num_raised} of {len(lines)} lines were met"


@pytest.mark.parametrize("seed", [None, 3], ids=["in order", "shuffled"])
@pytest.mark.sampled("shuffled")
def test_an_exception_at_any_line_leaves_no_wrong_expert_in_a_slot(tmp_path, monkeypatch, seed, fuzz):
    """A table that was written, and copies behind it that were not, in small steps; and in large ones areas."""
    path = make_checkpoint("qwen3_moe", tmp_path, **SMALL)
    slots = dict(
        expert_slots=3, host_memory_limit="1MiB", max_num_seqs=4, capture_num_tokens=[8], enable_cpu_offload=True
    )
    monkeypatch.setitem(MODES, "slots", (slots, 9))
    engine = make_engine(path, **ARGUMENTS)
    alone = [run(engine, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    player = Player(path, "slots", seed)
    found, once = lines_of(player, alone)
    stats = player.engine.stats()
    assert stats["expert_evictions"] and stats["streamed_bytes"]
    lines = draw(found, 400 if fuzz else NUM_SAMPLED, seed=12)
    attempts = [([(line, times, None)], KeyboardInterrupt) for line, times in lines]
    num_raised = attempt_all(path, alone, "slots", seed, attempts, once)
    assert num_raised > 0.8 * len(lines), f"{num_raised} of {len(lines)} lines were met"


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("seed", [None, 3], ids=["in order", "shuffled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("auto-shuffled-0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_an_exception_in_the_middle_of_a_recovery_leaves_nothing_behind(path, alone, found_in, mode, seed, share, fuzz):
    player, found, once = found_in(mode, seed)
    causes = [line for line, _ in draw(found, 40 if fuzz else 2, seed=5) if line not in once]
    causes_of = lines_of_recovery(player, alone, causes)
    lines = draw(dict.fromkeys(causes_of, 1), None if fuzz else 4, seed=len(mode))
    lines = of_share(lines, share) if fuzz else lines
    attempts = [
        ([(random.Random(name(line)).choice(causes_of[line]), 1, None), (line, 1, "recover")], KeyboardInterrupt)
        for line, _ in lines
    ]
    num_raised = attempt_all(path, alone, mode, seed, attempts)
    assert num_raised > len(attempts), "hardly a recovery was interrupted"


def test_an_interrupted_recovery_is_work_that_the_next_step_does(path, monkeypatch):
    """Else a loop over `has_work` would end with blocks that nobody holds."""
    engine = make_engine(path, **ARGUMENTS)
    engine.add_request("r", PROMPTS[0], PARAMS[0])

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(engine.runner, "execute", interrupted)  # the request fails
        patches.setattr(engine.mover, "recover", interrupted)
        engine.step()
    assert engine.has_work and not engine.scheduler.has_work
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_whoever_lost_an_output_ends_also_where_the_step_behind_is_of_others(path, monkeypatch, error):
    """Read in its turn, or in the recovery from a step that was not launched: its stream would lack a token."""

    class Refusing(list):
        def append(self, output):
            raise error

    def broken(*arguments):
        raise RuntimeError("out of luck")

    engine = make_engine(path, max_num_batched_tokens=4)  # without mixed steps the two take turns
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    decoding = engine.add_request("decoding", PROMPTS[1][:5], params)
    engine.step()
    behind = engine.add_request("behind", PROMPTS[0], params)
    while engine.live.in_flight.batch.chunks or not behind.sequences[0].num_computed:
        engine.step()
    assert not behind.sequences[0].num_sampled
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, RuntimeError)):
        patch.setattr(engine, "_outputs", Refusing())
        if error is MemoryError:
            patch.setattr(engine.runner, "execute", broken)
        engine.step()
    while engine.has_work:
        engine.step()
    assert [request.sequences[0].finish_reason for request in (decoding, behind)] == ["abort"] * 2
    assert_pools_as_before(engine)


def test_a_request_that_is_interrupted_while_it_is_queued_is_not_there(path):
    """Without its second completion in a queue it would be work that no step does."""

    class Interrupted(deque):
        def append(self, sequence):
            if self:
                raise KeyboardInterrupt
            super().append(sequence)

    engine = make_engine(path, **ARGUMENTS)
    engine.scheduler.waiting = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine.add_request("r", PROMPTS[0], SamplingParams(n=2))
    assert not engine.live.requests and not engine.has_work
    request = engine.add_request("r", PROMPTS[0], SamplingParams(n=2, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert request.is_finished
    assert_pools_as_before(engine)


def test_an_interrupt_between_two_lines_that_make_the_host_pool_leaves_offload_mode_possible(path):
    lines, first = inspect.getsourcelines(ModelRunner.open_host_pool)
    num_tried = 0
    for number in range(first + 1, first + len(lines)):
        engine = make_engine(path)

        def trace(frame, event, argument, number=number):
            if frame.f_code is not ModelRunner.open_host_pool.__code__:
                return None
            if event == "line" and frame.f_lineno == number:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            engine.switch_mode("offload")
        except KeyboardInterrupt:
            num_tried += 1
        finally:
            sys.settrace(None)
        if engine.mode == "resident":
            engine.switch_mode("offload")
        run(engine, PROMPTS[:1], [SamplingParams(max_tokens=3)])
        assert_pools_as_before(engine)
        engine.close()
    assert num_tried > 5


def attempt_all(
    path, alone: list, mode: str, seed: int | None, attempts: list, once: frozenset[Line] | set[Line] = frozenset()
) -> int:
    """Plays once for each attempt, one after the other on one engine, and checks; returns how many exceptions there
    were.

    Args:
        attempts: what `Tracer.raise_at` takes: targets and error of each.
        once: lines that only a new engine runs.
    """
    player, num_raised, failures = Player(path, mode, seed), 0, []
    for targets, error in [*attempts, ([], KeyboardInterrupt)]:  # the last one: nothing fails any more
        tracer = Tracer()
        tracer.raise_at(*targets, error=error)
        if targets and targets[0][0] in once:
            player = Player(path, mode, seed)
        try:
            player.check(tracer, alone)
            player.assert_nothing_left()
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt) and not tracer.raised:
                raise  # the user's own
            failures.append(f"{[name(line) for line in tracer.raised]}: {failure!r:.200}")
            player = Player(path, mode, seed)
        num_raised += len(tracer.raised)
    player.give_back()
    player.assert_nothing_left()
    assert not failures, "\n".join(failures)
    return num_raised
