"""`nanoinfer serve --ray` as a process: it answers, and finishes what runs when a signal comes."""

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
def server(tmp_path):
    path = make_served_checkpoint(tmp_path)
    words = [*OPTIONS.split(), "--max-model-len", "384", "--served-model-name", MODEL]
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
