"""`nanoinfer serve --ray` as a process: it answers, and finishes what runs when a signal comes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving import MODEL, events, make_served_checkpoint

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "--ray --replicas 2 --replica-cpus 0.1 --port 0 --device cpu --dtype float32 --block-size 16 --max-num-seqs 8"


@pytest.fixture
def server(tmp_path, request):
    path = make_served_checkpoint(tmp_path)
    words = [*OPTIONS.split(), "--max-model-len", "384", "--served-model-name", MODEL, *getattr(request, "param", ())]
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoinfer.commands.main", "serve", str(path), *words],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    said = []
    try:
        while not (found := re.search(r"serving on (http://\S+)", said[-1] if said else "")):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
        reader.start()
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_stream_ends_well_while_the_replicas_shut_down(server):
    process, url = server
    body = dict(model=MODEL, prompt="w20 w21", max_tokens=300, ignore_eos=True, stream=True)
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        parts = response.iter_text()
        text = next(parts)
        process.send_signal(signal.SIGTERM)
        text += "".join(parts)
    *_, end, last = events(text)
    assert end["choices"][0]["finish_reason"] == "length" and last["usage"]["completion_tokens"] == 300
    assert process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        time.sleep(0.1)
        httpx.get(f"{url}/health")


@pytest.mark.parametrize("server", [["--shutdown-timeout", "0"]], indirect=True)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_has_not_ended_in_time_is_told_that_the_server_shuts_down(server, is_streamed):
    process, url = server
    body = dict(model=MODEL, prompt="w20 w21", max_tokens=370, ignore_eos=True, stream=is_streamed)

    async def run():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            asking = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(6)]
            while "num_requests_running" not in (metrics := (await client.get("/metrics")).text) or not re.search(
                r"num_requests_running{.*} [1-9]", metrics
            ):
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*asking)

    answers = asyncio.run(run())
    assert process.wait(60) == 0
    found = [events(one.text)[-1] if is_streamed else one.json() for one in answers]
    codes = [one["error"]["code"] for one in found if "error" in one]
    assert set(codes) == {"shutting_down"}, "none ended late"
    assert all(one.status_code == (200 if is_streamed else 503) for one, told in zip(answers, found) if "error" in told)
