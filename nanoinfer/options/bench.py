"""Options of `nanoinfer bench latency` and `throughput`; they have vLLM's names."""

from __future__ import annotations

from nanoinfer.options.measuring import add_engine_arguments, add_model_arguments, writable
from nanoinfer.options.parser import Parser, at_least, length


def add_latency_arguments(parser: Parser) -> None:
    _add_arguments_of_one_mode(parser)
    for name, kind, default, least, text in (
        ("--input-len", length, 1024, 1, "tokens of each prompt"),
        # The first token of a prompt comes from its prefill, so a single token has no decode step.
        ("--output-len", length, 128, 2, "tokens to generate"),
        ("--batch-size", int, 1, 1, "sequences at once"),
        ("--num-iters", int, 5, 1, "times that the batch runs"),
        ("--num-iters-warmup", int, 1, 0, "times before, which do not count"),
    ):
        parser.add_argument(name, type=kind, default=default, check=at_least(least), help=text)


def add_throughput_arguments(parser: Parser) -> None:
    _add_arguments_of_one_mode(parser)
    for name in ("--input-len", "--output-len"):
        parser.add_argument(name, default="100-1024", help="tokens, a number or a range")
    parser.add_argument("--num-prompts", type=int, default=256, check=at_least(1), help="requests")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy")


def _add_arguments_of_one_mode(parser: Parser) -> None:
    add_model_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--mode",
        default="resident",
        help="where KV lies: resident = on the GPU, auto = in host memory, too, once the GPU is full, offload = from "
        "the start, streamed = offload with every full block in host memory",
    )
    parser.add_argument("--output-json", metavar="FILE", check=writable, help="write all figures")
