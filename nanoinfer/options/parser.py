"""Shared by all commands: how options are read, and how messages name them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

from nanoinfer.common.errors import MEANT, nearest
from nanoinfer.common.unsupported import ENGINE
from nanoinfer.config import Check, must_be

OFFLOAD = {"on": True, "auto": "auto", "off": False}
"""The words for the values of `enable_cpu_offload`."""
# Arguments that a command without an option for them takes from one of these, the first that it has.
_TAKEN_FROM = {
    "max_model_len": ("--context", "--input-len"),
    "max_num_seqs": ("--batch",),
    "num_requests": ("--requests",),
}


class Parser(argparse.ArgumentParser):
    """Refuses an unknown option or value with the nearest known name and the usage of the command that was called.

    The namespace's `parser` is the parser of that command.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_defaults(parser=self)

    def add_argument(self, *names: str, check: Check | None = None, **kwargs: Any) -> argparse.Action:
        """Declare an option: besides argparse's arguments what its value must be. Its help ends with the default."""
        default, text = kwargs.get("default"), kwargs.get("help") or ""
        if isinstance(default, str | int | float) and "action" not in kwargs and "(default" not in text:
            kwargs["help"] = f"{text} (default: %(default)s)"
        action = super().add_argument(*names, **kwargs)
        action.check = check
        return action

    def check(self, options: argparse.Namespace) -> None:
        """Put what the checks return in the place of the values; ValueError if one is not allowed."""
        for action in self._actions:
            value = getattr(options, action.dest, None)
            if value is not None and getattr(action, "check", None) is not None:
                setattr(options, action.dest, action.check(action.dest, value))

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> tuple:
        """Refuse unknown arguments here; argparse would pass them up to the parser of all commands."""
        args = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            for option in (argument.split("=")[0] for argument in args[: args.index("--") if "--" in args else None]):
                is_option = option.startswith("--") and " " not in option or option[:1] == "-" and option[1:] in MEANT
                if is_option and not any(known.startswith(option) for known in self._option_string_actions):
                    self._refuse(option)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _refuse(self, option: str) -> None:
        """End with what to do about an unknown option: vLLM's and other programs' ones are known by name."""
        name = option.lstrip("-").replace("-", "_")
        if name in ENGINE:
            self.error(f"{option} is not supported: {in_options(ENGINE[name][1], self)}")
        if "MODEL" in MEANT.get(name, ()):
            self.error(f"unknown option {option}: give the model, a directory or a hub id, without an option")
        self.error(f"unknown option {option}{_hint(option, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = _hint(value, action.choices) or ":"
            raise argparse.ArgumentError(
                action, f"{value!r} is not known{hint} choose from {', '.join(action.choices)}"
            )


def _hint(name: str, known: Collection[str]) -> str:
    guess = nearest(name, known)
    return f": did you mean {guess}?" if guess else ""


def at_least(least: int) -> Check:
    """For `check=` of an option with a number."""
    return must_be(f"at least {least}", lambda value: value >= least)


def length(text: str) -> int:
    """For `type=` of an option: parse a whole number of tokens; "4k" is 4096. No minimum is checked."""
    match = re.fullmatch(r"\s*(-?[0-9]+)([kK]?)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, such as 4096, or 4k for the same")
    return int(match[1]) * (1024 if match[2] else 1)


def in_options(text: str, parser: argparse.ArgumentParser) -> str:
    """Rewrite a message of the Python API in terms of the command: `max_num_seqs=3` becomes `--max-num-seqs 3`.

    An argument without an option in this command keeps its name.
    """
    known = {option: action for option, action in parser._option_string_actions.items() if option.startswith("--")}
    options = {option[2:].replace("-", "_"): option for option in known}
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
