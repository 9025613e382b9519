#!/usr/bin/env python
"""Load test of `nanoinfer serve`: many clients that stream, wait, leave half-way and send nonsense, and every answer
checked.

python tools/serve_load.py --tiny --clients 200 --seconds 300               a tiny model on the CPU
python tools/serve_load.py --shape qwen3-0.6b --clients 200 --seconds 300   random weights in a known shape, on the GPU
python tools/serve_load.py --url http://127.0.0.1:8000 --check lengths      a server that runs already, and need not
give equal tokens

What is expected is what the same server says to the same prompts one after the other before the load. Exit code 1: an
answer was wrong, something was not given back, or the server gave an answer that nobody should get.

Behind the load, short prompts come one at a time: alone, and beside a few clients that send long ones all the time
(--long-clients). The figure is their time to a first token.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

NONSENSE = (
    b"",
    b"{",
    b"\x00\xff" * 5000,
    b"[" * 20_000,
    b'{"prompt": []}',
    b'{"prompt": [5], "n": 1000000}',
    b'{"prompt": [5], "max_tokens": -1}',
    b'{"prompt": [5], "temperature": NaN}',
    b'{"prompt": [99999999999]}',
    b'{"prompt": [5], "top_k": 1e400}',
    b'{"prompt": [5], "temprature": 1}',
    b'{"prompt": {"a": "b"}, "stream": "yes"}',
    json.dumps({"prompt": [5] * 2_000_000}).encode(),
)
MIB = 2**20
SHORT = 20  # tokens of a short prompt


# HTTP: a client of the standard library's streams takes a fraction of the processor time of a full one.


class Connection:
    """One keep-alive connection; one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, method: str, path: str, body: bytes = b"") -> int:
        """Sends a request and returns the status of its answer, which `read` or `events` must then take."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head = f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
        was_open = self._writer is not None
        try:
            line = await self._exchange(head + body)
        except ConnectionError:
            line = b""
        if not line and was_open:  # the server may close an idle connection at any time
            self.close()
            line = await self._exchange(head + body)
        if not line:
            raise ConnectionError("the server closed the connection without an answer")
        self.headers = {}
        while (header := (await self._reader.readline()).rstrip()) != b"":
            name, value = header.decode().split(":", 1)
            self.headers[name.lower()] = value.strip()
        return int(line.split()[1])

    async def _exchange(self, data: bytes) -> bytes:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=4 * MIB)
        self._writer.write(data)
        await self._writer.drain()
        return await self._reader.readline()

    async def read(self) -> bytes:
        """The body of the answer."""
        if "content-length" in self.headers:
            body = await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            body = b"".join([part async for part in self._chunks()])
        if self.headers.get("connection", "").lower() == "close":
            self.close()
        return body

    async def events(self) -> AsyncIterator[dict]:
        """The events of the answer up to [DONE]; ConnectionError if it ends before."""
        rest = b""
        is_done = False
        async for part in self._chunks():
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                if line == b"data: [DONE]":
                    is_done = True
                else:
                    yield json.loads(line.removeprefix(b"data: "))
        if not is_done:
            raise ConnectionError("the stream was cut")

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await self._reader.readline() or b"", 16)
            part = await self._reader.readexactly(size + 2)
            if size == 0:
                return
            yield part[:-2]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


# The server


@dataclass
class Server:
    url: str
    process: asyncio.subprocess.Process | None = None
    log: collections.deque = field(default_factory=lambda: collections.deque(maxlen=40))

    def rss_mib(self) -> float | None:
        """Resident memory of the process; None where it is not ours."""
        return None if self.process is None else psutil.Process(self.process.pid).memory_info().rss / MIB

    async def metrics(self) -> dict[str, float]:
        connection = Connection(self.url)
        try:
            if await connection.send("GET", "/metrics") != 200:
                raise ConnectionError("/metrics is not answered")
            lines = (await connection.read()).decode().splitlines()
        finally:
            connection.close()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


@contextlib.asynccontextmanager
async def running_server(options: argparse.Namespace) -> AsyncIterator[Server]:
    """The server at --url, or one that is started here and ended by SIGTERM."""
    if options.url is not None:
        yield Server(options.url)
        return
    with tempfile.TemporaryDirectory() as directory:
        arguments = [*server_arguments(options, directory), *shlex.split(options.server_args)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nanoinfer.commands.main", "serve", *arguments,
            stderr=asyncio.subprocess.PIPE, env=server_environment(options), start_new_session=True,
        )  # fmt: skip
        server = Server("", process)
        try:
            while line := (await process.stderr.readline()).decode():
                server.log.append(line.rstrip())
                if found := re.search(r"serving on (http://\S+)", line):
                    server.url = found[1]
                    break
            else:
                raise SystemExit("the server did not start:\n" + "\n".join(server.log))
            drain = asyncio.create_task(_follow(process.stderr, server.log))
            yield server
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 60)
            await drain
            if process.returncode:
                raise SystemExit(f"the server ended with exit code {process.returncode}:\n" + "\n".join(server.log))
        except (OSError, EOFError, psutil.Error) as error:
            raise SystemExit(f"the server cannot be reached any more ({error}):\n" + "\n".join(server.log)) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _follow(stream: asyncio.StreamReader, log: collections.deque) -> None:
    while line := await stream.readline():
        log.append(line.decode().rstrip())


def server_environment(options: argparse.Namespace) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if options.tiny:
        # The tiny model spends its time in Python; threads that wait for each other by spinning only slow it down.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def server_arguments(options: argparse.Namespace, directory: str) -> list[str]:
    """Options of a server on a synthetic model in `directory`; the vocabulary's size is noted in `options`."""
    common = ["--port", "0", "--skip-tokenizer-init", "--served-model-name", "model"]
    if options.tiny:
        from engines import SMALL
        from tiny_models import VOCAB_SIZE, make_checkpoint

        options.vocab_size = options.vocab_size or VOCAB_SIZE
        make_checkpoint("qwen3", directory, **SMALL)
        return [directory, *common, "--device", "cpu", "--block-size", "16", "--max-model-len", "512"]
    from nanoinfer.models.shapes import SHAPES, write_shape

    write_shape(options.shape, directory)
    options.vocab_size = options.vocab_size or SHAPES[options.shape]["vocab_size"]
    return [directory, *common, "--load-format", "dummy", "--max-model-len", "4096"]


