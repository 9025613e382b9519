"""What an engine works on, and how it becomes consistent again after an exception at any line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from nanoinfer.engine.meter import LaunchedStep
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.start import BuiltEngine
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence, SequenceState


class Work:
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
            # To take a drafted token takes blocks, and who has which is not known before all is rebuilt.
            step.batch = replace(step.batch, drafts={})
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
