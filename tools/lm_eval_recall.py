#!/usr/bin/env python
"""Runs lm-evaluation-harness (local-completions) against `nanoinfer serve recall`: nothing is downloaded.

python tools/lm_eval_recall.py --lm-eval .venv-lm-eval/bin/lm_eval

Two tasks over the same questions about documents: `recall_said` generates the answers, and `recall_chosen` compares the
log-probabilities of all answers, which a server gives for prompts (`echo` with `logprobs`). Exit code 1 says that fewer
answers were right than `--least`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from transformers import AutoTokenizer  # noqa: E402

from nanoinfer.recall.text import Author, write_document  # noqa: E402
from nanoinfer.weights.find import PACKAGED  # noqa: E402

METRICS = {"recall_said": "exact_match,none", "recall_chosen": "acc,none"}
_COMMON = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
num_fewshot: 0
"""
TASKS = {
    "recall_said": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
metric_list:
  - metric: exact_match
""",
    "recall_chosen": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - metric: acc
""",
}


def questions(num_documents: int, num_tokens: int) -> list[dict]:
    """Return questions about documents, each with its answer and those of the document's other questions."""
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED["recall"])
    rows = []
    for number in range(num_documents):
        author = Author(Random(number))
        document = write_document(
            author, num_tokens, lambda text: len(tokenizer.encode(text, add_special_tokens=False)), [0.1, 0.5, 0.9]
        )
        asks = [ask for planted in document.planted if planted.wished for ask in planted.fact.asks]
        answers = ["".join(ask.answer) for ask in asks]
        for gold, ask in enumerate(asks):
            text = document.text + "".join(ask.question)
            rows.append({"text": text, "answer": answers[gold], "choices": answers, "gold": gold})
    return rows


def run(lm_eval: str, names: list[str], rows: list[dict], folder: Path) -> dict[str, float]:
    """Return the share of right answers of each task."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in names:
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name, data=data) + TASKS[name])
    command = [sys.executable, "-m", "nanoinfer.commands.main", "serve", "recall", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r"serving on (http\S+)", line)))
        model = {
            "model": "recall", "base_url": f"{url}/v1/completions", "tokenizer": PACKAGED["recall"],
            "tokenizer_backend": "huggingface", "num_concurrent": 4,
        }  # fmt: skip
        arguments = ",".join(f"{name}={value}" for name, value in model.items())
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        subprocess.run(
            [lm_eval, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(names),
             "--include_path", str(folder), "--output_path", str(folder / "out")],
            check=True, env=os.environ | offline, cwd=folder,
        )  # fmt: skip
    finally:
        server.terminate()
        server.communicate(timeout=60)
    (written,) = (folder / "out").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    return {name: results[name][METRICS[name]] for name in names}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, metavar="FILE", help="the command lm_eval")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(all)")
    parser.add_argument("--documents", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each document (%(default)s)")
    parser.add_argument("--least", type=float, default=0.9, help="share of right answers (%(default)s)")
    options = parser.parse_args(arguments)
    rows = questions(options.documents, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        shares = run(os.path.abspath(options.lm_eval), options.tasks, rows, Path(folder))
    for name, share in shares.items():
        print(f"{name}: {share:.2f} of {len(rows)} answers right")
    return 0 if min(shares.values()) >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
