"""`nanoinfer completion`: what a shell is told at a tab, asked as its script asks."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer.commands.main import main

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from nanoinfer.commands.main import main
main()
"""


@pytest.fixture
def folder(tmp_path):
    program = tmp_path / "nanoinfer"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return tmp_path


def offered(folder, *words):
    """Return what the program offers for the words, the last of which is being written."""
    line = shlex.join(["nanoinfer", *words]).removesuffix("''")
    asked = dict(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), COMP_TYPE="9", _ARGCOMPLETE_IFS="\n")
    asked |= dict(_ARGCOMPLETE_STDOUT_FILENAME=str(folder / "words"))
    subprocess.run([folder / "nanoinfer"], env=os.environ | asked, cwd=folder, check=True, capture_output=True)
    return [word.strip() for word in (folder / "words").read_text().splitlines()]


def test_commands_options_and_values_are_offered(folder):
    assert offered(folder, "se") == ["serve"]
    assert offered(folder, "bench", "l") == ["latency"]
    names = offered(folder, "serve", "m", "--gpu-memory")
    assert set(names) == {"--gpu-memory-limit", "--gpu-memory-utilization"}, "no other spellings"
    assert set(offered(folder, "quantize", "m", "--to", "int4")) == {"int4", "int4-symmetric"}
    assert set(offered(folder, "serve", "m", "--offload", "o")) == {"on", "off"}


def test_after_an_option_with_any_value_files_are_offered(folder):
    assert set(offered(folder, "serve", "m", "--host", "")) == {"nanoinfer", "words"}


def test_behind_an_unknown_option_the_known_ones_are_offered(folder):
    assert offered(folder, "serve", "m", "--log-requests", "--log-l") == ["--log-level"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_asks_the_program_by_the_script(folder, capsys):
    assert main(["completion", "bash"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    ask = """source script; COMP_LINE="nanoinfer serve m --offload=of" COMP_POINT=30 COMP_TYPE=9
    _python_argcomplete nanoinfer; printf "%s" "${COMPREPLY[@]}"; complete -p nanoinfer"""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", ask]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith("off ") and found.rstrip().endswith("nanoinfer")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_for_this_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert {"bash": "complete ", "zsh": "compdef ", "fish": "complete --command nanoinfer"}[shell] in script


def test_the_script_is_for_a_known_shell(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "fsh"])
    assert "'fsh' is not known: did you mean fish? choose from bash, zsh, fish" in capsys.readouterr().err
