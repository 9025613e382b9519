"""Requests that come, go and change the mode at given steps, for the tests of whole engines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engines import outcome, random_prompts
from references import check_references

from nanoinfer import LLMEngine, SamplingParams
from nanoinfer.common.errors import RequestError
from nanoinfer.requests.request import Request


@dataclass(frozen=True)
class Script:
    """What happens before which step.

    Attributes:
        arrivals: step -> (prompt, parameters) of the requests that come then; they are numbered in this order.
        aborts: step -> number of the request that is aborted then.
        modes: step -> the mode from then on.
        num_gpu_blocks: what is left of the GPU pool; None leaves all of it.
    """

    arrivals: dict[int, list[tuple[list[int], SamplingParams]]]
    aborts: dict[int, int] = field(default_factory=dict)
    modes: dict[int, str] = field(default_factory=dict)
    num_gpu_blocks: int | None = None


@dataclass
class Played:
    """What `play` saw.

    Attributes:
        outcomes: `engines.outcome` of each request.
        batches: what each step computed: [(begin, end), ...] of the chunks of a prefill step, the number of rows of a
            decode step, or both of a mixed one.
    """

    outcomes: list
    batches: list

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Played) and (self.outcomes, self.batches) == (other.outcomes, other.batches)


def shrink_gpu_pool(engine: LLMEngine, num_free: int) -> Callable[[], None]:
    """Leaves `num_free` free blocks in the GPU pool, of which nobody may hold any; the result gives the others back."""
    pool = engine.kv_cache.tables.gpu_blocks
    engine.mover.transfers.finish()
    assert pool.num_free >= num_free, f"{pool.num_free} blocks are free, {num_free} are to be left"
    first = pool.first
    pool.first += pool.num_blocks - num_free
    pool.rebuild([])

    def give_back() -> None:
        pool.first = first
        held = [block for block, count in pool.holders.items() for _ in range(count)]
        pool.rebuild(held, keeps_key=lambda key: True)

    return give_back


def record_batches(engine: LLMEngine) -> list:
    """A list that grows by what each step computes; see `Played.batches`."""
    batches, schedule = [], engine.scheduler.schedule

    def recorded():
        batch = schedule()
        if batch is not None and batch.chunks:
            chunks = [(chunk.begin, chunk.end) for chunk in batch.chunks]
            batches.append((chunks, len(batch.decoding)) if batch.decoding else chunks)
        elif batch is not None:
            batches.append(len(batch.decoding))
        return batch

    engine.scheduler.schedule = recorded
    return batches


def play(engine: LLMEngine, script: Script) -> Played:
    """Runs a script to its end."""
    give_back = shrink_gpu_pool(engine, script.num_gpu_blocks) if script.num_gpu_blocks else lambda: None
    batches = record_batches(engine)
    requests: list[Request] = []
    step, last = 0, max([*script.arrivals, *script.aborts, *script.modes])
    while step <= last or engine.has_work:
        for prompt, params in script.arrivals.get(step, []):
            requests.append(engine.add_request(f"request-{len(requests)}", prompt, params))
        if step in script.aborts:
            assert engine.abort(requests[script.aborts[step]].request_id), "the request has ended before its abort"
        if step in script.modes:
            engine.switch_mode(script.modes[step])
        engine.step()
        step += 1
    give_back()
    return Played([outcome(request) for request in requests], batches)


@dataclass
class Waited:
    """When a request had its first token and when it ended, in steps since it came; and what it got."""

    first_token: int | None = None
    end: int | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


def play_in_steps(engine: LLMEngine, requests: list[tuple[int, list[int], SamplingParams]]) -> list[Waited]:
    """Runs requests (step in which each comes, prompt, parameters), which come in this order, to their end."""
    added, found = [], [Waited() for _ in requests]
    for step in range(MAX_STEPS):
        while len(added) < len(requests) and requests[len(added)][0] <= step:
            added.append(engine.add_request(str(len(added)), *requests[len(added)][1:]))
        if len(added) == len(requests) and not engine.has_work:
            return found
        engine.step()
        for (begin, *_), request, waited in zip(requests, added, found, strict=False):
            if waited.first_token is None and request.first_token is not None:
                waited.first_token = step + 1 - begin
            if waited.end is None and request.is_finished:
                waited.end = step + 1 - begin
                waited.finish_reason = request.sequences[0].finish_reason
                waited.token_ids = request.sequences[0].output_token_ids
    pytest.fail("the engine does not come to an end")


MAX_STEPS = 3000


def play_at_random(
    engine: LLMEngine,
    requests: list[tuple[list[int], SamplingParams]],
    generator: random.Random,
    *,
    comes: float,
    is_aborted: float,
    is_switched: float,
    after_step: Callable[[int], None] = lambda num_shared: None,
) -> tuple[list[Request], set[int]]:
    """Adds, aborts and switches while the engine runs; returns the requests and the aborted ones' numbers. After each
    step its blocks are held as they must be.

    Args:
        comes, is_aborted, is_switched: how likely each is before a step.
        after_step: told how many GPU blocks rows share.
    """
    added, aborted = [], set()
    for _ in range(MAX_STEPS):
        while len(added) < len(requests) and (generator.random() < comes or not engine.has_work):
            try:
                added.append(engine.add_request(str(len(added)), *requests[len(added)]))
            except RequestError:  # the resident mode's pool is too small for it
                engine.switch_mode("offload")
        if not engine.has_work:
            return added, aborted
        running = [i for i, request in enumerate(added) if not request.is_finished]
        if running and generator.random() < is_aborted:
            victim = generator.choice(running)
            aborted.add(victim)
            engine.abort(str(victim))
        if generator.random() < is_switched:
            try:
                engine.switch_mode("resident" if engine.mode == "offload" else "offload")
            except ValueError:
                pass  # refused: what runs has no room there
        engine.step()
        after_step(check_references(engine))
    pytest.fail("the engine does not come to an end")


def tree_of_prompts(generator: random.Random, count: int, block: int = 4) -> list[list[int]]:
    """Each goes on from where another one may be left: at a block edge, inside a block, or at its end."""

    def drawn(shortest, longest):
        return random_prompts(1, shortest, longest, seed=generator.getrandbits(30))[0]

    prompts = [drawn(5 * block // 2, 11 * block // 2)]
    while len(prompts) < count:
        stem = generator.choice(prompts)
        cut = generator.choice([0, len(stem), generator.randint(0, len(stem)), *range(block, len(stem) + 1, block)])
        prompts.append(stem[: min(cut, 15 * block // 2)] + drawn(1, 5 * block // 2))
    return prompts
