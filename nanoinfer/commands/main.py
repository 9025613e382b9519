"""The `nanoinfer` command.

The code that reads the options imports neither torch nor transformers, so that `--help` and a misspelt option are
answered at once. The code of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

import nanoinfer
from nanoinfer.commands import bench, chat, completion, doctor, generate, inspect, plan, quantize, top, verify
from nanoinfer.commands import list as models
from nanoinfer.commands.full_device import advised_when_full
from nanoinfer.options import recall
from nanoinfer.options import serve as serve_options
from nanoinfer.options.parser import Parser, run_command

ALSO = {"chat": ("run",), "list": ("ls",)}
"""Other names of commands, as Ollama has them."""
_OPTIONS = {"help": "--help", "version": "--version"}
"""Words that are tried as commands, and are options: `nanoinfer help serve` is `nanoinfer serve --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `nanoinfer ...` and return its exit status; see `options.parser.run_command`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _OPTIONS:
        given = [*given[1:], _OPTIONS[given[0]]]
    parser = make_parser()
    completion.answer(parser)
    parser.set_defaults(command_line=f"nanoinfer {shlex.join(given)}")
    if not given:
        parser.print_help()
        return 0
    return run_command(parser, bench.with_default(given), advised_when_full(lambda options: options.run(options)))


def make_parser() -> Parser:
    parser = Parser(prog="nanoinfer", description="LLM inference for GPUs with too little memory")
    parser.add_argument("--version", action="version", version=f"nanoinfer {nanoinfer.__version__}")
    parser.set_defaults(root=parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", help="each has its own --help")
    for name, summary, add_arguments, run in (
        ("bench", "measure latency, throughput, or offload against resident decode",
         bench.add_arguments, bench.run),
        ("chat", "talk with a model in the terminal", chat.add_arguments, chat.run),
        ("completion", "a script with which a shell completes all this", completion.add_arguments, completion.run),
        ("doctor", "what this machine has, and what is not as it should be", doctor.add_arguments, doctor.run),
        ("eval", "questions whose answers are known", _add_evaluations, _evaluate),
        ("generate", "complete a prompt", generate.add_arguments, generate.run),
        ("inspect", "what a GGUF file holds, and what it takes here", inspect.add_arguments, inspect.run),
        ("list", "models that lie here, and how fast they are on this machine", models.add_arguments, models.run),
        ("plan", "what fits and how fast it can be, without GPU or weights", plan.add_arguments, plan.run),
        ("quantize", "write a checkpoint in fewer bits", quantize.add_arguments, quantize.run),
        ("serve", "an HTTP server with OpenAI's API", serve_options.add_arguments, _serve),
        ("top", "what the engine of a server does, in a terminal", top.add_arguments, top.run),
        ("verify", "compare modes, batches and chunks, bit for bit", verify.add_arguments, verify.run),
    ):  # fmt: skip
        command = commands.add_parser(name, help=summary, description=summary, aliases=ALSO.get(name, ()))
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _add_evaluations(parser: Parser) -> None:
    summary = "answers about facts planted in long contexts, by length and depth"
    evaluations = parser.add_subparsers(required=True, metavar="evaluation", help="each has its own --help")
    recall.add_arguments(evaluations.add_parser("recall", help=summary, description=summary))


def _evaluate(options: argparse.Namespace) -> int:
    import_module("nanoinfer.commands.recall").run(options)
    return 0


def _serve(options: argparse.Namespace) -> int:
    return import_module("nanoinfer.commands.serve").run(options)  # not before: asyncio takes longer than all options


if __name__ == "__main__":
    sys.exit(main())