# The clients


@dataclass
class Case:
    """A request and the right answer to it."""

    body: dict
    expected: list[int] = field(default_factory=list)


@dataclass
class Load:
    """Everything that the clients share, and what they have seen. Times in seconds."""

    server: Server
    cases: list[Case]
    check: str
    deadline: float = 0.0
    outcomes: collections.Counter = field(default_factory=collections.Counter)
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    num_tokens: int = 0

    async def client(self, number: int) -> None:
        """One request after the other until the deadline."""
        choose = random.Random(number)
        connection = Connection(self.server.url)
        while time.perf_counter() < self.deadline:
            kind = choose.random()
            try:
                if kind < 0.1:
                    await self.send_nonsense(connection, choose)
                elif kind < 0.2:
                    await self.leave(connection, choose)
                else:
                    await self.complete(connection, choose.choice(self.cases), stream=choose.random() < 0.7)
            except (OSError, EOFError, ValueError) as error:
                self.outcomes["connection error"] += 1
                self.unexpected.append(f"{type(error).__name__}: {error}")
                connection.close()
                await asyncio.sleep(0.1)
        connection.close()

    async def send_nonsense(self, connection: Connection, choose: random.Random) -> None:
        body = choose.choice(NONSENSE[:-1]) if choose.random() < 0.98 else NONSENSE[-1]
        status = await connection.send("POST", choose.choice(("/v1/completions", "/v1/chat/completions")), body)
        await connection.read()
        self.outcomes[f"nonsense: {status}"] += 1
        if status != 400:
            self.unexpected.append(f"status {status} for nonsense {body[:60]!r}")

    async def leave(self, connection: Connection, choose: random.Random) -> None:
        """Closes the connection half-way: in a stream after some events, else after some time."""
        case, stream = choose.choice(self.cases), choose.random() < 0.7
        body = json.dumps(case.body | {"stream": stream}).encode()
        if stream:
            status = await connection.send("POST", "/v1/completions", body)
            if status != 200:
                self.outcomes[f"status {status}"] += 1
                self.unexpected.append(f"status {status}: {(await connection.read())[:200]!r}")
                return
            num_wanted = choose.randint(0, case.body["max_tokens"] // 2)
            seen = 0
            async for _ in connection.events():
                seen += 1
                if seen > num_wanted:
                    break
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.send("POST", "/v1/completions", body), choose.random() * 0.3)
        connection.close()
        self.outcomes["left half-way"] += 1

    async def complete(self, connection: Connection, case: Case, stream: bool) -> None:
        begin = time.perf_counter()
        body = case.body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
        status = await connection.send("POST", "/v1/completions", json.dumps(body).encode())
        if status != 200:
            self.outcomes[f"status {status}"] += 1
            self.unexpected.append(f"status {status}: {(await connection.read())[:200]!r}")
            return
        times: list[float] = []
        if stream:
            tokens, reason, usage = [], None, None
            async for event in connection.events():
                if "error" in event:
                    self.unexpected.append(f"error in a stream: {event['error']['message'][:200]}")
                    self.outcomes["error in a stream"] += 1
                    continue
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    times += [time.perf_counter()] * len(choice["token_ids"])
                    tokens += choice["token_ids"]
                    reason = choice["finish_reason"] or reason
        else:
            answer = json.loads(await connection.read())
            (choice,), usage = answer["choices"], answer["usage"]
            tokens, reason = choice["token_ids"], choice["finish_reason"]
        self.outcomes["streamed" if stream else "whole"] += 1
        self.num_tokens += len(tokens)
        self.judge(case, tokens, reason, usage)
        if len(times) > 1:
            self.first_token.append(times[0] - begin)
            self.per_token.append((times[-1] - times[0]) / (len(times) - 1))

    def judge(self, case: Case, tokens: list[int], reason: str | None, usage: dict | None) -> None:
        wanted_usage = (len(case.body["prompt"]), case.body["max_tokens"])
        if reason != "length" or usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) != wanted_usage:
            self.wrong.append(f"finish_reason {reason!r}, usage {usage}, wanted {wanted_usage}")
        elif len(tokens) != case.body["max_tokens"]:
            self.wrong.append(f"{len(tokens)} tokens instead of {case.body['max_tokens']}")
        elif self.check == "exact" and tokens != case.expected:
            at = next(i for i, pair in enumerate(zip(tokens, case.expected, strict=True)) if pair[0] != pair[1])
            self.wrong.append(f"token {at} of {len(tokens)} is {tokens[at]} instead of {case.expected[at]}")


