#!/usr/bin/env python
"""Writes the tables of docs/coming-from.md that say what messages say: names that are understood, and what is refused.

python tools/other_names.py            (after a change in nanoinfer/common/ or nanoinfer/serve/fields.py)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nanoinfer.common.other_names import COMMANDS, INSTEAD, MEANT  # noqa: E402
from nanoinfer.common.told_elsewhere import TOLD_ELSEWHERE  # noqa: E402
from nanoinfer.common.unsupported import CHAT, ENGINE, GENERATE, MISSING_METHODS, SAMPLING, Table  # noqa: E402
from nanoinfer.serve.fields import UNSUPPORTED  # noqa: E402

DOCUMENT = ROOT / "docs" / "coming-from.md"


def meant() -> str:
    """Names that lead to one of ours, by what they mean."""
    return _table(("elsewhere", "here"), _by({name: _code(ours) for name, ours in MEANT.items()}))


def refused(table: Table) -> str:
    """Arguments that are not there, by what to do instead."""
    return _table(("not here", "instead"), _by({name: advice for name, (_, advice) in table.items()}))


def not_needed() -> str:
    """Options of other programs for which there is none here, by what to do instead."""
    return _table(("elsewhere", "instead"), _by(INSTEAD))


def commands() -> str:
    """Commands of other programs, by what to run here."""
    return _table(("elsewhere", "here"), _by(COMMANDS))


def elsewhere() -> str:
    """Options that one command has not, by where that is said."""
    rows = [(f"{command}: {text}", name) for command, told in TOLD_ELSEWHERE.items() for name, text in told.items()]
    found: dict[str, list[str]] = {}
    for text, name in rows:
        found.setdefault(text, []).append(name)
    return _table(("not here", "command: instead"), found)


def methods() -> str:
    return _table(("not here", "instead"), _by(MISSING_METHODS))


PARTS = {
    "meant": meant,
    "commands": commands,
    "instead": not_needed,
    "elsewhere": elsewhere,
    "engine": lambda: refused(ENGINE),
    "sampling": lambda: refused(SAMPLING),
    "methods": methods,
    "calls": lambda: refused(GENERATE | CHAT),
    "requests": lambda: refused({name: value for name, value in UNSUPPORTED.items() if name not in SAMPLING}),
}


def _by(said: Mapping[str, str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, text in said.items():
        found.setdefault(text, []).append(name)
    return found


def _table(head: tuple[str, str], found: Mapping[str, Iterable[str]]) -> str:
    rows = [(_code(names), text.replace("|", "\\|")) for text, names in found.items()]
    return "\n".join(f"| {left} | {right} |" for left, right in [head, ("---", "---"), *rows])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def fill_in(text: str) -> str:
    """The text with what stands between `<!-- names: part -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- names: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    DOCUMENT.write_text(fill_in(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
