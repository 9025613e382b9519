"""The engine's options are those of `EngineConfig`, in every command."""

from dataclasses import fields
from pathlib import Path

import pytest

from nanoinfer.commands.main import main
from nanoinfer.config import EngineConfig
from nanoinfer.options.engine import add_engine_options, engine_arguments, field_help, option_names, option_words
from nanoinfer.options.parser import Parser

FIELDS = [field.name for field in fields(EngineConfig) if field.name not in ("model", "progress_bar")]


def parse(arguments: list[str], **settings) -> dict:
    parser = Parser(prog="p")
    add_engine_options(parser, **settings)
    return engine_arguments(parser.parse_args(arguments))


def test_every_field_has_an_option_with_the_default_and_the_words_of_the_config():
    found = parse([])
    assert list(found) == FIELDS
    assert EngineConfig(model="m", **found) == EngineConfig(model="m")
    assert all(len(text) > 10 for text in field_help().values()) and set(FIELDS) <= field_help().keys()


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (["--offload"], "enable_cpu_offload", True),
        (["--offload", "auto"], "enable_cpu_offload", "auto"),
        (["--offload=off"], "enable_cpu_offload", False),
        (["--gpu-memory-limit", "12GiB"], "gpu_memory_limit", "12GiB"),
        (["--gpu-memory-limit", "12GiB"], "gpu_memory_limit", "12GiB"),
        (["--gpu-memory-limit", "0.5"], "gpu_memory_limit", 0.5),
        (["--gpu-memory-limit", "1.0"], "gpu_memory_limit", 1.0),
        (["--resident-kv", "0"], "resident_kv_limit", 0),
        (["--prefill-chunk", "2k"], "max_num_batched_tokens", 2048),
        (["--max-num-batched-tokens", "512"], "max_num_batched_tokens", 512),
        (["--max-model-len", "4k"], "max_model_len", 4096),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["--cuda-graph-batch-sizes", "1,2"], "cuda_graph_batch_sizes", [1, 2]),
        (["--cuda-graph-batch-sizes", "staged"], "cuda_graph_batch_sizes", "staged"),
        (["--capture-num-tokens", "none"], "capture_num_tokens", []),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--pin-host-memory", "require"], "pin_host_memory", "require"),
    ],
)
def test_an_option_becomes_the_argument(arguments, name, value):
    found = parse(arguments)
    assert found.pop(name) == value
    assert found == {other: text for other, text in parse([]).items() if other != name}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(enable_cpu_offload="auto", gpu_memory_limit="12GiB", max_model_len=4096),
        dict(enable_cpu_offload=True, enable_prefix_caching=False, enforce_eager=True, gpu_memory_limit=0.5),
        dict(capture_num_tokens=[], cuda_graph_batch_sizes=[1, 2], dtype="float16", quantization="int4"),
        dict(speculative_config=None),
        dict(speculative_config={"method": "suffix", "num_speculative_tokens": 3}),
        dict(
            capture_num_tokens=[16, 64], cuda_graph_batch_sizes="staged", resident_kv_limit=0, host_memory_limit="1GB"
        ),
    ],
)
def test_settings_become_the_words_that_give_them(settings):
    assert parse(option_words(settings, {})) == parse([]) | settings
    assert parse(option_words(settings, {"enable_cpu_offload": "auto"}), defaults={"enable_cpu_offload": "auto"}) == (
        parse([]) | settings
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--offload", "onn"], "choose from on, auto, off"),
        (["--cuda-graph-batch-sizes", "a"], "must be whole numbers, such as 16,64,256, or"),
        (["--gpu-memry", "1GiB"], "did you mean --gpu-memory-limit?"),
        (["--max-model-len", "4x"], "must be a whole number"),
        (["--speculative-config", "no"], "is no JSON"),
    ],
)
def test_what_no_option_takes_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "verify", "plan", "bench latency", "bench offload"])
def test_help_names_each_option_and_its_default(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "--gpu-memory-limit SIZE" in text and "None" not in text and "True " not in text
    if command == "serve":
        assert not [name for name in FIELDS if option_names(name)[0] not in text]
        assert "(default: off)" not in text and "(default: 0)" in text, "the seed's default is a number"
        assert "(default: auto)" in text and "What --max-num-seqs sequences" in text.replace("what", "What")


def test_a_command_that_a_launcher_has_started_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", "recall", "hello", "--tensor-parallel-size", "2"]) == 2
    assert "runs under torchrun, or another launcher" in capsys.readouterr().err


def test_no_command_declares_an_engine_option_itself():
    folder = Path(__file__).resolve().parents[2] / "nanoinfer"
    names = [f'"{option}"' for name in FIELDS for option in option_names(name)]
    found = {
        path.name: name
        for path in folder.rglob("*.py")
        for name in names
        if f"add_argument({name}" in "".join(path.read_text().split())
    }
    assert found == {"sampling.py": '"--seed"'}, "generate's --seed is that of the sampling"
