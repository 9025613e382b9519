"""An engine whose planning and execution lie in two processes, which send each other messages."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import SimpleNamespace

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine import engine as engine_module
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.start import build, kv_side
from nanoinfer.memory.setup import Setup
from nanoinfer.requests.sequence import Sequence
from nanoinfer.step.executor import Executor
from nanoinfer.step.messages import decode, encode

# What is known of an executor, but for what the model's files say.
FACTS = [name for name in Executor.__annotations__ if name not in ("plan", "spec", "layout")]


def execute_engines(connection) -> None:
    """The executing process: run the steps of one engine after the other."""
    gc.collect()
    gc.freeze()  # what other tests left is none of this process's: `num_sequences` counts the others
    while (config := decode(connection.recv_bytes())) is not None:
        execute_steps(connection, EngineConfig(**config))


def execute_steps(connection, config: EngineConfig) -> None:
    """Answer each message, (a method of `Executor`, its arguments), with what it returns."""
    with torch.inference_mode():
        executor = build(config, None).executor
        facts = [getattr(executor, name) for name in FACTS]
        connection.send_bytes(encode([replace(executor.plan, groups=()), *facts]))
        own = dict(num_sequences=lambda: sum(isinstance(one, Sequence) for one in gc.get_objects()))
        name = None
        while name != "close":
            name, arguments = decode(connection.recv_bytes())
            try:
                answer = (own[name] if name in own else getattr(executor, name))(*arguments), None
            except Exception as error:
                answer = None, error
            connection.send_bytes(encode(answer))


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
            connection.send_bytes(encode(None))
        process.join(20)


def _asks(name: str):
    return lambda self, *arguments: self.ask(name, *arguments)


class RemoteExecutor(Executor):
    """Sends each call to the other process. This one computes nothing."""

    def __init__(self, connection, config: EngineConfig) -> None:
        self._connection = connection
        connection.send_bytes(encode(asdict(config) | dict(model=str(config.model))))
        self.spec = Setup(config, torch.device("cpu")).spec
        plan, *facts = decode(connection.recv_bytes())
        self.plan, self.layout = replace(plan, groups=self.spec.kv_groups), self.spec.layout
        vars(self).update(zip(FACTS, facts, strict=True))

    def ask(self, name: str, *arguments):
        self._connection.send_bytes(encode((name, arguments)))
        found, error = decode(self._connection.recv_bytes())
        if error is not None:
            raise error
        return found

    def timeline(self) -> None:
        """The streams are the other process's."""

    def execute(self, plan, timeline=None):
        return self.ask("execute", plan)

    def sample(self, number, masks=None, on_logits=None):
        assert on_logits is None, "logits lie in the other process"
        self.ask("sample", number, masks)

    vars().update({name: _asks(name) for name in Executor.__abstractmethods__ - {"timeline", "execute", "sample"}})


def make_parted_engine(connection, config: EngineConfig, monkeypatch) -> LLMEngine:
    """An engine that plans in this process and executes in another one, which runs one engine at a time."""

    def build_parts(config, runtime):
        executor = RemoteExecutor(connection, config)
        parts = kv_side(config, executor)
        return SimpleNamespace(
            config=config,
            executor=executor,
            tokenizer=None,
            end_token_ids=frozenset(),
            sampling_defaults={},
            suppressed_token_ids=(),
            **parts,
        )

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "build", build_parts)
        return LLMEngine(config)
