"""Options of `nanoinfer bench exactness`."""

from __future__ import annotations

import argparse

from nanoinfer.options.measuring import add_engine_arguments, add_model_arguments
from nanoinfer.options.parser import length

SUMMARY = "the same requests alone, in batches, in every mode and through a server: how many bits differ"
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
        "--conditions",
        help="which of them, such as batch,server; default: all. "
        + ", ".join(f"{name}: {what}" for name, what in CONDITIONS.items()),
    )
    parser.add_argument("--output-json", metavar="FILE", help="write all figures")
    add_engine_arguments(parser)
