"""The commands of a chat: lines that begin with "/"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nanoinfer.chat.conversation import Conversation
from nanoinfer.chat.session import Session
from nanoinfer.chat.settings import checked
from nanoinfer.common.errors import did_you_mean
from nanoinfer.common.units import counted


class EndOfChat(Exception):
    """The user has had enough."""


def is_command(text: str) -> bool:
    return text.startswith("/")


def run(text: str, session: Session) -> str | None:
    """Carry a command out and return what there is to say; None: the last question is to be asked again.

    Raises:
        EndOfChat: `/exit`.
        ValueError, OSError: it cannot be carried out, and nothing has changed.
    """
    word, _, rest = text.partition(" ") if "\n" not in text.split(" ")[0] else text.partition("\n")
    name = word.strip()[1:].lower()
    if name not in COMMANDS:
        raise ValueError(
            f"there is no command /{name}{did_you_mean(name, COMMANDS)}: /help lists them; "
            "a message that begins with / takes a space before it"
        )
    return COMMANDS[name][2](session, rest.strip())


def _help(session: Session, _: str) -> str:
    shown = [(f"/{name} {wanted}".strip(), text) for name, (wanted, text, _) in COMMANDS.items() if text]
    return "\n".join([*(f"{usage:20} {text}" for usage, text in shown), KEYS])


def _clear(session: Session, _: str) -> str:
    session.conversation.messages.clear()
    return "the conversation begins anew" + (", with the same system prompt" if session.conversation.system else "")


def _undo(session: Session, _: str) -> str:
    session.conversation.undo()
    left = counted(len(session.conversation.messages), "message")
    return f"the last question and its answer are forgotten; {left} before them"


def _regenerate(session: Session, _: str) -> None:
    if not session.conversation.messages:
        raise ValueError("nothing was said yet")


def _system(session: Session, text: str) -> str:
    conversation = session.conversation
    if not text:
        return "there is no system prompt" if conversation.system is None else conversation.system
    conversation.system = None if text in ('""', "none") else text
    return "no system prompt any more" if conversation.system is None else "the system prompt holds from now on"


def _save(session: Session, name: str) -> str:
    path = _path("save", name)
    session.conversation.save(path)
    return f"saved {counted(len(session.conversation.messages), 'message')} in {path}"


def _load(session: Session, name: str) -> str:
    path = _path("load", name)
    session.conversation = Conversation.load(path)
    system = "" if session.conversation.system is None else ", and a system prompt"
    return f"loaded {counted(len(session.conversation.messages), 'message')} from {path}{system}"


def _path(command: str, name: str) -> Path:
    if not name:
        raise ValueError(f"/{command} needs the name of a file")
    return Path(name).expanduser()


def _stats(session: Session, _: str) -> str:
    said = {"conversation": counted(len(session.conversation.messages), "message")}
    said["generated"] = f"{session.total_tokens:,} tokens in this chat"
    if session.last is not None:
        said["last answer"] = session.last.line()
    return "\n".join(f"{name:20} {value}" for name, value in {**said, **session.model.stats()}.items())


def _set(session: Session, text: str) -> str:
    if not text:
        return "\n".join(session.settings.lines())
    word, _, rest = text.partition(" ")  # as in Ollama
    if word == "system":
        return _system(session, rest.strip())
    if word in ("think", "nothink"):
        session.settings = session.settings.with_thinking(session.model.format, is_on=word == "think")
        return "the model thinks as its template has it" if word == "think" else "the model is told not to think"
    text = rest.strip() if word == "parameter" else text
    name, _, value = text.replace("=", " ", 1).partition(" ")
    if not value.strip():
        checked(name)
        raise ValueError(f"/set {name} needs a value, such as /set temperature 0.7; /set alone shows all of them")
    session.settings = session.settings.with_value(name, value.strip())
    return next(line for line in session.settings.lines() if line.split()[0] == name.lstrip("-").replace("-", "_"))


def _end(session: Session, _: str) -> str:
    raise EndOfChat


# Name -> what it takes, what it does ("": another name of one that is listed), how.
COMMANDS: dict[str, tuple[str, str, Callable[[Session, str], str | None]]] = {
    "help": ("", "this list", _help),
    "clear": ("", "forget what was said; system prompt and settings stay", _clear),
    "regenerate": ("", "another answer to the last question", _regenerate),
    "undo": ("", "forget the last question and its answer", _undo),
    "system": ("TEXT", 'set the system prompt; alone: show it; "": none', _system),
    "save": ("FILE", "write the conversation, as JSON", _save),
    "load": ("FILE", "go on with a conversation from a file", _load),
    "stats": ("", "tokens, memory, what bounded the answers, what would help", _stats),
    "set": ("NAME VALUE", "set temperature, top_p, max_tokens, ...; think, nothink; alone: show all", _set),
    "exit": ("", "end the chat, as Ctrl-D does", _end),
    "quit": ("", "", _end),
    "bye": ("", "", _end),
    "?": ("", "", _help),
}
KEYS = (
    'Enter sends; Alt-Enter or Ctrl-J begins a new line, as Enter does behind """ until the next """. Ctrl-C ends an '
    "answer, Ctrl-D the chat."
)
