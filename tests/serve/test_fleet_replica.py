"""One server of several, called as Ray calls it, and the options that say how many there are."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading

import pytest
from serving import MODEL, make_served_checkpoint

from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import add_arguments, check_alone, replicas_of, server_options
from nanoinfer.serve.errors import UnavailableError
from nanoinfer.serve.ray import replica as replica_module
from nanoinfer.serve.ray.replica import Replica, get_scope
from nanoinfer.serve.served_requests import ServedRequests

WORDS = "--device cpu --dtype float32 --block-size 16 --max-num-seqs 8 --max-model-len 384 --served-model-name tiny"


def options_of(words="", model="any"):
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args([str(model), *words.split()], argparse.Namespace())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_replica_answers_and_is_healthy_until_its_engine_ends(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray says; where the replicas were started nothing was said
    replica = Replica(server_options(options_of(f"{WORDS} --api-key secret", path)), None, "r1")
    assert "OMP_NUM_THREADS" not in os.environ
    scope = get_scope("/v1/completions") | {"method": "POST", "headers": [(b"content-type", b"application/json")]}
    scope["headers"].append((b"x-api-key", b"secret"))
    body = json.dumps(dict(model=MODEL, prompt="w20 w21", max_tokens=3, ignore_eos=True)).encode()

    async def run():
        ((head, rest),) = [messages async for messages in replica.answer(scope, body)]
        await replica.check_health()
        asked = [await replica.ask(path) for path in ("/metrics", "/health", "/engine")]
        return head, json.loads(rest["body"]), *asked

    head, answer, metrics, health, figures = asyncio.run(run())
    assert head["status"] == 200 and answer["usage"]["completion_tokens"] == 3
    assert metrics[:2] == ("r1", 200) and b"nanoinfer:generation_tokens_total 3.0" in metrics[2]
    assert health == ("r1", 200, b"")
    assert figures[1] == 200 and json.loads(figures[2])["replicas"][0]["figures"]["num_generated_tokens"] == 3
    replica.close()
    with pytest.raises(UnavailableError, match="the engine is not running"):
        asyncio.run(replica.check_health())
    assert asyncio.run(replica.ask("/health"))[1] == 503

    class Hanging:
        def __init__(self, *_):
            pass

        async def parts(self):
            await asyncio.Event().wait()
            yield []

    monkeypatch.setattr(replica_module, "Exchange", Hanging)
    monkeypatch.setattr(replica_module, "_ASK_SECONDS", 0.01)
    assert asyncio.run(replica.ask("/metrics")) == ("r1", 504, b"")


def test_a_replica_that_drains_refuses_what_is_new_and_ends_what_runs_on(path, monkeypatch):
    step, begun, may_go_on = ServedRequests.step, threading.Event(), threading.Event()

    def slow(self):
        begun.set()
        assert may_go_on.wait(30)
        step(self)

    monkeypatch.setattr(ServedRequests, "step", slow)
    replica = Replica(server_options(options_of(WORDS, path)), "1", "r1")
    scope = get_scope("/v1/completions") | {"method": "POST", "headers": [(b"content-type", b"application/json")]}
    body = json.dumps(dict(model=MODEL, prompt="w20 w21", max_tokens=9, ignore_eos=True)).encode()

    async def answered():
        messages = [message async for some in replica.answer(scope, body) for message in some]
        return messages[0]["status"], json.loads(messages[1]["body"])["error"]

    async def run():
        running = asyncio.create_task(answered())
        assert await asyncio.to_thread(begun.wait, 30)
        draining = asyncio.create_task(replica.drain(60))
        await asyncio.sleep(0)
        refused = await answered()
        assert not running.done() and not draining.done(), "it has its time"
        await replica.check_health()  # Ray would load the model anew, beside this one
        await replica.drain(0)  # a second signal
        await asyncio.wait_for(draining, 30)
        may_go_on.set()
        return refused, await running

    try:
        found = asyncio.run(run())
    finally:
        may_go_on.set()
        replica.close()
    assert [(status, error["code"]) for status, error in found] == [(503, "shutting_down")] * 2
    assert "had not ended within 0 s" in found[1][1]["message"]


def test_the_threads_of_an_engine_are_those_of_one_server_whatever_ray_says():
    """Torch reads their number when it is imported."""
    code = (
        "import sys\n"
        "from nanoinfer.serve.ray.replica import Replica\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    Replica({}, '1', 'r1')\n"
        "except AttributeError:\n"  # there are no options
        "    import torch; print(torch.get_num_threads())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (found.stdout.split(), found.stderr) == (["1"], "")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--ray", (1, 1, 1.0, None, True)),
        ("--ray --replicas 3 --device cuda", (3, 3, 1.0, 1.0, True)),
        ("--ray --replicas 1-4 --replica-cpus 0.1 --device cpu --no-route-by-prefix", (1, 4, 0.1, 0.0, False)),
        ("--ray --replicas 2 --replica-gpus 0.5", (2, 2, 1.0, 0.5, True)),
    ],
)
def test_options_say_how_many_replicas_there_are_and_on_what(words, wanted):
    found = replicas_of(options_of(words))
    assert (found.least, found.most, found.num_cpus, found.num_gpus, found.by_prefix) == wanted


@pytest.mark.parametrize("number", ["0", "4-2", "0-1", "x", "1-", "-1", "1.5"])
def test_a_number_of_replicas_that_cannot_be_is_refused(number):
    with pytest.raises(
        ValueError, match=f"--replicas is '{number}', it must be a number from 1 on, or two such as 1-4"
    ):
        replicas_of(options_of(f"--ray --replicas={number}"))


@pytest.mark.parametrize("name", ["--replica-cpus", "--replica-gpus"])
def test_less_than_no_processors_are_refused(name):
    for value in ("-1", "nan"):
        with pytest.raises(ValueError, match=f"{name} is {float(value)}, it must be 0 or more"):
            replicas_of(options_of(f"--ray {name}={value}"))


def test_each_server_is_told_the_same_however_many_there_are():
    found = [server_options(options_of(f"--ray --strict {words}")) for words in ("", "--replicas 3 --replica-gpus 0.5")]
    assert found[0] == found[1] and found[0]["strict"] and found[0]["model"] == "any"


def test_options_of_several_servers_are_refused_for_one():
    check_alone(options_of())
    for words in ("--replicas 2", "--replica-cpus 1", "--replica-gpus 0", "--no-route-by-prefix"):
        with pytest.raises(ValueError, match="is for several servers: give --ray, too"):
            check_alone(options_of(words))
