"""An `LLM` as the model of a chat."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from nanoinfer.chat.session import Report
from nanoinfer.chat.settings import Settings
from nanoinfer.common.errors import RequestError
from nanoinfer.common.units import GIB, counted, format_size
from nanoinfer.engine.ahead import Ahead
from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.llm import LLM
from nanoinfer.memory.machine import advice_when_full
from nanoinfer.outputs import StreamOutput
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.requests.prompts import conversation
from nanoinfer.requests.request import Request
from nanoinfer.weights.other_kinds import no_template


class EngineModel:
    """Answers one question at a time with an LLM, which stays the caller's to close.

    Raises:
        ValueError: the model has no tokenizer, or its tokenizer no chat template.
    """

    def __init__(self, llm: LLM, name: str) -> None:
        self.name, self._llm, self._ids = name, llm, map("chat-{}".format, itertools.count())
        if llm.engine.drafts is not None:
            llm.engine.drafts.needs_stream = False  # who edits a text has much of it repeated
        tokenizer = llm.get_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(no_template(name))
        self.format = AnswerFormat.of_tokenizer(tokenizer)
        self._template = ChatTemplate(tokenizer, self.format)

    def run(self, messages: list[dict[str, Any]], settings: Settings) -> EngineRun:
        """Begin an answer.

        Raises:
            RequestError (a ValueError): the template refuses the messages, or there is no room for an answer.
        """
        prompt = self._template.encode(conversation(messages), settings.variables, tokenize=False)
        params = replace(settings.params, skip_special_tokens=not self.format.sees_special(with_tools=False))
        for left in list(self._llm.engine.live.requests):  # of an answer that an interrupt ended before it began
            self._llm.engine.abort(left)
        before = self._llm.engine.meter.snapshot()
        try:
            token_ids = self._llm.engine.intake.tokenize(prompt, is_bare=True)
            request = self._llm.engine.add_request(next(self._ids), {"prompt_token_ids": token_ids}, params)
        except RequestError as error:
            if not error.is_too_long or not any(message["role"] == "assistant" for message in messages):
                raise
            raise RequestError(f"{error}; /clear begins anew", field=error.field, is_too_long=True) from None
        return EngineRun(self._llm, request, prompt, before)

    @contextmanager
    def computing_ahead(self, messages: list[dict[str, Any]], settings: Settings) -> Iterator[None]:
        """Compute what the next prompt begins with, behind the answer that is last, until this is left."""
        has_left = threading.Event()
        thread = threading.Thread(target=self._compute_ahead, args=(messages, settings, has_left), daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_left.set()
            thread.join()

    def _compute_ahead(self, messages: list[dict[str, Any]], settings: Settings, has_left: threading.Event) -> None:
        engine = self._llm.engine
        ahead = Ahead(engine)
        with suppress(ValueError):  # the template takes no such messages, or the context is full
            ahead.offer(self._template.next_beginning(messages[:-1], messages[-1], settings.variables))
            while not has_left.is_set() and ahead.begin():
                while engine.has_work and not has_left.is_set():
                    engine.step()
        ahead.drop()
        while engine.has_work:
            engine.step()

    def stats(self) -> Mapping[str, str]:
        """Return what bounded all answers so far, and where KV lies."""
        found = self._llm.stats()
        queried, hit = found["prefix_cache_queried_tokens"], found["prefix_cache_hit_tokens"]
        plan = self._llm.engine.plan

        def held(tier: str, *kinds: str) -> str:
            return format_size(sum(found[f"{tier}_blocks_{kind}"] for kind in kinds) * plan.block_bytes)

        shown = {
            "model": f"{self.name}, {found['mode']} mode",
            "context": f"{plan.max_model_len:,} tokens at most",
            "prompts": f"{queried:,} tokens, {hit:,} of them from the cache",
            "KV cache": f"{held('gpu', 'used', 'cached')} of {held('gpu', 'total')} on the device, "
            f"{held('host', 'used', 'cached')} of {held('host', 'total')} in host memory",
        }
        if found["decode_streamed_bytes"]:
            shown["streamed"] = f"{found['decode_streamed_bytes'] / GIB:.2f} GiB at {found['link_gbps']:.1f} GB/s"
        if found["expert_fetches"]:
            shown["experts"] = f"{found['expert_hit_rate']:.0%} of the chosen ones were on the device, "
            shown["experts"] += f"{found['expert_fetched_bytes'] / GIB:.2f} GiB were brought there"
        if found["num_decode_steps"]:
            step_ms = found["decode_seconds"] / found["num_decode_steps"] * 1e3
            shown["decode steps"] = f"{found['num_decode_steps']:,} of {step_ms:.2f} ms, bound by {found['bound']}"
        return {**shown, "advice": found["advice"], **({"notes": "; ".join(found["notes"])} if found["notes"] else {})}


class EngineRun:
    """The text of one answer, delta by delta; see `session.Run`.

    Stepping the engine here, and not through `generate_stream`, lets an answer end between the chunks of a long prompt,
    too, of which a stream yields nothing.
    """

    def __init__(self, llm: LLM, request: Request, prompt: str, before: DecodeTimes) -> None:
        self.prompt = prompt
        self.report: Report | None = None
        self._engine, self._request, self._before = llm.engine, request, before

    def prompt_tokens(self) -> tuple[int, int]:
        return self._engine.live.prompt_tokens()

    def stop(self) -> None:
        self._engine.drop([self._request.request_id])  # whoever is inside ends it: this may come in the midst of a step

    def __iter__(self) -> Iterator[str]:
        """Yield the text that each step gains.

        Raises:
            ValueError: the answer failed, and only it.
            MemoryError: the GPU's memory is full.
        """
        try:
            while not self._request.is_finished:
                for output in self._engine.step():
                    if output.request_id == self._request.request_id:
                        yield _text(output)
        except RuntimeError as error:
            advice = advice_when_full(str(error))
            if advice is None:
                raise
            raise MemoryError(advice) from error
        finally:
            self.stop()  # where the caller leaves early
            while self._engine.has_work:  # the step in flight, whose time belongs to this answer
                self._engine.step()
            self.report = self._measured()

    def _measured(self) -> Report:
        metrics = self._request.output().metrics
        bound = self._engine.meter.times.since(self._before).bound
        seconds, context = metrics.time_per_output_token, self._engine.plan.max_model_len
        is_full = metrics.num_prompt_tokens + metrics.num_generated_tokens >= context
        full = f"stopped, the context of {context:,} tokens is full: /clear begins anew"
        at_limit = f"stopped at {counted(metrics.num_generated_tokens, 'token')}: /set max_tokens gives more"
        cuts = {"abort": "ended by you", "length": full if is_full else at_limit}
        return Report(
            num_tokens=metrics.num_generated_tokens,
            tokens_per_second=1 / seconds if seconds else None,
            bound=None if bound == "unknown" else bound,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_tokens=metrics.num_cached_tokens,
            first_token_seconds=metrics.time_to_first_token,
            cut=cuts.get(self._request.sequences[0].finish_reason),
            block_size=self._engine.config.block_size,
        )


def _text(output: StreamOutput) -> str:
    if output.error is not None:
        raise ValueError(output.error)
    return output.text_delta
