"""What lm-evaluation-harness is asked about the packaged model. It runs with `make lm-eval-test`."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "lm_eval_recall.py"


def test_each_question_has_its_answer_among_those_of_its_document():
    spec = importlib.util.spec_from_file_location("lm_eval_recall", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rows = tool.questions(2, 256)
    assert len(rows) == 6 and len({row["text"] for row in rows}) == 6
    for row in rows:
        assert row["text"].startswith("Records.") and row["text"].endswith("\nAnswer:")
        assert row["choices"][row["gold"]] == row["answer"] and len(set(row["choices"])) == 3
        key = row["answer"].split()[-1].rstrip(".")
        assert key in row["text"].rpartition("\nQuestion:")[0]
    assert tool.TASKS.keys() == tool.METRICS.keys()
