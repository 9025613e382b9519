"""What a command does about its model before anything that takes long is imported or loaded."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_models import write_gguf
from tiny_models import make_checkpoint

from nanoinfer.commands import main as cli
from nanoinfer.commands import model
from nanoinfer.devices import registry
from nanoinfer.devices.registry import device_of
from nanoinfer.memory import here
from nanoinfer.options.engine import engine_arguments
from nanoinfer.weights import find, lying_here
from nanoinfer.weights.lying_here import models_here

ROOT = Path(__file__).resolve().parents[2]
# Runs commands, each with a text in its stdin, and prints of each its code, what it said, and whether torch is there.
WATCHED = """
import contextlib, io, json, sys, tempfile
from nanoinfer.commands.main import main

for command, given in json.loads(sys.argv[1]):
    sys.stdin = tempfile.TemporaryFile("w+")
    sys.stdin.write(given)
    sys.stdin.seek(0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as heard:
        code = main(command)
    print(json.dumps([code, heard.getvalue(), "torch" in sys.modules]))
"""


def assert_refused_without_torch(expected, given="hello"):
    """expected: commands, and what each says. In one process: it takes half a second to start."""
    commands = [([str(word) for word in command], given) for command, _ in expected]
    process = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(expected), process.stderr
    for (command, said), (code, heard, has_torch) in zip(expected, results, strict=True):
        assert code == 2 and said in heard and not has_torch, (command, heard)


def test_what_can_be_refused_at_once_is_refused_without_torch():
    no_model = "tests holds no config.json and no GGUF file: give the directory of a"
    assert_refused_without_torch(
        [
            (["generate", "no-such", "x"], "model 'no-such' does not exist"),
            (["chat", "qwne3-8b"], "did you mean 'qwen3-8b'"),
            (["serve", "/no/such/folder"], "does not exist"),
            (["serve", "tests"], no_model),
            (["chat", "tests"], no_model),
            (["plan", "no-such"], "does not exist"),
            (["verify", "no-such"], "does not exist"),
            (["quantize", "no-such", "--to", "int4", "--out", "x"], "does not exist"),
            (["bench", "latency", "no-such"], "does not exist"),
        ]
    )


def test_a_text_that_did_not_come_is_asked_for_without_torch():
    said = "nothing came from stdin"
    assert_refused_without_torch([(["generate", "recall"], said), (["chat", "recall"], said)], given="")


def test_a_chat_with_a_file_without_a_template_is_refused_without_torch(tmp_path):
    path = write_gguf("llama", make_checkpoint("llama", tmp_path / "hf"), tmp_path / "model.gguf")
    said = "has no chat template: give one with --chat-template FILE"
    commands = ["chat", path], ["generate", path, "--chat", "-p", "x"], ["generate", path, "--system", "x", "-p", "x"]
    assert_refused_without_torch([(command, said) for command in commands])


def test_a_directory_without_a_tokenizer_is_refused_without_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    said = "has no tokenizer: give a directory or hub id that has its own with"
    assert_refused_without_torch([(["chat", tmp_path], said), (["generate", tmp_path, "-p", "x"], said)])
    options = argparse.Namespace(model=str(tmp_path), chat_template=None, tokenizer=None)
    model.prepare(options, takes_text=False, say=[].append)


@pytest.mark.parametrize(
    "files, has_one",
    [
        ({"tokenizer_config.json": {}}, False),
        ({"tokenizer_config.json": {"chat_template": "x"}}, True),
        ({"tokenizer_config.json": {}, "chat_template.jinja": ""}, True),
        ({"tokenizer_config.json": []}, True),
        ({}, True),
    ],
)
def test_a_directory_without_a_template_is_refused_where_its_files_say_so(files, has_one, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    options = argparse.Namespace(model=str(tmp_path), chat_template=None, tokenizer=None)
    if has_one:
        model.prepare(options, is_chat=True)
    else:
        with pytest.raises(ValueError, match="has no chat template"):
            model.prepare(options, is_chat=True)
        model.prepare(argparse.Namespace(**vars(options) | dict(chat_template="given")), is_chat=True)
        model.prepare(options)


# Names, and formats


class Gpu(type(device_of(registry.resolve_device("cpu")))):
    is_host = False
    name = "NVIDIA GeForce RTX 4070"

    def memory(self):
        return 11 * 2**30, 12 * 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A card with 12 GB for `here`, of which the planner is told as of a limit."""
    place = registry.resolve_device("cpu")
    monkeypatch.setattr(here, "device_of", lambda _: Gpu(place))
    monkeypatch.setattr(here, "forecaster", lambda name, **asked: forecaster(name, **asked | dict(gpu="RTX 4070")))
    return place


def forecaster(name, **asked):
    from nanoinfer.memory.forecaster import forecaster as made

    asked["host_memory_limit"] = asked.get("host_memory_limit") or "64GiB"
    return made(name, **asked)


@pytest.mark.parametrize(
    "name, quantization, words",
    [("qwen3-0.6b", None, ""), ("qwen3-8b", "int4", "weights in int4"), ("gpt-oss-20b", None, "")],
)
def test_a_name_has_the_format_that_the_plan_finds_fastest(name, quantization, words, gpu):
    changes, said = here.best_format(name, dict(enable_cpu_offload="auto", max_num_seqs=1, max_model_len=8192))
    assert changes.get("quantization") == quantization and words in said and bool(changes) == bool(said)


def test_a_plan_of_a_bare_name_says_what_a_server_takes_instead(gpu, capsys):
    limits = ["--gpu", "RTX 4070", "--host-memory-limit", "64GiB"]
    changes, what = here.best_format("qwen3-8b", dict(enable_cpu_offload="auto"))
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    assert cli.main(["plan", "qwen3-8b", *limits]) == 0
    said = f"The plan is of the weights as they are. nanoinfer serve qwen3-8b takes {what}; to plan that, add {words}."
    assert capsys.readouterr().out.splitlines()[-1] == said and what and words
    for given in (["qwen3-8b", *words.split()], ["qwen3-0.6b"]):
        assert cli.main(["plan", *given, *limits]) == 0
        assert "as they are" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["chat"], ["generate", "-p", "x"], ["serve"]], ids=lambda one: one[0])
