"""Options of `nanoinfer serve`, which `serve run` of Ray takes by name, too."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_FLEET = dict(replicas=None, replica_cpus=None, replica_gpus=None, route_by_prefix=True)  # defaults of --ray's options


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name such as qwen3-8b, a directory, a GGUF file or a hub id")
    parser.add_argument("--host", default="127.0.0.1", help='"0.0.0.0": all interfaces (default: %(default)s)')
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that clients use (default: MODEL)"
    )
    parser.add_argument(
        "--api-key", help="key that clients must send for /v1, /tokenize, /detokenize, /engine (default: none)"
    )
    add_engine_options(parser, defaults={"enable_cpu_offload": "auto"})
    _add_client_options(parser)
    _add_fleet_options(parser)
    log = parser.add_argument_group("log")
    log.add_argument(
        "--log-level", choices=LEVELS, default="info",
        help="info: a line for each request, and one every ten seconds under load; debug: also uvicorn's for each HTTP "
        "answer, and the text where a prompt parted from a recent one (%(default)s)",
    )  # fmt: skip
    log.add_argument("--log-format", choices=FORMATS, default="text", help="json: one JSON object a line (%(default)s)")


def _add_client_options(parser: Parser) -> None:
    clients = parser.add_argument_group("clients and their requests")
    clients.add_argument(
        "--allowed-origins", default="[]", metavar="JSON",
        help="web pages that may use the server from a browser, such as '[\"http://localhost:3000\"]'; "
        "'[\"*\"]': all (default: none)",
    )  # fmt: skip
    clients.add_argument(
        "--max-queue", type=int, default=1024, help="waiting sequences beyond which the answer is 429 (%(default)s)"
    )
    clients.add_argument(
        "--max-queue-bytes", default="256MiB", metavar="SIZE",
        help="bytes of waiting requests beyond which the answer is 429 (%(default)s)",
    )  # fmt: skip
    for name, what in (("tool-call", "how the model calls tools"), ("reasoning", "how it writes what it thinks")):
        clients.add_argument(
            f"--{name}-parser", default="auto", metavar="NAME",
            help=f'{what}: vLLM\'s name of the parser, "auto": by the chat template, "none": not at all (%(default)s)',
        )  # fmt: skip
    clients.add_argument(
        "--strict", action="store_true",
        help="refuse fields of requests with names that no API has (default: ignore them, with a line in the log)",
    )  # fmt: skip
    clients.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=True,
        help="a page at / with a chat and a picture of what the engine does",
    )  # fmt: skip
    clients.add_argument(
        "--compute-ahead", action=argparse.BooleanOptionalAction, default=True,
        help="while there are no requests, compute what a conversation's next prompt begins with: the last answer",
    )  # fmt: skip
    clients.add_argument(
        "--images", choices=("refuse", "replace"), default="refuse",
        help="images, documents and sounds in conversations; replace: a text stands in their place (%(default)s)",
    )  # fmt: skip
    clients.add_argument(
        "--special-tokens", choices=("control", "text"), default="control",
        help="what texts in conversations are that look like special tokens: these tokens, or text (%(default)s)",
    )  # fmt: skip
    for name, seconds, text in (
        ("--body-timeout", 60.0, "for the head of a request to arrive, and for its body"),
        ("--max-step-seconds", 120.0, "a step that runs for longer makes /health say 503"),
        ("--shutdown-timeout", 30.0, "for running requests to end after SIGTERM or SIGINT"),
    ):
        clients.add_argument(name, type=float, default=seconds, metavar="SECONDS", help=f"{text} (%(default)s)")


def _add_fleet_options(parser: Parser) -> None:
    fleet = parser.add_argument_group("replicas")
    fleet.add_argument("--ray", action="store_true", help="several servers behind one address, on Ray Serve")
    fleet.add_argument("--replicas", metavar="N", help="servers, or MIN-MAX for as many as requests need (default: 1)")
    fleet.add_argument(
        "--replica-cpus", type=float, metavar="N", help="processors that Ray sets aside for each (default: 1)"
    )
    fleet.add_argument(
        "--replica-gpus", type=float, metavar="N", help="GPUs of each (default: 1 where Ray has any, or --device cuda)"
    )
    fleet.add_argument(
        "--route-by-prefix", action=argparse.BooleanOptionalAction, default=_FLEET["route_by_prefix"],
        help="send a prompt to the replica that has the KV of its beginning; else to the least loaded one",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """How many servers run, on what each, and who gets which request.

    Attributes:
        least, most: their number; where these differ, Ray chooses by the requests that run and wait.
        num_cpus, num_gpus: what Ray sets aside for each; num_gpus None: 1 where Ray has any.
        by_prefix: a prompt goes where the KV of its beginning lies.
    """

    least: int
    most: int
    num_cpus: float
    num_gpus: float | None
    by_prefix: bool


def replicas_of(options: argparse.Namespace) -> Replicas:
    """Return what the options say of replicas.

    Raises:
        ValueError: they are no numbers, or none that is possible.
    """
    text = "1" if options.replicas is None else str(options.replicas)
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            f"--replicas is {text!r}, it must be a number from 1 on, or two such as 1-4, the smaller first"
        )
    num_cpus = 1.0 if options.replica_cpus is None else options.replica_cpus
    num_gpus = options.replica_gpus
    if num_gpus is None and options.device is not None and options.device != "auto":
        num_gpus = 0.0 if options.device == "cpu" else 1.0
    for name, number in (("--replica-cpus", num_cpus), ("--replica-gpus", num_gpus or 0.0)):
        if not number >= 0:
            raise ValueError(f"{name} is {number}, it must be 0 or more")
    return Replicas(least=least, most=most, num_cpus=num_cpus, num_gpus=num_gpus, by_prefix=options.route_by_prefix)


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return by name what each server is told, and not how many there are: another number starts none of them anew."""
    return {
        name: value
        for name, value in vars(options).items()
        if name not in ("ray", *_FLEET) and (value is None or isinstance(value, (str, int, float, list, dict)))
    }


def check_alone(options: argparse.Namespace) -> None:
    """Refuse options that only several servers have.

    Raises:
        ValueError: names one that was given.
    """
    for name, default in _FLEET.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} is for several servers: give --ray, too")
