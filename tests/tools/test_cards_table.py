"""README's table of what fits on which card is what the planner says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("cards_table", ROOT / "tools" / "cards_table.py")
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)
README = (ROOT / "README.md").read_text().splitlines()


@pytest.mark.parametrize("name", TOOL.TABLES)
def test_the_table_has_the_cards_and_rows_of_the_tool(name):
    begin = README.index(f"<!-- planned: {name} -->") + 1
    table = README[begin : README.index("<!-- end -->", begin)]
    assert table[:2] == TOOL.head(), "run python tools/cards_table.py"
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {row.name}" for row in TOOL.TABLES[name]]


@pytest.mark.parametrize("row", [row for rows in TOOL.TABLES.values() for row in rows], ids=lambda row: row.name)
@pytest.mark.sampled("Qwen3-4B, int4", "128k, KV in int8")
def test_a_row_is_what_plan_says(row):
    assert TOOL.line(row) in README, "run python tools/cards_table.py"
