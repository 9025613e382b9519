"""`tools/exactness.py`, on the CPU with the tiny shape: nothing differs, and what differs is counted."""

import json
import re
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import engines
import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer.common import exact
from nanoinfer.models.shapes import write_shape

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import exactness as cli  # noqa: E402
import exactness_comparison as comparison  # noqa: E402
from exactness_comparison import Answer, Condition  # noqa: E402
from exactness_engines import EngineAsker, check_finite, open_engine  # noqa: E402
from exactness_local import local_server  # noqa: E402
from exactness_workload import make_workload  # noqa: E402

COMMAND: list[str] = []
SMALL = ["--block-size", "16", "--output-len", "5", "--requests", "6", "--no-progress"]
ENGINE = [*COMMAND, "--shape", "tiny", "--device", "cpu", *SMALL]


def figures_of(arguments, path, status):
    out = path / "exactness.json"
    assert cli.main([*arguments, "--output-json", str(out)]) == status
    figures = json.loads(out.read_text())
    return figures, {condition["name"]: condition for condition in figures["conditions"]}


def test_every_condition_gives_the_bits_of_each_request_alone_and_the_document_has_what_is_printed(tmp_path, capsys):
    text = (Path(__file__).resolve().parents[2] / "docs" / "exactness.md").read_text()
    ((command, sample),) = re.findall(r"```\n\$ python tools/exactness.py (.*?)\n(.*?)\n```", text, flags=re.DOTALL)
    figures, found = figures_of(command.split(), tmp_path, 0)
    printed = capsys.readouterr().out
    assert printed.strip() == sample
    assert figures["identical"] and figures["command"].startswith("python tools/exactness.py --shape tiny ")
    assert list(found) == [
        "batch of 2",
        "batch of 9",
        "alone, with log-probabilities",
        "batch of 9, with log-probabilities",
        "prefill chunk of 17",
        "offload",
        "auto",
        "prefix caching",
        "prefix caching, again",
        "server, one at a time",
        "server, 9 at once",
    ]
    num_tokens = found["batch of 2"]["tokens"]["compared"]
    for name, condition in found.items():
        assert condition["left_out"] is None, name
        assert condition["requests"] == {"compared": 6, "different": 0}, name
        assert condition["tokens"] == {"compared": num_tokens, "different": 0}, name
        is_told = name.startswith(("batch of 9, with", "server"))
        # Its own, and those of the five most likely ones.
        assert condition["logprobs"]["compared"] == 6 * num_tokens * is_told, name
        assert condition["logits"]["compared"] == (0 if name.startswith("server") else num_tokens * 2048), name
    rows = [found[name]["at_once"] for name in ("batch of 2", "batch of 9", "offload", "server, 9 at once")]
    assert rows == [2, 9, 6, 9]
    last = printed.splitlines()[-1]
    assert last.startswith("identical: ") and last.endswith(" log-probabilities in 11 conditions")
    assert "MiB streamed" in printed and "prompt tokens so far were found" in printed
    assert "6 requests, 3 greedy and 3 with a seed; prompts of" in printed and "0 of 6" in printed


def test_a_dependence_on_the_batch_is_counted(tmp_path, capsys, monkeypatch):
    linear = exact.linear
    monkeypatch.setattr(exact, "linear", lambda x, weight, bias=None: linear(x, weight, bias) * (1 + 1e-6 * len(x)))
    figures, found = figures_of([*ENGINE, "--batch", "1,4", "--conditions", "batch"], tmp_path, 1)
    assert not figures["identical"]
    assert found["alone, again"]["requests"]["different"] == found["alone, again"]["logits"]["different"] == 0
    different = found["batch of 4"]
    assert different["requests"] == {"compared": 6, "different": 6}
    assert 0 < different["logits"]["different"] <= different["logits"]["compared"]
    assert different["tokens"]["different"] < different["tokens"]["compared"]
    assert capsys.readouterr().out.endswith("\nDIFFERENT in 1 of 2 conditions: batch of 4 (6 of 6 requests)\n")


def test_a_setting_that_does_not_fit_is_left_out_with_the_reason(capsys):
    # The chunk of a third of the longest prompt is smaller than what is to be captured.
    arguments = [*ENGINE, "--capture-num-tokens", "16,32", "--batch", "2"]
    assert cli.main([*arguments, "--conditions", "batch,chunk"]) == 0
    printed = capsys.readouterr().out
    assert "prefill chunk of 15: left out: --capture-num-tokens [16, 32] holds 32, and a prefill step" in printed
    assert printed.splitlines()[-1].endswith(" logits in 1 condition (left out: prefill chunk of 15)")
    assert cli.main([*arguments, "--conditions", "chunk"]) == 2
    assert capsys.readouterr().err == "exactness.py: nothing was compared: the table says why\n"


