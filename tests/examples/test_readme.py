"""README's Python runs as it stands, but for the model and how much of it is asked for."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of what no test has: a checkpoint of 8 GB and the memory for it.
REPLACED = {
    '"Qwen/Qwen3-4B"': '"recall"',
    'gpu_memory_limit="10GiB"': 'gpu_memory_limit="256MiB"',
    "max_model_len=32768": "max_model_len=1024",
    "max_tokens=256": "max_tokens=4",
}


def test_the_snippet_of_everything_runs(capsys):
    first, snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for text, other in REPLACED.items():
        assert text in snippet
        snippet = snippet.replace(text, other)
    names = {}
    exec(first.splitlines()[0], names)  # the import; tests/recall/ runs the rest
    exec(compile(snippet, "README.md", "exec"), names)
    with names["llm"] as llm:
        assert llm.mode == "resident"
    assert "'mode': 'resident'" in capsys.readouterr().out


def test_every_snippet_of_the_documents_is_python():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for snippet in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            compile(snippet, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
