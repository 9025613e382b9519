"""What was said, and its file: a list of messages as OpenAI's API takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.common.errors import shown

ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """The system prompt, and messages of the user and the assistant in turns.

    Attributes:
        messages: role and content; an answer before which the model thought has that in `reasoning_content`.
    """

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, question: str, answer: str, thought: str | None) -> None:
        """Add a question with its answer."""
        kept = {} if thought is None else {"reasoning_content": thought}
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **kept}]

    def undo(self) -> str:
        """Forget the last question with its answer, and return the question; ValueError: there is none."""
        if not self.messages:
            raise ValueError("nothing was said yet")
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ValueError: there is a file that is no conversation, which would be lost.
            OSError: the file cannot be written.
        """
        if path.exists():
            try:
                self.load(path)
            except (ValueError, OSError):
                raise ValueError(f"{path} is there and is no conversation: give another name") from None
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = json.dumps([*system, *self.messages], ensure_ascii=False, indent=2)
        beside = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            beside.write_text(text + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:  # which names the file beside it
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            with suppress(OSError):
                beside.unlink()

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read a file that `save` wrote, or a list of messages from elsewhere.

        Raises:
            ValueError: the file is no list of messages of a role and a text.
            OSError: the file cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no conversation: it is no JSON ({error})") from None
        if isinstance(content, dict) and "messages" in content:  # the body of a request
            content = content["messages"]
        if not isinstance(content, list) or not content:
            raise ValueError(f"{path} is no conversation: it must hold a list of messages")
        found = cls()
        for place, message in enumerate(content):
            role, text = _checked(f"{path}: message {place}", message)
            if role == "system":
                if place:
                    raise ValueError(f"{path}: message {place} is of the system: only the first one may be")
                found.system = text
            else:
                thought = message.get("reasoning_content")
                kept = {"reasoning_content": thought} if role == "assistant" and isinstance(thought, str) else {}
                found.messages.append({"role": role, "content": text, **kept})
        roles = [message["role"] for message in found.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError(f"{path} is no conversation: each question of the user must have one answer behind it")
        return found


def _checked(where: str, message: Any) -> tuple[str, str]:
    role, text = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if role not in ROLES:
        raise ValueError(f"{where} has role {shown(role)}: choose from {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise ValueError(f"{where} has content {shown(text)}: give text")
    return role, text


def state_directory() -> Path:
    """Return where programs of this user keep what outlives them, by the XDG base directory specification."""
    given = os.environ.get("XDG_STATE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return root / "nanoinfer"
