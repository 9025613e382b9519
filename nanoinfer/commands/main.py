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
from nanoinfer.commands import bench, quantize, serve, verify
from nanoinfer.commands import plan as plan_command
from nanoinfer.options import recall
from nanoinfer.options.engine import add_engine_options, engine_arguments
from nanoinfer.options.parser import Parser, length, run_command

_COMMANDS = {"plan": plan_command, "quantize": quantize, "serve": serve, "verify": verify}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `nanoinfer ...` and returns its exit status; see `options.parser.run_command`.

    `verify` and `bench exactness` return 1 if they find a difference, `plan` if something does not fit.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(_parser(), bench.with_default(given), lambda options: _run(options, given))


def _parser() -> Parser:
    parser = Parser(prog="nanoinfer", description="LLM inference for GPUs with too little memory")
    parser.add_argument("--version", action="version", version=f"nanoinfer {nanoinfer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_commands(
        commands.add_parser("bench", help="measure latency, throughput, offload against resident decode, or exactness")
    )
    evaluations = commands.add_parser("eval", help="questions whose answers are known").add_subparsers(required=True)
    recall.add_arguments(evaluations.add_parser("recall", help=recall.SUMMARY, description=recall.SUMMARY))
    _add_generate_arguments(commands.add_parser("generate", help="complete a prompt"))
    plan_command.add_arguments(
        commands.add_parser("plan", help="what fits and how fast it can be, without GPU or weights")
    )
    quantize.add_arguments(commands.add_parser("quantize", help="write a checkpoint in fewer bits"))
    serve.add_arguments(commands.add_parser("serve", help="an HTTP server with OpenAI's API"))
    verify.add_arguments(commands.add_parser("verify", help="compare modes, batches and chunks, bit for bit"))
    return parser


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    command_line = f"nanoinfer {shlex.join(given)}"
    if options.command in _COMMANDS:
        return _COMMANDS[options.command].run(options)
    if options.command == "bench":
        return bench.run(options, command_line)
    if options.command == "eval":
        import_module("nanoinfer.commands.recall").run(options, command_line)
    else:
        _generate(options)
    return 0


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=length, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    add_engine_options(parser, without=("seed", "skip_tokenizer_init"), defaults={"enable_cpu_offload": "auto"})


def _generate(options: argparse.Namespace) -> None:
    """Print the completion as it is generated."""
    params = nanoinfer.SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed)
    with nanoinfer.LLM(
        options.model,
        **(engine_arguments(options) | ({"max_num_seqs": 1} if options.max_num_seqs is None else {})),
        progress_bar=sys.stderr.isatty(),
    ) as llm:
        try:
            for output in llm.generate_stream(options.prompt, params):
                if output.error is not None:
                    raise ValueError(output.error)
                print(output.text_delta, end="", flush=True)
        except KeyboardInterrupt:
            print()  # so that the message about the interrupt begins on a new line
            raise
    print()


if __name__ == "__main__":
    sys.exit(main())
