"""The GPU record: made without a GPU, resumed, and asked for cases that there are not."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_gpu_bench():
    spec = importlib.util.spec_from_file_location("gpu_bench", ROOT / "tools" / "gpu_bench.py")
    gpu_bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_bench)
    return gpu_bench


@pytest.mark.sampled()
def test_the_gpu_record_can_be_made_without_a_gpu(tmp_path, monkeypatch):
    """Scaled down, for the code's sake: the figures mean nothing."""
    out = tmp_path / "made" / "record.json"
    only = "pin_16gib,one_sequence_32k,hf_offloaded,auto_3x,shared_document"
    arguments = ["--shape", "tiny", "--scale", "512", "--only", only, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", *arguments])
    assert load_gpu_bench().main() == 0
    record = json.loads(out.read_text())
    assert len(record["source_sha256"]) == 64 and set(record["cases"]) == set(only.split(","))
    assert not [name for name, case in record["cases"].items() if "failed" in case]
    settings = [found for found in record["cases"]["one_sequence_32k"].values() if isinstance(found, dict)]
    assert len(settings) == 7 and [found.get("bit_identical_to_resident") for found in settings] == [None] + [True] * 6
    auto = record["cases"]["auto_3x"]
    assert auto["auto"]["bit_identical"] and auto["auto"]["num_preemptions"] == 0 < auto["auto"]["streamed_bytes"]
    shared = record["cases"]["shared_document"]
    assert 0 < shared["bytes_ratio"] <= 1.1 and shared["tokens_per_second_ratio"] > 0
    assert all(record["cases"]["hf_offloaded"][mode]["ratio_to_floor"] > 0 for mode in ("hf", "hf-static"))


@pytest.mark.parametrize(
    "part, only, scale",
    [
        ("windows", "windows_gemma3-12b", 64),
        ("hybrids", "slots_million", 1024),
        ("waits", "state_gaps", 64),
        ("waits", "agents_streamed", 32),
        ("sparse", "sparse_families", 64),
    ],
)
@pytest.mark.sampled("hybrids-slots_million-1024")
def test_parts_of_the_gpu_record_can_be_made_without_a_gpu(part, only, scale, tmp_path, monkeypatch):
    out, arguments = tmp_path / "record.json", ["--part", part, "--only", only, "--scale", str(scale)]
    arguments += ["--shape", "tiny"]
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", *arguments, "--out", str(out)])
    assert load_gpu_bench().main() == 0
    (case,) = json.loads(out.read_text())[part]["cases"].values()
    rows = [row for row in case.values() if isinstance(row, dict)]
    assert rows and "failed" not in case
    if part == "windows":
        assert [row["held_to_needed"] for row in rows] == [1, 1]
    if part == "hybrids":
        assert [row["hit_rate"] for row in rows][0] == 1 and rows[1]["ratio_to_floor"] > 0
    if only == "agents_streamed":
        assert rows[1]["ratio_to_found"] == rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"]
    if only == "state_gaps":
        assert [row["gap_seconds"] > 0 for row in rows] == [True] * 2


def test_an_interrupted_gpu_record_is_resumed_only_with_the_same_source(tmp_path, monkeypatch):
    out, gpu_bench, measured = tmp_path / "record.json", load_gpu_bench(), []

    def case(name: str, failure: Exception | None = None):
        def measure(bench) -> dict:
            measured.append(name)
            if failure is not None:
                raise failure
            return {"figure": len(measured)}

        return measure

    def run(cases: dict, *arguments: str) -> dict:
        monkeypatch.setattr(gpu_bench, "CASES", cases)
        monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--scale", "512", "--out", str(out), *arguments])
        gpu_bench.main()
        return json.loads(out.read_text())

    monkeypatch.setattr(gpu_bench.measured, "part", lambda name, record: "")
    first, second = {"a": case("a"), "b": case("b", OSError("no"))}, {"c": case("c")}
    with pytest.raises(KeyboardInterrupt):
        run(first | {"c": case("c", KeyboardInterrupt())})
    record = run({"a": case("a"), "b": case("b")} | second, "--resume")
    assert measured == ["a", "b", "c", "b", "c"] and list(record["cases"]) == ["a", "b", "c"]
    assert record["cases"]["a"]["figure"] == 1 and [part["behind"] for part in record["resumed"]] == [["a"]]
    assert "resumed" not in run(second)
    with pytest.raises(SystemExit, match="another command, python tools/gpu_bench.py --scale 512 and not .* 256"):
        run(second, "--resume", "--scale", "256")
    monkeypatch.setattr(gpu_bench, "source_sha256", lambda: "another")
    with pytest.raises(SystemExit, match="another source_sha256"):
        run(second, "--resume")


def test_an_unknown_case_of_the_gpu_record_is_refused_with_the_nearest_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--only", "one_sequence_32"])
    with pytest.raises(SystemExit, match="2"):
        load_gpu_bench().main()
    assert "'one_sequence_32' is not known (did you mean 'one_sequence_32k'?)" in capsys.readouterr().err
