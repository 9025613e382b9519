"""An engine whose planning and execution lie in two processes, which send each other numbers only."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine import engine as engine_module
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.start import build, kv_side
from nanoinfer.requests.sequence import Sequence
from offload import CpuRuntime


def execute_engines(connection) -> None:
    """The executing process: run the steps of one engine after the other."""
    gc.collect()
    gc.freeze()  # what other tests left is none of this process's: `num_sequences` counts the others
    while (config := connection.recv()) is not None:
        execute_steps(connection, config)


def execute_steps(connection, config: EngineConfig) -> None:
    """Answer (name, arguments) with what the runner's part of this name returns."""
    with torch.inference_mode():
        built = build(config, None)
        runner, pending = built.runner, {}
        capture = runner.prefill_program.pieces.capture_num_tokens
        connection.send(
            (runner.plan, runner.spec, runner.layout, runner.num_gpu_blocks, runner.num_host_blocks, capture)
        )

        def execute(plan):
            pending[plan.number] = runner.execute(plan)
            return pending[plan.number].streamed_bytes

        def sample(number, masks):
            pending[number] = runner.sample(pending[number], masks=masks)

        def num_sequences():
            return sum(isinstance(one, Sequence) for one in gc.get_objects())

        own = dict(execute=execute, sample=sample, num_sequences=num_sequences)
        own["read"] = lambda number: pending[number].read()
        own["read_prompts"] = lambda number: pending.pop(number).read_prompts()
        while (message := connection.recv()) is not None:
            name, arguments = message
            try:
                if name in own:
                    found = own[name](*arguments)
                else:
                    with runner.own_threads():
                        found = attrgetter(name)(runner)(*arguments)
                connection.send((found, None))
            except Exception as error:
                connection.send((None, error))


@contextmanager
def executing_process() -> Iterator:
    """The connection to a process for `make_parted_engine`: a fork, which has imported what it needs."""
    context = multiprocessing.get_context("fork")
    connection, theirs = context.Pipe()
    process = context.Process(target=execute_engines, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # the process has its own: where it dies, whoever waits for it is told
    try:
        yield connection
    finally:
        with suppress(BrokenPipeError):
            connection.send(None)
        process.join(20)


class Remote:
    """Calls a part of the runner in the other process."""

    def __init__(self, call, part: str, **attributes) -> None:
        self._call, self._part = call, part
        vars(self).update(attributes)

    def __getattr__(self, name: str):
        return lambda *arguments: self._call(f"{self._part}.{name}".lstrip("."), *arguments)


class RemoteRunner(Remote):
    """What `LLMEngine` needs of a `ModelRunner`, without a tensor."""

    def __init__(self, connection, config: EngineConfig) -> None:
        self._connection = connection
        self._connection.send(config)
        self.plan, self.spec, self.layout, self.num_gpu_blocks, self.num_host_blocks, capture = connection.recv()
        own = dict(
            compute=SimpleNamespace(current=nullcontext), own_threads=nullcontext, expert_link=None
        )  # this process computes nothing
        super().__init__(self.ask, "", runtime=CpuRuntime(), **own)
        counters, host = SimpleNamespace(streamed_bytes=0), Remote(self.ask, "offload.host")
        self.offload = Remote(self.ask, "offload", counters=counters, host=host)
        self.prefill_program = SimpleNamespace(pieces=SimpleNamespace(capture_num_tokens=capture))
        self.block_copies = Remote(self.ask, "block_copies")

    def ask(self, name: str, *arguments):
        self._connection.send((name, arguments))
        found, error = self._connection.recv()
        if error is not None:
            raise error
        return found

    def execute(self, plan, timeline=None):
        return SimpleNamespace(number=plan.number, streamed_bytes=self.ask("execute", plan))

    def sample(self, launched, on_logits=None, masks=None):
        self.ask("sample", launched.number, masks)
        done = SimpleNamespace(query=lambda rule: True)
        ask = {name: partial(self.ask, name, launched.number) for name in ("read", "read_prompts")}
        return SimpleNamespace(**ask, done=done, made=None, experts_read=0, fetched_bytes=0)

    def close(self) -> None:
        self._connection.send(None)


def make_parted_engine(connection, config: EngineConfig, monkeypatch) -> LLMEngine:
    """An engine that plans in this process and executes in another one, which runs one engine at a time."""

    def build_parts(config, runtime):
        runner = RemoteRunner(connection, config)
        parts = kv_side(config, runner)
        return SimpleNamespace(
            config=config, runner=runner, tokenizer=None, end_token_ids=frozenset(), sampling_defaults={}, **parts
        )

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "build", build_parts)
        return LLMEngine(config)
