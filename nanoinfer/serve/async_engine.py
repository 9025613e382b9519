"""One engine for many asyncio tasks: a dedicated thread makes all calls to the engine."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.outputs import StreamOutput
from nanoinfer.requests.request import Request
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.errors import ApiError, EngineStepError, UnavailableError
from nanoinfer.serve.queue_limits import DEFAULT_QUEUE_BYTES, Charge, QueueLimit, WaitingBytes, num_queued
from nanoinfer.serve.request_stream import FinishedRequest, RequestStream
from nanoinfer.serve.tokenizing import Prompt, PromptTokenizer

logger = logging.getLogger("nanoinfer.serve")
T = TypeVar("T")
_JOIN_SECONDS = 60.0  # for the last step to end, and for freeing pinned memory
DEFAULT_STEP_SECONDS = 120.0  # the first steps may compile kernels


@dataclass(frozen=True)
class _Tracked:
    """A request in the engine, and the stream that reads its outputs."""

    request: Request
    stream: RequestStream
    place: int


class AsyncEngine:
    """Runs an `LLMEngine` in a thread and hands its outputs to asyncio tasks of one event loop.

    Between two steps the thread handles everything that arrived (new requests, aborts, questions). All outputs of a
    step are passed to the event loop in one call.

    Args:
        make_engine: called once, on the engine's thread.
        max_queue: the most sequences that may wait for a place among the running ones; requests beyond are refused.
        max_queue_bytes: the most bytes of waiting requests; a request counts from its arrival to its first token.
        max_step_seconds: a step that runs for longer is considered to hang.
    """

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        *,
        max_queue: int = 1024,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_step_seconds: float = DEFAULT_STEP_SECONDS,
    ) -> None:
        if not max_step_seconds > 0:
            raise ValueError(f"max_step_seconds is {max_step_seconds}, it must be above 0")
        self.max_step_seconds = max_step_seconds
        self.waiting = WaitingBytes(max_queue_bytes)
        self._limit = QueueLimit(max_queue)
        self.prompts: PromptTokenizer | None = None
        """Set by `start`, as are the engine's `mode`, `plan`, `config` and `sampling_defaults`."""
        self.num_prompt_tokens = 0
        """Prompt tokens of all accepted requests."""
        self.num_generated_tokens = 0
        self.on_finished: Callable[[FinishedRequest], None] = lambda finished: None
        """Called on the event loop for each prompt that has ended."""
        self._make_engine = make_engine
        self._inbox: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # keeps calls out of the inbox after the thread has emptied it for the last time
        self._is_closed = False
        self._is_draining = False
        self._failure: BaseException | None = None
        self._num_queued = 0  # sequences that wait for a place; below 0: free places
        self._step_began: float | None = None  # `time.monotonic` at the start of the running step
        self._tracked: dict[str, _Tracked] = {}  # this and all below: used on the engine's thread
        self._must_flush = False
        self._batch: list[Callable[[], None]] = []  # calls for the loop to make after this step
        self._streams: set[RequestStream] = set()  # used on the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[LLMEngine] = Future()
        self._thread = threading.Thread(target=self._run, name="nanoinfer-engine", daemon=True)

    def start(self) -> None:
        """Makes the engine and returns when it is ready.

        Raises:
            Exception: what the engine's constructor raised.
        """
        self._thread.start()
        # Other threads read only those attributes of the engine that never change after start-up.
        engine = self._started.result()
        self.mode, self.plan, self.config = engine.mode, engine.plan, engine.config
        self.sampling_defaults = engine.sampling_defaults
        self._limit.num_places = engine.plan.max_num_seqs
        self._num_queued = -engine.plan.max_num_seqs
        self.prompts = PromptTokenizer(
            engine.tokenizer, engine.intake.tokenize, engine.intake.check_vocabulary, engine.plan.max_model_len
        )

    def check_health(self) -> None:
        """Raises UnavailableError if new requests would not be answered, or not soon."""
        self._check_open()
        if (seconds := self.step_seconds) > self.max_step_seconds:
            raise UnavailableError(
                f"a step of the engine has run for {seconds:.0f} s, longer than --max-step-seconds "
                f"{self.max_step_seconds:g}: it hangs if this goes on; restart the server then",
                "engine_hangs",
            )

    @property
    def step_seconds(self) -> float:
        """Seconds for which the current step has been running; 0 if no step is running."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def has_failed(self) -> bool:
        """Whether the engine has stopped because of an error."""
        return self._failure is not None

    @property
    def num_streams(self) -> int:
        """Number of HTTP requests that wait or run."""
        return len(self._streams)

    # Requests, from the loop

    async def submit(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        wants_deltas: bool,
        arrival: float | None = None,
        charge: Charge | None = None,
    ) -> RequestStream:
        """Queues all prompts or none.

        Args:
            prompts: as returned by `self.prompts`.
            charge: counts the bytes of the request; the stream releases it.

        Raises:
            RequestError: the engine refuses a prompt or its parameters, or the queue could never hold all prompts.
            OverloadedError: too many sequences wait, or would wait with this request.
            UnavailableError: the server is shutting down or the engine is dead.
        """
        self._check_open()
        num_new = len(prompts) * params.n
        self._limit.check(self._num_queued, num_new)  # checked again on the engine's thread; this saves work
        self._loop = asyncio.get_running_loop()
        stream = RequestStream(
            prompts,
            wants_deltas=wants_deltas,
            arrival=time.perf_counter() if arrival is None else arrival,
            on_end=self._streams.discard,
            on_close=self._abort_later,
            charge=charge,
        )
        if charge is not None:
            charge.is_handed_over = True
        self._streams.add(stream)
        try:
            await self._call(lambda engine: self._add(engine, stream, params))
        except BaseException:
            stream.close()
            raise
        return stream

    async def stats(self) -> dict[str, Any]:
        """Return `LLMEngine.stats` as of the end of the current step."""
        return await self._call(lambda engine: engine.stats())

    def _call(self, function: Callable[[LLMEngine], T]) -> asyncio.Future[T]:
        """Runs `function` on the engine's thread between two steps."""
        future: Future[T] = Future()
        self._put((function, future))
        return asyncio.wrap_future(future)

    def _put(self, call: tuple[Callable[[LLMEngine], Any], Future]) -> None:
        with self._lock:
            if self._is_closed:
                raise self._dead()
            self._inbox.put(call)

    def _abort_later(self, stream: RequestStream) -> None:
        try:
            self._put((lambda engine: self._abort(engine, stream), Future()))
        except UnavailableError:
            pass  # the engine's thread has ended, so nothing runs any more

    def _check_open(self) -> None:
        if self._failure is not None or not self._thread.is_alive():
            raise self._dead()
        if self._is_draining:
            raise UnavailableError("the server is shutting down: send the request to another one", "shutting_down")

    def _dead(self) -> UnavailableError:
        why = f" ({type(self._failure).__name__}: {self._failure})" if self._failure is not None else ""
        return UnavailableError(f"the engine is not running{why}: restart the server", "engine_dead")

    # Shutdown, from the loop

    def begin_shutdown(self) -> None:
        """Refuse new requests from now on. Running requests go on."""
        self._is_draining = True

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until all requests have ended. After `timeout_seconds`, end the remaining requests with an error."""
        deadline = time.monotonic() + timeout_seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for stream in list(self._streams):
            stream.fail(
                UnavailableError(
                    f"the server shut down, and the request had not ended within {timeout_seconds:g} s", "shutting_down"
                )
            )

    def close(self) -> None:
        """End the thread and free the engine's memory. Requests that still run end with an error. Blocks."""
        self._is_draining = True
        with self._lock:
            self._inbox.put(None)
        if self._thread.is_alive() and self._started.done():  # do not wait for an interrupted load
            self._thread.join(_JOIN_SECONDS)
        if self.prompts is not None:
            self.prompts.close()

    # The engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(engine)
        try:
            while self._take_inbox(engine):
                if engine.has_work or self._must_flush:
                    self._step(engine)
                self._num_queued = num_queued(engine)
                self._send_batch()
        except BaseException as error:
            logger.exception("the engine is dead")
            self._failure = error
        self._end(engine)

    def _take_inbox(self, engine: LLMEngine) -> bool:
        """Make the calls in the inbox; wait for one if the engine has no work. Return False if the thread must end."""
        try:
            call = self._inbox.get(block=not engine.has_work and not self._must_flush)
            while call is not None:
                function, future = call
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(engine))
                    except BaseException as error:
                        future.set_exception(error)
                        if not isinstance(error, Exception):
                            raise
                call = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _add(self, engine: LLMEngine, stream: RequestStream, params: SamplingParams) -> None:
        if stream.has_ended:
            return  # the reader has left meanwhile
        self._limit.check(num_queued(engine), len(stream.prompts) * params.n)
        name = uuid.uuid4().hex
        added = {}
        try:
            for place, (text, token_ids) in enumerate(stream.prompts):
                request_id = f"{name}-{place}"
                request = engine.add_request(request_id, token_ids if text is None else text, params, token_ids)
                added[request_id] = _Tracked(request, stream, place)
        except BaseException:
            for request_id in added:
                engine.abort(request_id)
            raise
        self._tracked.update(added)
        self.num_prompt_tokens += sum(len(token_ids) for _, token_ids in stream.prompts)

    def _abort(self, engine: LLMEngine, stream: RequestStream) -> None:
        for request_id in [name for name, tracked in self._tracked.items() if tracked.stream is stream]:
            engine.abort(request_id)
            self._finish(request_id)

    def _step(self, engine: LLMEngine) -> None:
        self._step_began = time.monotonic()
        try:
            outputs = engine.step()
        except Exception as error:
            logger.exception("a step of the engine failed")
            self._fail_step(engine, error)
            self._must_flush = True  # the engine may hold outputs that only the next call of `step` returns
            return
        finally:
            self._step_began = None
        self._hand_out(engine, outputs)
        if self._must_flush:
            self._must_flush = False
            for request_id in [name for name, tracked in self._tracked.items() if tracked.request.is_finished]:
                self._finish(request_id, EngineStepError(RuntimeError("outputs were lost in a failed step")))

    def _hand_out(self, engine: LLMEngine, outputs: list[StreamOutput]) -> None:
        ended = {}
        for output in outputs:
            tracked = self._tracked.get(output.request_id)
            if tracked is None:
                continue
            if output.finish_reason == "error":
                engine.abort(output.request_id)  # aborts the request's other completions, if any
                ended.pop(output.request_id, None)
                self._finish(output.request_id, EngineStepError(output.error or "it says no more"))
                continue
            if not tracked.stream.has_started:
                tracked.stream.has_started = True
                self._batch.append((tracked.stream.start,))
            self.num_generated_tokens += len(output.token_ids_delta)
            if tracked.stream.wants_deltas:
                self._batch.append((tracked.stream.put, tracked.place, output))
            if tracked.request.is_finished:
                ended[output.request_id] = tracked
        for request_id, tracked in ended.items():
            if not tracked.stream.wants_deltas:
                self._batch.append((tracked.stream.put, tracked.place, tracked.request.output()))
            self._finish(request_id)

    def _fail_step(self, engine: LLMEngine, error: Exception) -> None:
        """End the requests that the engine has aborted; if there are none, end one, so that the next step differs."""
        failed = [
            name
            for name, tracked in self._tracked.items()
            if any(sequence.finish_reason in ("abort", "error") for sequence in tracked.request.sequences)
        ]
        if not failed:
            engine.runner.settle()  # raises if the device is lost: nothing can run then
            scheduler = engine.scheduler
            # Planning failed, most likely while it made room by preempting the youngest sequence. So end that one.
            victim = scheduler.running[-1] if scheduler.running else next(iter(scheduler.waiting), None)
            if victim is not None:
                engine.abort(victim.request_id)
                failed = [victim.request_id] if victim.request_id in self._tracked else []
        for request_id in failed:
            self._finish(request_id, EngineStepError(error))

    def _finish(self, request_id: str, error: ApiError | None = None) -> None:
        """Forget a request that has ended, and tell its reader."""
        tracked = self._tracked.pop(request_id)
        request, stream = tracked.request, tracked.stream
        reasons = ["error" if error is not None else sequence.finish_reason for sequence in request.sequences]
        first = None if request.first_token is None else request.first_token - stream.arrival
        finished = FinishedRequest(reasons, first, time.perf_counter() - stream.arrival, request.metrics())
        self._batch.append((self.on_finished, finished))
        self._batch.append((stream.end_one,) if error is None else (stream.fail, error))

    def _send_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._on_loop(_call_all, batch)

    def _on_loop(self, function: Callable, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed, so nobody reads

    def _end(self, engine: LLMEngine) -> None:
        """Fail everything that still waits for the engine, so that nothing waits for ever."""
        with self._lock:
            self._is_closed = True
            while not self._inbox.empty():
                call = self._inbox.get()
                if call is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(self._dead())
        self._send_batch()
        if self._loop is not None:
            self._on_loop(self._fail_all)
        try:
            engine.close()
        except Exception:
            logger.exception("the engine could not be closed")

    def _fail_all(self) -> None:
        for stream in list(self._streams):
            stream.fail(self._dead())


def _call_all(calls: list[tuple]) -> None:
    for function, *arguments in calls:
        function(*arguments)
