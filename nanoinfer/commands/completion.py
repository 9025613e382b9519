"""`nanoinfer completion` on the command line: at each tab the shell asks the program itself, through argcomplete."""

from __future__ import annotations

import argparse
import os

from nanoinfer.options.parser import Parser

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")
    parser.epilog = (
        'To have it in every new shell: the line eval "$(nanoinfer completion bash)" in ~/.bashrc; the same with zsh '
        "in ~/.zshrc, below compinit; of fish, the script itself in ~/.config/fish/completions/nanoinfer.fish."
    )


def run(options: argparse.Namespace) -> int:
    """Print the script with which the shell asks."""
    import argcomplete

    print(argcomplete.shellcode([options.root.prog], shell=options.shell))
    return 0


def answer(parser: Parser) -> None:
    """Print what the command line can go on with and end, if it is the shell that asks, at a tab."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
