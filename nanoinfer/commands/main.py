"""The `nanoinfer` command.

The code that reads the options imports neither torch nor transformers, so that `--help` and a misspelt option are
answered at once. The code of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import nanoinfer
from nanoinfer.commands import bench, plan, quantize, serve, verify
from nanoinfer.commands.full_device import advised_when_full
from nanoinfer.options import recall
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.parser import Parser, length, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `nanoinfer ...` and return its exit status; see `options.parser.run_command`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    parser.set_defaults(command_line=f"nanoinfer {shlex.join(given)}")
    if not given:
        parser.print_help()
        return 0
    return run_command(parser, bench.with_default(given), advised_when_full(lambda options: options.run(options)))


def make_parser() -> Parser:
    parser = Parser(prog="nanoinfer", description="LLM inference for GPUs with too little memory")
    parser.add_argument("--version", action="version", version=f"nanoinfer {nanoinfer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary, add_arguments, run in (
        ("bench", "measure latency, throughput, or offload against resident decode",
         bench.add_arguments, bench.run),
        ("eval", "questions whose answers are known", _add_evaluations, _evaluate),
        ("generate", "complete a prompt", _add_generate_arguments, _generate),
        ("plan", "what fits and how fast it can be, without GPU or weights", plan.add_arguments, plan.run),
        ("quantize", "write a checkpoint in fewer bits", quantize.add_arguments, quantize.run),
        ("serve", "an HTTP server with OpenAI's API", serve.add_arguments, serve.run),
        ("verify", "compare modes, batches and chunks, bit for bit", verify.add_arguments, verify.run),
    ):  # fmt: skip
        command = commands.add_parser(name, help=summary)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _add_evaluations(parser: argparse.ArgumentParser) -> None:
    summary = "answers about facts planted in long contexts, by length and depth"
    evaluations = parser.add_subparsers(required=True)
    recall.add_arguments(evaluations.add_parser("recall", help=summary, description=summary))


def _evaluate(options: argparse.Namespace) -> int:
    import_module("nanoinfer.commands.recall").run(options)
    return 0


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=length, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    add_engine_options(parser, without=("seed", "skip_tokenizer_init"), defaults={"enable_cpu_offload": "auto"})


def _generate(options: argparse.Namespace) -> int:
    """Print the completion as it is generated."""
    params = nanoinfer.SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed)
    arguments = engine_arguments(options) | ({"max_num_seqs": 1} if options.max_num_seqs is None else {})
    with (
        _second_interrupt_ends(options.parser.prog),
        nanoinfer.LLM(options.model, **arguments, progress_bar=sys.stderr.isatty()) as llm,
    ):
        try:
            for output in llm.generate_stream(options.prompt, params):
                if output.error is not None:
                    raise ValueError(output.error)
                print(output.text_delta, end="", flush=True)
        except KeyboardInterrupt:
            print()  # so that what the shell prints begins on a new line
            raise
    print()
    return 0


@contextmanager
def _second_interrupt_ends(name: str) -> Iterator[None]:
    """On Ctrl-C say that memory is given back, and that a second one ends the process before that."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also in the midst of a call that Python waits for
        # Not by `print`, in whose midst this may be.
        os.write(sys.stderr.fileno(), f"\n{name}: giving memory back; Ctrl-C again ends at once\n".encode())
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is not signal.SIG_IGN:  # as a shell sets it for what runs in the background
            signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
