"""Connections, byte by byte: what is one request, how long the server waits, and who gets an answer."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import uvicorn
from serving import Served, make_served_checkpoint

from nanoinfer.commands.serve import server_class
from nanoinfer.options.parser import INTERRUPTED
from nanoinfer.serve.connection import server_config

SECONDS = 0.4
LONG = dict(prompt=[20, 21], max_tokens=380, temperature=0, ignore_eos=True)
SHORT = LONG | dict(max_tokens=3, return_token_ids=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


class Listening:
    """A server on a thread of this process.

    Args:
        timeout: seconds of the server's patience.
        max_connections: as of `server_config`.
    """

    def __init__(self, path, timeout: float, max_connections: int | None = None) -> None:
        self.served = Served(path, app_options=dict(body_timeout=timeout))
        settings = server_config(self.served.app, timeout, max_connections=max_connections)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.num_forced = 0
        made = server_class(uvicorn.Server, closing_seconds=0.3, at_second_interrupt=self.count_forced)
        self.server = made(settings, self.served.async_engine, 30.0)
        self.thread = threading.Thread(target=self.server.run, kwargs=dict(sockets=[self._listener]))
        self.thread.start()
        self.wait_until(lambda: self.server.started)

    def count_forced(self):
        self.num_forced += 1

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(20)
        connection.connect(self._listener.getsockname())
        return connection

    def ask(self, *parts: bytes, ends: bool = False) -> bytes:
        """All that the server says to these bytes until it closes the connection."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def wait_until(self, condition, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server does not end"
        self.served.async_engine.close()


