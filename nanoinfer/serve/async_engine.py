"""One engine for many asyncio tasks: a dedicated thread makes all calls to the engine."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.figures import FACTS, Reading, values
from nanoinfer.serve.errors import UnavailableError
from nanoinfer.serve.partings import RecentPrompts
from nanoinfer.serve.published import Published
from nanoinfer.serve.request_log import RequestLog
from nanoinfer.serve.request_stream import RequestStream
from nanoinfer.serve.served_requests import ServedRequests
from nanoinfer.serve.tokenizing import PromptTokenizer
from nanoinfer.serve.waiting_bytes import DEFAULT_QUEUE_BYTES, WaitingBytes

logger = logging.getLogger("nanoinfer.serve")
T = TypeVar("T")
_JOIN_SECONDS = 60.0  # for the last step to end, and for freeing pinned memory
DEFAULT_STEP_SECONDS = 120.0  # the first steps may compile kernels


class AsyncEngine:
    """Runs an `LLMEngine` in a thread and hands its outputs to asyncio tasks of one event loop.

    Between two steps the thread handles everything that arrived (new requests, aborts, questions). All outputs of a
    step are passed to the event loop in one call.

    Args:
        make_engine: called once, on the engine's thread.
        max_queue: the most sequences that may wait for a place among the running ones; requests beyond are refused.
        max_queue_bytes: the most bytes of waiting requests; a request counts from its arrival to its first token.
        max_step_seconds: a step that runs for longer is considered to hang.
        compute_ahead: compute what next prompts begin with while there are no requests.
    """

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        *,
        max_queue: int = 1024,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_step_seconds: float = DEFAULT_STEP_SECONDS,
        compute_ahead: bool = True,
    ) -> None:
        if max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}, it must be at least 1: else nothing is ever taken")
        if not max_step_seconds > 0:
            raise ValueError(f"max_step_seconds is {max_step_seconds}, it must be above 0")
        self.max_step_seconds, self.computes_ahead = max_step_seconds, compute_ahead
        self.waiting = WaitingBytes(max_queue_bytes)
        self._max_queue = max_queue
        self.prompts: PromptTokenizer | None = None
        """Set by `start`, as are `log`, `requests`, `facts` and the engine's `mode`, `plan`, `config`,
        `sampling_defaults`."""
        self.log: RequestLog | None = None
        self._make_engine = make_engine
        self._inbox: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any], Future, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # keeps calls out of the inbox after the thread has emptied it for the last time
        self._is_closed = False
        self.is_draining = False
        self.failure: BaseException | None = None
        """The error because of which the engine has stopped."""
        self._streams: set[RequestStream] = set()  # used on the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[tuple[LLMEngine, ServedRequests]] = Future()
        self._thread = threading.Thread(target=self._run, name="nanoinfer-engine", daemon=True)

    def start(self) -> None:
        """Make the engine and return when it is ready; raise what its constructor raised."""
        self._thread.start()
        # Other threads read only those attributes of the engine that never change after start-up.
        engine, self.requests = self._started.result()
        self.mode, self.plan, self.config = engine.mode, engine.plan, engine.config
        self.sampling_defaults, self.facts = engine.sampling_defaults, values(FACTS, Reading(engine))
        self.prompts = PromptTokenizer(engine.tokenizer, engine.intake, engine.plan.max_model_len)
        size = self.config.block_size
        is_cached = self.config.caches_prefixes
        recent = RecentPrompts(size) if is_cached else None
        self.log = RequestLog(recent, self.prompts.shown, size)

    def check_health(self) -> None:
        """Raise UnavailableError if new requests would not be answered, or not soon."""
        self._check_open()
        if (seconds := self.step_seconds) > self.max_step_seconds:
            raise UnavailableError(
                f"a step of the engine has run for {seconds:.0f} s, longer than --max-step-seconds "
                f"{self.max_step_seconds:g}: it hangs if this goes on; restart the server then",
                code="engine_hangs",
            )

    @property
    def step_seconds(self) -> float:
        """Seconds for which the current step has been running; 0 if no step is running."""
        began = self.requests.step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # Requests, from the loop

    async def submit(self, stream: RequestStream) -> None:
        """Queue all prompts of a stream, as `self.prompts` returned them, or none. The stream closes its charge.

        Raises:
            RequestError: the engine refuses a prompt or its parameters, or the queue could never hold all prompts.
            OverloadedError: too many sequences wait, or would wait with this request.
            UnavailableError: the server is shutting down or the engine is dead.
        """
        self._check_open()
        self.requests.check_queue(stream.num_sequences)  # checked again on the engine's thread; this saves work
        self._loop = asyncio.get_running_loop()
        stream.on_end, stream.on_close = self._streams.discard, self._abort_later
        stream.charge = stream.charge.pop_all()
        self._streams.add(stream)
        try:
            await asyncio.wrap_future(self._call(lambda engine: self.requests.add(stream)))
        except BaseException:
            stream.close()
            raise

    def offer(self, token_ids: list[int]) -> None:
        """Have what the next prompt of a conversation begins with computed ahead."""
        with suppress(UnavailableError):
            self._call(lambda engine: self.requests.ahead.offer(token_ids))

    async def stats(self) -> dict[str, Any]:
        """Return `LLMEngine.stats` as of the end of the current step, and what is computed ahead."""
        ahead = self.requests.ahead
        of_ahead = lambda: dict(computed_ahead_tokens=ahead.num_tokens, computed_ahead_left_out=ahead.num_left_out)
        return await asyncio.wrap_future(self._call(lambda engine: engine.stats() | of_ahead()))

    async def figures(self, known: int | None = None) -> Published:
        """Return the figures published next behind those of this number; None: those that are true now."""
        publisher = self.requests.publisher
        asked = await asyncio.wrap_future(self._call(lambda engine: publisher.ask(known), changes=False))
        return await asyncio.wrap_future(asked)

    def _call(self, function: Callable[[LLMEngine], T], *, changes: bool = True) -> Future[T]:
        """Run `function` on the engine's thread between two steps. changes: whether it may change any figure."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise self._dead()
            self._inbox.put((function, future, changes))
        return future

    def _abort_later(self, stream: RequestStream) -> None:
        try:
            self._call(lambda engine: self.requests.abort(stream))
        except UnavailableError:
            pass  # the engine's thread has ended, so nothing runs any more

    def _check_open(self) -> None:
        if self.failure is not None or not self._thread.is_alive():
            raise self._dead()
        if self.is_draining:
            raise UnavailableError("the server is shutting down: send the request to another one", code="shutting_down")

    def _dead(self) -> UnavailableError:
        why = f" ({type(self.failure).__name__}: {self.failure})" if self.failure is not None else ""
        return UnavailableError(f"the engine is not running{why}: restart the server", code="engine_dead")

    # Shutdown, from the loop

    def begin_shutdown(self) -> None:
        """Refuse new requests from now on. Running requests go on."""
        self.is_draining = True

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until all requests have ended. After `timeout_seconds`, end the remaining requests with an error."""
        deadline = time.monotonic() + timeout_seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        message = f"the server shut down, and the request had not ended within {timeout_seconds:g} s"
        self._fail_all(UnavailableError(message, code="shutting_down"))

    def close(self) -> None:
        """End the thread and free the engine's memory. Requests that still run end with an error. Blocks."""
        self.is_draining = True
        with self._lock:
            self._inbox.put(None)
        if self._thread.is_alive() and self._started.done():  # do not wait for an interrupted load
            self._thread.join(_JOIN_SECONDS)
        if self.prompts is not None:
            self.prompts.close()
        if self.log is not None:
            self.log.close()

    # The engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._started.set_exception(error)
            return
        requests = ServedRequests(engine, self._max_queue)
        self._started.set_result((engine, requests))
        try:
            while self._take_inbox(engine, requests):
                engine.executor.check()
                if requests.has_work:
                    requests.publisher.is_stale = True
                    requests.step()
                requests.count_queued()
                requests.publisher.publish()
                self._send(requests)
        except BaseException as error:
            logger.exception("the engine is dead")
            self.failure = error
        self._end(engine, requests)

    def _take_inbox(self, engine: LLMEngine, requests: ServedRequests) -> bool:
        """Make the calls in the inbox; wait for one if there is no work. Return False if the thread must end."""
        try:
            wait = requests.publisher.seconds_left
            if engine.executor.looks_s is not None:
                wait = min(engine.executor.looks_s, engine.executor.looks_s if wait is None else wait)
            call = self._inbox.get(not requests.has_work, wait)
            while call is not None:
                function, future, changes = call
                requests.publisher.is_stale |= changes
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

    def _send(self, requests: ServedRequests) -> None:
        """Have the event loop make the calls that have come together."""
        calls, requests.calls = requests.calls, []
        if calls and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                pass  # the loop is closed, so nobody reads

    def _end(self, engine: LLMEngine, requests: ServedRequests) -> None:
        """Fail everything that still waits for the engine, so that nothing waits for ever."""
        with self._lock:
            self._is_closed = True
            while not self._inbox.empty():
                call = self._inbox.get()
                if call is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(self._dead())
        requests.publisher.fail(self._dead())
        requests.calls.append((self._fail_all, self._dead()))
        self._send(requests)
        try:
            engine.close()
        except Exception:
            logger.exception("the engine could not be closed")

    def _fail_all(self, error: UnavailableError) -> None:
        for stream in list(self._streams):
            stream.fail(error)


def _call_all(calls: list[tuple]) -> None:
    for function, *arguments in calls:
        function(*arguments)
