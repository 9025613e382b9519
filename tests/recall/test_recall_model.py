"""The packaged model answers README's first call rightly, about each name."""

import re
from pathlib import Path

import psutil

from nanoinfer import LLM
from nanoinfer.recall.text import WORDS

README = Path(__file__).resolve().parents[2] / "README.md"


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
