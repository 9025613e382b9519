"""The engine: requests in, steps, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine.drafts import Drafts, take_drafted
from nanoinfer.engine.intake import Intake
from nanoinfer.engine.masks import MaskMaker
from nanoinfer.engine.meter import LaunchedStep, StepMeter
from nanoinfer.engine.modes import Modes
from nanoinfer.engine.planner import StepPlanner
from nanoinfer.engine.recovery import LiveRequests, Turns
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.start import build
from nanoinfer.engine.stats import statistics
from nanoinfer.engine.trace import Trace
from nanoinfer.execution.runner import ModelRunner
from nanoinfer.outputs import StreamOutput
from nanoinfer.requests.prompts import Prompt
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step.batch import Batch, PrefillChunk
from nanoinfer.step.executor import ChunkLogprobs
from offload import Runtime

# What a closed engine lacks.
_PARTS = ("live", "executor", "scheduler", "planner", "kv_cache", "mover", "admission", "masks")


class LLMEngine:
    """Runs requests step by step. Not thread-safe: one thread at a time may call it, and another one is refused.

    Args:
        runtime: streams, events and graphs. The engine closes it, so it serves one engine. None: make the one that fits
            the device.

    Attributes:
        on_logits: called for each step that samples, with the sequences that get a token and their logits,
            [len(sequences), vocab_size], for work on the compute stream between the layers and the sampling. It may
            change the logits there. Where drafts were asked for, a sequence comes again for each of its drafted tokens;
            others are not made beside it. None: no call.
        samples_late: call `on_logits` and launch the sampling only when the tokens of the step before were read, so
            that what is uploaded may depend on them. The layers run meanwhile. Of the sequences some may have ended
            with the token just read; theirs will be dropped. A step with a grammar does so in any case.
        intake: checks prompts, also those of a closed engine.
        modes: which mode is current, and what each can hold.
        alone, drop: methods of `Turns`.
        masks: makes those of a step's grammars.
        work: the requests, and the step in flight.
    """

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, runtime: Runtime | None = None) -> None:
        self._turns = Turns(self._end_dropped)
        self.alone, self.drop = self._turns.alone, self._turns.drop
        built = build(config, runtime)
        self.config, self.executor = built.config, built.executor
        self.plan, self.tokenizer = self.executor.plan, built.tokenizer
        self.kv_cache, self.mover, self.admission = built.kv_cache, built.mover, built.admission
        self.vocab_size = self.executor.spec.vocab_size
        self.modes = Modes(built)
        self.intake = Intake(built, self.modes)
        self.planner = StepPlanner(self.kv_cache, built.end_token_ids)
        self.on_logits: Callable[[list[Sequence], torch.Tensor], None] | None = None
        self.samples_late = False
        self.masks = MaskMaker(self.vocab_size)
        self.scheduler = Scheduler(
            self.kv_cache, self.admission, self.mover, self.plan.max_num_batched_tokens, self.executor.num_graph_tokens,
            self.modes, self._fail_sequence, self.plan.step_unit,
        )  # fmt: skip
        self.sampling_defaults = built.sampling_defaults  # for fields of SamplingParams that a user leaves out
        self.meter, speculation = StepMeter(self.executor), config.speculative_config
        may_draft = self.plan.num_lines > 0
        self.drafts = Drafts(speculation, self.kv_cache, self.admission.max_splits, self.plan) if may_draft else None
        self.live = LiveRequests(built, self.scheduler, self.planner, self._read_tokens)
        self._outputs: list[StreamOutput] = []  # read from the device, but not returned by `step` yet
        try:
            self.modes.start()
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:
            raise RuntimeError("this engine is closed: make a new one")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def runner(self) -> ModelRunner:
        """What carries the steps out, where that is in this process: for those who look at what it holds."""
        return self.executor.runner

    # Requests

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, token_ids: list[int] | None = None,
        limits: TokenLimits | None = None,
    ) -> Request:  # fmt: skip
        """Queue a request. token_ids, limits: the prompt's and the params', if `intake` was asked for them before.

        Raises:
            ValueError: the id or the parameters cannot be used. Nothing changes.
            RequestError (a ValueError): the same, but the error names the field that is at fault.
        """
        if request_id in self.live.requests:
            raise ValueError(f"request id {request_id!r} is in use: give each request an id of its own")
        request = self.intake.make_request(request_id, prompt, params, token_ids, limits)
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request that `intake` has made."""
        with self.changing(), self.live.risking(request.sequences):  # half queued it would never end
            self.live.requests[request.request_id] = request
            for sequence in request.sequences:
                self.scheduler.waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request and free its memory; return False if there is no such request."""
        with self.changing():
            return self.live.abort([request_id])

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. A step also finishes a recovery that was interrupted."""
        is_open = self.live.in_flight is not None or not self.live.is_whole
        return self.scheduler.has_work or is_open or bool(self._outputs)

    # Steps

    @torch.inference_mode()
    def step(self) -> list[StreamOutput]:
        """Launch one prefill or decode step and read the one before, so that the device never waits for the host.

        Stop conditions are checked one step late: a step may compute one token too many for a sequence, and that token
        is dropped.

        Returns:
            One output for each sequence whose token was read: what the sequence gained.

        If a completion fails, for example in its detokenizer, only that completion ends: its last output has
        `finish_reason="error"`.

        Raises:
            Exception: whatever went wrong on the device or in planning. The requests of the failed step are aborted,
                and the engine goes on with all other requests. Outputs that were read before the failure are returned
                by the next call.
        """
        with self.changing():
            self._advance()
        outputs = self._outputs.copy()
        return (self._outputs.clear(), outputs)[1]  # in one line: an interrupt loses no output

    def _advance(self) -> None:
        before, is_apart = self.live.in_flight, False
        if before is not None and self.drafts:
            # It counts steps, so it is asked in each.
            are_wanted = self._may_draft and self.drafts.are_wanted(self.scheduler.running)
            if is_apart := are_wanted or bool(before.batch.drafts):
                self._take(before)  # what may come next follows from all tokens so far
                before = None
        batch = self._schedule()
        if batch is None:
            if before is not None:
                self._take(before)
            elif self.scheduler.wait():
                pass  # who waited for these blocks is in the next step
            elif self.masks.wait(self.scheduler.running):
                pass  # whoever has its mask now is in the next step
            elif self.scheduler.waiting and not self.scheduler.let_others_come_first():
                # Nothing can run: whoever loops over `has_work` would never leave.
                first = self.scheduler.waiting[0]
                self._fail_sequence(first, self.modes.refusal(first))
            return
        with self.live.risking(batch.sequences):
            launched = self._launch(batch)
            launched.is_apart = is_apart
            if before is not None:
                self._take(before)
            if not launched.is_sampled:
                self._sample(launched)
            if any(not sequence.is_finished for sequence in batch.sequences):
                self.live.in_flight = launched

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wrap code that changes requests, pools or tables: an exception at any line leaves them consistent."""
        with self.alone():
            live = self.live
            if not live.is_whole:  # a recovery was interrupted
                live.recover()
            live.is_whole = False
            try:
                if dropped := self._turns.dropped.copy():
                    self.live.abort(dropped)
                    del self._turns.dropped[: len(dropped)]
                yield
            except BaseException:
                live.recover()
                raise
            live.is_whole = True

    def _end_dropped(self) -> None:
        if "live" in vars(self):
            with self.changing():
                pass
        else:
            self._turns.dropped.clear()  # closed: nothing runs

    def _fail_sequence(self, sequence: Sequence, error: Exception) -> None:
        """End the request of a sequence because of an error that concerns only this request; free what it holds."""
        request = self.live.requests[sequence.request_id]
        self._outputs += request.fail(error)
        self.live.remove_ended([request])

    def _schedule(self) -> Batch[Sequence] | None:
        step = self.live.in_flight
        with self.meter.span("schedule") as begin:
            if step is not None and self.executor.is_done(step.number):
                step.made = begin  # it is read when the next step was launched
            batch = self.scheduler.schedule()
            return self.drafts.add(batch) if batch is not None and self._may_draft else batch

    @property
    def _may_draft(self) -> bool:
        """Whether there may be drafts; beside `on_logits`, which may know of none, only if they were asked for."""
        return self.drafts is not None and (self.on_logits is None or self.drafts.are_asked_for)

    def _launch(self, batch: Batch[Sequence]) -> LaunchedStep:
        """Launch the layers of a step, and the sampling unless it comes late."""
        with self.meter.span("launch prefill" if batch.chunks else "launch decode") as begin:
            if batch.chunks:  # a request's first step is never a decode step
                for sequence in batch.sequences:
                    self.live.requests[sequence.request_id].mark_scheduled()
            timeline = self.meter.timeline(not batch.chunks)
            plan = self.planner.begin_step(batch)
            of_members, streamed_bytes = self.executor.execute(plan, timeline)
            launched = LaunchedStep(batch, plan.number, begin, streamed_bytes, timeline)
            if not (self.samples_late or self.masks.are_wanted(batch.sampled)):
                self._sample(launched)
            self.planner.end_step(batch, plan)
            self.scheduler.keep_snapshots(batch)
            if of_members is not None:
                members = [*(chunk.sequence for chunk in batch.chunks), *(sequence for sequence, *_ in batch.lines())]
                for sequence, num_bytes in zip(members, of_members.tolist(), strict=True):
                    sequence.streamed_bytes += num_bytes
            self.meter.note_blocks(self.kv_cache.copies.num_resident, self.kv_cache.copies.num_streamed)
        return launched

    def _sample(self, step: LaunchedStep) -> None:
        on_logits = None if self.on_logits is None else partial(self.on_logits, step.batch.sampled_lines)
        masks, failed = self.masks.make(step.batch.sampled)
        for sequence, error in failed:
            self._outputs += self.live.requests[sequence.request_id].fail(error, sequence)
        if step.batch.drafts:
            masks = self.masks.with_drafts(step.batch, masks)
        self.executor.sample(step.number, masks, on_logits)
        step.is_sampled = True

    def _take(self, step: LaunchedStep) -> None:
        """Wait for a step, hand out its tokens and free the sequences that have ended."""
        with self.live.risking(step.batch.sampled):
            self.live.in_flight = None
            self._read_tokens(step)
            for sequence in step.batch.drafts:
                self.kv_cache.release_states(sequence)
            with self.meter.span("give back"):
                # In their order: in which order blocks are given back decides which cached ones are evicted first.
                names = dict.fromkeys(one.request_id for one in step.batch.sequences if one.finish_reason is not None)
                self.live.remove_ended([self.live.requests[name] for name in names if name in self.live.requests])
                if names and self.drafts:
                    self.drafts.keep(self.live.sequences)

    def _read_tokens(self, step: LaunchedStep) -> None:
        """Wait for a step and hand out its tokens. Tokens of sequences that have ended meanwhile are dropped."""
        sampled, read = self.meter.read(step)
        with self.meter.span("take tokens"):
            for chunk, found in zip(step.batch.chunks, self.executor.read_prompts(step.number), strict=False):
                if found is not None and chunk.sequence.finish_reason is None:
                    self._take_prompt(chunk, *found)
            of_lines, drafts, times = iter(sampled), step.batch.drafts, (read, step.made or read)
            for sequence in step.batch.sampled:  # with many rows each call of a function counts here
                result, draft = next(of_lines), drafts.get(sequence) if drafts else None
                guessed = list(islice(of_lines, len(draft))) if draft else None
                if sequence.finish_reason is not None:
                    continue
                request, failure = self.live.requests[sequence.request_id], None
                try:
                    request.take(sequence, result, times)
                except Exception as error:
                    failure = error
                if draft:
                    num_right = 0
                    if failure is None:
                        num_right, failure = take_drafted(request, sequence, guessed, draft, self.planner, times)
                    self.drafts.count(sequence, len(draft), num_right)
                    self.meter.num_decode_tokens += num_right
                try:
                    if failure is not None:
                        raise failure
                    output = request.stream_output(sequence)
                except Exception as error:
                    self._outputs += request.fail(error, sequence)
                    continue
                self._outputs.append(output)
        if self.drafts:
            self.drafts.note_read(step, read)
        self.masks.begin(step.batch.sampled)

    def _take_prompt(self, chunk: PrefillChunk, logprobs: ChunkLogprobs, error: Exception | None) -> None:
        request = self.live.requests[chunk.sequence.request_id]
        try:
            if error is not None:
                raise error
            request.take_prompt_logprobs(chunk.begin, *logprobs)
        except Exception as failure:
            self._outputs += request.fail(failure)

    # Modes and statistics

    @property
    def mode(self) -> str:
        """The current mode, "resident" or "offload"."""
        return self.modes.current

    @torch.inference_mode()
    def switch_mode(self, mode: str) -> None:
        """Switch to "offload" or "resident" mode. Running requests keep their KV, so their output does not change.

        Raises:
            ValueError: there is no such mode, or the running requests do not fit. Nothing changes then.
        """
        running = self.scheduler.running
        self.modes.check(mode, running, self.scheduler.waiting)  # refuse here, before anything has changed
        if mode != self.mode:
            with self.changing():
                self.modes.switch(mode, running)

    def stats(self) -> dict[str, int | float | str | list[str]]:
        """Return counters since the engine was made, and the state of both pools; `statistics` says which."""
        self.give_back()
        return statistics(self)

    def give_back(self) -> bool:
        """Give back the blocks whose copies have run, as steps do; return whether no copies are left to wait for."""
        lifetimes, transfers = self.kv_cache.tables.lifetimes, self.mover.transfers
        with self.changing():
            lifetimes.host_blocks.wait_for(0, may_wait=False)
            transfers.advance()
            transfers.let_go()
            lifetimes.reclaim()
            self.executor.drop_prefetch(lifetimes.take_gone())
        return transfers.is_idle and not (lifetimes.num_deferred_gpu or lifetimes.num_deferred_host)

    def start_trace(self) -> None:
        """Time every stream in every step until `stop_trace`. This slows the steps down a little."""
        self.meter.trace = Trace(self.runner.runtime, self.runner.compute)

    def stop_trace(self, name: str, number: int = 1) -> list[dict]:
        """Stop tracing and return its events, for `trace.write_trace`, as process `number` with the name `name`."""
        trace, self.meter.trace = self.meter.trace, None
        assert trace is not None, "start_trace comes first"
        return trace.events(name, number)

    def close(self) -> None:
        """Abort all requests and free device and host memory. The engine cannot be used afterwards.

        May be called again.
        """
        if "live" not in vars(self):
            return
        with self.alone():
            for request in self.live.requests.values():
                request.abort()
            with ExitStack() as stack:  # what an exception leaves half closed is dropped with the rest
                for name in _PARTS:
                    stack.callback(delattr, self, name)
                for part in (self.intake, self.modes, self.masks, self.executor):  # the last is closed first
                    stack.callback(part.close)  # prompts can still be checked
