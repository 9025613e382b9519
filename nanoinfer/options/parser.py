"""Shared by all commands: how options are read, how messages name them, and how a command ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from nanoinfer.common.errors import nearest
from nanoinfer.common.other_names import COMMANDS, INSTEAD, MEANT
from nanoinfer.common.told_elsewhere import TOLD_ELSEWHERE
from nanoinfer.common.units import parse_count
from nanoinfer.common.unsupported import ENGINE

_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(f"{path}{os.sep}" for path in (_PACKAGE, _PACKAGE.with_name("offload")))
REFUSED = 2
# The exit status that a shell reports for a process ended by a signal: 128 plus the signal's number.
INTERRUPTED = 130
BROKEN_PIPE = 141

OFFLOAD = {"on": True, "auto": "auto", "off": False}
"""The words for the values of `enable_cpu_offload`."""
_OF_OTHERS = MEANT.keys() | INSTEAD.keys() | ENGINE.keys() | {name for told in TOLD_ELSEWHERE.values() for name in told}
# Arguments that a command without an option for them takes from one of these, the first that it has.
_TAKEN_FROM = {
    "max_model_len": ("--context", "--input-len"),
    "max_num_seqs": ("--batch",),
    "num_requests": ("--requests",),
}


# What to do with words too many.
_OF_WORDS = {
    "nanoinfer chat": 'a message is typed or piped in; nanoinfer generate MODEL --chat "text" gives one answer',
    "nanoinfer generate": "a text of several words stands in quotes",
    "nanoinfer serve": "a server has one model",
}


class _Help(argparse.HelpFormatter):
    """Usage in one line: "[options]" stands for all that may be left out."""

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: object, prefix: str | None
    ) -> str:
        words, optional = [self._prog], False
        for action in actions:
            if not action.option_strings:
                words.append(self._format_args(action, self._get_default_metavar_for_positional(action)))
            elif action.required:
                value = self._format_args(action, self._get_default_metavar_for_optional(action))
                words.append(f"{action.option_strings[0]} {value}".strip())
            else:
                optional = True
        if optional:
            words.insert(1, "[options]")
        return f"{'usage: ' if prefix is None else prefix}{' '.join(words)}\n\n"


class Parser(argparse.ArgumentParser):
    """Refuses an unknown option or value with the nearest known name.

    The namespace's `parser` is the parser of the command that was called.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help} | kwargs)
        self.set_defaults(parser=self)

    @property
    def known(self) -> dict[str, argparse.Action]:
        """The options by all names under which they are taken."""
        return self._option_string_actions

    def take_also(self, option: str, *names: str) -> None:
        """Accept other spellings of an option, which no help and no message shows."""
        self.known.update(dict.fromkeys(names, self.known[option]))

    def shown(self, option: str) -> str:
        """Return the name that messages and help give to an option: the same, or the one that is spelt otherwise."""
        names = self.known[option].option_strings
        return option if option in names else next(name for name in names if name.startswith("--"))

    def error(self, message: str) -> NoReturn:
        """End with the message, and with what a model may be where none is given. The usage says which words there are,
        and so comes where these are too few or too many."""
        if message.endswith("required: MODEL"):
            message += ", such as qwen3-8b; nanoinfer list says what lies here"
        if re.match("unknown arguments|the following arguments", message):
            super().error(message)
        self.exit(REFUSED, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> tuple:
        """Refuse unknown arguments here; argparse would pass them up to the parser of all commands."""
        args = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None and "_ARGCOMPLETE" not in os.environ:  # what a shell asks is not refused
            for option in (argument.split("=")[0] for argument in args[: args.index("--") if "--" in args else None]):
                is_long = option.startswith("--") and " " not in option
                if (is_long or option[:1] == "-" and option[1:] in _OF_OTHERS) and not self._takes(option):
                    self._refuse(option)
        namespace, unknown = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():
            # Before Python 3.12.8 argparse takes an optional word for left out where options stand before it.
            if action.nargs == argparse.OPTIONAL and unknown and getattr(namespace, action.dest, None) is None:
                setattr(namespace, action.dest, unknown.pop(0))
        if unknown:
            said = _OF_WORDS.get(self.prog) if not unknown[0].startswith("-") else None
            self.error(f"unknown arguments: {' '.join(unknown)}{f': {said}' if said else ''}")
        return namespace, unknown

    def _takes(self, option: str) -> bool:
        """Whether this is an option, or the beginning of one: but no other program's name for something else."""
        if option in self.known:
            return True
        names = {self.shown(known) for known in self.known if known.startswith(option)}
        name = _plain(option)
        return bool(names) and (name not in _OF_OTHERS or {_plain(one) for one in names} <= {*MEANT.get(name, ())})

    def _refuse(self, option: str) -> None:
        """End with what to do about an unknown option: vLLM's and other programs' ones are known by name."""
        name = _plain(option)
        told = TOLD_ELSEWHERE.get(self.prog.removeprefix("nanoinfer "), {})
        name = name if name in MEANT or name in told else name.removeprefix("no_")
        if name in told:
            self.error(f"{option} is no option of {self.prog}: {told[name]}")
        if name in ENGINE:
            self.error(f"{option} is not supported: {in_options(ENGINE[name][1], self)}")
        if name in INSTEAD:
            self.error(f"{option} is not supported: {INSTEAD[name]}")
        if "MODEL" in MEANT.get(name, ()):
            self.error(
                f"unknown option {option}: give the model without an option: a name such as qwen3-8b, a directory, a "
                "GGUF file or a hub id"
            )
        hint = _hint(option, self.known, self.shown) or f": {self.prog} --help lists them"
        self.error(f"unknown option {option}{hint}")

    def _refuse_command(self, given: str) -> None:
        """End with what to run, if this is a command of another program, or a model."""
        plain = given.lower().replace("_", "-")
        if plain in COMMANDS:
            self.error(f"there is no command {given!r} here: {COMMANDS[plain]}")
        if re.search(r"[/.:\d]", given):  # no command has these
            self.error(f"{given!r} is no command. If it is a model: nanoinfer chat {given}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            told = TOLD_ELSEWHERE.get(self.prog.removeprefix("nanoinfer "), {})
            if isinstance(action, argparse._SubParsersAction) and value in told:
                self.error(f"{value!r} is not one of {self.prog}: {told[value]}")
            if self.prog == "nanoinfer" and isinstance(action, argparse._SubParsersAction):
                self._refuse_command(value)
            hint = _hint(value, action.choices) or ":"
            raise argparse.ArgumentError(
                action, f"{value!r} is not known{hint} choose from {', '.join(action.choices)}"
            )


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _hint(name: str, known: Collection[str], shown: Callable[[str], str] = str) -> str:
    guess = nearest(name, known)
    return f": did you mean {shown(guess)}?" if guess else ""


def length(text: str) -> int:
    """For `type=` of an option: parse a whole number of tokens; "4k" is 4096. No minimum is checked."""
    try:
        return parse_count(text, "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, such as 4096, or 4k for the same") from None


def json_object(text: str, example: str = '{"rope_theta": 5e5}') -> dict[str, Any]:
    """For `type=` of an option: parse an object in JSON. example: one, for the message about what is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be an object in JSON, such as '{example}'")
    return found


def in_options(text: str, parser: Parser) -> str:
    """Rewrite a message of the Python API in terms of the command: `max_num_seqs=3` becomes `--max-num-seqs 3`.

    An argument without an option in this command keeps its name.
    """
    known = {option: action for option, action in parser.known.items() if option.startswith("--")}
    options = {option[2:].replace("-", "_"): parser.shown(option) for option in known}
    # If an option has both `--name` and `--no-name`, the first counts.
    options |= {action.dest: option for option, action in reversed(known.items())}
    for argument, names in _TAKEN_FROM.items():
        options |= {argument: name for name in reversed(names) if name in known and argument not in options}
    text = re.sub(r"(?<=hf_overrides=)(\{.*\})", r"'\1'", text)  # as a shell takes it
    for argument, option in options.items():
        text = re.sub(rf"(?<![\w./-]){argument}=(?=\S)", f"{option} ", text)
        text = re.sub(rf"^{argument} is ", f"{option} is ", text)
        if "_" in argument:  # arguments without "_" may be ordinary words
            text = re.sub(rf"(?<![\w./-]){argument}(?![\w=/-])", option, text)
    if offload := options.get("enable_cpu_offload"):
        for word, value in OFFLOAD.items():
            text = text.replace(f"{offload} {value!r}", f"{offload} {word}")
            text = text.replace(f'{offload} "{value}"', f"{offload} {word}")
    return text


@contextmanager
def _worded_warnings(parser: Parser) -> Iterator[None]:
    """Show warnings of our own as the command's errors: in one line, without the place in the source."""
    before = warnings.formatwarning

    def worded(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> str:
        if not filename.startswith(_OURS):
            return before(message, category, filename, *rest)
        return f"{parser.prog}: {in_options(str(message), parser)}\n"

    warnings.formatwarning = worded
    try:
        yield
    finally:
        warnings.formatwarning = before


def run_command(parser: Parser, arguments: Sequence[str], command: Callable[[argparse.Namespace], int]) -> int:
    """Read the arguments, run the command and return its exit status, or the status for the error that ended it.

    The namespace's `check_engine`, where it has one, is called with the namespace before the command.

    The user's errors and Ctrl-C are reported in one line on stderr. A closed output pipe (`| head -1`) is not reported.
    """
    options = parser.parse_args(arguments)
    name = options.parser.prog
    try:
        try:
            if (check_engine := getattr(options, "check_engine", None)) is not None:
                check_engine(options)
            with _worded_warnings(options.parser):
                return command(options)
        finally:
            sys.stdout.flush()  # so that a broken pipe is noticed here and not when the interpreter ends
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, so stdout must lead to an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, MemoryError, OSError) as error:
        print(f"{name}: {in_options(str(error), options.parser)}", file=sys.stderr)
        return REFUSED
