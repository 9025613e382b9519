"""Two replicas of a tiny model on a local Ray, for the checks of tests/fleet."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import add_arguments, replicas_of
from nanoinfer.serve.ray.application import application

ENGINE = dict(block_size=32, dtype="float32", max_num_seqs=48, max_num_batched_tokens=512, max_model_len=1024)
APP = "fleet"


@contextlib.contextmanager
def local_ray() -> Iterator[str]:
    """Ray and its HTTP proxy; the address at which applications are reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def start(path: object, words: str = "") -> None:
    """Start replicas of a checkpoint, or change those that run. words: further options of `nanoinfer serve --ray`."""
    parser = Parser()
    add_arguments(parser)
    engine = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    given = [str(path), "--ray", "--replicas=2", "--replica-cpus=0.1", "--device=cpu", "--served-model-name=tiny"]
    options = parser.parse_args([*given, *engine, *words.split()], argparse.Namespace())
    serve.run(application(options, replicas_of(options)), name=APP)


def replica_processes() -> list[psutil.Process]:
    """The processes of replicas, in the order in which they were started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if f"ServeReplica:{APP}:Replica" in " ".join(process.cmdline()):  # it is up, then
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield client


async def samples(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    """The values of a metric by replica."""
    text = (await client.get("/metrics")).text
    return {one[0]: float(one[1]) for one in re.findall(rf'^nanoinfer:{name}{{replica="(\w+)"}} (\S+)$', text, re.M)}


async def wait_for_replicas(client: httpx.AsyncClient, number: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while len(await samples(client, "num_requests_running")) != number:
        assert time.monotonic() < deadline, f"there were not {number} replicas in {seconds} s"
        await asyncio.sleep(0.3)
