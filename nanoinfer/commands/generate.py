"""`nanoinfer generate` on the command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanoinfer.commands.model import load, prepare
from nanoinfer.commands.top import needed
from nanoinfer.common.progress import PromptProgress, on_terminal
from nanoinfer.common.terminal import without_orders
from nanoinfer.common.units import counted
from nanoinfer.options.engine import add_engine_options
from nanoinfer.options.parser import Parser, in_options
from nanoinfer.options.sampling import add_sampling_options, sampling_params
from nanoinfer.outputs import StreamOutput

_STDIN = "-"
_MAX_TOKENS = 128
_WATCH_SECONDS = 0.1
_TEXT_LINES = 8  # above the picture


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name such as qwen3-8b, a directory, a GGUF file or a hub id")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; - or nothing: what is piped in")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt as an option")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="ask a chat model: the prompt is put into its chat template as a message, and it answers; without this "
        "the text is continued as it stands",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system's message before it; implies --chat")
    parser.add_argument("--json", action="store_true", help="print the text, why it ended and its figures as JSON")
    parser.add_argument(
        "--watch", action="store_true", help="on a terminal, show below the text what the engine does (extra: chat)"
    )
    add_sampling_options(parser, f"{_MAX_TOKENS}; of a chat, as many as there is room for")
    defaults = {"enable_cpu_offload": "auto", "max_num_seqs": 1}
    add_engine_options(parser, without=("seed", "skip_tokenizer_init"), defaults=defaults)


def run(options: argparse.Namespace) -> int:
    """Print the completion as it is generated, and then on stderr how fast it was."""
    prompt = _prompt(options)
    is_chat = options.chat or options.system is not None
    shown_in = needed() if options.watch and sys.stderr.isatty() else None
    sampling_params(options, {"temperature": 1.0}, 1)  # refuse what is not allowed before anything is loaded
    prepare(options, is_chat=is_chat)
    with _second_interrupt_ends(options.parser.prog), load(options) as llm:
        params = sampling_params(options, llm.engine.sampling_defaults, None if is_chat else _MAX_TOKENS)
        if is_chat:
            prompt = _in_template(llm, prompt, options.system)
        before, shown = llm.engine.meter.snapshot(), without_orders if sys.stdout.isatty() else str
        text = ""
        prints = not options.json and (shown_in is None or not sys.stdout.isatty())
        outputs = llm.generate_stream(prompt, params)
        try:
            with watched(llm, shown_in) as show:
                for output in outputs if shown_in else _with_progress(llm, outputs):
                    if output.error is not None:
                        raise ValueError(output.error)
                    text += output.text_delta
                    if prints:
                        print(shown(output.text_delta), end="", flush=True)
                    show("" if prints else shown(text))
            if shown_in is not None and not prints and not options.json:
                print(shown(text), end="", flush=True)
        except KeyboardInterrupt:
            print()  # so that what the shell prints begins on a new line
            raise
        figures = dict(text=text, finish_reason=output.finish_reason, metrics=vars(output.metrics))
        print(json.dumps(figures, ensure_ascii=False) if options.json else "", flush=True)
        said = [_speed(llm, output.metrics, before)]
        if output.finish_reason == "length":
            if not is_chat and getattr(llm.engine.tokenizer, "chat_template", None):
                said.insert(0, "The text was continued as it stands: --chat asks the model")
            said.insert(0, _cut(output.metrics, llm.engine.plan.max_model_len))
        print(f"{options.parser.prog}: {in_options('. '.join(said), options.parser)}", file=sys.stderr)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    """Return the one prompt that is given: as a word, as an option or on stdin.

    A last line end of what is piped does not count, since `echo` writes one.
    """
    if options.text is not None and options.prompt is not None:
        raise ValueError("the prompt is given twice: leave the text or --prompt out")
    text = options.prompt if options.text is None else options.text
    if text is None and sys.stdin.isatty():
        raise ValueError('no prompt is given: nanoinfer generate MODEL "text", or pipe it into the command')
    if text is None or text == _STDIN:
        text = sys.stdin.read().removesuffix("\n")
        if not text:
            raise ValueError("nothing came from stdin: give a prompt, or pipe one into the command")
    return text


def _with_progress(llm: Any, outputs: Iterator[StreamOutput]) -> Iterator[StreamOutput]:
    """Yield the outputs; until the first one say on a terminal how far the prompt is read."""
    if not sys.stderr.isatty():
        yield from outputs
        return
    with PromptProgress(llm.engine.live.prompt_tokens, *on_terminal(sys.stderr)) as progress:
        for output in outputs:
            progress.end()
            yield output


@contextmanager
def watched(llm: Any, shown_in: tuple[Any, Any, Any] | None) -> Iterator[Callable[[str], None]]:
    """Give what shows the end of a text with the engine's picture below it, at most ten times a second."""
    if shown_in is None:
        yield lambda text: None
        return
    from rich.console import Group
    from rich.text import Text

    from nanoinfer.engine.figures import ENGINES, FACTS, Reading, values

    live, console, picture = shown_in
    made, last = picture(values(FACTS, Reading(llm.engine))), 0.0
    with live(console=console(stderr=True), auto_refresh=False, transient=True) as window:

        def show(text: str) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= _WATCH_SECONDS:
                last = now
                made.update(values(ENGINES, Reading(llm.engine, is_quick=True)), now)
                lines = Text(text).wrap(window.console, window.console.width)[-_TEXT_LINES:]
                window.update(Group(*lines, made), refresh=True)

        yield show


def _in_template(llm: Any, text: str, system: str | None) -> list[int]:
    """Return the tokens of a conversation with this message, in the model's chat template."""
    from nanoinfer.parsers.answer_format import AnswerFormat
    from nanoinfer.requests.chats import ChatTemplate

    messages = [] if system is None else [{"role": "system", "content": system}]
    template = ChatTemplate(llm.engine.tokenizer, AnswerFormat.of_tokenizer(llm.engine.tokenizer))
    return template.encode([*messages, {"role": "user", "content": text}])


def _speed(llm: Any, metrics: Any, before: Any) -> str:
    from nanoinfer.engine.stats import bound_line

    rate = f" at {1 / metrics.time_per_output_token:.1f} tokens/s" if metrics.time_per_output_token else ""
    return (
        f"{counted(metrics.num_prompt_tokens, 'prompt token')}, first token after "
        f"{metrics.time_to_first_token:.2f} s, {counted(metrics.num_generated_tokens, 'token')}{rate}; "
        f"{bound_line(llm.engine, before)}"
    )


def _cut(metrics: Any, context: int) -> str:
    if metrics.num_prompt_tokens + metrics.num_generated_tokens < context:
        return f"stopped at {counted(metrics.num_generated_tokens, 'token')}: -n gives more"
    return f"stopped, the context of {context:,} tokens is full: max_model_len gives more"


@contextmanager
def _second_interrupt_ends(name: str) -> Iterator[None]:
    """On Ctrl-C say that memory is given back, and that a second one ends the process before that."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also in the midst of a call that Python waits for
        # Not by `print`, in whose midst this may be.
        os.write(sys.stderr.fileno(), f"\n{name}: giving memory back; Ctrl-C again ends at once\n".encode())
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is not signal.SIG_IGN:  # as a shell sets it for what runs in the background
            signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
