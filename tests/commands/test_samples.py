"""What the documents show of a command's output is what it prints."""

import re
from pathlib import Path

import pytest

from nanoinfer.commands import main as cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name, num_samples", [("planner", 2), ("verify", 1)])
@pytest.mark.sampled("planner-2")
def test_the_samples_are_what_the_commands_print(name, num_samples, capsys):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    samples = re.findall(r"```\n\$ nanoinfer (.*?)\n(.*?)\n```", text, flags=re.DOTALL)
    assert len(samples) == num_samples
    for command, printed in samples:
        cli.main(command.split())
        assert capsys.readouterr().out.strip() == printed
