"""Which candidate an engine takes: of all that fit the one with which requests are done first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.common.speculation import DEFAULT_TOKENS
from nanoinfer.memory.candidates import Candidate, StreamedChoice, choices
from nanoinfer.memory.limits import checked_slots
from nanoinfer.memory.measure import Measure
from nanoinfer.memory.planner import Cost, Planner
from nanoinfer.memory.refusals import refuse
from nanoinfer.step.memory_plan import MemoryPlan

# Among plans within CLOSE of the best one, the speed of a single request decides. Among those that are EQUAL for it,
# the one that takes the least of the host's memory, and then the one with the largest steps.
CLOSE, EQUAL = 1.05, 1.01
# Where no number of requests is asked for, one alone takes at most so many times as long as by the best plan for it.
AT_MOST_ALONE = 2.0
# The tokens of drafts that were not asked for which are tried, and what room for them may have steps take.
UNASKED_DRAFTS, AS_FAST = (DEFAULT_TOKENS, DEFAULT_TOKENS // 2, DEFAULT_TOKENS // 4), 1.01
# A step with drafts waits some 4 ms for the host and for its last layers. This much passes over PCIe 5 meanwhile, in
# slots that a layer of a long context in few bits fills about.
DEEP_RING = dict(num_ring_slots=16, ring_slot_bytes=20 * 2**20)
# How many members of a family are looked at first, evenly spread; then those around the best one.
_GRID = 6


def best_plan(planner: Planner) -> MemoryPlan:
    """Divide the memory among the parts of the engine. Where there is too little, `TooSmall` says what works.

    Drafts that were not asked for get rows where something may stream, as many as cost next to no time; and so do
    rings in which the link goes on while the host waits for the tokens of a step with drafts.
    """
    config, spec = planner.config, planner.spec
    spec.check_context(config.max_model_len)
    planner.check_host_limit()
    search = Search(planner, checked_slots(config, spec))
    best = search.best()
    plan = _whole(planner, best)
    if planner.is_quick or not (config.may_offload or plan.passing_bytes):
        return plan
    for options in _with_drafts(planner):
        asking = replace(planner, config=replace(config, **options))
        cost = asking.cost(best.candidate)
        if cost.lacks is None and _is_as_fast(search.measure, found := _whole(asking, cost), plan):
            return found
    return plan


def _with_drafts(planner: Planner) -> Iterator[dict[str, Any]]:
    """Yield the options of plans that are worth a try beside that without them, the best ones first."""
    config = planner.config
    if config.speculative_config is None:
        return
    # In resident mode the KV cache would lose what the ring takes.
    is_open = config.enable_cpu_offload is True and config.num_ring_slots is None and config.ring_slot_bytes is None
    fits = not planner.device.is_host and planner.spec.layout.part_bytes <= DEEP_RING["ring_slot_bytes"]
    rings = [DEEP_RING] if is_open and fits else []
    if config.speculative_config != "auto":
        yield from rings
        return
    for count in UNASKED_DRAFTS:
        drafts = dict(speculative_config=dict(method="suffix", num_speculative_tokens=count))
        yield from (drafts | ring for ring in (*rings, {}))


def _is_as_fast(measure: Measure, found: MemoryPlan, plan: MemoryPlan) -> bool:
    """Whether all that runs by a plan is done as soon by another one, a step of one sequence among it."""
    context = min(measure.context, plan.max_model_len)
    if found.max_model_len < plan.max_model_len or found.max_running < plan.max_running:
        return False
    config = measure.config
    if config.max_model_len is not None and config.max_num_seqs is not None:  # so many at once are asked for
        if measure.holds_all(plan) and not measure.holds_all(found):
            return False
    if not measure.config.may_offload and found.num_gpu_blocks < plan.num_gpu_blocks:  # what it held has no other place
        return False
    times = [(measure.step_seconds(one, 1, context), measure.seconds(one, plan.max_running)) for one in (found, plan)]
    return all(time <= AS_FAST * before for time, before in zip(*times, strict=True))


def _whole(planner: Planner, cost: Cost) -> MemoryPlan:
    spec, device = planner.spec, planner.device
    plan = planner.plan(cost)
    # Without kernels that read packed weights as they lie, their matrices are kept where there is room for all.
    room = plan.budget_bytes - plan.total_bytes
    keeps_matrices = not device.is_fused and not plan.streamed_bytes and 0 < spec.matrix_bytes <= room
    return replace(plan, matrix_bytes=spec.matrix_bytes) if keeps_matrices else plan


class Search:
    """One search. Whatever it looks at is kept, so that a refusal can say what came closest.

    num_slots: for experts, if the settings ask for some.
    """

    def __init__(self, planner: Planner, num_slots: int) -> None:
        self.planner, self.num_slots = planner, num_slots
        self.measure = Measure(planner.config, planner.spec, planner.rates)
        self.costs: dict[Candidate, Cost] = {}
        self._seconds: dict[tuple[Candidate, int], float] = {}

    def best(self) -> Cost:
        """Return what to take; TooSmall: nothing fits."""
        for tokens in self.planner.steps:
            self._look_at_step(tokens)
        fitting = [cost for cost in self.costs.values() if cost.lacks is None]
        if not fitting:
            raise refuse(self.planner, self.costs.values())
        return self._choose(fitting)

    def seconds(self, cost: Cost, num_requests: int) -> float:
        key = cost.candidate, num_requests
        if key not in self._seconds:
            self._seconds[key] = self.measure.seconds(cost, num_requests)
        return self._seconds[key]

    def _choose(self, fitting: Sequence[Cost]) -> Cost:
        config, count = self.planner.config, self.planner.num_sequences
        if config.max_model_len is not None and config.max_num_seqs is not None:  # so many at once are asked for
            fitting = [cost for cost in fitting if self.measure.holds_all(cost)] or fitting
        if config.max_num_seqs is None:  # it may be one that comes: many are not to be had at any price for it
            fitting = _least(fitting, lambda cost: self.seconds(cost, 1), AT_MOST_ALONE)
        close = _least(fitting, lambda cost: self.seconds(cost, count), CLOSE)
        equal = _least(close, lambda cost: self.seconds(cost, 1), EQUAL)
        return min(equal, key=lambda cost: (cost.host_weight_bytes, -cost.max_num_batched_tokens))

    def _look_at_step(self, tokens: int) -> None:
        planner, least, num_slots = self.planner, self.planner.least, self.num_slots
        if not any(least) and not num_slots:
            self._cost(Candidate(tokens, embeddings=False))
        if num_slots or not planner.may_stream:
            if any(least) or num_slots:
                self._cost(Candidate(tokens, least, num_slots))
            return
        for head in sorted({least.head, planner.may_stream_head}):
            self._look_along([Candidate(tokens, one) for one in choices(least, planner.spec, head)])
        if planner.may_have_slots:
            sparse = planner.spec.sparse
            counts = range(sparse.num_experts, sparse.most_chosen - 1, -1)
            self._look_along([Candidate(tokens, StreamedChoice(), count) for count in counts])

    def _look_along(self, family: Sequence[Candidate]) -> None:
        """Look for the best of a family, each of whose members leaves more to the pool than those before.

        The measure falls along it and then rises, but for steps: KV passes beside what is computed up to some amount.
        """
        planner, groups = self.planner, self.planner.spec.kv_groups
        tokens, last = family[0].tokens, len(family) - 1
        counts = {1, planner.num_sequences}

        def first(num_blocks: int) -> int:
            return bisect_left(family, num_blocks, key=planner.num_blocks)

        begin = min(first(planner.least_blocks(tokens)), last)
        end = last
        if self._cost(family[last]).lacks == "host":
            end = bisect_left(family, True, lo=begin, key=lambda one: self._cost(one).lacks == "host") - 1
        if end < begin:
            self._cost(family[begin])
            return
        while begin < end and self._cost(family[begin]).lacks == "gpu":  # `first` went by an upper bound of blocks
            begin += 1
        blocks = groups.most_blocks(self.measure.context) + 2
        marks = {begin, end, *(first(blocks * count) + more for count in counts for more in (0, 1))}
        marks |= {begin + (end - begin) * index // _GRID for index in range(1, _GRID)}
        seen = sorted(index for index in marks if begin <= index <= end)
        for count in counts:
            self._refine(family, seen, count)

    def _refine(self, family: Sequence[Candidate], seen: Sequence[int], num_requests: int) -> None:
        """Look between the best of those that were seen and its neighbours, in halves."""

        def seconds(index: int) -> float:
            cost = self._cost(family[index])
            return float("inf") if cost.lacks else self.seconds(cost, num_requests)

        best = min(seen, key=seconds)
        low = max((index for index in seen if index < best), default=best)
        high = min((index for index in seen if index > best), default=best)
        while high - low > 2 or best in (low, high) and high - low > 1:
            between = [index for index in {(low + best) // 2, -(-(best + high) // 2)} if low < index < high]
            nearest = min([best, *between, low, high], key=seconds)
            points = sorted({low, best, high, *between})
            at = points.index(nearest)
            shrunk = points[max(0, at - 1)], points[min(len(points) - 1, at + 1)]
            if (nearest, *shrunk) == (best, low, high):
                break
            best, (low, high) = nearest, shrunk

    def _cost(self, candidate: Candidate) -> Cost:
        if candidate not in self.costs:
            self.costs[candidate] = self.planner.cost(candidate)
        return self.costs[candidate]


def _least(costs: Iterable[Cost], seconds: Callable[[Cost], float], within: float) -> list[Cost]:
    """Return those whose time is within a factor of the least."""
    times = [(seconds(cost), cost) for cost in costs]
    most = within * min(time for time, _ in times)
    return [cost for time, cost in times if time <= most]
