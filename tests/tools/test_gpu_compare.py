"""What compares clones on a GPU, and what has a server measured: played without a GPU, for the code's sake."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_compare.py"


def test_a_clone_is_measured_beside_this_one_and_has_the_same_bits():
    """The other clone is this one, so bits that differ are no clone's."""
    command = [sys.executable, str(TOOL), str(ROOT), "--scale", "64", "--seconds", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    spec = importlib.util.spec_from_file_location("gpu_compare", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    lines = [line.split("  ") for line in run.stdout.splitlines()]
    bits = [[cell.strip() for cell in line if cell.strip()] for line in lines if line[0].endswith("bits")]
    assert len(bits) == len(tool.CASES) and all(one == other and len(one) == 12 for _, one, other in bits)


def test_a_server_that_was_started_without_options_has_its_forecast_beside(tmp_path):
    out = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "tools" / "gpu_bench.py"), "--part", "waits", "--only", "served"]
    run = subprocess.run([*command, "--scale", "64", "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    row = json.loads(out.read_text())["waits"]["cases"]["served"]["tiny-sparse, 1GiB"]
    assert row["num_expert_slots"] == 8 and 0 < row["expert_hit_rate"] <= 1
    assert (
        0 < row["forecast_seconds"] and row["ratio_to_forecast"] == row["seconds_per_token"] / row["forecast_seconds"]
    )


def test_a_step_is_measured_by_its_drafted_tokens(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import gpu_common
    import gpu_serve

    for name, value in dict(DRAFTED=(2,), DRAFTED_ANSWER=25).items():
        monkeypatch.setattr(gpu_serve, name, value)
    found = gpu_serve.drafted(gpu_common.Bench("tiny", 16, torch.device("cpu")))
    plain, drafted = found["tiny, 0 drafted"], found["tiny, 2 drafted"]
    assert plain["tokens_per_step"] == 1 < drafted["tokens_per_step"] <= 3
    assert drafted["is_same_text"] and drafted["ratio_to_none"] == drafted["step_seconds"] / plain["step_seconds"]
