"""docs/troubleshooting.md: each message in it is one that a source has."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
LEAST = 24  # letters that a message of the sources has beside what is filled in: fewer fit to anything


def messages() -> list[str]:
    """What stands in boxes, each on one line, and in the first column of the table."""
    boxes = re.findall(r"^```text\n(.*?)\n```$", TEXT, re.MULTILINE | re.DOTALL)
    found = [" ".join(message.split()) for message in boxes + re.findall(r"^\| `(.*)` \| .* \|$", TEXT, re.MULTILINE)]
    # The line after a run is put together of what bounded it and the advice, others of a name and what is wrong.
    besides = r"^bound by [\w ]+: | \(link busy [^)]*\)$|^model \S+ (?=is not here)"
    return [re.sub(besides, "", message) for message in found]


def parts_of(node: ast.AST) -> list[str | None]:
    """The parts of a text; None is what is filled in."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*parts_of(node.left), *parts_of(node.right)]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in parts_of(value)]
    return [node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None]


def patterns(messages: list[str]) -> list[re.Pattern]:
    """A pattern for each text of the sources that may be one of the messages; what is filled in may be anything."""
    paths = (path for folder in ("nanoinfer", "offload") for path in (ROOT / folder).rglob("*.py"))
    texts = (parts_of(node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    said = (parts for parts in texts if sum(len(part or "") for part in parts) >= LEAST)
    likely = (parts for parts in said if any(all(part in one for part in parts if part) for one in messages))
    return [re.compile("".join(".*" if part is None else re.escape(part) for part in parts)) for parts in likely]


def test_every_message_is_one_of_the_program():
    found = messages()
    known = patterns(found)
    assert len(found) > 25

    def is_said(text: str) -> bool:
        return any(pattern.fullmatch(text) for pattern in known)

    sentences = [(message, re.split(r"\. (?=[A-Z])", message)) for message in found]
    assert [message for message, parts in sentences if not is_said(message) and not all(map(is_said, parts))] == []


def test_every_symptom_is_listed_with_a_link_that_leads_to_it():
    linked = re.findall(r"^- \[(.*?)\]\(#(.*?)\)$", TEXT, re.MULTILINE)
    titles = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert [title for title, _ in linked] == titles
    assert [link for _, link in linked] == [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
