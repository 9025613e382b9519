"""How the commands end, as processes of their own, and how they call their options."""

import argparse
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from nanoinfer.commands import main as cli
from nanoinfer.options import parser
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser, in_options, length, run_command
from offload.memory import pinned

ROOT = Path(__file__).resolve().parents[2]
NANOINFER = [sys.executable, "-m", "nanoinfer"]
FITS = ["qwen3-4b", "--gpu-memory-limit", "12GiB", "--host-memory-limit", "64GiB"]
ENDLESS = ["--device", "cpu", "--context", "64", "--output-len", "20000", "--mode", "resident"]


def start(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # most users have their output buffered
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with SIGINT ignored, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    "command, name",
    [
        ([*NANOINFER, "bench", "offload", "--shape", "tiny", *ENDLESS], "nanoinfer bench offload"),
        ([sys.executable, "bench_offload.py", "--shape", "tiny", *ENDLESS], "bench_offload.py"),
    ],
)
@pytest.mark.sampled("command1-bench_offload.py")  # `nanoinfer` runs as a program in test_serve_process.py, too
def test_an_interrupted_command_says_so_in_one_line(command, name):
    process = start(command)
    for line in process.stderr:
        if "resident mode" in line:
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == f"{name}: interrupted" and "Traceback" not in said


@pytest.mark.sampled()
def test_interrupted_text_ends_its_line_first():
    process = start(
        [*NANOINFER, "generate", "recall", "--device", "cpu", "--prompt", "Records.", "--max-tokens", "2000"]
    )
    text = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert text and rest.endswith("\n")
    assert process.returncode == 130 and said.endswith("nanoinfer generate: interrupted\n") and "Traceback" not in said


def test_a_first_interrupt_of_generate_announces_that_a_second_ends_at_once(monkeypatch, capfd):
    found = []

    class FakeLLM:
        engine = MagicMock(sampling_defaults={})

        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def generate_stream(self, *_):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("nothing was raised")

        def __exit__(self, *_):
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr("nanoinfer.LLM", FakeLLM)
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            if handler is signal.SIG_IGN:
                with pytest.raises(AssertionError, match="nothing was raised"):
                    cli.main(["generate", "recall", "--prompt", "x"])
            else:
                assert cli.main(["generate", "recall", "--prompt", "x"]) == 130
            assert signal.getsignal(signal.SIGINT) is handler, "the handler is not given back"
        assert found == [signal.SIG_DFL, signal.SIG_IGN], "a second interrupt would wait for the memory"
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.splitlines() == [
        "",
        "nanoinfer generate: giving memory back; Ctrl-C again ends at once",
        "nanoinfer generate: interrupted",
    ]


