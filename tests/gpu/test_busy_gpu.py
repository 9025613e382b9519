"""Several processes on one GPU at once: what is launched meets delays there that one process alone hardly has."""

import json
import os
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from gpu_models import QWEN3

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES, SECONDS = 15, 30
# The engine's own ring; and one with slots of two blocks of a layer, so that each list differs from the one before.
RING_SLOT_BYTES = [], [str(2**19)]
START_SECONDS = 300  # kernels are compiled once, by whichever process is first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.alone
def test_attention_over_a_ring_slot_reads_the_list_that_was_copied_right_before(tmp_path, capsys):
    """Launched with an early start, it read the list before: on an H200 that 15 processes used, 50 of 5,730 batches had
    other bits. `pytest tests/gpu/test_busy_gpu.py` says how many were compared."""
    play(tmp_path, "cuda", NUM_PROCESSES, SECONDS, capsys)


def play(directory: Path, device: str, num_processes: int, seconds: float, capsys) -> None:
    (directory / "config.json").write_text(json.dumps(QWEN3))
    command = [sys.executable, str(ROOT / "tests" / "support" / "eager_batches.py"), str(directory), device]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        logs = [stack.enter_context((directory / f"{i}.log").open("w+")) for i in range(num_processes)]
        processes = [
            subprocess.Popen(
                [*command, str(seconds), *RING_SLOT_BYTES[number % len(RING_SLOT_BYTES)]],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )
            for number, log in enumerate(logs)
        ]  # fmt: skip
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for process, log in zip(processes, logs, strict=True):
            is_there = select.select([process.stdout], [], [], START_SECONDS)[0]
            assert is_there and process.stdout.readline() == "ready\n", said(log)
        for process in processes:  # all are ready: from here on they share the GPU
            process.stdin.write("go\n")
            process.stdin.flush()
        found = []
        for process, log in zip(processes, logs, strict=True):
            printed, _ = process.communicate(timeout=seconds + START_SECONDS)
            assert process.returncode == 0, said(log)
            found.append(json.loads(printed))
    num_batches = sum(one["batches"] for one in found)
    differing = [one["difference"] for one in found if one["difference"] is not None]
    summary = f"{num_batches} batches of {num_processes} processes compared, {len(differing)} processes met other bits"
    with capsys.disabled():
        print(f" {summary} ", end="")
    assert not differing, f"{summary}; the first: {differing[0]}"


def said(log) -> str:
    log.seek(0)
    return log.read()[-3000:]