async def short_beside_long(server: Server, options: argparse.Namespace) -> dict | None:
    """Returns the times to a first token of short prompts, alone and beside long ones, none of which is known."""
    if not options.long_clients:
        return None
    choose = random.Random(options.seed)

    async def first_token(connection: Connection, length: int) -> float:
        prompt = [choose.randrange(3, options.vocab_size) for _ in range(length)]
        body = dict(prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True, stream=True)
        begin, end = time.perf_counter(), None
        status = await connection.send("POST", "/v1/completions", json.dumps(body).encode())
        if status != 200:
            raise SystemExit(f"a prompt of {length} tokens was refused: {(await connection.read())[:200]!r}")
        async for _ in connection.events():
            end = end or time.perf_counter()
        return end - begin

    async def ask(length: int, deadline: float, times: list[float]) -> None:
        connection = Connection(server.url)
        while not times or time.perf_counter() < deadline:
            times.append(await first_token(connection, length))
        connection.close()

    found = {}
    for name, num_long in (("alone", 0), ("beside_long", options.long_clients)):
        times: list[float] = []
        deadline = time.perf_counter() + options.seconds / 10
        long = [ask(options.long_prompt_len, deadline, []) for _ in range(num_long)]
        await asyncio.gather(*long, ask(SHORT, deadline, times))
        found[name] = {"median_ms": round(statistics.median(times) * 1e3, 2), "longest_ms": round(max(times) * 1e3, 2)}
    sizes = {"short_tokens": SHORT, "long_tokens": options.long_prompt_len, "long_clients": options.long_clients}
    return sizes | found


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Greedy and seeded requests in turn, half of the greedy ones with a repetition penalty."""
    choose = random.Random(options.seed)
    return [
        Case(
            dict(
                prompt=[choose.randrange(3, options.vocab_size) for _ in range(choose.randint(1, options.prompt_len))],
                max_tokens=choose.randint(2, options.output_len),
                temperature=float(i % 2),
                repetition_penalty=1.3 if i % 4 == 0 else 1.0,  # small models repeat themselves
                seed=i,
                ignore_eos=True,
                return_token_ids=True,
            )
        )
        for i in range(options.prompts)
    ]


# The run


async def run(options: argparse.Namespace) -> dict:
    """Runs the load and returns the figures."""
    async with running_server(options) as server:
        load = Load(server, make_cases(options), options.check)
        await reference_pass(load)
        before = await server.metrics()
        cpu_before = processor_seconds(server)
        begin = time.perf_counter()
        load.deadline = begin + options.seconds
        clients = [asyncio.create_task(load.client(i)) for i in range(options.clients)]
        await asyncio.sleep(options.seconds / 10)
        rss_early = server.rss_mib()
        _, hanging = await asyncio.wait(clients, timeout=options.seconds + options.patience)
        for task in hanging:
            task.cancel()
        seconds = time.perf_counter() - begin
        cpu_seconds = None if cpu_before is None else processor_seconds(server) - cpu_before
        short = await short_beside_long(server, options)
        after = await settled_metrics(server, before)
        rss_end = server.rss_mib()
    return report(options, load, seconds, before, after, rss_early, rss_end, len(hanging), cpu_seconds, short)


def processor_seconds(server: Server) -> float | None:
    if server.process is None:
        return None
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


async def reference_pass(load: Load) -> None:
    connection = Connection(load.server.url)
    for case in load.cases:
        status = await connection.send("POST", "/v1/completions", json.dumps(case.body).encode())
        answer = json.loads(await connection.read())
        if status != 200:
            raise SystemExit(f"the reference pass failed: {answer}")
        case.expected = answer["choices"][0]["token_ids"]
    connection.close()


BUSY = ("num_requests_running", "num_requests_waiting", "num_http_requests_open")
BLOCKS = ("gpu_kv_blocks_used", "host_kv_blocks_used")


async def settled_metrics(server: Server, before: dict[str, float]) -> dict[str, float]:
    """The server's metrics once nothing runs, or after 30 s."""
    for _ in range(150):
        after = await server.metrics()
        if not leaks(before, after):
            break
        await asyncio.sleep(0.2)
    return after


