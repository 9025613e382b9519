#!/usr/bin/env python
"""Throughput of two replicas on Ray Serve beside that of two servers, each with half of the clients: tokens a second.

python tools/fleet_load.py [--shape tiny] [--clients 32] [--tokens 128] [--requests 8] [--rounds 2]

Random weights, on the CPU, token ids as prompts. Both ways run in turn, whole answers and streams, each round anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from serve_load import Connection

from nanoinfer.models.shapes import SHAPES, write_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    for name, number in (("clients", 32), ("prompt", 64), ("tokens", 128), ("requests", 8), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    totals = {(way, stream): 0.0 for way in ("two servers", "Ray") for stream in (False, True)}
    with tempfile.TemporaryDirectory() as directory:
        write_shape(options.shape, directory)
        for _ in range(options.rounds):
            for way in ("two servers", "Ray"):
                with ExitStack() as servers:
                    given = (
                        ((),) * 2 if way == "two servers" else (("--ray", "--replicas", "2", "--replica-cpus", "0.1"),)
                    )
                    urls = [servers.enter_context(_running(directory, *words)) for words in given]
                    for stream in (False, True):
                        asyncio.run(_tokens_per_second(urls, options, stream, 1))
                        found = asyncio.run(_tokens_per_second(urls, options, stream, options.requests))
                        print(f"{way}, {'streams' if stream else 'whole answers'}: {found:.0f} tokens/s", flush=True)
                        totals[way, stream] += found / options.rounds
    for stream in (False, True):
        alone, fleet = totals["two servers", stream], totals["Ray", stream]
        kind = "streams" if stream else "whole answers"
        print(f"{kind}: {alone:.0f} tokens/s of two servers, {fleet:.0f} through Ray, {fleet / alone:.2f} of it")


@contextmanager
def _running(directory: str, *words: str) -> Iterator[str]:
    arguments = [directory, "--port", "0", "--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init"]
    arguments += ["--served-model-name", "model", "--max-num-seqs", "16", "--max-model-len", "1024", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoinfer.commands.main", "serve", *arguments, "--log-level", "warning"],
        stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        said = []
        while (
            found := re.search(r"serving on (http://\S+)", (said.append(process.stderr.readline()), said[-1])[1])
        ) is None:
            if not said[-1]:
                raise SystemExit("a server did not start:\n" + "".join(said))
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


async def _tokens_per_second(urls: list[str], options: argparse.Namespace, stream: bool, num_requests: int) -> float:
    """Have each client ask so many times, and return the tokens of all answers by the time that they took."""

    async def ask(number: int) -> None:
        connection = Connection(urls[number % len(urls)])
        for turn in range(num_requests):
            prompt = [3 + (number * 7 + turn * 13 + place * (1 + turn % 5)) % 90 for place in range(options.prompt)]
            body = dict(model="model", prompt=prompt, max_tokens=options.tokens, ignore_eos=True, stream=stream)
            status = await connection.send("POST", "/v1/completions", json.dumps(body).encode())
            if status != 200:
                raise SystemExit(f"status {status}: {await connection.read()!r}")
            if stream:
                async for _ in connection.events():
                    pass
            else:
                await connection.read()
        connection.close()

    begin = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(options.clients)))
    return options.clients * num_requests * options.tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
