#!/usr/bin/env python
"""What it costs a server that pages are open: the throughput of a batch, with pages and without, in turns.

python tools/watch_load.py --shape qwen3-0.6b                 256 rows, ten pages, on the GPU
python tools/watch_load.py --tiny --rows 8 --tokens 64        a tiny model on the CPU

The pages are followers of /engine/events in another process, which reads whatever comes. Exit code 1: with them the
batch was slower by more than --most-loss.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

from serve_load import Connection, Server, running_server

_ROWS_OF_REQUEST = 128


def follow(url: str, num_pages: int) -> None:
    """Follow a server's events as so many pages do, until the process is ended; say when all have their first."""
    begun = threading.Barrier(num_pages + 1)

    def page() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("GET", "/engine/events")
        answer = connection.getresponse()
        answer.readline()
        begun.wait()
        while answer.readline():
            pass

    for _ in range(num_pages):
        threading.Thread(target=page, daemon=True).start()
    begun.wait()
    print("all follow", flush=True)
    threading.Event().wait()


async def batch(server: Server, options: argparse.Namespace, turn: int) -> float:
    """Return the tokens per second of a batch of prompts that nobody has sent before."""

    async def request(first: int, rows: int) -> int:
        ids = range(first, first + rows)
        prompts = [[3 + (row * 31 + turn * 7 + i) % (options.vocab_size - 3) for i in range(16)] for row in ids]
        body = dict(prompt=prompts, max_tokens=options.tokens, ignore_eos=True, temperature=0)
        connection = Connection(server.url)
        status = await connection.send("POST", "/v1/completions", json.dumps(body).encode())
        answer = json.loads(await connection.read())
        connection.close()
        if status != 200:
            raise SystemExit(f"the batch failed: {answer}")
        return answer["usage"]["completion_tokens"]

    parts = [(first, min(_ROWS_OF_REQUEST, options.rows - first)) for first in range(0, options.rows, _ROWS_OF_REQUEST)]
    begin = time.perf_counter()
    tokens = await asyncio.gather(*(request(*part) for part in parts))
    return sum(tokens) / (time.perf_counter() - begin)


async def run(options: argparse.Namespace) -> dict:
    found: dict[str, list[float]] = {"without": [], "with": []}
    async with running_server(options) as server:
        await batch(server, options, 0)  # the first one is slower: kernels are compiled
        for turn in range(1, options.turns + 1):
            found["without"].append(await batch(server, options, 2 * turn))
            pages = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--follow", server.url, "--pages", str(options.pages),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                assert await pages.stdout.readline(), "the pages could not follow"
                found["with"].append(await batch(server, options, 2 * turn + 1))
            finally:
                pages.kill()
                await pages.wait()
    without, among = (statistics.median(found[name]) for name in ("without", "with"))
    loss = 1 - among / without
    return {
        "rows": options.rows, "pages": options.pages, "tokens_per_second": without,
        "tokens_per_second_with_pages": among, "loss": loss, "turns": found, "passed": loss <= options.most_loss,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    which.add_argument("--tiny", action="store_true", help="start one with a tiny random float32 model on the CPU")
    which.add_argument("--shape", help="start one with random weights in this shape, such as qwen3-0.6b")
    which.add_argument("--follow", metavar="URL", help="only follow this server, as the pages do")
    parser.add_argument("--server-args", default="", help="further options of the server that is started, as one text")
    parser.add_argument("--rows", type=int, default=256, help="sequences of the batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="batches with pages, and without (default: %(default)s)")
    parser.add_argument("--most-loss", type=float, default=0.01, help="share of the throughput (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, help="default: the model's, or 1000 with --url")
    options = parser.parse_args(arguments)
    if options.follow:
        follow(options.follow, options.pages)
    if options.url:
        options.vocab_size = options.vocab_size or 1000
    figures = asyncio.run(run(options))
    print(json.dumps(figures, indent=2))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
