"""Options of `nanoinfer bench offload`: their meaning, and the checks before anything runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from nanoinfer.config import QUANTISED
from nanoinfer.options import recall
from nanoinfer.options.measuring import (
    CACHES,
    ENGINE_MODES,
    TRACED_OUTPUT_LEN,
    add_engine_arguments,
    add_model_arguments,
    check_can_plot,
    check_can_write,
    counts,
    mode_names,
    shared_engine_arguments,
)
from nanoinfer.options.parser import length

SUMMARY = "decode with the KV cache in host memory against the GPU, with the floors of this machine"
# Options that a task does not use. They have no default in the parser, so that it is known whether they were given.
UNUSED = {"decode": ("depths", "questions"), "recall": ("batch", "output_len", "check", "profile")}
TASKS = tuple(UNUSED)
MODES = (*ENGINE_MODES, *CACHES)
DEFAULT_MODES = "streamed,resident"
DEFAULT_OUTPUT_LEN = 28  # 27 decode steps, of which 24 are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's options. Engine options have the engine's defaults."""
    add_model_arguments(parser)
    lists = {name: f"{text} (lists: --task recall only)" for name, text in recall.HELP_OF_LISTS.items()}
    add_engine_arguments(parser, lists)
    parser.add_argument(
        "--task",
        default="decode",
        choices=TASKS,
        help="decode = times of decode steps, recall = answers about long contexts (default: %(default)s)",
    )
    parser.add_argument("--context", help="prompt tokens, such as 1k,8k,32k (k = 1024)")
    parser.add_argument("--batch", help="sequences at once, such as 1,8 (default: 1)")
    parser.add_argument("--output-len", type=length, help=f"tokens to generate (default: {DEFAULT_OUTPUT_LEN})")
    parser.add_argument(
        "--mode",
        help="streamed = offload with every full block in host memory, offload = with what fits on the GPU, auto = "
        "offload once the GPU is full, resident, hf and hf-static = transformers' offloaded caches (default: "
        f"{DEFAULT_MODES}); with --task recall hf is transformers with the whole cache on the device, in float32, as "
        f"the reference, and hf-static is not known (default: {recall.DEFAULT_MODES})",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare tokens and log-probabilities of our modes; default: where at least two of them run",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument(
        "--profile", metavar="FILE", help="write a trace of the last case of each mode, for https://ui.perfetto.dev"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw ms per token, or accuracy, over context")
    recall.add_grid_arguments(parser)


@dataclass(frozen=True)
class Cases:
    """The cases that one call measures.

    Attributes:
        modes: modes from `MODES`, in the order in which they run.
        contexts: prompt lengths in tokens.
        batches: numbers of sequences that run at once.
        output_len: tokens that each sequence generates.
        check: compare the outputs of our modes.
    """

    modes: list[str]
    contexts: list[int]
    batches: list[int]
    output_len: int
    check: bool

    @property
    def last(self) -> list[int]:
        """Prompt lengths of the last case."""
        return [self.contexts[-1]] * self.batches[-1]


def check_task(options: argparse.Namespace) -> None:
    """Raises ValueError if an option was given that the task does not use, or a list of which it takes one."""
    for name in UNUSED[options.task]:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with --task {options.task}: leave it out")
    for name in recall.HELP_OF_LISTS if options.task == "decode" else ():
        value = getattr(options, name) or ""
        if "," in value:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: --task {options.task} takes one, --task recall a list"
            )


def read_cases(options: argparse.Namespace, is_cuda: bool) -> Cases:
    """Return the cases that the options ask for.

    Raises:
        ValueError: an option cannot be used.
    """
    modes = mode_names(DEFAULT_MODES if options.mode is None else options.mode, MODES)
    can_compare = len(set(modes) & set(ENGINE_MODES)) > 1
    if options.check and not can_compare:
        raise ValueError(
            f"--check compares our modes, --mode is {','.join(modes)}: name two of {', '.join(ENGINE_MODES)}"
        )
    references = [mode for mode in modes if mode in CACHES]
    if references and (options.quantization in QUANTISED or options.head_quantization is not None):
        raise ValueError(
            f"--mode {','.join(modes)}: {references[0]} measures transformers, which would have the wide weights: "
            "leave it out, or write the checkpoint with nanoinfer quantize and give --model DIR without these options"
        )
    output_len = DEFAULT_OUTPUT_LEN if options.output_len is None else options.output_len
    if output_len < 1:
        raise ValueError(f"--output-len {output_len} must be at least 1")
    check_can_write(options.json, options.plot, options.profile)
    check_can_plot(options.plot)
    return Cases(
        modes=modes,
        contexts=counts(options.context or ("1k,8k,32k" if is_cuda else "256,1k"), "--context"),
        batches=counts("1" if options.batch is None else options.batch, "--batch"),
        output_len=output_len,
        check=can_compare if options.check is None else options.check,
    )


def engine_arguments(options: argparse.Namespace, cases: Cases, mode: str, context: int) -> dict:
    """Return the arguments of the LLM that runs every case of `mode` up to `context` tokens."""
    own = dict(max_model_len=context + max(cases.output_len, TRACED_OUTPUT_LEN if options.profile else 0))
    if options.max_num_seqs is None:
        own["max_num_seqs"] = max(cases.batches)
    return ENGINE_MODES.get(mode, {}) | shared_engine_arguments(options) | own
