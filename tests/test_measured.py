"""The measured tables of the documents are those of the record, and the record is one of these sources."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from nanoinfer import cli

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "docs/offload.md", "docs/planner.md"])
def test_the_tables_are_those_of_the_newest_record(name):
    measured = load("measured")
    record, text = json.loads(measured.LATEST.read_text()), (ROOT / name).read_text()
    assert "<!-- measured: " in text
    assert measured.fill_in(text, record) == text, "run python tools/measured.py"


def test_a_table_follows_the_record():
    measured = load("measured")
    record = json.loads(measured.LATEST.read_text())
    record["cases"]["resident"]["1 x 1024"]["seconds_per_token"] = 0.123456
    text = "before\n<!-- measured: resident -->\nold\n<!-- end -->\nafter\n"
    found = measured.fill_in(text, record)
    assert "| 1 x 1024 | 123.46 |" in found and "old" not in found
    assert found.startswith("before\n<!-- measured: resident -->\n") and found.endswith("\n<!-- end -->\nafter\n")


@pytest.mark.parametrize("name, num_samples", [("planner", 2), ("verify", 1)])
def test_the_samples_are_what_the_commands_print(name, num_samples, capsys):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    samples = re.findall(r"```\n\$ nanoinfer (.*?)\n(.*?)\n```", text, flags=re.DOTALL)
    assert len(samples) == num_samples
    for command, printed in samples:
        cli.main(command.split())
        assert capsys.readouterr().out.strip() == printed
