"""The server as a process of its own: OpenAI's client, disconnects over TCP, signals, and a short load."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from engines import COMMON
from serving import MODEL, make_served_checkpoint

from nanoinfer import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
GREEDY = dict(temperature=0, extra_body={"ignore_eos": True, "return_token_ids": True})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


class Process:
    """`nanoinfer serve` on a free port."""

    def __init__(self, path, *arguments):
        options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", MODEL]
        options += ["--block-size", "16", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nanoinfer.commands.main",
                "serve",
                str(path),
                *options,
                "--max-model-len",
                "384",
                *arguments,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = re.search(r"http://[\w.:]+", self.wait_for("serving on"))[0]

    def _read(self):
        for line in self._process.stderr:
            self.lines.put(line)

    def wait_for(self, text, seconds=60):
        """The next line with `text`."""
        seen, deadline = [], time.monotonic() + seconds
        while not seen or text not in seen[-1]:
            try:
                seen.append(self.lines.get(timeout=max(0, deadline - time.monotonic())))
            except queue.Empty:
                self._process.kill()
                pytest.fail(f"the server did not say {text!r}: {''.join(seen)}")
        return seen[-1]

    def last_words(self):
        """All lines behind the one that was waited for last; the process must have ended."""
        self._reader.join()
        return "".join(self.lines.queue)

    @property
    def has_ended(self):
        return self._process.poll() is not None

    def signal(self, number):
        self._process.send_signal(number)

    def exit_code(self, seconds=30):
        return self._process.wait(seconds)

    def end(self):
        if not self.has_ended:
            self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def processes(path):
    """The servers so far: one test ends its own, which takes seconds to start."""
    processes = []
    yield processes
    for process in processes:
        process.end()


@pytest.fixture
def server(path, processes):
    if not processes or processes[-1].has_ended:
        processes.append(Process(path, "--api-key", "secret", "--shutdown-timeout", "60", "--log-format", "json"))
    return processes[-1]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(path):
    """What `LLM` says to the prompt of these tests, as text and as a chat."""
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False))) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (text,) = llm.generate("w20 w21", params, use_tqdm=False)
        (chat,) = llm.chat([{"role": "user", "content": "w20 w21"}], params, use_tqdm=False)
        return text.outputs[0], chat.outputs[0]


def samples(server, name):
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"nanoinfer:{name}"))


def test_openai_completions(client, wanted):
    answer = client.completions.create(model=MODEL, prompt="w20 w21", max_tokens=12, logprobs=1, user="me", **GREEDY)
    assert answer.choices[0].text == wanted[0].text and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].token_ids == wanted[0].token_ids and len(answer.choices[0].logprobs.tokens) == 12
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)
    options = dict(stream=True, stream_options={"include_usage": True})
    *parts, last = client.completions.create(model=MODEL, prompt="w20 w21", max_tokens=12, **options, **GREEDY)
    assert "".join(part.choices[0].text for part in parts) == wanted[0].text
    assert len(parts) == 12 and parts[-1].choices[0].finish_reason == "length" and last.usage.total_tokens == 14


def test_openai_chat(client, wanted):
    asked = dict(model=MODEL, messages=[{"role": "user", "content": "w20 w21"}], max_completion_tokens=12, **GREEDY)
    answer = client.chat.completions.create(logprobs=True, top_logprobs=1, **asked)
    assert answer.choices[0].message.content == wanted[1].text and answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 1
    first, *parts = client.chat.completions.create(stream=True, **asked)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == wanted[1].text


def test_openai_models_and_errors(server, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt", prompt="w20")
    with pytest.raises(openai.BadRequestError, match="max_model_len = 384") as caught:
        client.completions.create(model=MODEL, prompt="w20 w21", max_tokens=383)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="presence_penalty is 3.0"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "w1"}], presence_penalty=3)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_its_request(server, stream):
    before = samples(server, 'request_success_total{finished_reason="abort"}')
    body = dict(prompt=[20, 21], max_tokens=380, ignore_eos=True, stream=stream)
    content = json.dumps(body).encode()
    host, port = re.search(r"http://(.*):(\d+)", server.url).groups()
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
        while samples(server, "num_requests_running") == 0:
            time.sleep(0.005)
    deadline = time.monotonic() + 10
    while samples(server, "num_requests_running") or samples(server, "gpu_kv_blocks_used"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert samples(server, 'request_success_total{finished_reason="abort"}') == before + 1


def test_sigterm_lets_running_requests_end(server):
    body = dict(prompt=[20, 21], max_tokens=250, temperature=0, ignore_eos=True, return_token_ids=True)
    options, results = dict(headers={"Authorization": "Bearer secret"}, timeout=60), {}

    def ask(stream):
        response = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": stream}, **options)
        results[stream] = response.text

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while samples(server, "num_requests_running") < 2:
        time.sleep(0.005)
    server.signal(signal.SIGTERM)
    assert "2 requests may run for 60 s" in server.wait_for("shutting down")
    assert httpx.get(f"{server.url}/health").status_code == 503
    response = httpx.post(f"{server.url}/v1/completions", json=body, **options)
    assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
    for thread in threads:
        thread.join()
    tokens = json.loads(results[False])["choices"][0]["token_ids"]
    assert len(tokens) == 250
    *parts, last = results[True].strip().split("\n\n")
    streamed = [json.loads(part.removeprefix("data: "))["choices"][0]["token_ids"] for part in parts]
    assert last == "data: [DONE]" and sum(streamed, []) == tokens
    assert server.exit_code() == 0
    words = server.last_words()
    assert "leaked" not in words, "a library has found its objects when the interpreter ended"
    lines = [json.loads(line) for line in words.splitlines()]
    requests = [line for line in lines if line.get("event") == "request"]
    assert [line["output_tokens"] for line in requests] == [250, 250] and len(lines) == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (["--host", "192.0.2.1"], "--host 192.0.2.1 is no address of this machine: give 127.0.0.1, or 0.0.0.0"),
        (["--port", "80000"], "--port 80000 cannot be used (bind(): port must be 0-65535.): choose another"),
    ],
)
def test_an_address_that_is_none_is_told_what_to_give(words, said, path, capsys):
    from nanoinfer.commands.main import main

    assert main(["serve", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_the_model_is_loaded(path, capsys, monkeypatch):
    from nanoinfer.commands.main import main

    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0:11434")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = taken.getsockname()[1]
        assert main(["serve", str(path), "--port", str(given)]) == 2
    said = capsys.readouterr().err
    assert f"port {given} is in use: give another with --port, such as {given + 1}, or 0 for any free one" in said
    assert "loading" not in said, "before anything is said of the model"
    assert "VLLM_API_KEY is not read here: give --api-key" in said
    assert "OLLAMA_HOST" not in said, "its option is given"
    for seconds in ("-1", "nan"):
        assert main(["serve", str(path), "--shutdown-timeout", seconds]) == 2
        assert f"--shutdown-timeout is {float(seconds)}, it must be 0 or more" in capsys.readouterr().err