@contextmanager
def listening(path, timeout: float = SECONDS, **options):
    one = Listening(path, timeout, **options)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def impatient(path):
    with listening(path) as one:
        yield one


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def request(body: dict, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


CLOSE = "Connection: close"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


def body_of(answer: bytes) -> dict:
    return json.loads(answer[answer.rindex(b"\r\n\r\n") + 4 :])


def test_a_body_with_two_lengths_is_refused_and_what_follows_is_no_request(impatient):
    content = b'{"prompt":[20],"max_tokens":1}'
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    for order in (slice(None), slice(None, None, -1)):
        lengths = [b"Content-Length: %d" % len(chunked), b"Transfer-Encoding: chunked"][order]
        head = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", *lengths, b"", b""]
        answer = impatient.ask(b"\r\n".join(head) + chunked + HEALTH)
        assert statuses(answer) == [400] and body_of(answer)["error"]["code"] == "two_lengths"


def test_requests_one_behind_the_other_get_their_answers_in_their_order(impatient):
    answer = impatient.ask(request(SHORT) + HEALTH + request(SHORT | dict(n=0), CLOSE))
    assert statuses(answer) == [200, 200, 400]


@pytest.mark.parametrize("begin", [b"", HEALTH[:10], HEALTH[:-1]])
def test_a_head_that_does_not_end_is_not_waited_for(impatient, begin):
    """Whatever comes in meanwhile."""
    with impatient.connect() as connection:
        answer, began = b"", time.monotonic()
        connection.settimeout(SECONDS / 8)
        connection.sendall(begin)
        while True:
            assert time.monotonic() < began + 20 * SECONDS
            try:
                if not (part := connection.recv(65536)):
                    break
                answer += part
            except TimeoutError:
                connection.sendall(begin and b"a")
            except ConnectionResetError:
                break
    assert statuses(answer) == ([408] if begin else [])
    assert not begin or body_of(answer)["error"]["code"] == "head_timeout"


def test_a_body_that_does_not_end_is_not_waited_for(impatient):
    answer = impatient.ask(request(SHORT)[:-1])
    assert statuses(answer) == [408] and body_of(answer)["error"]["code"] == "body_timeout"
    answer = impatient.ask(request({}, path="/nowhere")[:-1])  # which was answered before its end
    assert statuses(answer) == [404]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_behind_its_request_gets_its_answer(impatient, stream):
    wanted = impatient.ask(request(SHORT, CLOSE))
    answer = impatient.ask(request(SHORT | dict(stream=stream)), ends=True)
    found = [status for status in statuses(answer) if status != 100]
    assert found == [200] and answer.count(b"[DONE]") == stream
    if not stream:
        assert body_of(answer)["choices"] == body_of(wanted)["choices"]
    assert 200 in statuses(impatient.ask(request(SHORT), HEALTH, ends=True))
    assert impatient.ask(request(SHORT, version="1.0"), ends=True) == b"", "HTTP/1.0 knows no interim answers"


def test_what_is_sent_to_see_whether_a_client_is_there_means_nothing(impatient, monkeypatch):
    monkeypatch.setattr("nanoinfer.serve.connection._FIRST_PROBE_SECONDS", 0.01)
    monkeypatch.setattr("nanoinfer.serve.connection._PROBE_FACTOR", 1)
    asked = LONG | dict(max_tokens=30)
    answer = impatient.ask(request(asked), ends=True)
    *interim, last = statuses(answer)
    assert set(interim) == {100} and last == 200 and body_of(answer)["usage"]["completion_tokens"] == 30
    stream = impatient.ask(request(asked | dict(stream=True, return_token_ids=True)), ends=True)
    lines = [line for line in stream.split(b"\n") if line.startswith((b"data", b":"))]
    assert b":" in lines and lines[-1] == b"data: [DONE]"
    events = [json.loads(line[5:]) for line in lines[:-1] if line != b":"]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 30


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_is_gone_ends_its_request(impatient, stream, version):
    engine = impatient.served.engine
    with impatient.connect() as connection:
        connection.sendall(request(LONG | dict(n=8, stream=stream), version=version))
        impatient.wait_until(lambda: engine.live.requests)
        requests = list(engine.live.requests.values())
    impatient.wait_until(lambda: not engine.live.requests)
    assert {sequence.finish_reason for one in requests for sequence in one.sequences} == {"abort"}


def ask_and_do_not_read(server: Listening, connection: socket.socket) -> None:
    """Returns when the server waits for room. The kernel's buffers would hold a short answer."""
    text = "w20 " * 30_000
    connection.sendall(request(dict(prompt=text, return_token_strs=True), path="/tokenize"))
    server.wait_until(lambda: any(one.flow.write_paused for one in server.server.server_state.connections))


def test_a_client_that_does_not_read_is_not_waited_for(impatient):
    with impatient.connect(receive_bytes=1024) as connection:
        ask_and_do_not_read(impatient, connection)
        impatient.wait_until(lambda: not impatient.server.server_state.connections)


def test_a_client_that_does_not_read_does_not_hold_up_the_end(path, caplog):
    caplog.set_level("INFO", "nanoinfer")
    with listening(path, timeout=3600) as one, one.connect(receive_bytes=1024) as connection:
        ask_and_do_not_read(one, connection)
        one.end()
    assert [record.getMessage() for record in caplog.records if record.name == "nanoinfer"] == [
        "shutting down; 0 requests may run for 30 s, Ctrl-C again ends them now",
        "1 client did not read to the end",
    ]


def test_a_second_interrupt_ends_what_runs(path, caplog):
    caplog.set_level("INFO", "nanoinfer")
    with listening(path, timeout=3600) as one, one.connect() as connection, ThreadPoolExecutor(1) as reader:
        connection.sendall(request(LONG | dict(n=100, stream=True)))
        answer = reader.submit(read_all, connection)
        one.wait_until(lambda: one.served.engine.live.requests)
        one.server.handle_exit(signal.SIGINT, None)
        one.wait_until(lambda: "1 request may run for 30 s, Ctrl-C again ends" in caplog.text)
        assert not one.num_forced
        one.server.handle_exit(signal.SIGINT, None)
        one.end()
        assert b'"code": "shutting_down"' in answer.result() and one.num_forced == 1


def test_a_process_ends_behind_the_second_interrupt_whatever_its_threads_do():
    script = (
        "import threading, time; from nanoinfer.commands import serve; serve.LAST_SECONDS = 0.1; serve.end_anyway(); "
        "threading.Thread(target=time.sleep, args=[600]).start()"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == INTERRUPTED


@pytest.mark.parametrize("path_with_slash", ["/v1/completions/", "/tokenize/", "/health/", "/v1/models/"])
def test_a_slash_behind_a_path_changes_nothing(impatient, path_with_slash):
    bare = path_with_slash[:-1]
    if bare in ("/health", "/v1/models"):
        asked = [f"GET {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode() for path in (path_with_slash, bare)]
    else:
        body = dict(prompt="w20") if bare == "/tokenize" else SHORT | dict(request_id="same")
        asked = [request(body, CLOSE, path=path) for path in (path_with_slash, bare)]
    answers = [impatient.ask(one) for one in asked]
    assert [statuses(answer) for answer in answers] == [[200], [200]]
    contents = [answer[answer.index(b"\r\n\r\n") :] for answer in answers]
    if bare == "/tokenize":
        assert contents[0] == contents[1]


def test_a_connection_too_many_gets_503_and_the_log_says_it_once(path, caplog):
    with listening(path, timeout=3600, max_connections=2) as one:
        held = [one.connect() for _ in range(2)]
        one.wait_until(lambda: len(one.server.server_state.connections) == 2)
        for _ in range(3):
            with one.connect() as more:
                answer = read_all(more)
            assert statuses(answer) == [503] and body_of(answer)["error"]["code"] == "too_many_connections"
        held[0].sendall(request(SHORT, "Connection: close"))
        assert statuses(read_all(held[0])) == [200]
        one.wait_until(lambda: len(one.server.server_state.connections) == 1)
        assert statuses(one.ask(request(SHORT, "Connection: close"))) == [200]
        for connection in held:
            connection.close()
    assert sum("file descriptors for no more" in record.getMessage() for record in caplog.records) == 1


def test_the_limit_of_open_files_is_raised_and_a_lack_of_them_is_said_once():
    code = """
import asyncio, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 400))
from nanoinfer.serve.descriptors import make_room
room = make_room()
print(room, resource.getrlimit(resource.RLIMIT_NOFILE))

async def work():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=1000)
    address, held, clients = server.sockets[0].getsockname(), [], [socket.socket() for _ in range(3)]
    try:
        while True:
            held.append(socket.socket())
    except OSError:
        pass
    for client in clients:
        client.connect(address)
    await asyncio.sleep(2.5)
    for one in (*held, *clients):
        one.close()

asyncio.run(work())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "144 (400, 400)\n"
    assert ran.stderr == "no file descriptor is free for a new connection, which waits: raise ulimit -n\n"
