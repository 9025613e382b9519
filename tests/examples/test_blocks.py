"""Every block of README and docs that can be pasted into a shell is run: by bash, whose programs note what they are
given, and each of these calls then by the program itself, on a tiny model in place of a large one."""

import io
import json
import re
import runpy
import shlex
import subprocess
import tomllib
import unittest.mock
from dataclasses import replace
from pathlib import Path

import pytest
from serving import make_served_checkpoint

from nanoinfer.bench import beyond, replay, texts
from nanoinfer.commands import bench, recall, serve, top
from nanoinfer.commands import main as cli
from nanoinfer.gguf.sources import PACKAGES
from nanoinfer.serve.fields import Fields, parse
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.verify import check
from nanoinfer.verify.runs import make_runs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("nanoinfer", "python", "pip", "make", "curl")
OTHERS = ("claude", "docker", "lm_eval", "ray", "serve")
NOTING = (
    '#!/bin/sh\nprintf "%s\\\\0" "$(basename "$0")" "$@" >> "$CALLS"; printf "\\\\001" >> "$CALLS"; cat > /dev/null\n'
)
# In place of models that no test has, of what they need, and of what would take long.
SMALL = {
    "--gpu-memory-limit": "256MiB", "--host-memory-limit": "64MiB", "--max-model-len": "256", "--shape": "tiny",
    "--requests": "2", "--questions": "5", "--port": "0",
    "--link-gbps": "0.5", "--context": "40",
}  # fmt: skip
ALWAYS = {
    "generate": ["-n", "2"], "quantize": [], "chat": ["--max-model-len", "256"], "serve": ["--port", "0"],
    "verify": ["--context", "512", "--output-len", "4"], "doctor": [], "top": ["--interval", "0.01"],
    "bench": ["--context", "40", "--output-len", "4", "--mode", "resident", "--no-progress"],
    "bench latency": ["--input-len", "20", "--output-len", "4", "--num-iters", "1", "--shape", "tiny"],
    "bench throughput": ["--input-len", "20", "--output-len", "4", "--num-prompts", "2", "--shape", "tiny"],
    "eval recall": ["--context", "768", "--depths", "0.5", "--questions", "5", "--no-progress"],
}  # fmt: skip


def blocks(path: Path) -> list[str]:
    """The blocks that a reader pastes: each line of them begins with a program."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    found = [block for language, block in fenced if language in ("", "bash", "sh")]
    program = re.compile(rf"(?:\w+=\S+ )*(?:export |source |printf |(?:{'|'.join((*OURS, *OTHERS))})(?![\w:]))")
    return [re.sub(r" \[(--[^\]]*)\]", r" \1", block) for block in found if program.match(block)]


def calls(block: str, folder: Path) -> list[list[str]]:
    """What bash calls of a block, as words."""
    for name in (*OURS, *OTHERS):
        (folder / name).write_text(NOTING)
        (folder / name).chmod(0o755)
    noted = folder / "calls"
    noted.touch()
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(noted)}
    block = block.replace("source .venv/bin/activate", ":")
    process = subprocess.run(
        ["bash", "-e"], input=block, cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    assert process.returncode == 0 and not process.stderr, f"{block}\n{process.stderr}"
    return [words.split("\0")[:-1] for words in noted.read_text().split("\1")[:-1]]


BLOCKS = [(path, block) for path in PAGES for block in blocks(path)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_served_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Commands end before they would listen, or go on for long; they write to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "_serve", lambda server, listener: None)
    monkeypatch.setattr(serve, "_run_replicas", lambda options: 0 if serve.replicas_of(options) else 1)
    monkeypatch.setattr(top.Looks, "look", lambda looks: "nobody answers here")
    monkeypatch.setattr(check, "make_runs", lambda *given: make_runs(*given)[:1])
    monkeypatch.setattr(recall, "checkpoint_sha256", lambda path: None)
    monkeypatch.setattr(texts, "parsed", short)
    monkeypatch.setattr(beyond, "parsed", short)
    monkeypatch.setattr(beyond, "FORMATS", beyond.FORMATS[:1])
    monkeypatch.setattr(replay, "REPEATS", 1)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))


def short(content: str, parsed=texts.parsed) -> texts.Texts:
    """Texts whose answers are short."""
    found = parsed(content)
    return replace(found, cases={name: (prompt, answer[:3]) for name, (prompt, answer) in found.cases.items()})


def small(words: list[str], model: str) -> list[str]:
    """A command on the tiny model, with little of everything."""
    name = words[0] if words[0] not in ("bench", "eval") or words[1].startswith("-") else " ".join(words[:2])
    if name == "plan":
        return ["qwen3-8b" if word.startswith("Qwen/") else word for word in words]
    found = list(words)
    for place, word in enumerate(words):
        if word in SMALL:
            found[place + 1] = SMALL[word]
        if word in ("--mode", "--quantization"):  # of several the last
            found[place + 1] = words[place + 1].rpartition(",")[2]
        if re.fullmatch(r"MODEL|smollm2|Qwen/\S+|qwen3-\S+|model\.gguf", word) and words[place - 1] != "--out":
            found[place] = found[place] if words[place - 1] == "--shape" else model
    device = [] if "--device" in words or name in ("list", "completion", "top") else ["--device", "cpu"]
    return [*found, *device, *ALWAYS.get(name, [])]


def run(words: list[str], model: str) -> None:
    program, *rest = words
    if program == "nanoinfer":
        command = small(rest, model)
        assert cli.main(command) == 0, shlex.join(command)
    elif program == "python" and rest[0] == "bench_offload.py":
        name = ["eval", "recall"] if "--task" in rest else ["bench", "offload"]
        assert bench.main(small([*name, *rest[1:]], model)[2:]) == 0, rest
    elif program == "python" and rest[0] == "-m":
        with unittest.mock.patch("sys.argv", rest[1:]):
            runpy.run_path(ROOT.joinpath(*rest[1].split(".")).with_suffix(".py"), run_name="__main__")
    elif program == "python":
        source = (ROOT / rest[0]).read_text()
        own = re.findall(r'"(--[a-z-]+)"', source)
        shared = "add_engine" in source or "add_arguments" in source
        assert [one for one in rest[1:] if one.startswith("--") and one not in own and not shared] == [], rest
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.fullmatch(r"\.\[([a-z,]+)\]", rest[-1])
        assert set(named[1].split(",")) <= set(extras) if named else rest[-1] in PACKAGES.values(), rest
    elif program == "make":
        targets = [one for one in rest if "=" not in one] or ["setup"]
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(targets) <= set(known), rest
    elif program == "curl":
        body = json.loads(rest[rest.index("-d") + 1])
        assert "/v1/chat/completions" in " ".join(rest) and parse(ChatRequest, json.dumps(body).encode(), Fields())
    elif program == "docker":
        run(rest[rest.index("IMAGE") + 1 :], model)
    else:
        assert program in OTHERS


def test_blocks_are_found():
    assert len(BLOCKS) > 25 and len([one for one in BLOCKS if one[0].name == "README.md"]) >= 5
    assert {path.name for path, _ in BLOCKS} >= {"chat.md", "serve.md", "verify.md", "planner.md", "fleet.md"}


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda number: f"{BLOCKS[number][0].name}-{number}")
def test_a_block_runs_as_it_is_pasted(number, model, quick, tmp_path):
    found = calls(BLOCKS[number][1], tmp_path)
    assert found or BLOCKS[number][1].startswith("export")
    for words in found:
        run(words, model)