def test_a_command_has_its_own_settings_planned(command, gpu):
    options = cli.make_parser().parse_args([command[0], "qwen3-8b", *command[1:], "--max-model-len", "8k"])
    changes, _ = here.best_format(options.model, engine_arguments(options))
    assert changes == {"quantization": "int4"}


def test_weights_stay_as_they_are_on_a_host():
    assert here.best_format("qwen3-32b", dict(device="cpu")) == ({}, "")


def test_a_bare_name_says_what_it_is_and_what_is_changed_and_a_folder_or_an_id_has_no_other_format(
    tmp_path, monkeypatch, capsys
):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(find, "snapshot_download", lambda *_, dry_run=False, **__: [] if dry_run else str(tmp_path))
    asked = []

    def best(name, arguments):
        asked.append(name)
        return {"quantization": "int4"}, "weights in int4"

    monkeypatch.setattr(here, "best_format", best)

    def prepared(name, *words):
        options = cli.make_parser().parse_args(["generate", name, "x", *words])
        model.prepare(options)
        return options.quantization, capsys.readouterr().err

    name, said = prepared("qwen3-8b")
    assert name == "int4" and said.splitlines() == [
        "nanoinfer generate: qwen3-8b is Qwen/Qwen3-8B",
        "nanoinfer generate: weights in int4, in which it is fastest on this GPU (nanoinfer plan qwen3-8b says more)",
    ]
    assert prepared("qwen3-8b", "--quantization", "int8")[0] == "int8"
    first = prepared("qwen3:8b", "--quantization", "int8")[1].splitlines()[0]
    assert first.endswith("qwen3:8b is Qwen/Qwen3-8B, the hub's checkpoint, and not Ollama's file: ollama:qwen3:8b")
    assert prepared("Qwen/Qwen3-8B") == (None, "") and prepared(str(tmp_path)) == (None, "")
    assert asked == ["qwen3-8b"]


