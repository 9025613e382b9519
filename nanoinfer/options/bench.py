"""Options of `nanoinfer bench latency` and `throughput`; they have vLLM's names."""

from __future__ import annotations

from nanoinfer.options.measuring import add_engine_arguments, add_locality_argument, add_model_arguments
from nanoinfer.options.parser import Parser, length


def add_latency_arguments(parser: Parser) -> None:
    _add_arguments_of_one_mode(parser)
    parser.add_argument("--input-len", type=length, default=1024, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=length, default=128, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at once (default: %(default)s)")
    add_locality_argument(parser)
    parser.add_argument("--num-iters", type=int, default=5, help="times that the batch runs (default: %(default)s)")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=1, help="times before, which do not count (default: %(default)s)"
    )


def add_throughput_arguments(parser: Parser) -> None:
    _add_arguments_of_one_mode(parser)
    for name in ("input", "output"):
        parser.add_argument(f"--{name}-len", help="tokens, a number or a range (default: 100-1024; on the CPU 16-64)")
    parser.add_argument("--num-prompts", type=int, help="requests (default: 256; on the CPU 16)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy (default: %(default)s)")


def _add_arguments_of_one_mode(parser: Parser) -> None:
    add_model_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--mode",
        default="resident",
        help="where KV lies: resident = on the GPU, auto = in host memory, too, once the GPU is full, offload = from "
        "the start, streamed = offload with every full block in host memory (default: %(default)s)",
    )
    parser.add_argument("--output-json", metavar="FILE", help="write all figures")
