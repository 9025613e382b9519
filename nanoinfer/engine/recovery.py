"""Whose turn it is with an engine, what it works on, and how that becomes consistent after an exception at any line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from nanoinfer.engine.meter import LaunchedStep
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.start import BuiltEngine
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence, SequenceState

NO_TOKEN = -1
"""In place of a drafted token: it is not the one that was sampled."""


class BusyError(RuntimeError):
    """Another thread is in a call of the engine."""


class Turns:
    """Whose turn it is: one thread at a time is in an engine, and whoever drops requests meanwhile waits for nobody.

    Args:
        end_dropped: ends the requests in `dropped` and removes them from it; called while nobody is inside.

    Attributes:
        dropped: ids of requests that must end and still may run. Others append to it at any moment.
    """

    def __init__(self, end_dropped: Callable[[], None]) -> None:
        self.dropped: list[str] = []
        self._end_dropped = end_dropped
        self._inside: dict[str, int] = {}  # the thread that is in a call, if one is
        self._is_ending = False  # whether somebody ends what was dropped, and looks again behind that

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse other threads while this one is inside. May be nested.

        A change that another thread has half made would be taken for an interrupted recovery, and end its requests.

        Raises:
            RuntimeError: another thread is inside. Nothing has changed.
        """
        caller, is_outermost = threading.get_ident(), not self._inside
        try:
            if self._inside.setdefault("thread", caller) != caller:  # one operation: no thread comes in between
                raise BusyError(
                    "another thread is in a call of this engine, and one at a time may be: wait until it has returned "
                    "(threading.Lock), give each thread an engine of its own, or ask a server (nanoinfer serve)"
                )
            yield
        finally:
            if is_outermost and self._inside.get("thread") == caller:
                self._inside.clear()
                self.drop(())

    def drop(self, request_ids: Iterable[str]) -> None:
        """End requests, of which some may have ended already, as soon as nobody is inside.

        For callers that cannot choose the moment: the garbage collector may close a generator on any thread, and also
        on the thread that is inside, in the midst of a step. So nobody waits here: whoever is inside ends them, in its
        next change or when it leaves.
        """
        self.dropped += request_ids
        while self.dropped and not self._inside and not self._is_ending:
            self._is_ending = True
            try:
                with suppress(BusyError):  # somebody came in meanwhile, and looks here when it leaves
                    self._end_dropped()
            finally:
                self._is_ending = False


class LiveRequests:
    """The requests of an engine and its step in flight, which no exception leaves half changed.

    Args:
        read_tokens: waits for a step and hands out its tokens.

    Attributes:
        requests: the requests that have not ended, by id.
        in_flight: the step that was launched, sampling included, and not read yet.
        at_risk: see `risking`. A step that was launched and not sampled yet is known nowhere else.
        is_whole: False while requests, pools or tables are being changed.
    """

    def __init__(
        self,
        built: BuiltEngine,
        scheduler: Scheduler,
        planner: StepPlanner,
        read_tokens: Callable[[LaunchedStep], None],
    ) -> None:
        self._built, self._scheduler, self._planner = built, scheduler, planner
        self._read_tokens = read_tokens
        self.requests: dict[str, Request] = {}
        self.in_flight: LaunchedStep | None = None
        self.at_risk: list[Sequence] = []
        self.is_whole = True
        self._is_recovering = False

    @contextmanager
    def risking(self, sequences: list[Sequence]) -> Iterator[None]:
        """An exception from inside ends the requests of these sequences, as their state is unknown until it is left."""
        outside, self.at_risk = self.at_risk, [*self.at_risk, *sequences]
        yield
        self.at_risk = outside

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for request in self.requests.values() for sequence in request.sequences]

    def prompt_tokens(self, asked: Iterable[Request] | None = None) -> tuple[int, int]:
        """Return how many tokens of requests' prompts are read, and of how many. Any thread may call this, at any
        moment: the figures are as old as the last step.

        Args:
            asked: None: all requests.
        """
        done, total = 0, 0
        requests = list(self.requests.values() if asked is None else asked)
        for request in requests:
            length = len(request.prompt_token_ids)
            total += length
            done += min(length, max(sequence.num_computed for sequence in request.sequences))
        step = self.in_flight
        if step is not None and self._built.executor.is_asynchronous:  # launched, and not computed yet
            names = {request.request_id for request in requests}
            done -= sum(one.end - one.begin for one in step.batch.chunks if one.sequence.request_id in names)
        return done, total

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str]) -> bool:
        """End requests and free what they hold; return False if none of these is there."""
        requests = [self.requests[name] for name in request_ids if name in self.requests]
        for request in requests:
            request.abort()
        self.remove_ended(requests)
        return bool(requests)

    def remove_ended(self, requests: Iterable[Request]) -> None:
        """Free the rows and KV blocks of sequences that have ended."""
        for request in requests:
            for sequence in request.sequences:
                if sequence.finish_reason is not None and not sequence.is_finished:
                    self._scheduler.remove(sequence)
            if request.is_finished:
                self.requests.pop(request.request_id, None)

    def recover(self) -> None:
        """Restore a consistent state after an exception, and keep the requests that it has not touched.

        The tokens of a step in flight are read, because that step is unharmed. The requests of the failed step are
        aborted. Then everything else (rows, tables, pools, promises, queues) is rebuilt from the remaining requests.

        The recovery may itself be interrupted and called again. Every request that has begun is aborted then.
        """
        built, scheduler = self._built, self._scheduler
        is_sound, self._is_recovering = not self._is_recovering, True
        built.executor.settle()
        step, self.in_flight = self.in_flight, None
        if step is not None and is_sound:
            # To take a drafted token takes blocks, and who has which is not known before all is rebuilt: none is right.
            drafts = {sequence: [NO_TOKEN] * len(draft) for sequence, draft in step.batch.drafts.items()}
            step.batch = replace(step.batch, drafts=drafts)
            try:
                self._read_tokens(step)
            except Exception:
                self.at_risk = [*self.at_risk, *step.batch.sampled]
        if not is_sound:
            self.at_risk = [one for one in self.sequences if _has_begun(one)]
        for sequence in self.at_risk:
            request = self.requests.get(sequence.request_id)
            if request is not None and sequence in request.sequences:  # not a later request of the same name
                request.abort()
        for request in self.requests.values():
            if request.is_awaited:  # a step that was launched and will not be read
                request.abort()
        scheduler.recover(self.sequences)
        ended = [sequence for sequence in self.sequences if sequence.is_finished]
        built.mover.recover(scheduler.running, [*scheduler.waiting, *ended], keeps_prefixes=is_sound)
        self.requests = {name: request for name, request in self.requests.items() if not request.is_finished}
        built.admission.forget()
        self._planner.forget()
        built.executor.forget()
        self.at_risk = []
        self._is_recovering = False
        self.is_whole = True


def _has_begun(sequence: Sequence) -> bool:
    """Whether anything was computed of a sequence, or found. Who was let in and not to the end waits, with a row."""
    has_any = sequence.row is not None or sequence.kept_blocks is not None
    return has_any or sequence.state is not SequenceState.WAITING
