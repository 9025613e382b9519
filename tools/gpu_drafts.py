#!/usr/bin/env python
"""Drafts on text that copies, and on text that does not: tokens a pass and milliseconds a token beside plain decode.

python tools/gpu_drafts.py --write replay.json       (texts as tokens, from this project's docs and Python's library)
python tools/gpu_drafts.py --replay replay.json [--only edit,prose]

A shape has random weights, and what it would say copies nothing. So each step is made to give the token that the text
has next, by its logits, while the drafter sees prompt and past alone, and all else is the product's own way.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402

from nanoinfer import SamplingParams  # noqa: E402
from nanoinfer.measure.report import table  # noqa: E402

CONTEXT, OUTPUT = 32_000, 256
GIB = 2**30
SUFFIX = dict(method="suffix", num_speculative_tokens=8)
STREAMED = dict(enable_cpu_offload=True, host_memory_limit="16GiB", resident_kv_limit=0, gpu_memory_limit=20 * GIB)
ENGINES = {
    "4B, 32k streamed": ("qwen3-4b", CONTEXT, STREAMED),
    "4B, 32k streamed, int4 KV": ("qwen3-4b", CONTEXT, STREAMED | dict(kv_cache_dtype="int4")),
    "8B under 8 GiB, 4k, weights stream": (
        "qwen3-8b", 4096, dict(enable_cpu_offload=True, host_memory_limit="24GiB", gpu_memory_limit=8 * GIB),
    ),
    "4B, 4k, resident": ("qwen3-4b", 4096, dict(gpu_memory_limit=20 * GIB)),
}  # fmt: skip


def texts() -> dict[str, tuple[str, str]]:
    """Prompts' ends and what is to come behind them: code with a name changed, quotes, fresh prose."""
    code = inspect.getsource(argparse._get_action_name) + inspect.getsource(argparse.ArgumentParser.parse_known_args)
    renamed = re.sub(r"\bnamespace\b", "settings", code)
    page = (ROOT / "docs" / "blocks.md").read_text()
    sentences = [one.strip() for one in re.split(r"(?<=\.)\s", page) if 60 < len(one) < 300]
    quotes = "".join(f'{number}. As the page says: "{one}"\n' for number, one in enumerate(sentences[::3], 1))
    prose = (ROOT / "docs" / "sparse.md").read_text()
    return {
        "edit": (f"```python\n{code}```\nThe same with `namespace` called `settings`:\n```python\n", renamed),
        "quotes": (f"{page}\nWhat this page says, in quotes:\n", quotes),
        "prose": ("Write about experts in host memory.\n", prose[len(prose) // 3 :]),
    }


def write(path: Path) -> None:
    """Write the texts as tokens of SmolLM2's tokenizer, whose ids every shape has."""
    from nanoinfer import LLM

    tokenizer = LLM("smollm2", max_model_len=256, progress_bar=False).get_tokenizer()
    pages = sorted((ROOT / "docs").glob("*.md"))
    filler = tokenizer.encode("\n".join(one.read_text() for one in pages if one.stem not in ("blocks", "sparse")))
    cases = {}
    for name, (prompt, answer) in texts().items():
        cases[name] = dict(prompt=tokenizer.encode(prompt), answer=tokenizer.encode(answer)[:OUTPUT])
    path.write_text(json.dumps(dict(filler=filler[:CONTEXT], cases=cases)))


class Replay:
    """Has each sampled token be that of a text: `LLMEngine.on_logits`."""

    def __init__(self) -> None:
        self.answer: list[int] = []

    def __call__(self, sequences: list, logits: torch.Tensor) -> None:
        seen: Counter = Counter()
        for line, sequence in zip(logits, sequences, strict=True):
            place = min(sequence.num_sampled + seen[sequence.sequence_id], len(self.answer) - 1)
            seen[sequence.sequence_id] += 1
            line.fill_(-torch.inf)
            line[self.answer[place]] = 0


def measure(bench, name: str, found: dict, only: list[str]) -> list[dict]:
    """Run each text without drafts and with them, once to warm up; return figures."""
    from nanoinfer.measure.run import release

    shape, context, arguments = ENGINES[name]
    rows: dict[str, list] = {one: [] for one in only}
    for speculation in (None, SUFFIX):
        options = dict(max_model_len=context + OUTPUT + 64, max_num_seqs=1, enable_prefix_caching=True)
        llm = bench.llm(shape, speculative_config=speculation, **options, **arguments)
        llm.engine.on_logits = replay = Replay()
        for one in only:
            case = found["cases"][one]
            replay.answer = answer = case["answer"] if speculation else case["answer"][:64]
            prompt = [*found["filler"][: context - len(case["prompt"])], *case["prompt"]]
            params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
            for _ in range(2):
                output = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == answer, "another token came than was to come"
            metrics = output.metrics
            seconds = (metrics.total_time - metrics.time_to_first_token) / (len(answer) - 1)
            passes = len(answer) - metrics.num_accepted_tokens
            rows[one].append((seconds, len(answer) / passes, metrics.num_drafted_tokens))
        llm.engine.on_logits = None
        release(llm)
    return [
        dict(case=f"{name}, {one}", plain=1e3 * plain, drafts=1e3 * drafts)
        | dict(passes=per_pass, times=plain / drafts, drafted=drafted)
        for one, [(plain, *_), (drafts, per_pass, drafted)] in rows.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--only", default="edit,quotes,prose")
    parser.add_argument("--engines", default=",".join(map(str, range(len(ENGINES)))), help="numbers, from 0 on")
    options = parser.parse_args()
    if options.write:
        return write(options.write)
    from gpu_common import Bench

    found, names = json.loads(options.replay.read_text()), list(ENGINES)
    bench = Bench(None, 1, torch.device("cuda", 0))
    print(torch.cuda.get_device_name(0), hashlib.sha256(options.replay.read_bytes()).hexdigest()[:16], flush=True)
    columns = {
        "case": "{case}", "plain, ms a token": "{plain:,.2f}", "with drafts": "{drafts:,.2f}", "times": "{times:.2f}",
        "tokens a pass": "{passes:.2f}", "drafted": "{drafted}",
    }  # fmt: skip
    for number in map(int, options.engines.split(",")):
        print(table(measure(bench, names[number], found, options.only.split(",")), columns.items()), flush=True)
    return None


if __name__ == "__main__":
    main()
