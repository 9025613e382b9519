"""The requests that the engine's thread runs for HTTP requests, each with the stream that reads its outputs."""

from __future__ import annotations

import copy
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.common.errors import RequestError
from nanoinfer.engine.ahead import Ahead
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.memory.machine import advice_when_full
from nanoinfer.outputs import StreamOutput
from nanoinfer.parallel.processes import RankError
from nanoinfer.requests.request import Request
from nanoinfer.serve.ended import EndedRequest, ended_request
from nanoinfer.serve.errors import ApiError, BadRequestError, OverloadedError
from nanoinfer.serve.load import Load, LoadMeter
from nanoinfer.serve.partings import Parting
from nanoinfer.serve.published import Publisher
from nanoinfer.serve.request_stream import RequestStream

logger = logging.getLogger("nanoinfer.serve")


@dataclass(slots=True)
class _Tracked:
    request: Request
    stream: RequestStream
    place: int
    before: DecodeTimes | None = None  # sums over the decode steps until its first token


class ServedRequests:
    """Adds requests to the engine, runs its steps and hands out what they give. Used on the engine's thread only.

    Attributes:
        num_queued: sequences that lack a place even after the next step, as of the last `count_queued`; a negative
            number counts free places.
        calls: functions with their arguments, for the event loop to call after this step.
        on_finished: called on the event loop for each prompt that has ended.
        load: says what the server did in the last seconds.
        on_load: called on the event loop with what `load` says.
        num_prompt_tokens: prompt tokens of all accepted requests.
        ahead: what is computed where there are no requests.
        publisher: the figures for whoever reads them.
        parted_last, parted_again: of prompts that parted from a recent one, where the newest did, and how many of their
            tokens are behind that again.
        step_began: `time.monotonic` at the start of the running step.
    """

    def __init__(self, engine: LLMEngine, max_queue: int) -> None:
        self._engine, self._max_queue, self._num_places = engine, max_queue, engine.plan.max_running
        self.count_queued()
        self.calls: list[tuple] = []
        self.on_finished: Callable[[EndedRequest], None] = lambda ended: None
        self.load = LoadMeter(engine, self)
        self.on_load: Callable[[Load], None] = lambda load: None
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.step_began: float | None = None
        self.tracked: dict[str, _Tracked] = {}
        self.ahead = Ahead(engine)
        self.publisher = Publisher(engine, self)
        self.parted_last = self.parted_again = 0
        self._must_flush = False

    def note_parting(self, parting: Parting) -> None:
        """Count one prompt that parted from a recent one. May be called on any thread, but on one only."""
        self.parted_last, self.parted_again = parting.at, self.parted_again + parting.num_again
        self.publisher.is_stale = True

    @property
    def has_work(self) -> bool:
        return self._has_requests or self.ahead.is_wanted

    @property
    def _has_requests(self) -> bool:
        return self._engine.has_work or self._must_flush

    def add(self, stream: RequestStream) -> None:
        """Add all prompts of a stream to the engine, or none. Raises as `check_queue` and `LLMEngine.add_request`."""
        if stream.has_ended:
            return  # the reader has left meanwhile
        self.ahead.stop()
        self.count_queued()
        self.check_queue(stream.num_sequences)
        name = uuid.uuid4().hex
        added = {}
        try:
            for place, (text, token_ids) in enumerate(stream.prompts):
                request_id = f"{name}-{place}"
                prompt = token_ids if text is None else text
                request = self._engine.add_request(request_id, prompt, stream.params, token_ids, stream.limits)
                added[request_id] = _Tracked(request, stream, place)
        except BaseException:
            for request_id in added:
                self._engine.abort(request_id)
            raise
        self.tracked.update(added)
        self.num_prompt_tokens += sum(len(token_ids) for _, token_ids in stream.prompts)

    def count_queued(self) -> None:
        scheduler = self._engine.scheduler
        self.num_queued = len(scheduler.waiting) + len(scheduler.running) - self._num_places

    def check_queue(self, num_new: int) -> None:
        """Refuse `num_new` sequences if more than `max_queue` would wait with them. May be called on any thread.

        Raises:
            RequestError: the server could never accept so many sequences at once.
            OverloadedError: too many sequences wait at the moment.
        """
        num_queued = self.num_queued  # once: the engine's thread may count meanwhile
        if num_queued + num_new <= self._max_queue:
            return
        possible = self._max_queue + self._num_places
        if num_new > possible:
            raise RequestError(
                f"the request has {num_new} completions (prompts times n), the server runs {self._num_places} at once "
                f"and queues {self._max_queue}: send at most {possible} in one request, or start the server with "
                "a larger --max-queue",
                field="prompt",
            )
        raise OverloadedError(
            f"the queue has no room: {max(0, num_queued)} of {self._max_queue} sequences wait, the request has "
            f"{num_new}: try again later"
        )

    def prompt_tokens(self, stream: RequestStream) -> tuple[int, int]:
        """Return how many tokens of a stream's prompts are read, and of how many. May be called on any thread."""
        mine = [tracked.request for tracked in list(self.tracked.values()) if tracked.stream is stream]
        return self._engine.live.prompt_tokens(mine)

    def abort(self, stream: RequestStream) -> None:
        """End those requests of a stream that still run."""
        for request_id in [name for name, tracked in self.tracked.items() if tracked.stream is stream]:
            self._engine.abort(request_id)
            self._finish(request_id)

    def step(self) -> None:
        """Run a step. If it fails, end the requests that failed with it."""
        if not self._has_requests and not self._begin_ahead():
            return
        self.step_began = time.monotonic()
        self.load.before_step(self.step_began)
        try:
            outputs = self._engine.step()
        except RankError:  # there is no engine any more
            raise
        except Exception as error:
            logger.exception("a step of the engine failed")
            if (advice := advice_when_full(str(error))) is not None:
                logger.error("%s", advice)
            self._fail_step(advice or f"{type(error).__name__}: {error}")
            self._must_flush = True  # the engine may hold outputs that only the next call of `step` returns
            return
        finally:
            self.step_began = None
        self._hand_out(outputs)
        if self._must_flush:
            self._must_flush = False
            for request_id in [name for name, tracked in self.tracked.items() if tracked.request.is_finished]:
                self._finish(request_id, "outputs were lost in a failed step")
        if (load := self.load.after_step(time.monotonic())) is not None:
            self.calls.append((self.on_load, load))

    def _begin_ahead(self) -> bool:
        try:
            return self.ahead.begin()
        except Exception:  # nobody waits for it
            logger.exception("what the next prompts begin with cannot be computed ahead")
            self.ahead.drop()
            return self._has_requests

    def _hand_out(self, outputs: list[StreamOutput]) -> None:
        ended = {}
        for output in outputs:
            tracked = self.tracked.get(output.request_id)
            if tracked is None:
                continue
            if output.finish_reason == "error":
                self._engine.abort(output.request_id)  # aborts the request's other completions, if any
                ended.pop(output.request_id, None)
                self._finish(output.request_id, output.error or "it says no more")
                continue
            if tracked.before is None:
                tracked.before = copy.copy(self._engine.meter.times)
            if not tracked.stream.has_started:
                tracked.stream.has_started = True
                self.calls.append((tracked.stream.charge.close,))
            self.num_generated_tokens += len(output.token_ids_delta)
            if tracked.stream.wants_deltas:
                self.calls.append((tracked.stream.put, tracked.place, output))
            if tracked.request.is_finished:
                ended[output.request_id] = tracked
        for request_id, tracked in ended.items():
            if not tracked.stream.wants_deltas:
                for sequence in tracked.request.sequences:
                    whole = tracked.request.stream_output(sequence, is_whole=True)
                    self.calls.append((tracked.stream.put, tracked.place, whole))
            self._finish(request_id)

    def _fail_step(self, error: str) -> None:
        """End the requests that the engine has aborted; if there are none, end one, so that the next step differs."""
        failed = [
            name
            for name, tracked in self.tracked.items()
            if any(sequence.finish_reason in ("abort", "error") for sequence in tracked.request.sequences)
        ]
        if not failed:
            self._engine.executor.settle()  # raises if the device is lost: nothing can run then
            scheduler = self._engine.scheduler
            # Planning failed, most likely while it made room by preempting the youngest sequence. So end that one.
            victim = scheduler.running[-1] if scheduler.running else next(iter(scheduler.waiting), None)
            if victim is not None:
                self._engine.abort(victim.request_id)
                failed = [victim.request_id] if victim.request_id in self.tracked else []
        for request_id in failed:
            self._finish(request_id, error)

    def _finish(self, request_id: str, error: str | None = None) -> None:
        """Forget a request that has ended, by itself or because of an error of the engine, and tell its reader."""
        tracked = self.tracked.pop(request_id)
        request, stream = tracked.request, tracked.stream
        name = stream.name if len(stream.prompts) == 1 else f"{stream.name}-{tracked.place}"
        times = None if tracked.before is None else self._engine.meter.times.since(tracked.before)
        try:
            ended = ended_request(name, request, stream.arrival, times, has_failed=error is not None)
        except Exception:  # its reader is told in any case
            logger.exception("what request %r took cannot be told", name)
        else:
            self.calls.append((self.on_finished, ended))
        if error is None:
            self.calls.append((stream.end_one,))
        elif isinstance(request.failure, RequestError):  # what was asked for is at fault
            self.calls.append((stream.fail, BadRequestError(error, param=request.failure.field)))
        else:
            message = (
                f"the engine failed while it computed this request ({error}): send it again, and look into the "
                "server's log if it happens again"
            )
            self.calls.append((stream.fail, ApiError(message, code="engine_error")))
