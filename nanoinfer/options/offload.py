"""Options of `nanoinfer bench offload`."""

from __future__ import annotations

import argparse

from nanoinfer.options import recall
from nanoinfer.options.measuring import add_engine_arguments, add_locality_argument, add_model_arguments
from nanoinfer.options.parser import Parser, length

# Each task's options that have other defaults in the other task, or no meaning there. These defaults are not the
# parser's, so that it is known which options were given.
TASKS = {
    "decode": dict(
        mode="streamed,resident",
        batch="1",
        output_len=28,
        check=None,
        profile=None,
        link_gbps=None,
        router_locality=None,
    ),
    "recall": recall.DEFAULTS,
    "replay": dict(mode="streamed", output_len=256, link_gbps=None, replay=None),
    "beyond": dict(output_len=256, link_gbps=None, replay=None),
}
_BY_OPTION = "replay", "beyond"


def add_arguments(parser: Parser) -> None:
    decode, asked, replayed = TASKS["decode"], TASKS["recall"], TASKS["replay"]
    add_model_arguments(parser)
    lists = {name: f"{text} (lists: --task recall only)" for name, text in recall.HELP_OF_LISTS.items()}
    lists["kv_cache_dtype"] = lists["kv_cache_dtype"].replace("recall only", "recall and --beyond only")
    add_engine_arguments(parser, lists)
    parser.add_argument(
        "--task",
        default="decode",
        choices=[task for task in TASKS if task not in _BY_OPTION],
        help="decode = times of decode steps, recall = answers about long contexts (default: %(default)s)",
    )
    parser.add_argument(
        "--replay", metavar="FILE", help="have each step give the token of a text, without drafts and with them; "
        "python -m nanoinfer.bench.texts FILE writes the texts"
    )  # fmt: skip
    parser.add_argument(
        "--beyond",
        action="store_true",
        help="all KV streamed, in each KV format, without drafts and with them, beside the floors",
    )
    parser.add_argument("--context", help="prompt tokens, such as 1k,8k,32k (k = 1024)")
    parser.add_argument("--batch", help=f"sequences at once, such as 1,8 (default: {decode['batch']})")
    parser.add_argument(
        "--output-len",
        type=length,
        help=f"tokens to generate (default: {decode['output_len']}, with texts {replayed['output_len']})",
    )
    parser.add_argument(
        "--mode",
        help="streamed = offload with every full block in host memory, offload = with what fits on the GPU, auto = "
        "offload once the GPU is full, resident, hf and hf-static = transformers' offloaded caches (default: "
        f"{decode['mode']}); with --task recall modes of the engine only (default: {asked['mode']})",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare tokens and log-probabilities of our modes; default: where at least two of them run",
    )
    parser.add_argument(
        "--link-gbps",
        type=float,
        help="emulate a slower link, of so many GB/s in each direction: 25 = PCIe 4 x16, 12.5 = PCIe 3 x16 (default: "
        "the machine's own)",
    )
    add_locality_argument(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument(
        "--profile", metavar="FILE", help="write a trace of the last case of each mode, for https://ui.perfetto.dev"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw ms per token, or accuracy, over context")
    recall.add_grid_arguments(parser)


def take_task(options: argparse.Namespace) -> None:
    """Give the options that were left out the defaults of the task; refuse those that have no meaning there."""
    by_option = [task for task in ("beyond", "replay") if getattr(options, task)]
    named = f"--{by_option[0]}" if by_option else f"--task {options.task}"
    if by_option and options.task != "decode":
        raise ValueError(f"{named} replays texts, and --task {options.task} has its own: leave one of the two out")
    options.task = by_option[0] if by_option else options.task
    defaults = TASKS[options.task]
    for name in (name for task in TASKS.values() for name in task):
        if name not in defaults and getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with {named}: leave it out")
    takes_list = ("kv_cache_dtype",) if options.task == "beyond" else ()
    for name in (one for one in recall.HELP_OF_LISTS if options.task != "recall" and one not in takes_list):
        value = getattr(options, name) or ""
        if "," in value:
            raise ValueError(f"--{name.replace('_', '-')} {value}: {named} takes one, --task recall a list")
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
