#!/usr/bin/env python
"""Does a request's answer depend on the other requests in the batch, or on how it is sent? To the bit, in any server.

python tools/exactness.py MODEL            or            python tools/exactness.py --base-url http://127.0.0.1:8000

The same requests are sent one after the other, and then in batches, in every mode and through a server. Each answer is
compared with the answer to the request alone. With `--base-url` another server gets the same requests alone and in
batches, for a comparison side by side.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from exactness_comparison import Answer, Condition, is_identical, table, verdict
from exactness_engines import CROWD, ask_setting, check_finite, make_settings, open_engine
from exactness_local import local_server
from exactness_servers import ServerAsker
from exactness_workload import Workload, all_answers, make_workload

from nanoinfer.common.errors import choose
from nanoinfer.common.units import counted
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import resolve_device
from nanoinfer.measure.logits import check_can_keep
from nanoinfer.measure.report import write_figures
from nanoinfer.memory.setup import Setup
from nanoinfer.options.measuring import (
    add_engine_arguments,
    add_model_arguments,
    check_at_least,
    check_can_write,
    counts,
    open_model,
    shared_engine_arguments,
)
from nanoinfer.options.parser import Parser, in_options, length, run_command

DEFAULT_VOCAB_SIZE = 1000
# The conditions that are compared with each request alone, in this order.
CONDITIONS = {
    "batch": "beside others",
    "logprobs": "with log-probabilities",
    "chunk": "with another prefill chunk",
    "offload": "every full block streams",
    "auto": "a pool that fills up",
    "prefix": "with prefix caching, asked twice",
    "server": "through HTTP",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--base-url", metavar="URL",
        help="ask this server with OpenAI's API, such as http://127.0.0.1:8000, and no engine here; --model is a name "
        "that it serves (default: the first one)",
    )  # fmt: skip
    parser.add_argument("--api-key", help="bearer token for --base-url (default: $OPENAI_API_KEY, where it is set)")
    parser.add_argument("--vocab-size", type=int, help="prompts for --base-url have token ids below it (default: 1000)")
    parser.add_argument("--requests", type=int, default=16, help="that are compared (default: %(default)s)")
    parser.add_argument(
        "--batch", default="2,16,64,256",
        help="requests at once, filled up with others that are not compared (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output-len", type=length, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--conditions", default=",".join(CONDITIONS),
        help="which of them, such as batch,server; default: all. "
        + ", ".join(f"{name}: {what}" for name, what in CONDITIONS.items()),
    )  # fmt: skip
    parser.add_argument("--output-json", metavar="FILE", help="write all figures")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> dict:
    """Run the benchmark, print the report and return its figures; `identical` is the result."""
    check_at_least(options, requests=1, output_len=1)
    check_can_write(options.output_json)
    sizes = counts(options.batch, "--batch")
    names = [name.strip() for name in options.conditions.split(",")]
    for name in names:
        choose("--conditions", name, CONDITIONS)
    _check_options(options)
    if options.base_url is not None:
        title, conditions, device = *_ask_server(options, sizes), None
    else:
        device = resolve_device(options.device)
        title, conditions = _ask_engines(options, sizes, names, device)
    # The reasons why conditions were left out are written in the terms of the Python API.
    print(f"{title}\nhow many differ from each request alone:\n\n{in_options(table(conditions), options.parser)}\n")
    if all(condition.left_out for condition in conditions):
        raise ValueError("nothing was compared: the table says why")
    print(verdict(conditions))
    figures = {
        "identical": is_identical(conditions),
        "title": title,
        "conditions": [asdict(condition) for condition in conditions],
    }
    write_figures(options.output_json, figures, options.command_line, device)
    return figures


def _check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that would be ignored."""
    if options.base_url is None:
        for name in ("api_key", "vocab_size"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} goes with --base-url only: leave it out")
        if options.enable_prefix_caching is not None:
            raise ValueError("enable_prefix_caching is a condition of its own: leave it out, give --conditions prefix")
        return
    # The prompts depend on block size and seed, for a server too.
    for name in ("shape", "conditions", *options.engine_options):
        if name not in ("block_size", "seed") and getattr(options, name) != options.parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for an engine here, --base-url asks a server: leave it out")
    if options.vocab_size is not None and options.vocab_size < 4:
        raise ValueError(f"--vocab-size {options.vocab_size} must be at least 4")


# Another server


def _ask_server(options: argparse.Namespace, sizes: list[int]) -> tuple[str, list[Condition]]:
    api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    asker = ServerAsker(options.base_url, options.model, api_key)
    vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
    workload = make_workload(options.requests, vocab_size, options.block_size, options.output_len, options.seed)
    asker.leave_out_what_is_refused(workload.prompts[0], workload.params[0])
    _progress(options, "alone")
    wanted, conditions = all_answers(workload, 1, asker.ask), []
    # Twice alone: a difference between these two does not come from other requests.
    for name, size in [("alone, again", 1), *((f"among {size}", size) for size in sizes if size > 1)]:
        _progress(options, name)
        conditions.append(Condition(name, size))
        conditions[-1].compare(wanted, all_answers(workload, size, asker.ask))
    title = f"{asker.model} at {asker.base_url}: {_describe(workload)}"
    if asker.left_out:
        title += f"\nthe server does not take {', '.join(asker.left_out)}, which were left out"
    return title, conditions


