"""`nanoinfer chat` on the command line."""

from __future__ import annotations

import argparse
import select
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from nanoinfer.chat.settings import VARIABLES, Settings
from nanoinfer.commands.model import load, prepare
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import REFUSED, Parser, in_options
from nanoinfer.options.sampling import add_sampling_options, sampling_params


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name such as qwen3-8b, a directory, a GGUF file or a hub id")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the chat template's own)")
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    add_sampling_options(parser, "as many as there is room for")
    defaults = {"enable_cpu_offload": "auto", "max_num_seqs": 1}
    add_engine_options(parser, without=("seed", "skip_tokenizer_init"), defaults=defaults)


def run(options: argparse.Namespace) -> int:
    """Talk until the user ends it."""
    settings = Settings(sampling_params(options, {"temperature": 1.0}, None))  # refuses what is not allowed at once
    if options.chat_template_kwargs is not None:
        settings = settings.with_value(VARIABLES, options.chat_template_kwargs)
    is_on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not sys.stdin.isatty():
        _check_there_is_something()
    screen = _terminal() if is_on_terminal else _plain()  # before the model is loaded, which takes long
    prepare(options, is_chat=True)
    from nanoinfer.chat.engine_model import EngineModel
    from nanoinfer.chat.loop import converse
    from nanoinfer.chat.session import Session

    with load(options) as llm:
        settings = replace(settings, params=sampling_params(options, llm.engine.sampling_defaults, None))
        session = Session(EngineModel(llm, options.model), settings, options.system)
        if is_on_terminal:
            screen.note("/help lists what there is; Ctrl-D ends the chat")
        worded = partial(in_options, parser=options.parser)
        has_ended_well = converse(session, screen, stops_answers=is_on_terminal, worded=worded)
    return 0 if has_ended_well else REFUSED


def _check_there_is_something() -> None:
    """Raise ValueError if stdin has ended; what is yet to come is not waited for."""
    file = getattr(sys.stdin, "buffer", None)
    if file is not None and select.select([file], [], [], 0)[0] and not file.peek(1):
        raise ValueError("nothing came from stdin: pipe a message for each line into the command, or use a terminal")


def _terminal() -> Any:
    try:
        from nanoinfer.chat.conversation import state_directory
        from nanoinfer.chat.terminal import TerminalScreen
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"{package} is not installed: in the clone, pip install -e '.[chat]'") from error
    return TerminalScreen(state_directory())


def _plain() -> Any:
    from nanoinfer.chat.screens import PlainScreen

    return PlainScreen(sys.stdin, sys.stdout, sys.stderr)
