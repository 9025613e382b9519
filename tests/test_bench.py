"""The benchmark and the command line, on the CPU with the tiny shape."""

import json

import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer import cli
from nanoinfer.bench.command import main
from nanoinfer.bench.floors import Floors, bytes_read_per_step
from nanoinfer.bench.measure import Row, compare
from nanoinfer.bench.report import COLUMNS, table

TINY = ["--shape", "tiny", "--context", "64,300", "--batch", "1,2", "--output-len", "6", "--no-progress"]
TINY += ["--block-size", "32", "--device", "cpu"]


def test_the_table_has_all_columns_a_floor_and_the_check(tmp_path, capsys):
    report, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*TINY, "--mode", "offload,resident,hf", "--json", str(report), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert all(column in printed for column in COLUMNS) and "floors of this run" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(report.read_text())
    assert content["versions"]["torch"] == torch.__version__ and content["floors"]["link_bytes_per_second"] > 0
    rows = {(row["mode"], row["batch"], row["context"]): row for row in content["rows"]}
    assert len(rows) == 12
    for (mode, batch, context), row in rows.items():
        if mode == "hf":
            continue
        assert row["seconds_per_token"] > 0 and row["ratio_to_floor"] > 0 and row["num_steps"] >= 2
        assert (row["streamed_bytes_per_step"] > 0) == (mode == "offload")
        if mode == "offload":
            full_blocks = context // 32
            layer_block = 2 * 32 * 4 * 32 * 4
            assert row["streamed_bytes_per_step"] == 4 * batch * full_blocks * layer_block
        else:
            assert row["check"] == "identical to offload"


def test_a_checkpoint_is_measured_with_its_own_weights(tmp_path, capsys):
    path = make_checkpoint("llama", tmp_path)
    arguments = ["--model", str(path), "--context", "40", "--output-len", "4", "--mode", "resident,hf-static"]
    assert main([*arguments, "--no-progress", "--device", "cpu"]) == 0
    assert "hf-static" in capsys.readouterr().out


def test_a_case_that_cannot_fit_is_a_row_with_the_reason(capsys):
    assert main([*TINY, "--gpu-memory", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "is too small" in printed and "give at least" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode", "ofload"], "'ofload' is not known (did you mean 'offload'?)"),
        (["--shape", "qwen3-4"], "shape 'qwen3-4' is not known (did you mean 'qwen3-4b'?)"),
        (["--context", "1q"], "--context '1q' must be whole numbers"),
        (["--batch", "0"], "--batch '0' must be whole numbers"),
        (["--output-len", "-3"], "--output-len -3 must be at least 1"),
        (["--device", "abacus"], "device='abacus' is no device"),
    ],
)
def test_a_bad_option_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_a_difference_between_modes_is_shown():
    rows = [Row("offload", 1, 8, outputs=[([1, 2], [0.0, 0.0])]), Row("resident", 1, 8, outputs=[([1, 3], [0.0, 0.0])])]
    compare(rows)
    assert rows[1].check == "DIFFERS from offload in sequence 0" and rows[1].check in table(rows)
    rows[1].outputs = [([1, 2], [0.0, 1e-7])]
    compare(rows)
    assert rows[1].check.startswith("DIFFERS"), "one bit of a log-probability counts"


def test_the_floor_is_the_slower_of_link_and_device():
    floors = Floors(link=10.0, device=100.0)
    assert floors.offload_step(streamed_bytes=50, read_bytes=200) == 5
    assert floors.offload_step(streamed_bytes=0, read_bytes=200) == 2


def test_bytes_read_count_windows_and_leave_out_unused_embeddings(tmp_path):
    from nanoinfer.loader import load_config
    from nanoinfer.models import resolve

    for tied in (False, True):
        config = load_config(make_checkpoint("mistral", tmp_path / str(tied), sliding_window=10, tied=tied))
        spec = resolve(config).spec_from_config(config, torch.float32)
        kv = 3 * (10 + 4) * 2 * 2 * 16 * 4
        embeddings = 0 if tied else 160 * 48 * 4
        assert bytes_read_per_step(spec, [50, 4]) == spec.weight_bytes - embeddings + kv


def test_the_command_generates_and_reports_errors_in_one_line(tmp_path, capsys):
    assert cli.main(["bench", *TINY, "--mode", "resident"]) == 0
    assert "x floor" in capsys.readouterr().out
    assert cli.main(["generate", str(tmp_path / "nothing"), "--prompt", "hello"]) == 2
    assert capsys.readouterr().err.startswith("nanoinfer generate: model ")
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("nanoinfer 0.")


def test_the_gpu_record_can_be_made_without_a_gpu(tmp_path):
    """Scaled down, for the code's sake: the figures mean nothing."""
    import subprocess
    import sys
    from pathlib import Path

    root, out = Path(__file__).resolve().parent.parent, tmp_path / "record.json"
    only = "pin_32gib,offload_32k,resident"
    command = [sys.executable, str(root / "tools" / "gpu_bench.py"), "--shape", "tiny", "--scale", "128"]
    subprocess.run([*command, "--only", only, "--out", str(out)], check=True, capture_output=True, timeout=200)
    record = json.loads(out.read_text())
    assert len(record["source_sha256"]) == 64 and set(record["cases"]) == set(only.split(","))
    rings = [ring for name, ring in record["cases"]["offload_32k"].items() if " x " in name]
    assert len(rings) == 4 and all(ring["bit_identical_to_resident"] for ring in rings)
