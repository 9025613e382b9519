"""Options and arguments in the sentences of the pages: each exists, and takes the value that stands behind it."""

import argparse
import ast
import functools
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from nanoinfer import EngineConfig, SamplingParams
from nanoinfer.commands.main import make_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = "CHANGELOG.md"  # names what there was
# Options of other programs, beside those in the tables of docs/coming-from.md.
OTHERS = {
    "quantization.md": {"--format"},
    "ranks.md": {"--nproc-per-node"},
    "troubleshooting.md": {"--ulimit", "--gpus", "--memory", "--local-dir"},
}
MESSAGES = ('kv_cache_dtype="fp8" needs',)
SETTINGS = {field.name: EngineConfig for field in fields(EngineConfig)} | {
    field.name: SamplingParams for field in fields(SamplingParams)
}


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    found, waiting = {}, [("", make_parser())]
    while waiting:
        name, parser = waiting.pop()
        below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        waiting += [(f"{name} {word}".strip(), child) for one in below for word, child in one.choices.items()]
        if not below:
            found[name] = parser
    return found


@functools.cache
def of_scripts() -> set[str]:
    """Options of the tools and the examples."""
    paths = [*(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    return {one for path in paths for one in re.findall(r"\"(--[a-z][a-z-]+)\"", path.read_text())}


def spans(path: Path) -> list[str]:
    """What stands between backticks in a page's sentences and tables; not in its boxes."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.replace("\\|", "|").split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def options_in(span: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span)


def is_known(option: str) -> bool:
    return any(option in parser.known for parser in parsers().values()) or option in of_scripts()


@functools.cache
def foreign() -> set[str]:
    """Names in the first columns of the tables of docs/coming-from.md, and what its texts say is not there."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    cells = re.findall(r"^\| (.+?) \| .+ \|$", text, re.MULTILINE)
    cells += re.findall(r"there is no `.*?`", text)
    return {option for cell in cells for option in options_in(cell)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_option_that_a_sentence_names_exists(path):
    found = [(option, span) for span in spans(path) for option in options_in(span)]
    others = foreign() | OTHERS.get(path.name, set())
    assert [one for one in found if not is_known(one[0]) and one[0] not in others] == []


def taken(words: list[str]) -> bool:
    """Whether some command takes these words behind a model, and no engine refuses what they say."""
    for name, parser in parsers().items():
        if words[0].partition("=")[0] in parser.known:
            needed = {"quantize": ["--to", "int4", "--out", "x"]}.get(name, [])
            try:
                options = make_parser().parse_args([*name.split(), "m", *words, *needed])
                if (check := getattr(options, "check_engine", None)) is not None:
                    check(options)
                return True
            except (SystemExit, ValueError):
                continue
    return False


def alternatives(span: str) -> list[list[str]]:
    """The words of an option with a value, once for each of the values in braces; none where it stands for any."""
    if not re.match(r"--[a-z][a-z0-9-]+[ =]", span) or not is_known(options_in(span)[0]):
        return []
    choices = re.search(r" \{([a-z,]+)\}$", span)
    texts = [span[: choices.start()] + f" {one}" for one in choices[1].split(",")] if choices else [span]
    return [shlex.split(text) for text in texts if not re.search(r"\b[A-Z]{3,}\b|\.\.\.|^\S+ [A-Z]$", text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_an_option_takes_the_value_that_a_sentence_gives_it(path):
    given = [words for span in spans(path) for words in alternatives(span)]
    assert [words for words in given if words[0] not in of_scripts() and not taken(words)] == []


@pytest.mark.parametrize("path", [path for path in PAGES if path.name != HISTORY], ids=lambda path: path.name)
def test_an_argument_takes_the_value_that_a_sentence_gives_it(path):
    for span in spans(path):
        for name, value in re.findall(r"(?<![\w.])([a-z_]+)=(\"[^\"]*\"|[\w.+-]+)(?=[,)\s;]|$)", span):
            if name not in SETTINGS or span.startswith(tuple(MESSAGES)):
                continue
            try:
                given = ast.literal_eval(value)
            except ValueError:
                continue  # it stands for any
            SETTINGS[name](**({"model": "m"} if SETTINGS[name] is EngineConfig else {}), **{name: given})


def test_every_option_of_the_server_has_its_line():
    rows = {option for path in ("serve", "fleet") for option in options_in(rows_of(ROOT / "docs" / f"{path}.md"))}
    shown = {names[-1] for action in parsers()["serve"]._actions if (names := action.option_strings)}
    known = {name for action in parsers()["serve"]._actions for name in action.option_strings}
    unseen = {"--help", "--cache-type-k", "--cache-type-v"}  # the latter are llama.cpp's names
    assert sorted(shown - rows - unseen) == [] and len(rows & known) > 40


def rows_of(path: Path) -> str:
    """The first cells of a page's tables."""
    return "\n".join(re.findall(r"^\| (.+?) \|", path.read_text(), re.MULTILINE))


def test_sentences_are_found():
    found = [span for path in PAGES for span in spans(path)]
    assert sum(bool(alternatives(span)) for span in found) > 30 and len({*map(tuple, map(options_in, found))}) > 100
    assert not is_known("--gpu-layers")
    assert not taken(["--offload", "perhaps"]) and not taken(["--load-format", "dumy"])
    assert taken(["--offload", "on"]) and alternatives("--offload {on,off}") == [
        ["--offload", "on"],
        ["--offload", "off"],
    ]
