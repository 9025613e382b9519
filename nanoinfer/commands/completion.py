"""`nanoinfer completion` on the command line."""

from __future__ import annotations

import argparse

from nanoinfer.options.completion import SHELLS, script
from nanoinfer.options.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")
    parser.epilog = (
        'To have it in every new shell: the line eval "$(nanoinfer completion bash)" in ~/.bashrc; the same with zsh '
        "in ~/.zshrc, below compinit; of fish, the script itself in ~/.config/fish/completions/nanoinfer.fish."
    )


def run(options: argparse.Namespace) -> int:
    """Print the script, made of the options of all commands."""
    print(script(options.shell, options.root), end="")
    return 0
