"""What `--help` shows, what an unknown option is told, and that each thing has one name."""

import argparse
import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.commands.main import main, make_parser
from nanoinfer.common import other_names
from nanoinfer.common.other_names import (
    COMMANDS,
    ENVIRONMENT,
    INSTEAD,
    MEANT,
    NO_PATHS,
    PATHS,
    VALUES_MEANT,
    takes_also,
)
from nanoinfer.common.told_elsewhere import TOLD_ELSEWHERE
from nanoinfer.common.unsupported import ENGINE
from nanoinfer.options import engine
from nanoinfer.options.engine import option_names
from nanoinfer.options.parser import Parser

ROOT = Path(__file__).resolve().parents[2]
FIELDS = [field.name for field in fields(nanoinfer.EngineConfig)]


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


PARSERS = {parser.prog: parser for parser in parsers(make_parser())}


@pytest.mark.parametrize("name", PARSERS)
def test_a_command_says_what_it_is_for_and_each_option_what_it_does(name):
    parser = PARSERS[name]
    assert parser.description and [action.dest for action in parser._actions if not action.help] == []
    usage = parser.format_usage()
    assert usage.startswith(f"usage: {name} [options]") and usage.count("\n") == 1


def said(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    printed = capsys.readouterr()
    assert stop.value.code == (0 if "--help" in arguments else 2)
    return printed.out or printed.err


def test_options_stand_in_groups_with_the_usual_ones_first(capsys):
    text = said(["serve", "--help"], capsys)
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert titles == ["positional arguments", "options", "length and memory", "model and formats", "machine",
                      "tuning and tests", "clients and their requests", "replicas", "log"]  # fmt: skip
    places = [text.index(f"\n  --{name} ") for name in ("port", "max-model-len", "gpu-memory-limit", "dtype",
                                                        "block-size", "max-queue")]  # fmt: skip
    assert places == sorted(places)
    text = said(["generate", "--help"], capsys)
    assert text.index("--prompt") < text.index("sampling:") < text.index("--top-k") < text.index("length and memory:")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan", "verify", "bench latency", "eval recall"])
def test_help_says_one_default_of_an_option(command, capsys):
    text = " ".join(said([*command.split(), "--help"], capsys).split())
    parts = re.split(r" (?=--[a-z])", text)
    assert [part for part in parts if re.search(r"\bDefault\b", part) and "(default: " in part] == []
    if command in ("generate", "chat"):
        assert "--max-num-seqs N the most sequences that run at once (default: 1)" in text


def test_a_field_in_no_group_comes_last(monkeypatch):
    monkeypatch.setitem(engine.GROUPS, "machine", ("attention_backend",))
    parser = Parser(prog="p")
    engine.add_engine_options(parser, ("device", "dtype", "seed"))
    text = parser.format_help()
    assert "machine:" not in text and text.index("tuning and tests:") < text.index("--device") < text.index("--seed")


def test_other_spellings_are_taken_and_shown_nowhere(capsys):
    others = [name for field in FIELDS for name in option_names(field)[1:]]
    assert {"--gpu-memory", "--host-memory"} <= set(others)
    for command in ("serve", "generate", "plan", "verify", "bench offload"):
        text = said([*command.split(), "--help"], capsys)
        assert not [name for name in [*others, *["--context"] * (command == "plan")] if f"{name} " in text]
    given = ["plan", "m", "--gpu-memory=1GiB", "--host-memory", "2GiB", "--context", "4k", "--max-num-seqs", "3"]
    options = make_parser().parse_args(given)
    assert (options.gpu_memory_limit, options.host_memory_limit) == ("1GiB", "2GiB")
    assert (options.max_model_len, options.batch) == (4096, 3)
    for name in others:
        assert name in PARSERS["nanoinfer serve"].known


def test_documents_have_the_names_that_are_shown():
    others = [name for field in FIELDS for name in option_names(field)[1:]]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        assert not re.findall(rf"(?:{'|'.join(others)})(?![\w-])", text), path
        assert not re.findall(r"nanoinfer plan [^\n]*--context", text), path


@pytest.mark.parametrize(
    "given, message",
    [
        # llama.cpp
        ("--ctx-size=4096", "did you mean --max-model-len?"),
        ("--n-gpu-layers=99", "is not supported: what does not fit on the GPU streams to it by itself: leave it out"),
        ("-ngl", "is not supported: what does not fit on the GPU streams to it by itself: leave it out"),
        ("--parallel", "did you mean --max-num-seqs?"),
        ("-ub", "did you mean --max-num-batched-tokens?"),
        ("--no-kv-offload", "did you mean --offload?"),
        ("--cache-type", "did you mean --kv-cache-dtype?"),
        ("--flash-attn", "is not supported: attention never holds all scores at once: leave it out"),
        ("--rope-freq-base", "did you mean --hf-overrides?"),
        ("-hf", "a name such as qwen3-8b, a directory, a GGUF file or a hub id"),
        ("--threads", "is not supported: torch chooses the threads"),
        ("--no-mmap", "is not supported: files are read, and not mapped: leave it out"),
        ("--mmproj", "is not supported: models here read text only: leave it out"),
        ("--mlock", "is not supported: what lies in host memory is pinned where the system allows it"),
        (
            "--prompt-cache",
            "is not supported: the prefix cache lies in memory and ends with the process, so there is no file",
        ),
        ("--slot-save-path", "is not supported: the prefix cache lies in memory"),
        ("--mirostat", "is not supported: there is no such sampler: give temperature, top_p, top_k or min_p"),
        ("--offline", "is not supported: set the environment variable HF_HUB_OFFLINE=1"),
        ("--no-webui", "is not supported: the server has a page of its own at /, which --no-page leaves out"),
        ("--format", "is not supported: a request to nanoinfer serve may have response_format"),
        ("-cnv", "is not supported: nanoinfer chat MODEL is a conversation"),
        ("--model-draft", "is not supported: no second model drafts"),
        # Ollama
        ("--num-ctx", "did you mean --max-model-len?"),
        ("--num-gpu", "is not supported: what does not fit on the GPU streams"),
        ("--num-batch", "did you mean --max-num-batched-tokens?"),
        ("--keep-alive", "is not supported: the model stays loaded"),
        # vLLM
        ("--pp", "is not supported: give --tensor-parallel-size"),
        ("-tp", "did you mean --tensor-parallel-size?"),
        ("--no-enable-chunked-prefill", "is not supported: prompts are computed in chunks of --max-num-batched-tokens"),
        ("--uvicorn-log-lvl", "unknown option --uvicorn-log-lvl"),
        ("--gpu-memry", "did you mean --gpu-memory-limit?"),  # nearest is another spelling
    ],
)
def test_an_option_of_another_program_is_told_what_means_the_same(given, message, capsys):
    (error,) = said(["serve", "m", given, "1"], capsys).splitlines()
    assert error.startswith(f"nanoinfer serve: error: {'unknown option ' * ('is not supp' not in message)}".strip())
    assert given.split("=")[0] in error and message in error


@pytest.mark.parametrize(
    "command, given, message",
    [
        (
            "serve",
            "--reasoning",
            'each request says it, as "reasoning_effort": "none" or "chat_template_kwargs": {"enable_thinking": false}',
        ),
        ("serve", "--chat-template-kwargs", '"chat_template_kwargs": {"enable_thinking": false}'),
        ("serve", "--reasoning-budget", "each request says it, as thinking_token_budget"),
        (
            "serve",
            "--system",
            "--system is no option of nanoinfer serve: clients send it with each request, as a message",
        ),
        ("serve", "--temperature", "and where they do not, the checkpoint's generation_config.json counts"),
        ("serve", "--repeat-penalty", "and where they do not, the checkpoint's generation_config.json counts"),
        ("serve", "--no-enable-log-requests", "--log-level warning logs no requests, info a line for each"),
        ("chat", "--repeat-penalty", "set it in the chat, such as /set repetition_penalty 1.1"),
        ("chat", "--think", "give --chat-template-kwargs '{\"enable_thinking\": false}'"),
        ("chat", "--host", "--host is no option of nanoinfer chat: nanoinfer serve has it"),
        ("generate", "--repeat-penalty", "requests and SamplingParams have it by its name, such as repetition_penalty"),
        ("generate", "--chat-template-kwargs", "requests and LLM.chat have chat_template_kwargs"),
        ("plan", "--device", "give the card with --gpu, or its memory with --gpu-memory-limit"),
        ("generate", "--image", "--image is not supported: models here read text only: leave it out"),
        ("generate", "--prompt-file", "--prompt-file is not supported: pipe the file into the command: < FILE"),
        ("chat", "--system-prompt-file", 'is not supported: give its text: --system "$(cat FILE)"'),
        ("serve", "--log-file", "is not supported: the log goes to stderr: redirect it, 2> FILE"),
        ("serve", "--hf-overrides-file", "unknown option --hf-overrides-file: nanoinfer serve --help lists them"),
        ("serve", "--chat-templat-file", "unknown option --chat-templat-file: did you mean --chat-template?"),
    ],
)
def test_what_a_command_has_no_option_for_is_told_where_it_is_said(command, given, message, capsys):
    assert said([command, "m", given, "x"], capsys).endswith(f"{message}\n")


@pytest.mark.parametrize(
    "given, message",
    [
        ("llama-run", "there is no command 'llama-run' here: use nanoinfer chat MODEL, or nanoinfer generate MODEL"),
        ("pull", "there is no command 'pull' here: none is needed: a model is downloaded when it is first used"),
        ("ps", "GET /v1/models"),
        ("show", "use nanoinfer plan MODEL"),
        ("cli", "use nanoinfer chat MODEL"),
        ("rm", "delete its files: hf cache ls, then hf cache rm model/ORG/NAME; of Ollama, ollama rm NAME"),
        ("stop", "a model is loaded as long as its command runs, which Ctrl-C ends"),
        ("create", "there is no Modelfile: give the options, and the system's message in the request"),
        ("run-batch", "use examples/batch.py"),
        ("update", "in the clone, git pull && make"),
        ("llama_server", "use nanoinfer serve MODEL"),
        ("Qwen/Qwen3-4B", "'Qwen/Qwen3-4B' is no command. If it is a model: nanoinfer chat Qwen/Qwen3-4B"),
        ("severe", "'severe' is not known: did you mean serve? choose from bench, chat"),
    ],
)
def test_a_command_of_another_program_is_told_what_to_run(given, message, capsys):
    assert message in said([given, "m", "--port", "1"], capsys)


def test_a_seed_that_is_left_out_is_the_same_each_time(capsys):
    text = " ".join(said(["generate", "--help"], capsys).split())
    drawn = f"(default: drawn from the engine's, which is {nanoinfer.EngineConfig.seed}, so that the command gives"
    assert drawn in text


@pytest.mark.parametrize("kind, is_file", [("Q4_K_M", True), ("IQ4_XS", True), ("bitsandbytes", False)])
def test_a_type_of_gguf_is_told_to_be_a_file(kind, is_file):
    with pytest.raises(ValueError, match="did you mean 'int4'.*give one of int4") as error:
        nanoinfer.EngineConfig(model="m", quantization=kind)
    assert ("give org/name-GGUF:TYPE as the model" in str(error.value)) is is_file


@pytest.mark.parametrize("given, same", [(["help"], ["--help"]), (["help", "serve"], ["serve", "--help"])])
def test_help_is_a_command_too(given, same, capsys):
    texts = []
    for words in (given, same):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_version_is_a_command_too(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["version"])
    assert capsys.readouterr().out == f"nanoinfer {nanoinfer.__version__}\n"


def test_no_option_that_a_command_has_is_told_elsewhere():
    for command, told in TOLD_ELSEWHERE.items():
        known = PARSERS[f"nanoinfer {command}"].known
        assert [name for name in told if f"--{name.replace('_', '-')}" in known or f"-{name}" in known] == []


def test_no_command_of_others_is_one_of_ours_and_what_is_told_instead_exists():
    ours = {name.removeprefix("nanoinfer ").split()[0] for name in PARSERS if name != "nanoinfer"}
    assert not ours & COMMANDS.keys()
    named = {name for advice in COMMANDS.values() for name in re.findall(r"nanoinfer (\w+)", advice)}
    assert len(named) > 5 and named <= ours
    scripts = {name for advice in COMMANDS.values() for name in re.findall(r"(?:examples|tools)/\w+\.py", advice)}
    assert len(scripts) > 1 and [name for name in scripts if not (ROOT / name).is_file()] == []


def test_sampling_options_of_others(capsys):
    assert "did you mean --max-tokens?" in said(["generate", "m", "--num-predict", "5"], capsys)
    assert make_parser().parse_args(["generate", "m", "--temp", "1"]).temperature == 1, "a beginning of what it means"
    assert "did you mean --gpu-memory-limit?" in said(["generate", "m", "--gpu-mem", "1GiB"], capsys)
    with pytest.raises(ValueError, match="did you mean 'repetition_penalty'"):
        nanoinfer.SamplingParams(repeat_penalty=1.1)


def test_a_name_means_one_thing():
    tree = ast.parse(Path(other_names.__file__).read_text())
    keys = [key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    names = [name for key in keys for name in key.split()]
    tables = (MEANT, INSTEAD, VALUES_MEANT, COMMANDS, PATHS, NO_PATHS, ENVIRONMENT)
    assert sorted(names) == sorted(name for table in tables for name in table)
    assert not PATHS.keys() & NO_PATHS.keys()
    assert not INSTEAD.keys() & ENGINE.keys()
    known = {name for parser in PARSERS.values() for name in parser.known}
    taken = {f"--{name.replace('_', '-')}" for name in INSTEAD}
    assert not taken & known, "an option that exists needs no advice"


def test_a_keyword_under_another_name_is_taken_once():
    limits = dict(gpu_memory="12GiB", host_memory="64GiB")
    old = nanoinfer.plan("qwen3-4b", **limits, context=4096, batch=2)
    names = dict(gpu_memory_limit="12GiB", host_memory_limit="64GiB", max_model_len=4096)
    assert nanoinfer.plan("qwen3-4b", **names, max_num_seqs=2) == old and old.context == 4096 and old.batch == 2
    with pytest.raises(ValueError, match="context is another name of max_model_len: give one of them"):
        nanoinfer.plan("qwen3-4b", **limits, context=4096, max_model_len=4096)
    assert nanoinfer.plan("qwen3-4b", **limits, max_model_len=-1).context == 32_768
    assert takes_also(new="old")(lambda new: new)(old=3) == 3


def test_an_option_and_its_field_have_one_name():
    for field in ("max_model_len", "gpu_memory_limit", "host_memory_limit"):
        assert option_names(field)[0] == f"--{field.replace('_', '-')}"
        assert field in PARSERS["nanoinfer plan"].parse_args(["m"]).engine_options
