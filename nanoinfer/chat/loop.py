"""The loop of a chat: a message or a command in, an answer out."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

from nanoinfer.chat.commands import EndOfChat, is_command, run
from nanoinfer.chat.screens import Screen
from nanoinfer.chat.session import Session


def converse(
    session: Session,
    screen: Screen,
    *,
    stops_answers: bool,
    worded: Callable[[str], str] = str,
) -> bool:
    """Talk until the user ends it, or an error does; return whether the user did.

    Args:
        stops_answers: Ctrl-C ends an answer; else it ends the program, as those without a terminal expect.
        worded: gives an engine's message in the words of the command.
    """
    while (text := _read(session, screen)) is not None:
        try:
            if not is_command(text):
                _answer(session, screen, text, stops_answers)
            elif (said := run(text, session)) is not None:
                screen.say(said)
            else:
                _answer_again(session, screen, stops_answers)
        except EndOfChat:
            return True
        except KeyboardInterrupt:  # not in the midst of an answer
            if not stops_answers:
                raise
            screen.note("interrupted")
        except BrokenPipeError:
            raise
        except (ValueError, MemoryError, OSError) as error:
            if not screen.complain(str(error) if is_command(text) else worded(str(error))):
                return False
    return True


def _read(session: Session, screen: Screen) -> str | None:
    with session.waiting():
        return screen.read()


def _answer_again(session: Session, screen: Screen, stops_answers: bool) -> None:
    """Ask the last question once more; its answer stays where there is no other."""
    params, conversation = session.settings.params, session.conversation
    if params.is_greedy or params.seed is not None:
        why = "temperature is 0" if params.is_greedy else "seed is set"
        screen.note(f"{why}: the same answer comes; /set {why.split()[0]} changes that")
    last, is_kept = conversation.messages[-2:], False
    question = conversation.undo()
    try:
        is_kept = _answer(session, screen, question, stops_answers)
    finally:
        if not is_kept:
            conversation.messages += last


def _answer(session: Session, screen: Screen, question: str, stops_answers: bool) -> bool:
    """Show an answer, and return whether it is part of the conversation."""
    answer = session.ask(question)
    with closing(iter(answer)) as pieces, _interrupt_calls(answer.stop) if stops_answers else nullcontext():
        try:
            with screen.answering(answer.prompt_tokens) as show:
                for kind, text in pieces:
                    show(kind, text)
        except KeyboardInterrupt:
            if not stops_answers:
                raise
    is_kept = session.keep(question, answer)
    if answer.report is not None:
        screen.note(answer.report.line())
    if not is_kept:
        screen.note("there is no answer, so the question is not part of the conversation")
    return is_kept


@contextmanager
def _interrupt_calls(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C; on a second one raise KeyboardInterrupt wherever the program is."""
    is_first = True

    def interrupt(*_: object) -> None:
        nonlocal is_first
        if not is_first:
            raise KeyboardInterrupt
        is_first = False
        stop()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
