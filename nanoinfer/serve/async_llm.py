"""vLLM's `AsyncLLM`: an engine for many asyncio tasks, the one that the server uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.outputs import CompletionOutput, RequestOutput, StreamOutput
from nanoinfer.requests.prompts import Prompt, unpack
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.request_stream import ReaderLeft, RequestStream


class AsyncLLM:
    """An LLM whose requests come from asyncio tasks. Its steps run on a thread of their own, all requests together.

    Use it on one event loop.

    Args:
        model, arguments: as of `nanoinfer.LLM`.
        max_queue: the most sequences that may wait for a place among those that run; requests beyond are refused.

    Raises:
        What `LLM` raises.
    """

    def __init__(self, model: str | Path, *, max_queue: int = 1024, **arguments: Any) -> None:
        config = EngineConfig(model=model, **arguments)
        self._engine = AsyncEngine(lambda: LLMEngine(config), max_queue=max_queue)
        self._running: dict[str, RequestStream] = {}
        self._new_ids = (f"async-{number}" for number in itertools.count())
        self._engine.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yield the whole output so far whenever it has grown, the last time with `finished`.

        Whoever stops reading ends the request. A request that fails while it runs has `error` in its last output.

        Args:
            prompt: as of `LLM.generate`, one.
            sampling_params: None: what the checkpoint recommends.
            request_id: the name for `abort`, of no other request that runs; None: one is made.

        Raises:
            ValueError: the prompt or its parameters cannot be used, or the name is taken.
            nanoinfer.serve.errors.ApiError: too many wait, or the engine has stopped.
        """
        name = next(self._new_ids) if request_id is None else request_id
        if name in self._running:
            raise ValueError(f"request_id={name!r} is that of a request that runs: give another one")
        params = SamplingParams(**self._engine.sampling_defaults) if sampling_params is None else sampling_params
        given = unpack(prompt)
        arrival, tokenized = time.perf_counter(), await self._engine.prompts.tokenize(given)
        limits, how = await self._engine.prompts.limits(params), dict(wants_deltas=True, charge=ExitStack())
        stream = RequestStream([tokenized], params, limits, name=name, arrival=arrival, **how)
        self._running[name] = stream
        found = RequestOutput(
            request_id=name,
            prompt=given if isinstance(given, str) else None,
            prompt_token_ids=tokenized[1],
            outputs=[CompletionOutput(index=index, text="", token_ids=[]) for index in range(params.n)],
        )
        try:
            await self._engine.submit(stream)
            while outputs := await stream.next():
                completions = list(found.outputs)
                for _, output in outputs:
                    completions[output.index] = _grown(completions[output.index], output)
                    found = replace(
                        found,
                        outputs=completions,
                        finished=all(one.finished for one in completions),
                        metrics=output.metrics or found.metrics,
                        error=output.error or found.error,
                        prompt_logprobs=output.prompt_logprobs or found.prompt_logprobs,
                    )
                yield found
        except ReaderLeft:  # by `abort`
            ended = [replace(one, finish_reason=one.finish_reason or "abort") for one in found.outputs]
            yield replace(found, outputs=ended, finished=True)
        finally:
            stream.close()
            if self._running.get(name) is stream:
                del self._running[name]

    async def abort(self, request_id: str) -> None:
        """End a request: its last output has `finish_reason="abort"`. Nothing happens if it does not run."""
        if stream := self._running.get(request_id):
            stream.close()

    async def stats(self) -> dict[str, Any]:
        """Return counters since the start; see `LLM.stats`."""
        return await self._engine.stats()

    def shutdown(self) -> None:
        """End the requests that run and free the engine's memory. Blocks until the step that runs has ended."""
        self._engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()


def _grown(one: CompletionOutput, output: StreamOutput) -> CompletionOutput:
    """Return a completion with what it gained."""
    changes: dict[str, Any] = dict(text=one.text + output.text_delta, token_ids=one.token_ids + output.token_ids_delta)
    if (new := output.logprobs_delta) is not None:
        gained = sum(of[token].logprob for token, of in zip(output.token_ids_delta, new, strict=True))
        changes |= dict(
            cumulative_logprob=(one.cumulative_logprob or 0.0) + gained, logprobs=[*(one.logprobs or []), *new]
        )
    if output.finished:
        changes |= dict(finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    return replace(one, **changes)
