"""`nanoinfer top` and `generate --watch`: the picture of an engine in a terminal."""

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from engines import make_engine
from rich.console import Console
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.commands import generate, top
from nanoinfer.commands.main import main
from nanoinfer.commands.picture import Picture, bar
from nanoinfer.engine.figures import ENGINES, FACTS, Reading, values


def drawn(picture):
    console = Console(file=io.StringIO(), width=200)
    console.print(picture)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_engine(make_checkpoint("qwen3", tmp_path_factory.mktemp("model")), enable_cpu_offload=True)


@pytest.fixture
def figures(engine):
    engine.add_request("r", [5, 6, 7] * 12, SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(4):
        engine.step()
    found = values(ENGINES, Reading(engine, is_quick=True))
    while engine.has_work:
        engine.step()
    return found


def test_the_picture_has_states_and_rates_between_two_looks(engine, figures):
    picture = Picture(values(FACTS, Reading(engine)) | {"is_host": False, "link_bytes_per_second": 2e9}, "r1\x1b[2J")
    picture.update(figures, 10.0, 0.25)
    first = drawn(picture)
    assert "1 run of" in first and "figures of 0.2 s ago" in first and "0.0/s out" in first and "\x1b" not in first
    later = figures | {
        "num_decode_tokens": figures["num_decode_tokens"] + 30,
        "num_generated_tokens": 70,  # some by steps that computed prompts, too
        "streamed_bytes": figures["streamed_bytes"] + 3 * 10**9,
        "num_decode_steps": figures["num_decode_steps"] + 10,
        "step_floor_seconds": 0.02,
    }
    assert "drafts" not in first
    picture.update(figures | {"num_generated_tokens": 30, "num_drafted_tokens": 8, "num_accepted_tokens": 2}, 11.0)
    assert "25% of the guessed tokens were right" in drawn(picture)
    picture.update(figures | {"num_generated_tokens": 30}, 12.0)
    picture.update(later, 14.0, step_seconds=3.0)
    text = drawn(picture)
    assert "20.0/s out" in text and "1.50 GB/s of 2, busy" in text and "a step has run for 3.0 s" in text
    assert "where link and memory allow 150.0" in text
    assert "full blocks on the GPU" in text and "through the ring" in text and "KV on the host" in text
    picture.update(later, 14.0)
    assert "20.0/s out" in drawn(picture), "the same figures again are no new rate"
    picture.update(later, 15.0)
    assert "0.0/s out" in drawn(picture) and not re.search("bound by +prefill", drawn(picture))
    picture.update(later | {"prefill_seconds": later["prefill_seconds"] + 1}, 16.0)
    assert re.search("bound by +prefill", drawn(picture))


def test_bars_are_as_long_as_shares():
    assert bar(1, 2, 1).plain == "█" * 12 + "▒" * 12 and bar(0, 0).plain == "░" * 24 and bar(9, 3).plain == "█" * 24


class Server(HTTPServer):
    """Answers GET /engine with `answer`, if it gets the key."""

    answer, key = None, None

    class RequestHandlerClass(BaseHTTPRequestHandler):
        def do_GET(self):
            is_right = self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}"
            body = json.dumps(self.server.answer if is_right else {"error": {"message": "send the key"}}).encode()
            self.send_response(200 if is_right else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass


@pytest.fixture
def server(engine, figures):
    with Server(("127.0.0.1", 0), Server.RequestHandlerClass) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        told = {"age": 0.0, "step_seconds": 0.0, "figures": figures, "facts": values(FACTS, Reading(engine))}
        server.answer = {"replicas": [told | {"name": "one"}, told | {"name": "two"}]}
        yield server
        server.shutdown()
        thread.join()


def test_a_server_or_each_replica_is_looked_at(server, capsys, monkeypatch):
    url = f"http://127.0.0.1:{server.server_port}"
    assert main(["top", url, "--interval", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert " one: " in shown and " two: " in shown and shown.count("bound by") == 2
    server.key = "secret"
    assert main(["top", url, "--once"]) == 2 and "answers 401: send the key" in capsys.readouterr().err
    assert main(["top", url, "--once", "--interval", "0.01", "--api-key", "secret"]) == 0


def test_what_cannot_be_shown_is_said(monkeypatch, capsys):
    assert main(["top", "http://127.0.0.1:9"]) == 2 and "is nanoinfer serve running there?" in capsys.readouterr().err
    assert main(["top", "127.0.0.1:8000"]) == 2 and "no address of a server" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 2
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert main(["top"]) == 2 and "pip install -e '.[chat]'" in capsys.readouterr().err


def test_a_run_is_watched_below_its_text(engine, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(generate, "_WATCH_SECONDS", 0.0)
    live, _, picture = top.needed()

    def console(stderr):
        return Console(file=out, force_terminal=True, width=120)

    class Llm:
        pass

    Llm.engine = engine
    with generate.watched(Llm, (live, console, picture)) as show:
        show(" ".join(f"w{i}" for i in range(1000)))
    assert "bound by" in out.getvalue() and "w999" in out.getvalue() and "w500 " not in out.getvalue()
    with generate.watched(Llm, None) as show:
        show("nothing")