def leaks(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What the server still holds although nobody asks for anything."""
    found = [f"{name} is {after[f'nanoinfer:{name}']:g}" for name in BUSY if after[f"nanoinfer:{name}"]]
    pairs = [(name, before[f"nanoinfer:{name}"], after[f"nanoinfer:{name}"]) for name in BLOCKS]
    return found + [f"{name} was {old:g} and is {new:g}" for name, old, new in pairs if old != new]


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Median and 99th percentile in milliseconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2)}


def report(
    options: argparse.Namespace, load: Load, seconds: float, before: dict, after: dict,
    rss_early: float | None, rss_end: float | None, num_hanging: int, cpu_seconds: float | None,
    short: dict | None,
) -> dict:  # fmt: skip
    growth = None if rss_end is None else rss_end - rss_early
    problems = leaks(before, after)
    if growth is not None and growth > options.max_growth_mib:
        problems.append(f"the server's memory grew by {growth:.0f} MiB after the first tenth")
    if num_hanging:
        problems.append(f"{num_hanging} clients had no answer {options.patience:g} s after the end")
    aborted = 'nanoinfer:request_success_total{finished_reason="abort"}'
    if load.outcomes["left half-way"] > 20 and after.get(aborted, 0) == before.get(aborted, 0):
        problems.append("clients left half-way, but the server has aborted nothing")
    if not load.outcomes["streamed"]:
        problems.append("no stream was completed")
    passed = not (load.wrong or load.unexpected or problems)
    return {
        "clients": options.clients,
        "seconds": round(seconds, 1),
        "check": options.check,
        "outcomes": dict(sorted(load.outcomes.items())),
        "tokens_per_second": round(load.num_tokens / seconds, 1),
        "requests_per_second": round((load.outcomes["streamed"] + load.outcomes["whole"]) / seconds, 1),
        "time_to_first_token": percentiles(load.first_token),
        "time_per_output_token": percentiles(load.per_token),
        "time_to_first_token_of_short_prompts": short,
        "server_processor_share": None if cpu_seconds is None else round(cpu_seconds / seconds, 2),
        "server_rss_mib": None if rss_end is None else {"at_10_percent": round(rss_early), "at_end": round(rss_end)},
        "engine_at_end": {name: after[f"nanoinfer:{name}"] for name in BUSY + BLOCKS},
        "preemptions": after["nanoinfer:num_preemptions_total"] - before["nanoinfer:num_preemptions_total"],
        "wrong_answers": len(load.wrong),
        "wrong_examples": load.wrong[:5],
        "unexpected": len(load.unexpected),
        "unexpected_examples": load.unexpected[:5],
        "problems": problems,
        **({} if passed else {"server_log": list(load.server.log)}),
        "passed": passed,
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    which.add_argument("--tiny", action="store_true", help="start one with a tiny random float32 model on the CPU")
    which.add_argument("--shape", help="start one with random weights in this shape, such as qwen3-0.6b")
    parser.add_argument("--server-args", default="", help="further options of the server that is started, as one text")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument(
        "--check", choices=("exact", "lengths"), default="exact",
        help="exact (default): every token; lengths: their number, finish reason and usage",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=24, help="distinct requests (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=96, help="tokens of a prompt, at most (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens to generate, at most (default: %(default)s)")
    parser.add_argument(
        "--long-clients", type=int, default=6, help="clients with long prompts, behind the load; 0: none (default: 6)"
    )
    parser.add_argument(
        "--long-prompt-len", type=int, help="tokens of such a prompt (default: 3500, or 400 with --tiny)"
    )
    parser.add_argument("--vocab-size", type=int, help="default: the model's, or 1000 with --url")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds for the last answers (default: %(default)s)"
    )
    parser.add_argument(
        "--max-growth-mib", type=float, default=256, help="of the server's memory (default: %(default)s)"
    )
    parser.add_argument("--out", help="write the figures to this file, as JSON")
    options = parser.parse_args(arguments)
    options.long_prompt_len = options.long_prompt_len or (400 if options.tiny else 3500)
    if options.url:
        options.vocab_size = options.vocab_size or 1000
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    figures = asyncio.run(run(options))
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
