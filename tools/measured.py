#!/usr/bin/env python
"""Writes the measured tables of README.md and docs/*.md, and the picture of steps over context.

measured.jinja says what they show; the figures are those of latest.json, serve.json and recall/ in docs/measurements.

python tools/measured.py            (after make gpu-bench)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanoinfer.bench.rows import draw_steps  # noqa: E402

LATEST = ROOT / "docs" / "measurements" / "latest.json"
PEERS = LATEST.with_name("peers.json")  # what tools/gpu_bench.py --llama-cpp wrote
SERVE = LATEST.with_name("serve.json")  # what tools/serve_load.py wrote, by machine
PICTURE = LATEST.with_name("offload_h200.png")
RECALL = LATEST.with_name("recall")  # curve.json, figures.json of train_recall.py, eval.json of recall_reference.py
RULE = ["---"] * 20


def _formatted(value: float | None, spec: str, scale: float = 1, none: str | None = None) -> str:
    """A figure times a factor, or what stands for it where the record has none; without that, this raises."""
    if none is not None and (value is None or isinstance(value, Undefined)):
        return none
    return format(value * scale, spec)


def _cases(part: dict) -> list[tuple[str, dict]]:
    """Those that have figures, by name."""
    return [(name, case) for name, case in part.items() if isinstance(case, dict)]


def _joined(parts: Iterable[dict], apart: bool = False) -> list[tuple[str, dict]]:
    """The cases of all parts: one of each name, the last one, or all of them."""
    found = [case for part in parts for case in _cases(part)]
    return found if apart else list(dict(found).items())


def _short(name: str) -> str:
    """A kernel's name without return type, arguments and templates, as a table can hold it."""
    name = name.removeprefix("void ").split("(")[0].split("<")[0].replace("|", "/")
    return name if len(name) <= 48 else f"{name[:45]}..."


class _Missing(StrictUndefined):
    """What the record does not have: it can be asked for, but not written."""

    def __bool__(self) -> bool:
        return False


ENVIRONMENT = Environment(
    loader=FileSystemLoader(ROOT / "tools"), undefined=_Missing, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters |= {
    "f": _formatted,
    "gib": lambda value, digits=2, none=None: _formatted(value, f".{digits}f", 1 / 2**30, none),
    "mib": lambda value, digits=0: _formatted(value, f".{digits}f", 1 / 2**20),
    "cases": _cases,
    "finished": lambda part: {name: case for name, case in part.items() if "failed" not in case},
    "joined": _joined,
    "line": lambda text: " ".join(text.split()) + "\n",
    "short": _short,
}
ENVIRONMENT.globals["head"] = lambda *names: f"| {' | '.join(names)} |\n| {' | '.join(RULE[: len(names)])} |"
PARTS = ENVIRONMENT.get_template("measured.jinja").module


def part(name: str, record: dict) -> str:
    """The text of a part; "" if the record has nothing of it, as a table without rows."""
    text = getattr(PARTS, name)(record).strip()
    return "" if text.endswith(f"| {RULE[0]} |") else text


def draw(record: dict, path: Path) -> None:
    """Draw ms per decode step over context: ours with their floors, transformers' and llama.cpp's."""
    cases, lines = record.get("peers", {}).get("cases", {}), {}
    for label, case, name in (
        ("all streamed", "curve", "streamed"),
        ("offload, 12 GiB limit", "curve", "offload"),
        ("resident, 12 GiB limit", "curve", "resident"),
        ("transformers, offloaded cache", "hf_offloaded", "hf"),
        ("transformers, offloaded static cache", "hf_offloaded", "hf-static"),
        ("llama.cpp, KV on the host", "llama_cpp", "f16, KV on the host"),
        ("llama.cpp, all on the GPU", "llama_cpp", "f16"),
    ):
        points = []
        for key, found in cases.get(case, {}).items():
            if key.rpartition(", ")[0] == name:
                floor = found["floor_seconds"] if case == "curve" else None
                points.append((int(key.rpartition(", ")[2]), found["seconds_per_token"], floor))
        if points:
            lines[label] = points
    if lines:
        draw_steps(path, lines)


def read_record() -> dict:
    """The GPU record, with the server's figures as `serve`, the recall model's as `recall`, and those beside others as
    `peers`."""
    recall = {path.stem: json.loads(path.read_text()) for path in sorted(RECALL.glob("*.json"))}
    others = {"serve": json.loads(SERVE.read_text()), "recall": recall}
    if PEERS.exists():
        others["peers"] = json.loads(PEERS.read_text())
    return json.loads(LATEST.read_text()) | others


def fill_in(text: str, record: dict) -> str:
    """The text with what stands between `<!-- measured: name -->` and `<!-- end -->` written anew.

    A part of which the record has nothing becomes empty; a name that is not ours stays as it is.
    """

    def written(match: re.Match) -> str:
        if not hasattr(PARTS, match[2]):
            return match[0]
        found = part(match[2], record)
        return "\n".join([match[1], *([found] if found else []), match[3]])

    return re.sub(r"(<!-- measured: (\w+) -->)\n.*?(<!-- end -->)", written, text, flags=re.DOTALL)


def main() -> None:
    record = read_record()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        if (filled := fill_in(text, record)) != text:
            path.write_text(filled)
    draw(record, PICTURE)


if __name__ == "__main__":
    main()