def test_a_line_says_what_is_loaded_and_how_large_it_is(tmp_path):
    said = []
    options = argparse.Namespace(model="recall", chat_template=None, tokenizer=None)
    model.prepare(options, say=said.append)
    assert len(said) == 1 and said[0].startswith("loading recall, ") and said[0].endswith(" MiB")


# What lies here


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(lying_here, "PACKAGED", {})
    monkeypatch.setattr(lying_here, "PACKAGES", ())
    hub = tmp_path / "hub"
    monkeypatch.setattr(lying_here, "scan_cache_dir", lambda: cached(hub))
    return tmp_path


def cached(folder):
    def repository(name, kind="model"):
        revisions = [SimpleNamespace(last_modified=place, snapshot_path=folder / name / one)
                     for place, one in enumerate(("old", "new"))]  # fmt: skip
        return SimpleNamespace(repo_id=f"org/{name}", repo_type=kind, revisions=revisions)

    return SimpleNamespace(repos=[repository("b"), repository("a-GGUF"), repository("data", "dataset")])


def lay(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 2**20)


def test_what_lies_here_goes_by_names_that_commands_take(home):
    lay(home / "hub" / "b" / "new", "config.json", "model-1.safetensors", "model-2.safetensors")
    lay(home / "hub" / "b" / "old", "x-Q4_0.gguf")
    lay(home / "hub" / "a-GGUF" / "new", "a-Q4_K_M.gguf", "a-mmproj.gguf", "b-Q4_K_M.gguf")
    lay(home / "hub" / "data" / "new", "c-Q4_0.gguf")
    shards = "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"
    lay(home / ".lmstudio" / "models" / "pub" / "x-GGUF", *shards)
    found = {one.name: one.num_bytes // 2**20 for one in models_here()}
    other = str(home / "hub" / "a-GGUF" / "new" / "b-Q4_K_M.gguf")
    assert found == {"org/a-GGUF:Q4_K_M": 1, other: 1, "org/b": 2, "pub/x-GGUF:Q8_0": 2}
    for name in ("pub/x-GGUF:Q8_0", other):
        assert find.find_model(name) in [one.path for one in models_here()]


@pytest.mark.parametrize("word", ["list", "ls"])
def test_the_list_says_what_becomes_of_each(word, home, capsys, monkeypatch):
    lay(home / "hub" / "b" / "new", "config.json", "model.safetensors")
    monkeypatch.setattr(lying_here, "PACKAGED", {"recall": find.PACKAGED["recall"]})
    assert cli.main([word, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=3)[::3] == ["recall", "runs on the CPU"]
    assert lines[1].startswith("org/b ") and "MiB  does not run: " in lines[1] and "not readable as JSON" in lines[1]
    assert lines[-1].startswith("2 models; others are downloaded when they are first used")


@pytest.mark.parametrize(
    "name, said", [("qwen3-0.6b", r"at most \d+ tokens/s"), ("qwen3-8b", r"at most \d+ tokens/s, streams")]
)
def test_a_gpu_has_the_time_of_the_plan(name, said, gpu, monkeypatch):
    assert re.fullmatch(said, here.what_becomes_of(name, "cpu"))


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(here, "memory_available_bytes", lambda: 2**20)
    assert here.what_becomes_of(find.PACKAGED["recall"], "cpu").startswith("needs 10.2")


def test_run_is_another_name_of_chat():
    options = cli.make_parser().parse_args(["run", "m"])
    assert options.run is cli.make_parser().parse_args(["chat", "m"]).run
