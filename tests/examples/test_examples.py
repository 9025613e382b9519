"""Each example, run as a user runs it, with the model that comes along: it knows the right answers."""

import contextlib
import io
import json
import re
import runpy
import socket
import sys
import threading
from pathlib import Path
from random import Random

import pytest
import uvicorn

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.recall.text import Author, write_document
from nanoinfer.serve.app import AppSettings, create_app
from nanoinfer.serve.async_engine import AsyncEngine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTES = "Records. The pass key of Mira Holt is 48192. The pass key of Mira Lowell is 70355."


def run(monkeypatch, name: str, *arguments: str, typed: str = "") -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_listed_and_run():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == names
    assert {name for name in re.findall(r'"(\w+\.py)"', Path(__file__).read_text())} == names


def test_a_batch_gives_an_answer_for_each_line(monkeypatch, capsys, tmp_path):
    prompts = [f"{NOTES} Question: What is the pass key of Mira {name}?" for name in ("Holt", "Lowell")]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts))
    run(monkeypatch, "batch.py", "recall", tmp_path / "prompts.txt")
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in answers] == prompts
    assert ["48192" in answers[0]["answer"], "70355" in answers[1]["answer"]] == [True, True]
    assert [one["finish_reason"] for one in answers] == ["stop", "stop"]


def test_a_chat_keeps_its_history(monkeypatch, capsys):
    typed = "".join(f"What is the pass key of Mira {name}?\n" for name in ("Holt", "Lowell"))
    run(monkeypatch, "chat.py", "recall", "--system", NOTES, typed=typed)
    said = "> The pass key of Mira Holt is 48192.\n> The pass key of Mira Lowell is 70355.\n> "
    assert capsys.readouterr().out == said


def test_a_long_document_is_read_once(monkeypatch, capsys, tmp_path):
    document = write_document(Author(Random(0)), 1500, lambda fragments: len("".join(fragments).split()), [0.1, 0.6])
    (tmp_path / "document.txt").write_text(document.text)
    asked = re.findall(r"The pass key of (\w+ \w+) is (\d+)\.", document.text)[::3][:2]
    questions = [f"What is the pass key of {name}?" for name, _ in asked]
    # Four blocks of KV on the GPU, and more in the document.
    limit = ["--gpu-memory-limit", "160MiB"]
    run(monkeypatch, "long_document.py", "recall", tmp_path / "document.txt", *questions, *limit)
    out, err = capsys.readouterr()
    assert re.findall(r"is (\d+)\.", out) == [key for _, key in asked]
    num_tokens = int(re.search(r"read: +100%\|[^|]*\| (\d+)/\1 ", err)[1])
    num_cached, num_mib = re.search(r"\n([\d,]+) prompt tokens from the cache, ([\d,]+) MiB streamed", err).groups()
    assert int(num_cached.replace(",", "")) == num_tokens // 256 * 256  # the second question's document
    assert int(num_mib.replace(",", "")) > 0


def test_a_small_card_runs_within_its_plan(monkeypatch, capsys):
    limits = ["--host-memory-limit", "64MiB", "--max-model-len", "1024"]
    prompt = f"{NOTES} Question: What is the pass key of Mira Holt?"
    run(monkeypatch, "small_card.py", "recall", prompt, "--gpu-memory-limit", "256MiB", *limits)
    out, err = capsys.readouterr()
    assert "48192" in out
    assert re.search(r"GPU memory +0\.\d\d of 0\.25 GiB", err)
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, "small_card.py", "recall", prompt, "--gpu-memory-limit", "2MiB", *limits)
    out, err = capsys.readouterr()
    assert "does not fit" in err and not out


def test_switching_modes_changes_no_token(monkeypatch, capsys):
    run(monkeypatch, "switch_modes.py", "recall", NOTES)
    out = capsys.readouterr().out
    assert re.search(r"\[offload\].*\[resident\].*\nthe same tokens$", out, re.DOTALL)


@contextlib.contextmanager
def served(model: str):
    """The server on a free port, in a thread."""
    config = EngineConfig(model=model, device="cpu", max_num_seqs=2, max_model_len=512, progress_bar=False)
    engine = AsyncEngine(lambda: LLMEngine(config), max_queue=8)
    engine.start()
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(engine, AppSettings(served_model_names=[model]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        engine.close()


def test_openais_client_gets_a_streamed_answer(monkeypatch, capsys):
    prompt = f"{NOTES} Question: What is the pass key of Mira Holt?"
    with served("recall") as url:
        run(monkeypatch, "openai_client.py", "recall", prompt, "--base-url", url)
    assert re.search(r"Mira Holt is 48192\.\n\d+ tokens in, \d+ out\n$", capsys.readouterr().out)


def test_anthropics_client_gets_a_streamed_answer(capsys):
    snippet = re.search(r"```python\n(.*?)```", (EXAMPLES.parent / "docs" / "agents.md").read_text(), re.DOTALL)[1]
    prompt = f"{NOTES} Question: What is the pass key of Mira Holt?"
    with served("recall") as url:
        for text, other in {
            "http://127.0.0.1:8000": url.removesuffix("/v1"), "MODEL": "recall", "What is a KV cache?": prompt,
        }.items():  # fmt: skip
            assert text in snippet
            snippet = snippet.replace(text, other)
        exec(compile(snippet, "agents.md", "exec"), {})
    assert "Mira Holt is 48192." in capsys.readouterr().out
