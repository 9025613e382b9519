"""The packaged model answers rightly, the same in every mode as in transformers; and so does README's first call."""

import re
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from nanoinfer import LLM
from nanoinfer.measure.answers import largest_error
from nanoinfer.recall.answers import EngineAnswers
from nanoinfer.recall.evaluate import Exam, Grid, evaluate
from nanoinfer.recall.reference import ReferenceAnswers
from nanoinfer.recall.text import WORDS
from nanoinfer.weights.find import PACKAGED

GRID = Grid(lengths=(1024,), depths=(0.0, 0.6), num_questions=5)
README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PACKAGED["recall"])


@pytest.mark.sampled()
def test_both_modes_and_transformers_answer_rightly(tokenizer):
    end = tokenizer.eos_token_id
    exam = Exam(tokenizer, GRID)
    wanted = evaluate(ReferenceAnswers(PACKAGED["recall"], end), exam, progress=False)
    assert wanted.lowest >= 0.95
    # Not bfloat16: where the processor has no instructions for it, it takes minutes.
    common = dict(device="cpu", dtype="float32", max_model_len=1024, max_num_seqs=10, progress_bar=False)
    for extra in ({}, dict(enable_cpu_offload=True, resident_kv_limit=0)):
        with LLM("recall", **common, **extra) as llm:
            found = evaluate(EngineAnswers(llm, end), exam, progress=False)
        assert found.answers == wanted.answers and (found.streamed_bytes[0] > 0) == bool(extra)
        assert largest_error(found.probes[0], wanted.probes[0]) < 0.01


def test_readmes_first_lines_print_a_right_answer_about_each_name(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert '"recall"' in code
    asked, wanted = re.search(r"of (\w+ \w+)\?", code)[1], re.search(r"print\(.*\)\s+# (.*)", code)[1]
    facts = {match[1]: match[0] for match in re.finditer(r"The pass key of (\w+ \w+) is \d{5}\.", code)}
    assert len(facts) == 2 and facts[asked] == wanted
    for name, fact in facts.items():
        first, last = name.split()
        assert first in WORDS["first_names"] and last in WORDS["last_names"]
        exec(compile(code.replace(f"{asked}?", f"{name}?"), "README.md", "exec"), {})
        assert capsys.readouterr().out.strip() == fact


def test_a_pool_on_the_cpu_takes_memory_only_as_it_is_used():
    """Else the first call of a machine without a GPU would begin with writing zeros for many seconds."""
    before = psutil.Process().memory_info().rss
    with LLM("recall", device="cpu", gpu_memory_limit="4GiB", enable_cpu_offload=True, progress_bar=False) as llm:
        assert llm.engine.runner.gpu_kv.nbytes > 3 * 2**30
        assert psutil.Process().memory_info().rss - before < 2**30
