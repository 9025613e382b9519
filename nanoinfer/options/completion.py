"""Scripts with which a shell completes the commands and their options, made of what the parsers declare."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nanoinfer.options.parser import Parser

_MOST_CHARS = 70  # of what is said about an option


@dataclass(frozen=True)
class Option:
    """An option by all its names.

    Attributes:
        values: those to choose from, if they are known.
        is_switch: it takes no value.
    """

    names: tuple[str, ...]
    text: str
    values: tuple[str, ...]
    is_switch: bool


@dataclass(frozen=True)
class Command:
    """A command by its path, such as "/bench/latency": the words that it takes, with their texts, and its options."""

    path: str
    below: dict[str, str]
    options: tuple[Option, ...]


def script(shell: str, parser: Parser) -> str:
    """Return the script for one of `SHELLS`; where nothing is known, files are completed."""
    return _MAKERS[shell](parser.prog, list(_commands(parser, "")))


def _commands(parser: Parser, path: str) -> Iterator[Command]:
    """Yield the parser's command, and then all below it."""
    below, children = {}, {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children |= action.choices
            below |= {one.dest: _short(one.help) for one in action._get_subactions()}
        elif not action.option_strings:
            below |= dict.fromkeys(action.choices or (), "")
    options = tuple(_option(action, parser) for action in parser._actions if action.option_strings)
    yield Command(path, below, options)
    for name, child in children.items():
        yield from _commands(child, f"{path}/{name}")


def _option(action: argparse.Action, parser: Parser) -> Option:
    shown = str(action.metavar)
    values = action.choices or (re.findall(r"\w+", shown) if shown.startswith("{") else ())
    text = _short(parser._get_formatter()._expand_help(action))
    return Option(tuple(action.option_strings), text, tuple(map(str, values)), action.nargs == 0)


def _short(text: str | None) -> str:
    """Return the first sentence of a help text, or the beginning of a long one."""
    first = re.split(r"(?<=\w)[.;:] | \(default", " ".join((text or "").split()))[0].rstrip(".")
    return first if len(first) <= _MOST_CHARS else first[: first.rindex(" ", 0, _MOST_CHARS)] + " ..."


def _paths(found: list[Command]) -> str:
    """Return the paths of all commands but the first, as a pattern of bash and zsh."""
    return "|".join(command.path for command in found[1:])


def _after_options(found: list[Command], offer: Callable[[Sequence[str]], str]) -> tuple[list[str], list[str]]:
    """Return a shell's cases behind options whose values are known, and the patterns of those that take anything."""
    values, free = [], []
    for command in found:
        for option in command.options:
            pattern = "|".join(f"{command.path or '/'}:{one}" for one in option.names)
            if option.values:
                values.append(f"        {pattern}) {offer(option.values)} ;;")
            elif not option.is_switch:
                free.append(pattern)
    return values, free


def _bash(name: str, found: list[Command]) -> str:
    words = []
    for command in found:
        names = [*command.below, *(one for option in command.options for one in option.names)]
        words.append(f"        {command.path or '/'}) words={shlex.quote(' '.join(names))} ;;")
    values, free = _after_options(found, lambda words: f"words={shlex.quote(' '.join(words))}")
    return f"""# Completions of {name} for bash, written by: {name} completion bash
_{name}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=$((COMP_CWORD - 1)) command= words= word
    if [[ $current == = ]]; then
        current=
    elif [[ ${{COMP_WORDS[before]}} == = ]]; then
        before=$((before - 1))
    fi
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $command/$word in
        {_paths(found)}) command=$command/$word ;;
        esac
    done
    case ${{command:-/}}:${{COMP_WORDS[before]}} in
{chr(10).join(values)}
        {"|".join(free)}) return ;;
        *)
            case ${{command:-/}} in
{chr(10).join("    " + line for line in words)}
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _{name} {name}
"""


def _zsh(name: str, found: list[Command]) -> str:
    cases = []
    for command in found:
        below = " ".join(shlex.quote(f"{one}:{text}") for one, text in command.below.items())
        options = " ".join(shlex.quote(f"{one}:{o.text}") for o in command.options for one in o.names)
        cases.append(f"        {command.path or '/'}) below=({below}) options=({options}) ;;")
    values, free = _after_options(found, lambda words: f"compadd -- {' '.join(map(shlex.quote, words))}; return")
    return f"""#compdef {name}
# Completions of {name} for zsh, written by: {name} completion zsh
_{name}() {{
    local command= word
    local -a below options
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case $command/$word in
        ({_paths(found)}) command=$command/$word ;;
        esac
    done
    case ${{command:-/}}:${{words[CURRENT-1]}} in
{chr(10).join(values)}
        {"|".join(free)}) _files; return ;;
    esac
    case ${{command:-/}} in
{chr(10).join(cases)}
    esac
    if [[ $words[CURRENT] == -* ]]; then
        _describe -o option options
    elif (( $#below )); then
        _describe command below
    else
        _files
    fi
}}
if [[ $funcstack[1] == _{name} ]]; then
    _{name} "$@"
else
    compdef _{name} {name}
fi
"""


def _fish(name: str, found: list[Command]) -> str:
    lines = []
    for command in found:
        start = f"complete -c {name} -n 'test (__{name}_command) = {command.path or '/'}'"
        lines += [f"{start} -f -a {one} -d {_quoted(text)}" for one, text in command.below.items()]
        for option in command.options:
            names = " ".join(f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in option.names)
            if option.values:
                names += f" -x -a {_quoted(' '.join(option.values))}"
            elif not option.is_switch:
                names += " -r"
            lines.append(f"{start} {names} -d {_quoted(option.text)}")
    return f"""# Completions of {name} for fish, written by: {name} completion fish
function __{name}_command
    set -l command
    for word in (commandline -opc)[2..]
        switch "$command/$word"
            case {" ".join(command.path for command in found[1:])}
                set command "$command/$word"
        end
    end
    test -n "$command"; and echo $command; or echo /
end
{chr(10).join(lines)}
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_MAKERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
SHELLS = tuple(_MAKERS)
