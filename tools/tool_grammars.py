#!/usr/bin/env python
"""How many tools a grammar of calls takes, with the time and memory of the process in which it is compiled for trial.

    python tools/tool_grammars.py
    python tools/tool_grammars.py --counts 700 800 --parameters 14

For each form of calls: CPU seconds and the process's largest memory so far, or why llguidance takes no such grammar.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nanoinfer.parsers.grammar import SHAPES, CallGrammar  # noqa: E402
from nanoinfer.parsers.tools import Tool  # noqa: E402
from nanoinfer.structured.grammar import load_llguidance  # noqa: E402
from nanoinfer.structured.trial import Trial  # noqa: E402

TAGS = (
    "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] [CALL_ID] <|channel|> <|message|> <|constrain|> "
    "<|end|> <|start|> <arg_key> </arg_key> <arg_value> </arg_value> <seed:tool_call> </seed:tool_call>"
).split()
NUM_BYTES = 256  # tokens before the tags (`structured/check.py`)
KINDS = [
    {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b", "c"]},
    {"type": "array", "items": {"type": "string"}},
]  # fmt: skip


def tool(number: int, num_parameters: int) -> Tool:
    properties = {f"parameter_{place}_{number}": KINDS[place % len(KINDS)] for place in range(num_parameters)}
    return Tool(
        f"server_{number // 20}__tool_{number}",
        {"type": "object", "properties": properties, "required": list(properties)[:1], "additionalProperties": False},
    )


def used(trial: Trial) -> tuple[float, float]:
    """Return CPU seconds and the largest memory, in MiB, of the process that compiles."""
    process = Path("/proc", str(trial.process.pid))
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    memory = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), int(memory.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 100, 1024], help="tools (1 100 1024)")
    parser.add_argument("--parameters", type=int, default=5, help="of each tool (%(default)s)")
    parser.add_argument("--tokens", type=int, default=151_936, help="of the vocabulary (%(default)s)")
    options = parser.parse_args()
    ids = {tag: NUM_BYTES + 1 + place for place, tag in enumerate(TAGS)}
    lark = load_llguidance().LLMatcher.grammar_from_lark
    for form, shape in SHAPES.items():
        trial = Trial(TAGS, options.tokens, limit_seconds=60)
        trial.fault(lark('start: "a"'))  # what is made of the vocabulary is made once
        for count in options.counts:
            text = CallGrammar(shape, ids).of([tool(number, options.parameters) for number in range(count)])
            before, _ = used(trial)
            fault = trial.fault(lark(text))
            after, memory = used(trial)
            said = fault[0].partition("\n")[0][:80] if fault else "taken"
            print(f"{form}: {count} tools, {len(text)} characters, {after - before:.2f} s, {memory:.0f} MiB: {said}")
        trial.close()


if __name__ == "__main__":
    main()
