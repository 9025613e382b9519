"""Names and versions that stand in two places: the same in the documents as in the code."""

import ast
import functools
import json
import re
import shlex
from pathlib import Path

import pytest

from nanoinfer.commands.main import make_parser

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for folder in ("offload", "nanoinfer") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, *SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
SUPPORTED = (ROOT / "docs" / "supported.md").read_text()
# Who waits, dot, what waits "after" what.
RULE = r"[a-z_]+\.[a-z_]*after_[a-z_]+"
WAITS = ("wait", "query", "synchronize", "_reclaim")


@functools.cache
def rules_of_waits():
    """Every text that a wait is given as its rule, also as a constant such as GPU_RULE."""
    texts = [path.read_text() for path in SOURCES]
    texts = [text for text in texts if "_RULE" in text or any(f".{name}(" in text for name in WAITS)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
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


def test_pages_say_of_amd_what_the_tests_compile():
    source = (ROOT / "tests" / "kernels" / "test_kernels_compile.py").read_text()
    tested = sorted({*re.findall(r"gfx[0-9]\w+", source)})
    assert len(tested) > 2 and "compile_kernels.py" in source
    for page in ("supported.md", "devices.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        said = re.search(r"[^.]*kernels? compiles? for [^.]*gfx[^.]*", text)[0].replace("`", "")
        assert sorted(re.findall(r"gfx[0-9]\w+", said)) == tested, page
        assert "down to" in said and "make amd-test" in said, page


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
    assert f"| Python | {oldest} to {newest} |" in SUPPORTED
    major, minor = newest.split(".")
    assert f'requires-python = ">={oldest},<{major}.{int(minor) + 1}"' in (ROOT / "pyproject.toml").read_text()


def test_the_versions_of_libraries_are_those_that_are_asked_for_and_tested_with():
    pyproject, constraints = ((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))
    record = json.loads((ROOT / "docs" / "measurements" / "latest.json").read_text())["versions"]
    for name in ("torch", "triton", "transformers"):
        needed, tested = re.search(rf"^\| {name} \| ([\d.]+) or newer.*? \| (.*) \|$", SUPPORTED, re.MULTILINE).groups()
        assert f'"{name}>={needed}' in pyproject
        pinned = re.search(rf"^{name}==(.*)$", constraints, re.MULTILINE)
        pinned = pinned or re.search(rf"{name}==([\d.]+)", (ROOT / "Makefile").read_text())
        assert pinned[1] in tested and (name == "transformers" or record[name] in tested)
    compiled = (ROOT / "tests" / "kernels" / "test_kernels_compile.py").read_text()
    architectures = json.loads(re.search(r'parametrize\("architecture", (\[.*\])\)', compiled)[1])
    assert re.findall(r"^\| (\d+\.\d) \|", SUPPORTED, re.MULTILINE) == [f"{one / 10}" for one in architectures]


def test_what_is_to_be_installed_is_installed_from_the_clone():
    """No index has the package."""
    paths = [*PAGES, *SOURCES, *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    found = {
        (path.name, extras)
        for path in paths
        for extras in re.findall(r"pip install ([^\n`]*\[.*?\].?)", path.read_text())
    }
    assert {name for name, _ in found} >= {"README.md", "chat.md", "serve.py", "openai_client.py"}
    assert [one for one in sorted(found) if not re.fullmatch(r"-e '\.\[[a-z,]+\]'", one[1])] == []


def test_the_words_of_messages_and_tables_are_explained_where_a_newcomer_looks():
    text = (ROOT / "docs" / "words.md").read_text()
    words = {
        word
        for cell in re.findall(r"^\| \*\*(.*)\*\* \| [A-Z].*\. \|$", text, re.MULTILINE)
        for word in cell.split(", ")
    }
    assert 12 <= len(words) <= 24 and text.count("\n| **") == len(words) - 1, "head and embeddings share a line"
    assert {"KV block", "ring", "pinned", "floor", "head", "wide", "product", "spilled", "working memory"} <= words
    for path in (ROOT / "README.md", ROOT / "docs" / "planner.md", ROOT / "docs" / "troubleshooting.md"):
        assert "words.md)" in path.read_text(), path


DOCUMENTS = [*PAGES, *sorted((ROOT / "examples").iterdir())]


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


def anchors(path: Path) -> set[str]:
    """What a link may name behind #: the titles, in small letters and with dashes."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.suffix == ".md"], ids=lambda path: str(path.name))
def test_every_link_and_path_leads_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    named = re.findall(r"`((?:nanoinfer|offload|tests|tools|examples|docs)/[\w/.]*)`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