PLAN_THAT_PRINTS = """
import sys
from nanoinfer.commands import main as cli, plan
plan.run = lambda options: print("a table")
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_reader_who_leaves_is_told_nothing():
    process = start([sys.executable, "-c", PLAN_THAT_PRINTS, "plan", *FITS])
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


def small_parser():
    parser = Parser(prog="small")
    parser.add_argument("model")
    parser.add_argument("--context", type=length)
    parser.add_argument("--batch", type=int)
    add_engine_options(
        parser,
        ("gpu_memory_limit", "enable_cpu_offload", "max_num_batched_tokens", "num_ring_slots", "dtype",
         "enable_prefix_caching"),
    )  # fmt: skip
    return parser


@pytest.mark.parametrize("error", [ValueError("wrong"), MemoryError("wrong"), FileNotFoundError("wrong")])
def test_a_users_error_is_one_line(error, capsys):
    def command(options):
        raise error

    assert run_command(small_parser(), ["x"], command) == 2
    assert capsys.readouterr() == ("", "small: wrong\n")


@pytest.mark.parametrize("ours", [parser.__file__, pinned.__file__])
def test_a_warning_of_ours_is_one_line_in_the_words_of_the_command_and_others_stay(ours):
    said = []

    def command(options):
        said.extend(warnings.formatwarning("lower max_num_seqs", UserWarning, name, 7, "x") for name in (ours, "a.py"))
        return 0

    before = warnings.formatwarning
    assert run_command(small_parser(), ["x"], command) == 0 and warnings.formatwarning is before
    assert said == ["small: lower --batch\n", before("lower max_num_seqs", UserWarning, "a.py", 7, "x")]


def test_an_error_of_ours_is_not_hidden():
    def command(options):
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError):
        run_command(small_parser(), ["x"], command)
    assert run_command(small_parser(), ["x"], lambda options: 1) == 1


@pytest.mark.parametrize(
    "message, shown",
    [
        ("gpu_memory_limit='12X' is no size", "--gpu-memory-limit '12X' is no size"),
        ("raise gpu_memory_limit.", "raise --gpu-memory-limit."),
        ('state it, such as gpu_memory="12GiB"', 'state it, such as --gpu-memory-limit "12GiB"'),
        ("lower max_model_len or set enable_cpu_offload=True", "lower --context or set --offload on"),
        ('enable_cpu_offload="auto" has no', "--offload auto has no"),
        ("lower max_num_batched_tokens=256 or max_num_seqs=1", "lower --max-num-batched-tokens 256 or --batch 1"),
        ("context=5 must be", "--context 5 must be"),
        ("dtype is 'x', it must be", "--dtype is 'x', it must be"),
        ("leave enable_prefix_caching out", "leave --enable-prefix-caching out"),
        # Ordinary words, parts of other names and of paths, and what the command has no option for.
        ("lower the context or the batch", "lower the context or the batch"),
        ("my_num_ring_slots and /num_ring_slots/x", "my_num_ring_slots and /num_ring_slots/x"),
        ("num_ring_slots_2", "num_ring_slots_2"),
        ("host_memory_limit=5 or block_size=16", "host_memory_limit=5 or block_size=16"),
        ("model=5", "model=5"),
    ],
)
def test_a_message_calls_the_options_by_their_names(message, shown):
    assert in_options(message, small_parser()) == shown


def test_an_option_of_its_own_comes_before_one_that_an_argument_is_taken_from():
    parser = small_parser()
    parser.add_argument("--input-len", type=length)
    assert in_options("lower max_model_len or max_num_seqs", parser) == "lower --context or --batch"
    add_engine_options(parser, ("max_num_seqs",))
    assert in_options("lower max_model_len or max_num_seqs", parser) == "lower --context or --max-num-seqs"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["plan", "--contxt", "4k"],
            "^nanoinfer plan: error: unknown option --contxt: did you mean --max-model-len",
        ),
        (["bench", "latency", "--input-length=4"], "^nanoinfer bench latency: error: .*did you mean --input-len\\?$"),
        (["bench", "--oputput-len", "4"], "^nanoinfer bench offload: error: .*did you mean --output-len\\?$"),
        (["plan", "qwen3-4b", "--zzz"], "unknown option --zzz: nanoinfer plan --help lists them$"),
        # What other programs call it, and what vLLM has and this engine does not.
        (["plan", "qwen3-4b", "--ctx-size", "4k"], "unknown option --ctx-size: did you mean --max-model-len\\?$"),
        (["serve", "x", "--ctx-size", "4k"], "unknown option --ctx-size: did you mean --max-model-len\\?$"),
        (["serve", "x", "-c", "4096"], "unknown option -c: did you mean --max-model-len\\?$"),
        (
            ["generate", "x", "--n-gpu-layers", "99"],
            "--n-gpu-layers is not supported: what does not fit on the GPU streams to it by itself: leave it out",
        ),
        (["generate", "x", "--max-new-tokens=5"], "did you mean --max-tokens\\?$"),
        (["serve", "--model", "x"], "unknown option --model: give the model without an"),
        (["serve", "x", "--enable-lora"], "--enable-lora is not supported: merge the adapter into the weights$"),
        (
            ["serve", "x", "--swap-space", "4"],
            "--swap-space is not supported: --host-memory-limit bounds the",
        ),
        (["serve", "x", "--lora-path", "y"], "unknown option --lora-path: nanoinfer serve --help"),
        (["plan", "qwen3-4b", "12GiB"], "usage: nanoinfer plan .*unknown arguments: 12GiB$"),
        (["plam"], "argument command: 'plam' is not known: did you mean plan\\? choose from bench, "),
        (["bench", "troughput"], "'troughput' is not known: did you mean throughput\\?"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_one(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and re.search(message, capsys.readouterr().err.strip(), re.DOTALL)


@pytest.mark.parametrize(
    "arguments, guess",
    [
        (["plan", "qwen3-4", "--gpu-memory-limit", "12GiB"], "'qwen3-4b'"),
        (["plan", "reccall", "--gpu-memory-limit", "12GiB"], "'recall'"),
        (["generate", "recal", "--prompt", "x"], "'recall'"),
        (["verify", "reccall"], "'recall'"),
        (["bench", "latency", "recal"], "'recall'"),
        (["eval", "recall", "recal"], "'recall'"),
        (["generate", "gema-3-1b", "--prompt", "x"], "'gemma-3-1b'"),
    ],
)
def test_a_mistyped_model_is_refused_with_the_nearest_one(arguments, guess, capsys):
    assert cli.main(arguments) == 2
    assert f"does not exist (did you mean {guess}?): give a name" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["input", "qwen3-40b", "llama9-8b"])
def test_another_size_or_a_word_that_is_near_to_nothing_is_no_guess(model, capsys):
    assert cli.main(["plan", model, "--gpu-memory-limit", "12GiB"]) == 2
    assert f"model {model!r} does not exist: give a name such as qwen3-4b" in capsys.readouterr().err


def test_a_shape_is_no_checkpoint_for_those_who_generate(capsys):
    assert cli.main(["generate", "tiny", "--prompt", "x"]) == 2
    assert "model 'tiny' is the name of a shape, which has random weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama-3.1-8b", "llama3.1:8b"])
def test_a_plan_takes_the_name_of_a_model_however_it_is_spelt(name, capsys):
    assert cli.main(["plan", name, "--gpu", "RTX 4090", "--host-memory-limit", "64GiB", "--max-model-len", "8k"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}, 1 x 8,192 tokens")


def test_without_arguments_the_command_prints_its_help(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: nanoinfer") and "what fits and how fast" in printed


def test_a_limit_without_a_unit_is_asked_about(capsys):
    assert cli.main(["plan", "qwen3-4b", "--gpu-memory-limit", "12", "--host-memory-limit", "64GiB"]) == 2
    assert "--gpu-memory-limit '12' is 12 bytes: did you mean \"12GiB\"?" in capsys.readouterr().err
    assert cli.main(["plan", "qwen3-4b", "--gpu-memory-limit", "12GiB", "--host-memory-limit", "62.5"]) == 2
    assert "--host-memory-limit '62.5' is 62 bytes: did you mean \"62.5GiB\"?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify"], ["bench", "latency"], ["bench", "throughput"], ["bench", "offload"]])
def test_a_shape_in_the_place_of_a_checkpoint_is_refused_with_its_option(command, capsys):
    assert cli.main([*command, "qwen3-4b"]) == 2
    assert "'qwen3-4b' is a shape, which has random weights: give --shape qwen3-4b, or a" in capsys.readouterr().err


def test_lengths_may_end_in_k():
    assert [length(text) for text in ("4096", "4k", " 128K ", "0", "-3")] == [4096, 4096, 131072, 0, -3]
    for text in ("", "k", "4.5k", "4m", "four"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} must be a whole number, such as 4096"):
            length(text)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "x", "--max-model-len", "2k", "--prefill-chunk", "2k"],
        ["verify", "--context", "2k", "--output-len", "2k"],
        ["generate", "x", "--prompt", "x", "--max-model-len", "2k", "--max-tokens", "2k"],
        ["serve", "x", "--max-model-len", "2k", "--max-num-batched-tokens", "2k"],
        ["bench", "latency", "--input-len", "2k", "--output-len", "2k"],
        ["bench", "offload", "--output-len", "2k", "--prefill-chunk", "2k"],
        ["eval", "recall", "--prefill-chunk", "2k"],
    ],
)
def test_every_length_may_end_in_k(command):
    given = [name[2:].replace("-", "_") for name in command if name.startswith("--") and name != "--prompt"]
    given = ["max_num_batched_tokens" if name == "prefill_chunk" else name for name in given]
    assert [getattr(cli.make_parser().parse_args(command), name) for name in given] == [2048] * len(given)
