#!/usr/bin/env python
"""How long a sparse model takes to its first token: packed, and quantised while it is read.

python tools/gpu_loading.py WIDE_DIR PACKED_DIR [--shape qwen3-30b-a3b] [--device cuda]

Writes the shape with random weights to WIDE_DIR (61 GB; a RAM disk will do), quantises it to int4 in PACKED_DIR
(16 GB) and starts a process on each. What was written just now is in the page cache. Prints one line of JSON for each
step, with the most host memory that the process held.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tools"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

START = """
import json, resource, sys, time
from nanoinfer import LLM, SamplingParams
model, device, quantization, begin = sys.argv[1], sys.argv[2], sys.argv[3] or None, float(sys.argv[4])
imported = time.time()
options = dict(quantization=quantization, progress_bar=True, max_model_len=4096)
with LLM(model, device=device, **options) as llm:
    constructed = time.time()
    llm.generate([list(range(5, 133))], SamplingParams(temperature=0, max_tokens=1))
    figures = dict(first_token_s=time.time() - begin, import_s=imported - begin, constructor_s=constructed - imported)
    print(json.dumps(figures | dict(host_peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wide", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--once", action="store_true", help="start each once: the second needs to compile nothing")
    arguments = parser.parse_args()

    from gpu_startup import write_checkpoint

    from nanoinfer.weights.write import quantise_checkpoint

    def say(what: str, begin: float, **figures) -> None:
        print(json.dumps({"step": what, "seconds": round(time.time() - begin, 1), **figures}), flush=True)

    begin = time.time()
    if not (arguments.wide / "config.json").is_file():
        arguments.wide.mkdir(parents=True, exist_ok=True)
        say("written", begin, bytes=write_checkpoint(arguments.wide, arguments.shape, arguments.device))
    for model, quantization in ((arguments.wide, "int4"), (arguments.packed, "")):
        if not quantization and not (model / "config.json").is_file():
            begin = time.time()
            quantise_checkpoint(arguments.wide, model, "int4", device=arguments.device, progress=False)
            say("quantised", begin)
        for turn in ("first start",) if arguments.once else ("first start", "again"):
            begin = time.time()
            command = [sys.executable, "-c", START, str(model), arguments.device, quantization, str(begin)]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
            say(f"{turn}, {quantization or 'packed'}", begin, **json.loads(found.splitlines()[-1]))


if __name__ == "__main__":
    main()
