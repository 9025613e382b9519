"""`bench_offload.py --beyond`: what fewer bits of KV and drafts bring beyond the link, alone and together.

All KV streams. The first row is plain decode in the model's own bits, and the link bounds it; every other row says how
many times as many tokens a second it has, beside its own floor.
"""

from __future__ import annotations

import argparse

from nanoinfer.bench.replay import SUFFIX, Case, ReplayRow, arguments_of, compare, contexts_of, finish, measured
from nanoinfer.bench.texts import made, parsed, read
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.options.measuring import open_model

FORMATS = "fp8", "int8", "k8v4", "int4"
COPIES, FRESH = "rename", "prose"
"""Of the texts one that drafts help, and one that they hardly do. Without drafts the text makes no difference."""


def run(options: argparse.Namespace) -> list[ReplayRow]:
    """Run each KV format without drafts and with them, all KV streamed."""
    device = resolve_device(options.device)
    contexts = contexts_of(options, device)
    formats = ["auto", *(FORMATS if options.kv_cache_dtype == "auto" else options.kv_cache_dtype.split(","))]
    texts = parsed(made()) if options.replay is None else read(options.replay)
    if missing := [name for name in (COPIES, FRESH) if name not in texts.cases]:
        raise ValueError(
            f"--replay {options.replay!r} has no text {missing[0]!r}, which --beyond replays: leave it out"
        )
    drafts = dict(speculative_config=options.speculative_config or SUFFIX)
    with open_model(options, device_of(device).is_host) as (model, _):
        cases = [
            Case(
                "streamed", context, arguments_of(options, "streamed", context) | dict(kv_cache_dtype=kind) | own, names
            )
            for context in contexts
            for kind in dict.fromkeys(formats)
            for own, names in (({}, (COPIES,)), (drafts, (COPIES, FRESH)))
        ]
        rows, floors = measured(cases, options, model, texts, device)
    firsts = {row.context: row for row in reversed(rows) if (row.kv_cache_dtype, row.drafts) == ("auto", "none")}
    for row in rows:
        compare(row, firsts[row.context])
    return finish(options, rows, texts, floors, device)
