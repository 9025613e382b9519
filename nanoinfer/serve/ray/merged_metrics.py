"""The metrics of several replicas as one text: each sample has a label for the replica."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (.*)")


def merged(texts: Mapping[str, str]) -> str:
    """Return one text in Prometheus' format from one of each replica, by name. The lines of a metric lie together."""
    heads: dict[str, list[str]] = {}  # by metric, in the order in which they come
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        metric = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, kind, metric, *_ = line.split(" ", 3)
                known = heads.setdefault(metric, [])
                if line not in known:
                    known.append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                labels = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(metric, []).append(f"{name}{{{labels}}} {value}")
    lines = [line for metric, head in heads.items() for line in (*head, *samples.get(metric, ()))]
    return "".join(f"{line}\n" for line in lines)