def test_a_request_that_fails_is_no_equal_answer(tmp_path, capsys, monkeypatch):
    ask = EngineAsker.ask

    def fail(asker, crowd, **arguments):
        found = ask(asker, crowd, **arguments)
        if len(crowd) > 1:
            asker.failures.append("no such luck")
        return found

    monkeypatch.setattr(EngineAsker, "ask", fail)
    _, found = figures_of([*ENGINE, "--batch", "1,4", "--conditions", "batch,chunk"], tmp_path, 1)
    failures = [condition["failure"] for condition in found.values()]
    assert failures == [None, "no such luck", "no such luck"]
    printed = capsys.readouterr().out
    assert "\nbatch of 4: FAILED: no such luck\n" in printed
    assert "\nDIFFERENT in 2 of 3 conditions: batch of 4 (failed), prefill chunk of 15 (failed)\n" in printed
    monkeypatch.setattr(EngineAsker, "ask", lambda asker, crowd, **_: asker.failures.append("never") or {0: None})
    assert cli.main([*ENGINE, "--requests", "1"]) == 2
    assert "a request alone failed: never" in capsys.readouterr().err


def test_what_a_checkpoint_recommends_does_not_reach_the_server(tmp_path):
    path = make_checkpoint("llama", tmp_path, **engines.SMALL)
    (path / "generation_config.json").write_text(json.dumps({"top_k": 2, "repetition_penalty": 1.5}))
    arguments = [str(path), "--device", "cpu", *SMALL, "--batch", "3", "--conditions", "server"]
    _, found = figures_of([*COMMAND, *arguments], tmp_path, 0)
    assert [found[name]["left_out"] for name in ("server, one at a time", "server, 3 at once")] == [None, None]


