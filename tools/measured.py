#!/usr/bin/env python
"""Writes the measured tables of README.md and docs/*.md, and the picture of steps over context.

The figures are those of latest.json, serve.json and recall/ in docs/measurements.

python tools/measured.py            (after make gpu-bench)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanoinfer.bench.rows import draw_steps  # noqa: E402

LATEST = ROOT / "docs" / "measurements" / "latest.json"
PEERS = LATEST.with_name("peers.json")  # what tools/gpu_bench.py --llama-cpp wrote
SERVE = LATEST.with_name("serve.json")  # what tools/serve_load.py wrote, by machine
PICTURE = LATEST.with_name("offload_h200.png")
RECALL = LATEST.with_name(
    "recall"
)  # curve.json and figures.json of train_recall.py, eval.json of `nanoinfer eval recall`
GIB = 2**30


RECALL_KINDS = ("pass_key", "table", "passage", "count")


def where(record: dict) -> str:
    """What was measured with, and against which floors."""
    versions, floors = record["versions"], record["floors"]
    return (
        f"One {versions['device']}, torch {versions['torch']}, Qwen3-4B shape with random weights in bf16 unless said "
        f"otherwise, medians, from `make gpu-bench`. The floor is measured in the same run, before and after each "
        f"case: streamed bytes over one large pinned copy ({floors['link_bytes_per_second'] / 1e9:.1f} GB/s), or bytes "
        f"read over one large device copy ({floors['device_bytes_per_second'] / 1e12:.2f} TB/s) where that takes "
        "longer."
    )


def offload_steps(record: dict) -> str:
    """One decode step in offload mode."""
    cases = record["cases"]
    one, long, batches = cases["one_sequence_32k"], cases["one_sequence_128k"], cases["streamed_batches"]
    huge, hf = cases["one_sequence_400k"], cases["hf_offloaded"]
    rows = [
        _step("1 x 32k, all streamed, ring 4 x 32 MiB (default)", one["streamed, ring 4 x 32 MiB"]),
        _step("1 x 32k, all streamed, ring 8 x 32 MiB", one["streamed, ring 8 x 32 MiB"]),
        _step("1 x 32k, all streamed, ring 8 x 8 MiB", one["streamed, ring 8 x 8 MiB"]),
        _step("1 x 32k, half of the KV resident", one["half resident"]),
        _step("1 x 32k, 12 GiB limit", one["12 GiB limit"]),
        _step("1 x 32k, all fits", one["all fits"]),
        _step("the same in resident mode", one["resident"]),
        _step("1 x 128k, all streamed", long["streamed"]),
        _step("1 x 128k, 12 GiB limit", long["12 GiB limit"]),
        *(_step(f"{name} tokens, all streamed", batches[name]) for name in batches if name != "case_seconds"),
        _step("Qwen3-0.6B shape, 1 x 400,000 tokens, 8 GiB limit", huge),
        _step("transformers, offloaded cache, 1 x 32k", hf["hf"]),
        _step("transformers, offloaded static cache, 1 x 32k", hf["hf-static"]),
    ]
    return _table(["one decode step", "ms", "floor, ms", "ratio", "KV on the GPU"], rows)


def _step(name: str, case: dict) -> list[str]:
    share = case.get("kv_resident_share")
    return [
        name,
        f"{case['seconds_per_token'] * 1e3:.2f}",
        f"{case['floor_seconds'] * 1e3:.2f}",
        f"{case['ratio_to_floor']:.3f}",
        "-" if share is None else f"{share:.0%}",
    ]


def prefill(record: dict) -> str:
    """Prefill of a long prompt in both modes."""
    long = record["cases"]["one_sequence_128k"]
    rows = [
        [name, f"{case['prefill_tokens_per_second']:,.0f}", f"{case.get('prefill_ratio_to_resident', 1):.3f}",
         f"{case['peak_bytes'] / GIB:.2f} of {case['limit_bytes'] / GIB:.2f}"]
        for name, case in long.items() if isinstance(case, dict)
    ]  # fmt: skip
    return _table(["prefill of 131,072 tokens", "tokens/s", "of resident", "GPU peak, GiB"], rows)


def planner(record: dict) -> str:
    """What the planner said and what was used."""
    rows = [
        [
            name,
            f"{case['planned_bytes'] / GIB:.3f}",
            f"{case['peak_bytes'] / GIB:.3f}",
            f"{case['planned_to_peak']:.4f}",
        ]
        for name, case in record["cases"]["planner"].items()
        if isinstance(case, dict)
    ]
    return _table(["setting", "planned, GiB", "peak, GiB", "ratio"], rows)


def resident(record: dict) -> str:
    """One decode step where everything is on the GPU."""
    rows = [_step(name, case)[:4] for name, case in record["cases"]["resident"].items() if isinstance(case, dict)]
    return _table(["resident, sequences x tokens", "ms", "floor, ms", "ratio"], rows)


def sparse(record: dict) -> str:
    """Sparse models: steps as microseconds a layer, which is a whole step divided by the layers, and prefill."""
    cases = {name: one for case in record.get("sparse", {}).get("cases", {}).values() for name, one in case.items()}
    rows = []
    for name, case in cases.items():
        if not isinstance(case, dict) or "seconds_per_token" not in case and "time_per_flop_ratio" not in case:
            continue
        more, layer = case.get("more_than_dense"), case.get("microseconds_per_layer")
        rows.append(
            [
                name,
                f"{case['seconds_per_token'] * 1e3:.3f}" if "seconds_per_token" in case else "",
                f"{layer:,.1f}" if layer else "",
                f"{more:+.1f}" if more else "",
                "" if layer else f"{case['prefill_tokens_per_second']:,.0f}",
                f"{case['time_per_flop_ratio']:.2f}" if "time_per_flop_ratio" in case else "",
            ]
        )
    head = [
        "sequences x tokens",
        "ms a step",
        "us a layer",
        "more than dense",
        "prefill, tokens/s",
        "time per FLOP of 4B's",
    ]
    where = f'One {record["sparse"]["versions"]["device"]}, `make gpu-bench ARGS="--part sparse"`:\n\n' if rows else ""
    return where + _table(head, rows) if rows else ""


def sparse_planner(record: dict) -> str:
    """Sparse shapes of four layers: what was planned beside the peak."""
    cases = record.get("sparse", {}).get("cases", {}).get("sparse_planner", {})
    rows = [
        [
            name,
            f"{case['planned_bytes'] / 2**30:.2f}",
            f"{case['peak_bytes'] / 2**30:.2f}",
            f"{case['planned_to_peak']:.3f}",
        ]
        for name, case in cases.items()
        if isinstance(case, dict)
    ]
    return _table(["shape, layers", "planned, GiB", "peak, GiB", "ratio"], rows) if rows else ""


def links(record: dict) -> str:
    """Steps in 4 bits within small budgets, over the machine's link and over slower ones that are emulated."""
    found = record.get("links", {})
    cases = [case for part in found.get("cases", {}).values() for case in part.values() if isinstance(case, dict)]
    rows = [
        [case["case"], case["link"], f"{case['seconds_per_token'] * 1e3:.1f}", f"{case['tokens_per_second']:.1f}",
         case["bound"], f"{case['kv_resident_share']:.0%}", f"{case['forecast_seconds'] * 1e3:.1f}",
         f"{case['ratio_to_forecast']:.3f}"]
        if "seconds_per_token" in case
        else [case["case"], case["link"], "left out", *[""] * 5]
        for case in cases
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["one sequence", "link", "ms a token", "tokens/s", "bound by", "KV on the GPU", "forecast, ms", "ratio"]
    where = f'One {found["versions"]["device"]}, `make gpu-bench ARGS="--part links"`:'
    return f"{where}\n\n{_table(head, rows)}"


def weights(record: dict) -> str:
    """Steps whose weights are streamed, and a prompt."""
    found = record.get("weights", {})
    cases = {name: case for part in found.get("cases", {}).values() for name, case in part.items()}
    rows = [
        [name, f"{seconds * 1e3:.1f}", f"{case['streamed_gib']:.2f}" if "streamed_gib" in case else "",
         f"{case['ratio_to_floor']:.3f}" if "ratio_to_floor" in case else "",
         f"{case['ratio_to_resident']:.2f}" if "ratio_to_resident" in case else "",
         f"{case['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in case else ""]
        for name, case in cases.items()
        if isinstance(case, dict) and (seconds := case.get("seconds_per_token", case.get("seconds")))
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["", "ms", "GiB streamed", "of the floor", "of resident's time", "peak, GiB"]
    where = f'One {found["versions"]["device"]}, `make gpu-bench ARGS="--part weights"`:'
    return f"{where}\n\n{_table(head, rows)}"


def prefill_32k(record: dict) -> str:
    """Prefill of a prompt of 32,768 tokens in both modes."""
    case = record["cases"].get("one_sequence_32k", {})
    found = {name: case[name] for name in ("resident", "12 GiB limit") if name in case}
    if len(found) < 2:
        return ""
    wanted = found["resident"]["time_to_first_token"]
    rows = [
        [name, f"{figures['time_to_first_token']:.3f}", f"{figures['prefill_tokens_per_second']:,.0f}",
         f"{figures['time_to_first_token'] / wanted:.3f}"]
        for name, figures in found.items()
    ]  # fmt: skip
    return _table(["prefill of 32,768 tokens", "s", "tokens/s", "of resident's time"], rows)


def slots(record: dict) -> str:
    """Steps with experts in host memory, of which some are in slots, and a prompt."""
    found = record.get("slots", {})
    cases = {name: case for part in found.get("cases", {}).values() for name, case in part.items()}
    rows = [
        [name, f"{seconds * 1e3:.2f}", f"{case['hit_rate']:.0%}" if case.get("hit_rate") is not None else "",
         f"{case['fetched_mib']:,.0f}" if "fetched_mib" in case else "",
         f"{case['ratio_to_floor']:.2f}" if "ratio_to_floor" in case else "",
         f"{case['more_than_resident']:+.1f}" if "more_than_resident" in case else "",
         f"{case['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in case else ""]
        for name, case in cases.items()
        if isinstance(case, dict) and (seconds := case.get("seconds_per_token", case.get("seconds")))
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["", "ms", "found in slots", "MiB brought", "of the floor", "us a layer more than resident", "peak, GiB"]
    where = f'One {found["versions"]["device"]}, `make gpu-bench ARGS="--part slots"`:'
    return f"{where}\n\n{_table(head, rows)}"


def latency(record: dict) -> str:
    """What a step and a start cost beside the kernels: figures that are no tables."""
    profiles, start = record["cases"].get("kernels", {}), record["cases"].get("start_up", {})
    one, many = profiles.get("1 x 1024", {}), profiles.get("0.6B, 256 x 550", {})
    lines = []
    if "gap_between_steps_share" in one:
        lines.append(
            f"- **GPU idle, 1 x 1k**: {one['gap_between_steps_share']:.1%} of a step passes between its last kernel "
            f"and the next one's first ({one['gap_between_steps_seconds'] * 1e6:.0f} µs), "
            f"{one['gaps_within_step_share']:.1%} between its {one['num_kernels_per_step']:.0f} kernels."
        )
    if "host_seconds_per_step" in many:
        busy = many.get("busy_seconds_per_step")
        lines.append(
            f"- **CPU per step, 256 sequences** (Qwen3-0.6B shape, 550 tokens each, temperature 0.6): "
            f"{many['host_seconds_per_step'] * 1e3:.2f} ms of a step of {many['seconds_per_token'] * 1e3:.2f} ms"
            + (f", in which the GPU works {busy * 1e3:.2f} ms." if busy else ".")
        )
    if "cold" in start and "warm" in start:
        cold, warm = start["cold"], start["warm"]
        lines.append(
            f"- **Start-up**, {start['checkpoint_bytes'] / 1e9:.1f} GB of weights in the page cache, "
            f"modules compiled to bytecode: first token {warm['seconds_to_first_token']:.1f} s after the process "
            f"began, of which `LLM(...)` takes {warm['constructor_seconds']:.1f} s; "
            f"{cold['seconds_to_first_token']:.1f} s and {cold['constructor_seconds']:.1f} s the first time, "
            "when kernels are compiled."
        )
        lines.append(
            f"- **Graph memory**: {warm['graph_bytes'] / 2**20:.0f} MiB for {len(warm['graph_batch_sizes'])} batch "
            f"sizes up to {warm['graph_batch_sizes'][-1]}."
        )
    return "\n".join(lines)


def arrivals(record: dict) -> str:
    """Streams beside which short prompts arrive."""
    rows = [
        [name, f"{case['seconds_between_tokens'] * 1e3:.2f}", f"{case['longest_seconds_between_tokens'] * 1e3:.1f}",
         f"{case['seconds_to_first_token_of_a_prompt'] * 1e3:.1f}", f"{case['tokens_per_second']:,.0f}"]
        for name, case in record["cases"].get("arrivals", {}).items() if isinstance(case, dict)
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["8 streams, a prompt every third step", "ms a token", "longest, ms", "first token after, ms", "tokens/s"]
    return _table(head, rows)


def kernels(record: dict) -> str:
    """The kernels of decode steps."""

    def microseconds(line: dict, name: str) -> str:
        return f"{line[name] * 1e6:,.1f}" if name in line else "-"

    rows = [
        [setting, f"`{_short(line['name'])}`", f"{line['calls_per_step']:.0f}", microseconds(line, "seconds_per_call"),
         microseconds(line, "floor_seconds"), f"{line['ratio_to_floor']:.2f}" if "ratio_to_floor" in line else "-",
         f"{line['share']:.1%}"]
        for setting, case in record["cases"].get("kernels", {}).items() if isinstance(case, dict)
        for line in case.get("kernels", ())
    ]  # fmt: skip
    if not rows:
        return ""
    return _table(["decode", "kernel", "calls", "µs per call", "floor, µs", "ratio", "of the step"], rows)


def prefill_attention(record: dict) -> str:
    """Attention of one chunk of a long prompt, ours beside the libraries'."""
    case = record["cases"].get("prefill_attention", {})
    rows = [
        [name, f"{found['seconds'] * 1e3:.2f}", f"{found['operations_per_second'] / 1e12:,.0f}",
         f"{found['ratio_to_floor']:.2f}"]
        for name, found in case.items() if isinstance(found, dict) and "seconds" in found
    ]  # fmt: skip
    if not rows:
        return ""
    head = f"attention of {case['chunk']:,} queries to {case['context']:,} keys"
    return _table([head, "ms", "TFLOP/s", f"of the time at {case['matrix_rate'] / 1e12:,.0f} TFLOP/s"], rows)


def _short(name: str) -> str:
    """A kernel's name without return type, arguments and templates, as a table can hold it."""
    name = name.removeprefix("void ").split("(")[0].split("<")[0].replace("|", "/")
    return name if len(name) <= 48 else f"{name[:45]}..."


def auto(record: dict) -> str:
    """A load of three times the pool."""
    rows = [
        [name, f"{case['gpu_blocks']:,}", f"{case['num_preemptions']}", f"{case['streamed_bytes'] / 1e9:,.1f}",
         f"{case['tokens_per_second']:,.0f}", "yes" if case["bit_identical"] else "NO"]
        for name, case in record["cases"]["auto_3x"].items() if isinstance(case, dict)
    ]  # fmt: skip
    return _table(
        ["32 requests of 200 + 600 tokens", "GPU blocks", "preemptions", "streamed, GB", "tokens/s", "same tokens"],
        rows,
    )


def other(record: dict) -> str:
    """Figures that are no tables, of those cases that the record has."""
    cases = {name: case for name, case in record["cases"].items() if "failed" not in case}
    lines, mib = [], 2**20
    if one := cases.get("one_sequence_32k"):
        compared = [case for case in one.values() if isinstance(case, dict) and "bit_identical_to_resident" in case]
        identical = sum(case["bit_identical_to_resident"] for case in compared)
        lines.append(
            f"- **Bits**: of the {len(compared)} settings at 32k, {identical} gave the tokens and log-probabilities of "
            "resident mode to the last bit."
        )
        if "all fits" in one:
            lines.append(f"- **All fits**: a step takes {one['all fits']['ratio_to_resident']:.3f} of resident mode's.")
    if huge := cases.get("one_sequence_400k"):
        lines.append(
            f"- **400,000 tokens within 8 GiB** (Qwen3-0.6B shape, {huge['kv_bytes'] / 1e9:.1f} GB of KV): peak "
            f"{huge['peak_bytes'] / GIB:.2f} GiB, ring {huge['ring_bytes'] / mib:.0f} MiB "
            f"({huge['ring_bytes_at_32k'] / mib:.0f} MiB at 32k), prefill {huge['time_to_first_token']:.0f} s."
        )
    if shared := cases.get("shared_document"):
        lines.append(
            f"- **16 questions about {shared['document_tokens']:,} tokens**, streamed: {shared['bytes_ratio']:.2f} "
            f"times the bytes of one question, {shared['tokens_per_second_ratio']:.1f} times its tokens/s."
        )
    if soak := cases.get("soak"):
        half = soak["growth_at_half"]
        lines.append(
            f"- **{soak['requests']:,} requests within 2.5 GiB** (Qwen3-0.6B shape, streaming): from the 200th to the "
            f"last, GPU memory grew by {soak['gpu_growth_bytes'] / mib:.1f} MiB and host memory by "
            f"{soak['host_growth_bytes'] / mib:.1f} MiB (at half-way {half['gpu_growth_bytes'] / mib:.1f} "
            f"and {half['host_growth_bytes'] / mib:.1f})."
        )
    if pin := cases.get("pin_16gib"):
        first, again = pin["first"], pin["again"]
        lines.append(
            f"- **Host pool of 16 GiB**: {first['seconds_per_gib']:.3f} s per GiB where the memory had not been used "
            f"before, {again['seconds_per_gib']:.3f} s when it had; the first GiB was usable after "
            f"{first['seconds_to_first_segment']:.2f} and {again['seconds_to_first_segment']:.2f} s."
        )
    if batch := cases.get("batch_throughput"):
        step = ""
        if "max_num_batched_tokens" in batch:
            step = f", prefill steps of up to {batch['max_num_batched_tokens']:,} tokens"
        lines.append(
            f"- **Throughput, everything resident** (Qwen3-0.6B shape, 256 requests of 100 to 1,024 tokens in and out, "
            f"temperature 0.6{step}): {batch['tokens_per_second']:,.0f} output tokens/s."
        )
    return "\n".join(lines)


def serve(record: dict) -> str:
    """The server under load."""
    loads = record.get("serve", {})
    rows = [
        [load["where"], f"{sum(load['outcomes'].values()):,}", f"{load['tokens_per_second']:,.0f}",
         *(f"{load[name][part]:,.0f}" for name in ("time_to_first_token", "time_per_output_token")
           for part in ("p50_ms", "p99_ms")),
         str(load["wrong_answers"]), str(load["unexpected"]),
         f"{load['server_rss_mib']['at_end'] - load['server_rss_mib']['at_10_percent']:+d}"]
        for load in loads.values()
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["200 clients, 5 minutes", "requests", "tokens/s", "first token p50, ms", "p99", "per token p50, ms", "p99"]
    return _table([*head, "wrong", "unexpected", "memory, MiB"], rows)


def recall_training(record: dict) -> str:
    """How the recall model learned: the last entry of the training's log for each length of rows."""
    stages = {entry["length"]: entry for entry in record.get("recall", {}).get("curve", [])}
    rows = [
        [f"{length:,}", f"{entry['step']:,}", f"{entry['tokens'] / 1e6:.0f}", f"{entry['seconds']:.0f}",
         f"{entry['loss']:.2f}", *(f"{entry[kind]:.0%}" if kind in entry else "-" for kind in RECALL_KINDS)]
        for length, entry in stages.items()
    ]  # fmt: skip
    head = [
        "tokens in a row",
        "steps",
        "million tokens",
        "seconds",
        "loss",
        "pass keys",
        "tables",
        "passages",
        "counts",
    ]
    return _table(head, rows) if rows else ""


def recall_trained(record: dict) -> str:
    """What the training tool found at its end, by length and depth."""
    cells = record.get("recall", {}).get("figures", {}).get("pass_keys", {})
    if not cells:
        return ""
    depths = list(next(iter(cells.values())))
    rows = [
        [f"{int(length):,}", *(f"{right / asked:.2f}" for right, asked in row.values())]
        for length, row in cells.items()
    ]
    return _table(["tokens", *(f"{float(depth):.0%}" for depth in depths)], rows)


def recall_modes(record: dict) -> str:
    """The recall evaluation: each mode against transformers."""
    found = record.get("recall", {}).get("eval", {})
    if not found:
        return ""
    rows = []
    for mode, scores in found["results"].items():
        shown = [f"{min(row):.2f}" for row in scores["accuracy"]]
        error = max((error for error in scores.get("largest_logprob_error", ()) if error is not None), default=None)
        rows.append(
            [
                mode,
                *shown,
                f"{scores['equal_answers']} of {found['questions']}",
                "-" if error is None else f"{error:.4f}",
                f"{sum(scores['streamed_bytes']) / 1e9:,.1f}" if "streamed_bytes" in scores else "-",
            ]
        )
    head = [f"worst cell of {length:,} tokens" for length in found["lengths"]]
    head += ["answers equal to the first", "largest log-prob error", "streamed, GB"]
    versions = found["versions"]
    where = f"`{found['command']}`, on {versions['device']}, torch {versions['torch']}:"
    return f"{where}\n\n{_table(['mode', *head], rows)}"


def quantised(record: dict) -> str:
    """Decode and prefill with quantised weights."""
    rows = [
        [
            name,
            f"{case['seconds_per_token'] * 1e3:.2f}",
            f"{case['ratio_to_bf16']:.3f}",
            f"{case['ratio_to_floor']:.2f}",
            # A short one is over in so few milliseconds that the host decides.
            f"{case['prefill_ratio_to_bf16']:.3f}" if name.endswith(" 32768") else "-",
            f"{case['weight_bytes'] / GIB:.2f}",
        ]
        for name, case in record["cases"].get("quantised", {}).items()
        if isinstance(case, dict)
    ]
    head = ["one decode step", "ms", "of bf16", "of its floor", "prefill time, of bf16", "weights, GiB"]
    return _table(head, rows) if rows else ""


def packed_products(record: dict) -> str:
    """The products of a layer with quantised weights, by the number of rows."""
    rows = [
        [name, f"{case['seconds'] * 1e6:.1f}", f"{case['ratio_to_bf16']:.2f}", f"{case['ratio_to_one_row']:.2f}"]
        for name, case in record["cases"].get("packed_products", {}).items()
        if isinstance(case, dict) and "seconds" in case
    ]
    return _table(["products of a layer", "µs", "of bf16", "of one row"], rows) if rows else ""


def beside_llama_cpp(record: dict) -> str:
    """llama.cpp's figures beside ours, all of one run."""
    cases = record.get("peers", {}).get("cases", {})
    theirs = cases.get("llama_cpp", {})
    if "build" not in theirs:
        return ""
    build = f" b{theirs['build']}" if theirs["build"] else ""  # 0: built from an archive
    packed, over_context = cases["quantised"], cases["curve"]
    steps = [
        ("16 bits, 1 x 1k", "f16, 1024", packed["bf16, 1 x 1024"]),
        ("16 bits, 1 x 32k", "f16, 32768", packed["bf16, 1 x 32768"]),
        ("4 bits (Q4_K_M, int4), 1 x 1k", "Q4_K_M, 1024", packed["int4, 1 x 1024"]),
        ("4 bits, 1 x 32k", "Q4_K_M, 32768", packed["int4, 1 x 32768"]),
        ("16 bits, all KV on the host, 1 x 8k", "f16, KV on the host, 8192", over_context["streamed, 8192"]),
    ]
    rows = []
    for name, key, ours in [step for step in steps if step[1] in theirs]:
        pair = theirs[key]["seconds_per_token"], ours["seconds_per_token"]
        times = f"{pair[0] / pair[1]:.2f}"
        rows.append([f"decode step, {name}", *(f"{seconds * 1e3:.2f} ms" for seconds in pair), times])
    wide = packed["bf16, 1 x 32768"]
    pair = theirs["f16, prefill, 32768"]["prefill_tokens_per_second"], wide["prefill_tokens_per_second"]
    rows.append(["prefill of 32k, 16 bits", *(f"{rate:,.0f} tokens/s" for rate in pair), f"{pair[1] / pair[0]:.2f}"])
    where = record["peers"]["versions"]["device"]
    head = [f"Qwen3-4B shape, {where}", f"llama.cpp{build}", "nanoinfer", "times as fast"]
    return _table(head, rows)


def files_beside_llama_cpp(record: dict) -> str:
    """Ours and llama.cpp on the same GGUF files, all of one run, and ours in int4 beside."""
    found, rows = record.get("peers", {}).get("files", {}), []
    for name, model in (("gguf_dense", "4B"), ("gguf_sparse", "30B-A3B"), ("gguf_streamed", "30B-A3B")):
        for key, case in found.get("cases", {}).get(name, {}).items():
            if isinstance(case, dict) and "times_as_fast" in case:
                rows.append(_of_file(f"{model}, {key}", case))
    head = [f"Qwen3 shapes, {found['versions']['device']}", "llama.cpp", "nanoinfer", "times as fast"] if rows else []
    return _table(head, rows) if rows else ""


def _of_file(name: str, case: dict) -> list[str]:
    """The row of ours beside llama.cpp's run of a GGUF file, a decode step or a prefill."""
    times = f"{case['times_as_fast']:.2f}"
    if "llama_cpp_seconds_per_token" in case:
        pair = case["llama_cpp_seconds_per_token"], case["seconds_per_token"]
        return [f"decode step, {name}", *(f"{seconds * 1e3:.2f} ms" for seconds in pair), times]
    pair = case["llama_cpp_prefill_tokens_per_second"], case["prefill_tokens_per_second"]
    return [name, *(f"{rate:,.0f} tokens/s" for rate in pair), times]


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


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PARTS: dict[str, Callable[[dict], str]] = {
    part.__name__: part
    for part in (
        where,
        offload_steps,
        prefill,
        prefill_32k,
        planner,
        resident,
        sparse,
        sparse_planner,
        links,
        weights,
        slots,
        latency,
        arrivals,
        kernels,
        prefill_attention,
        quantised,
        packed_products,
        beside_llama_cpp,
        files_beside_llama_cpp,
        auto,
        other,
        serve,
        recall_training,
        recall_trained,
        recall_modes,
    )
}


def fill_in(text: str, record: dict) -> str:
    """The text with what stands between `<!-- measured: name -->` and `<!-- end -->` written anew.

    A part of which the record has nothing becomes empty; a name that is not ours stays as it is.
    """

    def part(match: re.Match) -> str:
        if match[2] not in PARTS:
            return match[0]
        found = PARTS[match[2]](record)
        return "\n".join([match[1], *([found] if found else []), match[3]])

    return re.sub(r"(<!-- measured: (\w+) -->)\n.*?(<!-- end -->)", part, text, flags=re.DOTALL)


def main() -> None:
    record = read_record()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        if (filled := fill_in(text, record)) != text:
            path.write_text(filled)
    draw(record, PICTURE)


if __name__ == "__main__":
    main()
