"""`nanoinfer completion`: what the shells offer, asked as they ask their scripts."""

import shlex
import shutil
import subprocess

import pytest

from nanoinfer.commands.main import main, make_parser

# Each prints one word a line for the command line in "$@", whose last word is being written. Of zsh, whose completion
# needs a terminal, the functions that would show the words print them.
ASK = {
    "bash": 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nanoinfer; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'compdef() {}; compadd() { shift; print -l -- "$@" }; _files() { print FILES }; '
    '_describe() { for one in "${(@P)@[-1]}"; do print -r -- "${one%%:*}"; done }; '
    'script=$1; shift; source $script; words=("$@"); CURRENT=$#; _nanoinfer',
    "fish": "source $argv[1]; complete -C (string join -- ' ' $argv[2..])",
}


@pytest.fixture(scope="module", params=ASK)
def offered(request, tmp_path_factory):
    """Returns what a shell offers for the words, which begin as the last one does."""
    shell, path = request.param, tmp_path_factory.mktemp("completion") / "script"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")

    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main(["completion", shell]) == 0

    def ask(*words):
        first = ["--norc"] if shell == "bash" else ["-f"] if shell == "zsh" else ["--no-config"]
        zeroth = ["_"] if shell == "zsh" else []
        command = [shell, *first, "-c", ASK[shell], *zeroth, str(path), "nanoinfer", *words]
        process = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
        assert process.stderr == "", shlex.join(command)
        found = [line.split("\t")[0] for line in process.stdout.splitlines()]
        return [word for word in found if word.startswith(words[-1].removeprefix("="))]

    ask.shell = shell
    return ask


def test_commands_options_and_values_are_offered(offered):
    assert offered("se") == ["serve"]
    assert {"latency", "offload"} <= set(offered("bench", ""))
    assert set(offered("serve", "m", "--gpu-memory-")) == {"--gpu-memory-limit", "--gpu-memory-utilization"}
    assert offered("generate", "m", "--top") and not offered("serve", "m", "--top")
    assert offered("bench", "latency", "--num-iters-w") == ["--num-iters-warmup"]
    assert set(offered("quantize", "m", "--to", "int4")) == {"int4", "int4-symmetric"}
    assert offered("serve", "m", "--offload", "o") in (["on", "off"], ["off", "on"])
    assert offered("completion", "z") == ["zsh"]
    if offered.shell == "bash":  # to which an equals sign is a word of its own
        assert offered("serve", "--offload", "=", "of") == ["off"]
        assert offered("serve", "--offload", "=") == ["on", "auto", "off"]
    assert not [name for name in offered("serve", "m", "--json", "--") if name in ("serve", "plan")]


def test_after_an_option_with_any_value_no_words_are_offered(offered):
    found = offered("serve", "m", "--host", "")
    assert not {"--host", "on", "latency"} & set(found)


@pytest.mark.parametrize("shell", ASK)
def test_every_option_that_is_shown_is_in_the_script(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    serve = next(action for action in make_parser()._actions if isinstance(action.choices, dict)).choices["serve"]
    for action in serve._actions:
        for name in action.option_strings:
            assert (f" -l {name[2:]} " if shell == "fish" and name.startswith("--") else name) in script
    assert "--gpu-memory " not in script and "-l gpu-memory " not in script, "another spelling"


def test_the_script_is_for_a_known_shell(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "fsh"])
    assert "'fsh' is not known: did you mean fish? choose from bash, zsh, fish" in capsys.readouterr().err