def test_an_engine_is_gone_before_the_next_one_is_made(tmp_path):
    arguments = dict(
        model=write_shape("tiny", tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu", block_size=16,
        max_model_len=64, max_num_seqs=2, progress_bar=False,
    )  # fmt: skip
    with open_engine(arguments) as asker:
        runner = weakref.ref(asker.engine.runner)
    assert asker is not None and runner() is None


# Other servers


def test_our_own_server_is_found_identical(tmp_path, capsys):
    arguments = dict(
        model=write_shape("tiny", tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu", block_size=16,
        max_model_len=128, max_num_seqs=8, progress_bar=False,
    )  # fmt: skip
    with local_server(arguments, max_queue=64) as url:
        command = [*COMMAND, "--base-url", url, *SMALL, "--batch", "2,8"]
        figures, found = figures_of(command, tmp_path, 0)
        assert cli.main([*command, "--model", "modle"]) == 2
        assert "--model 'modle' is not served at" in (said := capsys.readouterr()).err and "'model'" in said.err
        assert cli.main([*command, "--output-len", "100"]) == 2
        assert "answered with status 400: the prompt has" in capsys.readouterr().err
    assert list(found) == ["alone, again", "among 2", "among 8"]
    assert all(condition["texts"]["compared"] == 6 for condition in found.values())
    assert all(condition["logprobs"]["compared"] > condition["tokens"]["compared"] > 0 for condition in found.values())
    assert figures["title"].startswith("model at http://127.0.0.1:") and "left out" not in figures["title"]
    assert "versions" not in figures, "those of the server are not known"


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Clients that left are none of its business."""


@contextmanager
def fake_server(answer, models=(200, {"data": [{"id": "fake"}]})):
    """A server whose completions are `answer(body, number of requests that are open)`: a status and a dict."""
    state = {"open": 0, "keys": []}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(*models)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state["open"] += 1
                state["keys"].append(self.headers.get("Authorization"))
            threading.Event().wait(0.02)  # for the others of the crowd to come
            with lock:
                num_open = state["open"]
            threading.Event().wait(0.02)
            with lock:
                state["open"] -= 1
            found = answer(body, num_open)
            if found is None:
                self.close_connection = True  # and nothing said
            else:
                self.send(*found)

        def send(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text, **more):
    return 200, {"choices": [{"text": text, **more}]}


def test_a_server_whose_answers_change_with_others_is_different(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")

    def answer(body, num_open):
        crowded = num_open > 1
        logprobs = {
            "tokens": ["a", "b", "c" if crowded else "d"],
            "token_logprobs": [-1.0, -2.0 - 1e-9 * crowded, -3.0],
            "top_logprobs": None,
        }
        return completion("ab" + "dc"[crowded], logprobs=logprobs)

    with fake_server(answer) as (url, state):
        figures, found = figures_of([*COMMAND, "--base-url", url + "/v1/", *SMALL, "--batch", "4"], tmp_path, 1)
        assert set(state["keys"]) == {"Bearer from-the-environment"}
        state["keys"].clear()
        assert cli.main([*COMMAND, "--base-url", url, "--api-key", "mine", *SMALL, "--batch", "1"]) == 0
        assert set(state["keys"]) == {"Bearer mine"}
    assert found["alone, again"]["requests"]["different"] == 0
    counted = {name: found["among 4"][name] for name in ("requests", "texts", "tokens", "logprobs")}
    assert counted == {
        "requests": {"compared": 6, "different": 6},
        "texts": {"compared": 6, "different": 6},
        "tokens": {"compared": 18, "different": 6},
        "logprobs": {"compared": 18, "different": 6},
    }
    assert figures["title"].startswith("fake at http://127.0.0.1:")
    assert "\nDIFFERENT in 1 of 2 conditions: among 4 (6 of 6 requests)\n" in capsys.readouterr().out


def test_fields_that_a_server_refuses_are_left_out_and_named(capsys):
    def answer(body, num_open):
        for name in ("return_token_ids", "ignore_eos"):
            if name in body:
                return 400, {"error": {"message": f"unknown field {name}"}}
        content = [{"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -0.5}]}]
        return completion("x", logprobs={"content": content})

    with fake_server(answer) as (url, _):
        assert cli.main([*COMMAND, "--base-url", url, *SMALL, "--batch", "3"]) == 0
    printed = capsys.readouterr().out
    assert "the server does not take return_token_ids, ignore_eos, which were left out" in printed
    assert "identical: 12 texts, 12 tokens, 24 log-probabilities in 2 conditions" in printed


@pytest.mark.parametrize(
    "answer, message",
    [
        ((400, {"error": {"message": "no\nthanks"}}), "answered with status 400: no thanks"),
        ((500, "broken"), 'answered with status 500: "broken"'),
        (None, "gave no answer ("),
        ((200, {"choices": []}), "gave an answer of another shape: b'{\"choices\": []}'"),
    ],
)
def test_a_server_that_does_not_answer_is_one_line(answer, message, capsys):
    with fake_server(lambda body, num_open: answer) as (url, _):
        assert cli.main([*COMMAND, "--base-url", url, *SMALL]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


@pytest.mark.parametrize(
    "models, message",
    [
        ((404, {}), "does not list its models: give --model"),
        ((200, {"data": [{"name": "fake"}]}), "does not list its models: is it a server with OpenAI's API?"),
        ((401, {"error": {"message": "who are you"}}), "answered with status 401: who are you"),
    ],
)
def test_a_server_that_does_not_say_what_it_serves_is_one_line(models, message, capsys):
    with fake_server(lambda body, num_open: completion("x"), models) as (url, _):
        assert cli.main([*COMMAND, "--base-url", url, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_a_server_of_ours_that_does_not_start_in_time_says_so(tmp_path, monkeypatch):
    def never_ready(server, sockets):
        while not server.should_exit:
            time.sleep(0.001)

    monkeypatch.setattr("uvicorn.Server.run", never_ready)
    monkeypatch.setattr("exactness_local._START_SECONDS", 0.05)
    arguments = engines.COMMON | dict(model=make_checkpoint("qwen3", tmp_path, **engines.SMALL))
    with pytest.raises(ValueError, match="did not start within 0.05 seconds"), local_server(arguments, max_queue=4):
        pytest.fail("it is there")
    assert not [thread for thread in threading.enumerate() if thread.name == "local-server"]


def test_logits_that_are_no_numbers_are_no_reference():
    answers = [Answer([1], logits=[torch.tensor([1.0, float("nan")])])]
    with pytest.raises(ValueError, match="logits of a request alone are not finite: try another --dtype"):
        check_finite(answers)


def test_one_refused_request_of_many_ends_the_run(capsys):
    def answer(body, num_open):
        return completion("x") if num_open == 1 else (429, {"error": {"message": "too many"}})

    with fake_server(answer) as (url, _):
        assert cli.main([*COMMAND, "--base-url", url, *SMALL, "--batch", "8"]) == 2
    assert "answered with status 429: too many\n" in capsys.readouterr().err


# What is counted


def count(name, wanted, found):
    condition = Condition("x")
    condition.compare([wanted], [found])
    assert condition.requests == comparison.Count(1, getattr(condition, name).different > 0)
    return getattr(condition, name).compared, getattr(condition, name).different


def test_bits_are_compared_and_missing_tokens_count():
    rows = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])]
    other = [torch.tensor([-0.0, 1.0]), torch.tensor([2.0, 3.0])]
    assert count("logits", Answer([1, 2], logits=rows), Answer([1, 2], logits=other)) == (4, 1)
    assert count("logits", Answer([1, 2], logits=rows), Answer([1, 2], logits=rows[:1])) == (4, 2)
    assert count("tokens", Answer([1, 2, 3]), Answer([1, 5])) == (3, 2)
    assert count("tokens", Answer([]), Answer([1])) == (1, 1)
    assert count("texts", Answer(None, "a"), Answer(None, "b")) == (1, 1)
    assert count("texts", Answer(None), Answer(None, "b")) == (0, 0)
    assert count("logprobs", Answer(None, logprobs=[[0.1, 0.1]]), Answer(None, logprobs=[[0.1, 0.2], [3]])) == (3, 2)


def test_requests_share_beginnings_and_crowds_hold_each_once():
    workload = make_workload(16, 1000, 16, 32, seed=0)
    prompts = workload.prompts
    assert len({len(prompt) for prompt in prompts}) > 8 and max(map(len, prompts)) > 32
    for beginning in (prompts[2][:24], prompts[6][:32]):
        assert sum(prompt[: len(beginning)] == beginning for prompt in prompts) == 4
    assert sum(params.is_greedy for params in workload.params) == 8
    for size in (1, 2, 3, 16, 64):
        crowds = workload.crowds(size)
        assert all(len(crowd) == size for crowd in crowds)
        assert sorted(number for crowd in crowds for number, *_ in crowd if number is not None) == list(range(16))
        assert workload.crowds(size) == crowds, "the same each time"
        requests = [request for crowd in crowds for _, *request in crowd]
        assert all(len(prompt) + params.max_tokens <= workload.max_model_len for prompt, params in requests)


# What cannot be used


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--requests", "0"], "--requests 0 must be at least 1"),
        (["--batch", "0,2"], "--batch '0,2' must be whole numbers of at least 1"),
        (["--conditions", "batch,ofload"], "--conditions 'ofload' is not known (did you mean 'offload'?): choose from"),
        (["--api-key", "x"], "--api-key goes with --base-url only"),
        (["--vocab-size", "9"], "--vocab-size goes with --base-url only"),
        (["--enable-prefix-caching"], "--enable-prefix-caching is a condition of its own"),
        (["--requests", "300", "--shape", "qwen3-4b"], "of logits to compare, 4 GiB are allowed: lower --requests"),
        (["--output-json", "/no/such/place/x.json"], "the directory of '/no/such/place/x.json' does not exist"),
        (["--shape", "tinny"], "shape 'tinny' is not known (did you mean 'tiny'?)"),
        (["/no/such/model"], "model '/no/such/model' does not exist"),
        (["qwen3-4b"], "'qwen3-4b' is a shape, which has random weights: give --shape qwen3-4b"),
        (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached ([Errno 111] Conn"),
        (["--base-url", "ftp://x"], "--base-url 'ftp://x' is no address: give one such as http://"),
        (["--base-url", "http://x:port"], "--base-url 'http://x:port' is no address"),
        (["--base-url", "localhost:8000"], "--base-url 'localhost:8000' is no address"),
        (["--base-url", "http://x", "--shape", "tiny"], "--shape is for an engine here, --base-url asks a server"),
        (["--base-url", "http://x", "--dtype", "float16"], "--dtype is for an engine here, --base-url asks a server"),
        (["--base-url", "http://x", "--conditions", "batch"], "--conditions is for an engine here"),
        (["--base-url", "http://x", "--vocab-size", "3"], "--vocab-size 3 must be at least 4"),
    ],
)
def test_a_bad_option_is_one_line(arguments, message, capsys):
    assert cli.main([*COMMAND, "--no-progress", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_an_unknown_option_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*COMMAND, "--base-ulr", "http://x"])
    assert stop.value.code == 2 and "unknown option --base-ulr: did you mean --base-url?" in capsys.readouterr().err