# Engines in this process


def _ask_engines(
    options: argparse.Namespace, sizes: list[int], names: list[str], device: torch.device
) -> tuple[str, list[Condition]]:
    common: dict[str, Any] = shared_engine_arguments(options) | dict(enable_cpu_offload=False)
    if options.max_num_seqs is None:
        common["max_num_seqs"] = max(*sizes, CROWD)
    with open_model(options, device.type) as (model, name):
        common["model"] = model
        config = EngineConfig(**common)
        spec = Setup(config, device).spec
        workload = make_workload(options.requests, spec.vocab_size, config.block_size, options.output_len, options.seed)
        # Two copies: the logits of the requests alone, and the logits that are compared with them.
        check_can_keep(workload.num_output_tokens, spec.vocab_size, "lower --requests or --output-len", copies=2)
        common["max_model_len"] = workload.max_model_len
        wanted, conditions = _ask_base(options, common, workload, sizes, names)
        for title, arguments in make_settings(names, workload).items():
            _progress(options, title)
            conditions += ask_setting(title, common | arguments, workload, wanted)
        if "server" in names:
            server = local_server(common | dict(enable_prefix_caching=True), max(1024, sizes[-1]))
            conditions += _ask_own_server(options, server, workload, sizes, wanted)
    return f"{name}: {_describe(workload)}", conditions


def _ask_base(
    options: argparse.Namespace, common: dict[str, Any], workload: Workload, sizes: list[int], names: list[str]
) -> tuple[list[Answer], list[Condition]]:
    """Return the answers to each request alone, and the other conditions that use the same engine."""
    conditions: list[Condition] = []
    with open_engine(common) as asker:
        _progress(options, "alone")
        alone, wanted = asker.condition("alone", workload, 1)
        if alone.failure:
            raise ValueError(f"a request alone failed: {alone.failure}")
        check_finite(wanted)

        def ask(name: str, size: int, with_logprobs: bool = False) -> list[Answer]:
            _progress(options, name)
            condition, answers = asker.condition(name, workload, size, with_logprobs=with_logprobs)
            condition.compare(wanted, answers)
            conditions.append(condition)
            return answers

        if "batch" in names:
            for size in sizes:
                ask(f"batch of {size}" if size > 1 else "alone, again", size)
        if "logprobs" in names or "server" in names:
            told = ask("alone, with log-probabilities", 1, True)
            wanted = [replace(one, logprobs=other.logprobs) for one, other in zip(wanted, told, strict=True)]
        if "logprobs" in names and sizes[-1] > 1:
            ask(f"batch of {sizes[-1]}, with log-probabilities", sizes[-1], True)
    return wanted, conditions


def _ask_own_server(
    options: argparse.Namespace, server: AbstractContextManager[str], workload: Workload, sizes: list[int],
    wanted: list[Answer],
) -> list[Condition]:  # fmt: skip
    """Send the requests through HTTP, one at a time and among others, with the server's default of prefix caching."""
    conditions: list[Condition] = []
    try:
        with server as url:
            asker = ServerAsker(url)
            for size in sorted({1, sizes[-1]}):
                name = f"server, {size} at once" if size > 1 else "server, one at a time"
                _progress(options, name)
                conditions.append(Condition(name, size))
                try:
                    conditions[-1].compare(wanted, all_answers(workload, size, asker.ask))
                except ValueError as error:  # not fatal: the same engine has answered without HTTP before
                    conditions[-1].failure = str(error)
    except ModuleNotFoundError as error:
        left_out = f"{error.name} is not installed: in the clone, pip install -e '.[serve]'"
        conditions.append(Condition("server", left_out=left_out))
    return conditions


def _describe(workload: Workload) -> str:
    lengths = [len(prompt) for prompt in workload.prompts]
    num_greedy = sum(params.is_greedy for params in workload.params)
    return (
        f"{counted(len(lengths), 'request')}, {num_greedy} greedy and {len(lengths) - num_greedy} with a seed; prompts "
        f"of {min(lengths)} to {max(lengths)} tokens, up to {workload.output_len} generated"
    )


def _progress(options: argparse.Namespace, name: str) -> None:
    if not options.no_progress:
        print(f"nanoinfer: {name}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 where bits differ or a request failed, 2 where nothing could be compared."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="exactness.py", description="how many bits of an answer depend on other requests")
    add_arguments(parser)
    parser.set_defaults(command_line=f"python tools/exactness.py {shlex.join(given)}".strip())
    return run_command(parser, given, lambda options: 0 if run(options)["identical"] else 1)


if __name__ == "__main__":
    sys.exit(main())
