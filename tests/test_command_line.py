"""How the commands end, as processes of their own, and how they call their options."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer.command_line import run_command

ROOT = Path(__file__).resolve().parent.parent
NANOINFER = [sys.executable, "-m", "nanoinfer.cli"]
FITS = ["qwen3-4b", "--gpu-memory", "12GiB", "--host-memory", "64GiB"]
ENDLESS = ["--device", "cpu", "--context", "1024", "--output-len", "20000", "--mode", "resident"]


def start(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "command, name",
    [
        ([*NANOINFER, "bench", "offload", "--shape", "tiny", *ENDLESS], "nanoinfer bench"),
        ([sys.executable, "bench_offload.py", "--shape", "tiny", *ENDLESS], "bench_offload.py"),
    ],
)
def test_an_interrupted_command_says_so_in_one_line(command, name):
    process = start(command)
    for line in process.stderr:
        if "resident mode" in line:
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == f"{name}: interrupted" and "Traceback" not in said


def test_interrupted_text_ends_its_line_first():
    process = start(
        [*NANOINFER, "generate", "recall", "--device", "cpu", "--prompt", "Records.", "--max-tokens", "2000"]
    )
    text = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert text and rest.endswith("\n")
    assert process.returncode == 130 and said.endswith("nanoinfer generate: interrupted\n") and "Traceback" not in said


def test_a_reader_who_leaves_is_told_nothing():
    process = start([*NANOINFER, "plan", *FITS])
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


@pytest.mark.parametrize("error", [ValueError("wrong"), MemoryError("wrong"), FileNotFoundError("wrong")])
def test_a_users_error_is_one_line(error, capsys):
    def command():
        raise error

    assert run_command("nanoinfer plan", command) == 2
    assert capsys.readouterr() == ("", "nanoinfer plan: wrong\n")


def test_an_error_of_ours_is_not_hidden():
    def command():
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError):
        run_command("nanoinfer plan", command)
    assert run_command("nanoinfer plan", lambda: 1) == 1
