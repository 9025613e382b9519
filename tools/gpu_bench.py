#!/usr/bin/env python
"""The project's GPU measurements, each with the floors of the same run, written to docs/measurements/latest.json.

make gpu-bench            or            python tools/gpu_bench.py --only resident,kernels

With --part sparse it measures sparse models, with --part links slower links, emulated, with --part weights weights that
do not fit, with --part slots or hybrids experts in host memory, with --part waits what a client of a server and the
next turn of a chat wait for, with --part windows layers that see a window. Each part is kept in the same file beside
the rest, under its name.

With --llama-cpp DIR it measures ours, transformers and llama.cpp side by side, and writes peers.json beside that
file; with --part files ours and llama.cpp on the same GGUF files, and with --part families more shapes in int4 beside
llama.cpp in Q4_0, for which it needs the package gguf, and 40 GiB in memory or on disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import measured  # noqa: E402
import torch  # noqa: E402
from gpu_cases import CASES, FILES, PEERS, Bench  # noqa: E402
from gpu_links import LINKS  # noqa: E402
from gpu_links import report as links_report  # noqa: E402
from gpu_llama import FAMILIES  # noqa: E402
from gpu_serve import CASES as WAITS  # noqa: E402
from gpu_serve import report as waits_report  # noqa: E402
from gpu_slots import HYBRIDS, SLOTS  # noqa: E402
from gpu_slots import report as slots_report  # noqa: E402
from gpu_sparse import SPARSE, report  # noqa: E402
from gpu_weights import WEIGHTS  # noqa: E402
from gpu_weights import report as weights_report  # noqa: E402
from gpu_windows import WINDOWS  # noqa: E402
from gpu_windows import report as windows_report  # noqa: E402

from nanoinfer.common.errors import nearest  # noqa: E402
from nanoinfer.measure.report import versions  # noqa: E402
from nanoinfer.measure.run import free_memory  # noqa: E402
from nanoinfer.memory.floors import measure_floors  # noqa: E402

LATEST = ROOT / "docs" / "measurements" / "latest.json"
BESIDE = LATEST.with_name("peers.json")
# Parts with a record of their own in the file.
BESIDE_DENSE = ("sparse", "links", "weights", "slots", "waits", "windows", "hybrids", "files", "families")
# What one looks at first, printed after each case.
SHOWN = (
    "seconds_per_token", "ratio_to_floor", "ratio_to_forecast", "ratio_to_resident", "kv_resident_share", "bound",
    "prefill_tokens_per_second", "prefill_ratio_to_resident", "seconds_per_gib", "tokens_per_second", "planned_to_peak",
    "under_limit", "llama_cpp_seconds_per_token", "llama_cpp_prefill_tokens_per_second", "llama_cpp_failed",
    "times_as_fast", "ratio_to_int4", "ratio_to_none",
    "bit_identical_to_resident", "bit_identical", "num_preemptions", "ring_bytes_at_32k",
    "bytes_ratio", "tokens_per_second_ratio", "gpu_growth_bytes", "host_growth_bytes", "host_seconds_per_step",
    "gap_between_steps_share", "gaps_within_step_share", "seconds_to_first_token", "constructor_seconds",
    "graph_bytes", "skipped", "failed",
)  # fmt: skip


def source_sha256() -> str:
    """SHA-256 over every source file in sorted path order: path, NUL, bytes, NUL."""
    digest = hashlib.sha256()
    folders = ("nanoinfer", "offload")
    for path in sorted(str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.py")):
        digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(CASES)
    parser.add_argument("--part", choices=["dense", *BESIDE_DENSE], default="dense", help="default: %(default)s")
    parser.add_argument("--only", help=f"cases, separated by commas, of {known}; with --llama-cpp {', '.join(PEERS)}")
    parser.add_argument("--out", help=f"default: {LATEST.name}, or {BESIDE.name} with --llama-cpp")
    parser.add_argument(
        "--resume", action="store_true", help="measure what the record at --out lacks, if it is of the same source"
    )
    parser.add_argument("--shape", help="another shape for all cases, such as tiny")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="folder of llama-bench and llama-quantize, to measure beside"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after these, of all cases")
    parser.add_argument("--scale", type=int, default=1, help="divide contexts and sizes, to try the code")
    options = parser.parse_args()
    part = None if options.part == "dense" else options.part
    parts = {None: PEERS, "files": FILES, "families": FAMILIES}
    if not options.llama_cpp:
        parts = {None: CASES, "sparse": SPARSE, "links": LINKS, "weights": WEIGHTS, "slots": SLOTS, "waits": WAITS}
        parts |= {"windows": WINDOWS, "hybrids": HYBRIDS}
    if part not in parts:
        parser.error(f"--part {part} goes {'without' if options.llama_cpp else 'with'} --llama-cpp DIR")
    cases = parts[part]
    names = options.only.split(",") if options.only else list(cases)
    unknown = [name for name in names if name not in cases]
    if unknown:
        hint = nearest(unknown[0], cases)
        guess = f" (did you mean {hint!r}?)" if hint else ""
        parser.error(f"case {unknown[0]!r} is not known{guess}: choose from {', '.join(cases)}")
    out = Path(options.out or (BESIDE if options.llama_cpp else LATEST)).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(options.shape, options.scale, device, options.llama_cpp)
    floors = measure_floors(device)
    # Where the record is written does not matter.
    given = [
        word
        for name in ("part", "only", "shape", "scale")
        if (value := getattr(options, name)) != parser.get_default(name)
        for word in (f"--{name}", str(value))
    ]
    given += ["--llama-cpp", "DIR"] if options.llama_cpp else []
    record = {
        "command": shlex.join(["python", "tools/gpu_bench.py", *given]),
        "versions": versions(device),
        "source_sha256": source_sha256(),
        "floors": {"link_bytes_per_second": floors.link, "device_bytes_per_second": floors.device},
        "cases": {},
    }
    whole = json.loads(out.read_text()) if out.exists() else {}
    if options.resume and (before := whole.get(part) if part else whole):
        record = _resumed(before, record)
        names = [name for name in names if name not in record["cases"]]
    start = time.perf_counter()
    for name in names:
        begin = time.perf_counter()
        if begin - start > options.seconds:
            print(f"{name}: not begun, {begin - start:.0f} s are over", flush=True)
            continue
        try:
            record["cases"][name] = cases[name](bench)
        except Exception as error:  # one case must not lose the others
            traceback.print_exc()
            record["cases"][name] = {"failed": f"{type(error).__name__}: {error}"}
            free_memory()
        record["cases"][name]["case_seconds"] = round(time.perf_counter() - begin, 1)
        if part:
            whole = whole | {part: record}
        else:
            whole = record | {name: whole[name] for name in BESIDE_DENSE if name in whole}
        out.write_text(json.dumps(whole, indent=1) + "\n")
        case = record["cases"][name]
        print(f"{name} ({case['case_seconds']:.1f} s): {_summary(case)}", flush=True)
    if table := measured.part("kernels", record):
        print(table)
    reports = dict(sparse=report, links=links_report, weights=weights_report, slots=slots_report, waits=waits_report)
    reports |= dict(windows=windows_report, hybrids=slots_report)
    shown = reports.get(part)
    if shown:
        print(shown({name: row for case in record["cases"].values() for name, row in case.items()}))
    print(f"{len(names)} cases in {time.perf_counter() - start:.0f} s, written to {out}", flush=True)
    return 0 if all("failed" not in case for case in record["cases"].values()) else 1


def _resumed(old: dict, new: dict) -> dict:
    """Return the old record without what failed, and the floors of the run that goes on with it."""
    for name in ("command", "versions", "source_sha256"):
        if old[name] != new[name]:
            sys.exit(f"--resume: the record at --out has another {name}, {old[name]} and not {new[name]}")
    cases = {name: case for name, case in old["cases"].items() if "failed" not in case}
    return old | {
        "cases": cases,
        "resumed": [*old.get("resumed", []), {"behind": list(cases), "floors": new["floors"]}],
    }


def _summary(case: dict) -> str:
    def short(figures: dict) -> str:
        values = {name: figures[name] for name in SHOWN if name in figures}
        return ", ".join(f"{n}={v:.5g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())

    parts = [short(case)] + [f"[{name}] {short(part)}" for name, part in case.items() if isinstance(part, dict)]
    return " ".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
