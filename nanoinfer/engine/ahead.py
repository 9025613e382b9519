"""What the next prompts will begin with is computed while nothing else is to be done."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.memory.streamed import streamed_bytes
from nanoinfer.requests.request import Request
from nanoinfer.sampling_params import SamplingParams

MAX_SECONDS = 0.25
"""How long a step may take by its forecast: whoever comes meanwhile waits for it."""


@dataclass(frozen=True)
class _Part:
    """What is computed at a time: of a beginning the tokens from `begin` to `end`."""

    request: Request
    wanted: list[int]
    begin: int
    end: int


class Ahead:
    """Computes beginnings of prompts ahead, so that they are found in the prefix cache. For the engine's thread.

    What decode has computed is not found, as it rounds otherwise than prefill. So the history with the last answer,
    which a conversation's next prompt begins with, is computed once more, in steps of at most `MAX_SECONDS`, as long as
    no request is there. It takes blocks that are free, or that were never found by anybody, and no more memory. What it
    would have to do at others' cost is left out: a longer step, experts put out of their slots.

    Attributes:
        num_tokens: tokens that were computed so.
        num_left_out: beginnings of which a part was not computed.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self._size = engine, engine.kv_cache.prefixes.unit
        self._waiting: list[list[int]] = []  # of whole units; the newest is last
        self._part: _Part | None = None
        self._names = map("ahead-{}".format, itertools.count())
        self.num_tokens = self.num_left_out = 0

    @property
    def is_wanted(self) -> bool:
        """Whether anything waits to be computed."""
        return bool(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether what the engine computes is this."""
        return self._part is not None

    def offer(self, token_ids: list[int]) -> None:
        """Take what a conversation's next prompt will begin with, in place of that of its earlier turns.

        Of several conversations the newest come first, and as many wait as there may be sequences.
        """
        num_tokens = min(len(token_ids), self._engine.plan.max_model_len - 2)
        wanted = token_ids[: num_tokens - num_tokens % self._size]
        self._waiting = [one for one in self._waiting if one != wanted[: len(one)]]
        if wanted and self._engine.config.caches_prefixes:
            self._waiting.append(wanted)
        del self._waiting[: -self._engine.plan.max_running]

    def begin(self) -> bool:
        """Queue the next part as a request of the engine, which has no work; return whether there is one."""
        last = self._end()
        while self._waiting:
            wanted = self._waiting[-1]
            begin = self._found(wanted)
            if begin < len(wanted):
                has_failed = last is not None and last.wanted is wanted and begin < last.end  # or was put out at once
                self._part = None if has_failed else self._next_part(wanted, begin)
                if self._part is not None:
                    self._engine.queue(self._part.request)
                    return True
                self.num_left_out += 1
            self._waiting.pop()
        return False

    def _next_part(self, wanted: list[int], begin: int) -> _Part | None:
        """Return what a step computes of a beginning; None: it would be long, or there is no room."""
        num_tokens = self._most_tokens(len(wanted) - begin, len(wanted))
        if not num_tokens:
            return None
        part = _Part(self._request(wanted[: begin + num_tokens]), wanted, begin, begin + num_tokens)
        return part if self._has_room(part) else None

    def stop(self) -> None:
        """End what is being computed: a request has come. What has become full by now stays published."""
        if self._part is not None:
            self._engine.abort(self._part.request.request_id)
            self._end()

    def drop(self) -> None:
        """Stop, and forget all that waits."""
        self._waiting.clear()
        self.stop()

    def _end(self) -> _Part | None:
        """Count what was computed, and return what it was."""
        part, self._part = self._part, None
        if part is not None:
            self.num_tokens += max(0, self._found(part.wanted) - part.begin)
        return part

    def _request(self, beginning: list[int]) -> Request:
        # Its last block is not published, and its one token is thrown away. Without a seed it would change others'.
        prompt = [*beginning, beginning[0]]
        params = SamplingParams(temperature=0, seed=0, max_tokens=1, ignore_eos=True, detokenize=False)
        return self._engine.intake.make_request(next(self._names), prompt, params, prompt, is_ahead=True)

    def _found(self, wanted: list[int]) -> int:
        (sequence,) = self._request(wanted).sequences
        return self._engine.kv_cache.prefixes.num_found(sequence)

    def _most_tokens(self, num_left: int, num_tokens: int) -> int:
        """Return how many of the tokens that are left of `num_tokens` a step computes in time, in whole blocks."""
        engine, executor, meter = self._engine, self._engine.executor, self._engine.meter
        streamed = streamed_bytes(engine.config, executor.spec, engine.plan, [num_tokens])
        if engine.plan.num_expert_slots or streamed > MAX_SECONDS * executor.link:
            return 0
        in_time = MAX_SECONDS * meter.num_prefill_tokens / meter.prefill_seconds if meter.prefill_seconds else 0
        most = min(num_left, int(in_time), engine.plan.max_num_batched_tokens - 1)
        return most - most % self._size

    def _has_room(self, part: _Part) -> bool:
        """Whether there are blocks for it that nobody wants, besides those of its beginning that are there."""
        engine = self._engine
        num_blocks = engine.kv_cache.tables.groups.chunk_blocks(part.end - part.begin)
        tables = engine.kv_cache.tables
        (_, pool), (sequence,) = tables.home, part.request.sequences
        with engine.changing():
            found = engine.kv_cache.prefixes.find(sequence)
            num_unwanted = pool.num_unwanted
            found.let_go(tables)
        if not tables.is_offload:
            return num_blocks + len(tables.groups) <= num_unwanted  # one more in each group for its end
        if pool.num_blocks < pool.num_possible:
            num_unwanted = pool.num_free - pool.num_cached  # for more, memory that is being pinned would be waited for
        return num_blocks <= num_unwanted
