"""Names and versions that stand in two places: the same in the documents as in the code."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

from nanoinfer.commands.main import make_parser

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for folder in ("offload", "nanoinfer") for path in sorted((ROOT / folder).rglob("*.py"))]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
# Who waits, dot, what waits "after" what.
RULE = r"[a-z_]+\.[a-z_]*after_[a-z_]+"
WAITS = ("wait", "query", "synchronize", "_reclaim")


@functools.cache
def rules_of_waits():
    """Every text that a wait is given as its rule, also as a constant such as GPU_RULE."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    constants = {
        node.value.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and any(getattr(name, "id", getattr(name, "attr", "")).endswith("_RULE") for name in node.targets)
    }
    return constants | {
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_every_rule_says_who_waits_after_what():
    rules = rules_of_waits()
    assert len(rules) >= 8, "the waits were not found"
    assert [rule for rule in sorted(rules) if not re.fullmatch(RULE, rule)] == []


def test_a_rule_that_is_named_exists():
    rules = rules_of_waits()
    named = [(str(path.relative_to(ROOT)), set(re.findall(rf'[`"]({RULE})[`"]', path.read_text()))) for path in TEXTS]
    assert set.union(*(names for _, names in named)) >= rules
    assert [(path, names - rules) for path, names in named if names - rules] == []


def test_the_table_of_rules_lists_each_one_once():
    table = re.findall(rf"^\| `({RULE})` \|", (ROOT / "docs" / "offload.md").read_text(), re.MULTILINE)
    # What `nanoinfer verify` waits for by itself is no part of a step.
    assert sorted(table) == sorted(rule for rule in rules_of_waits() if not rule.startswith("verify."))


def test_the_same_versions_of_python_are_named_everywhere():
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    oldest, newest = re.search(r"\((\d, \d+)\) <= sys\.version_info\[:2\] <= \((\d, \d+)\)", makefile).groups()
    oldest, newest = (version.replace(", ", ".") for version in (oldest, newest))
    assert f"needs Python {oldest} to {newest}" in makefile
    assert f"with Python {oldest} to {newest} (" in readme
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()


DOCUMENTS = [*(path for path in TEXTS if path.suffix == ".md"), *sorted((ROOT / "examples").iterdir())]


def commands(text: str) -> list[list[str]]:
    """The words of each line that begins with the command, as a reader pastes it."""
    lines = re.findall(r"^(?: {4,}|\$ )?(nanoinfer (?!runs)[a-z].*)$", text.replace("\\\n", " "), re.MULTILINE)
    # Brackets say that an option may be left out; what stands behind < or > is the shell's.
    lines = [re.split(r" [<>|] ", re.sub(r" \[(--[^\]]*)\]", r" \1", line))[0] for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_document_has_the_options_that_it_is_given(path, capsys):
    for command in commands(path.read_text()):
        try:
            make_parser().parse_args(command)
        except SystemExit as ending:
            assert not ending.code, f"{shlex.join(command)}: {capsys.readouterr().err}"


def test_commands_are_found():
    assert sum(len(commands(path.read_text())) for path in DOCUMENTS) > 20
