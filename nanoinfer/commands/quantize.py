"""`nanoinfer quantize` on the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nanoinfer.commands.model import check
from nanoinfer.common.units import format_size
from nanoinfer.config import QUANTISED
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="directory or hub id of a checkpoint in 16 or 32 bits, or of gpt-oss in MXFP4"
    )
    parser.add_argument(
        "--to", required=True, choices=QUANTISED,
        help="int4: groups of 128, 64 or 32 columns, each with a scale and a zero point; int4-symmetric: without zero "
        "points, 3%% fewer bytes and a larger error; int8, fp8: a scale for each row",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write, which must not hold anything")
    parser.add_argument(
        "--head", choices=("int8",), help="quantise head and embeddings, too (default: they stay as they are)"
    )
    add_engine_options(parser, only=("device",))


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint and say where it is. On an error nothing is left there."""
    check(options.model)
    from nanoinfer.devices.registry import resolve_device
    from nanoinfer.weights.write import quantise_checkpoint

    with _signals_interrupt():
        out = quantise_checkpoint(
            options.model,
            options.out,
            options.to,
            head_quantization=options.head,
            device=resolve_device(options.device),
            progress=sys.stderr.isatty(),
        )
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{out}: {format_size(num_bytes)} of weights in the compressed-tensors format")
    return 0


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let signals that would end the process interrupt it as Ctrl-C does, so that no part of a checkpoint is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ending = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, interrupt) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
