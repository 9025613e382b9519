"""The benchmark and the command line, on the CPU with the tiny shape."""

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer.bench import offload
from nanoinfer.bench.rows import COLUMNS, compare, report
from nanoinfer.commands import main as cli
from nanoinfer.commands.bench import main
from nanoinfer.measure.answers import Answer
from nanoinfer.measure.run import Row
from nanoinfer.memory import floors
from nanoinfer.memory.floors import Floors, bytes_read_per_step
from nanoinfer.options import measuring as bench_options
from nanoinfer.options import offload as offload_options
from nanoinfer.options.parser import Parser
from offload.runtime import base

TINY = ["--shape", "tiny", "--context", "64,300", "--batch", "1,2", "--output-len", "6", "--no-progress"]
TINY += ["--block-size", "32", "--device", "cpu"]
ROOT = Path(__file__).resolve().parents[2]


def rows_of(*arguments):
    """The benchmark's rows, tokens included, by mode, batch and context."""
    parser = Parser()
    parser.set_defaults(command_line="a test")
    offload_options.add_arguments(parser)
    options = parser.parse_args([*TINY, *arguments])
    offload_options.take_task(options)
    rows = offload.run(options)
    return {(row.mode, row.batch, row.context): row for row in rows}


def test_the_table_has_all_columns_a_floor_and_the_check(tmp_path, capsys):
    report, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = [*TINY, "--batch", "2", "--mode", "streamed,resident,hf"]
    assert main([*arguments, "--json", str(report), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert all(column in printed for column in COLUMNS) and "floors of this run" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(report.read_text())
    assert content["command"].startswith("python bench_offload.py --shape tiny --context 64,300 ")
    assert content["versions"]["torch"] == torch.__version__ and content["floors"]["link_bytes_per_second"] > 0
    rows = {(row["mode"], row["batch"], row["context"]): row for row in content["rows"]}
    assert len(rows) == 6
    for (mode, batch, context), row in rows.items():
        assert row["seconds_per_token"] > 0 and row["ratio_to_floor"] > 0 and row["num_steps"] >= 2
        assert row["problem"] is None
        if mode == "hf":
            continue
        assert (row["streamed_bytes_per_step"] > 0) == (mode == "streamed")
        if mode == "streamed":
            full_blocks = context // 32
            layer_block = 2 * 32 * 4 * 32 * 4
            assert row["streamed_bytes_per_step"] == 4 * batch * full_blocks * layer_block
        else:
            assert row["check"] == "identical to streamed"


def test_an_emulated_link_is_named_wherever_its_figures_are(tmp_path, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(base, "HostLink", partial(base.HostLink, sleep=slept.append))
    monkeypatch.setattr(offload, "measure_floors", lambda device: Floors(link=2e9, device=1e12))
    written, profile = tmp_path / "bench.json", tmp_path / "trace.json"
    arguments = [*TINY, "--context", "64", "--batch", "1", "--mode", "streamed,resident", "--profile", str(profile)]
    assert main([*arguments, "--link-gbps", "0.5", "--json", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "the link is emulated: 0.5 GB/s in each direction" in printed and "emulated link GB/s" in printed
    assert "link 2.0 GB/s" in printed or "main memory 2.0 GB/s" in printed, "the machine's own"
    content = json.loads(written.read_text())
    assert content["floors"]["link_is_emulated"] and content["floors"]["own_link_bytes_per_second"] == 2e9
    streamed, resident = content["rows"]
    assert (
        streamed["emulated_link_gbps"]
        == streamed["link_floor_gbps"]
        == content["floors"]["link_bytes_per_second"] / 1e9
    )
    assert streamed["floor_seconds"] == streamed["streamed_bytes_per_step"] / 0.5e9 == streamed["forecast_seconds"]
    assert streamed["ratio_to_forecast"] == streamed["seconds_per_token"] / streamed["forecast_seconds"]
    assert resident["check"] == "identical to streamed" and slept
    assert "streamed, emulated link of 0.5 GB/s" in profile.read_text()
    assert main([*arguments, "--link-gbps", "2.5"]) == 2
    assert "--link-gbps 2.5 is more than this machine's link has (2.0 GB/s)" in capsys.readouterr().err


def test_a_budget_streams_less_and_auto_nothing_where_all_fits():
    """4 layers, blocks of 32 KiB each: at 300 tokens 9 full blocks, of which the limit leaves some on the GPU."""
    arguments = ["--context", "300", "--batch", "2", "--output-len", "4"]
    rows = {mode: rows_of(*arguments, "--mode", mode)[mode, 2, 300] for mode in ("streamed", "offload", "auto")}
    assert rows["streamed"].kv_resident_share == 0 and rows["offload"].kv_resident_share == 1
    assert rows["offload"].streamed_bytes_per_step == rows["auto"].streamed_bytes_per_step == 0
    spec_bytes = 4 * 2 * 9 * 2 * 32 * 4 * 32 * 4
    assert rows["streamed"].streamed_bytes_per_step == spec_bytes
    assert all(row.bound in ("link", "CPU", "device memory") for row in rows.values())
    assert all(row.forecast_seconds == row.floor_seconds for row in rows.values()), "the planner knew what streams"


def test_a_profile_has_the_lanes_of_every_mode(tmp_path):
    profile = tmp_path / "trace.json"
    arguments = ["--context", "64", "--batch", "2", "--mode", "streamed,resident"]
    rows = rows_of(*arguments, "--profile", str(profile))
    assert all(row.problem is None for row in rows.values())
    events = json.loads(profile.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["resident", "streamed"]
    lanes = {
        processes[pid]: {e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
        for pid in processes
    }
    assert lanes["resident"] == {"CPU", "compute"}
    assert lanes["streamed"] >= {"CPU", "compute", "copy (host to GPU)"}
    for pid in processes:
        names = [event["name"] for event in events if event["pid"] == pid]
        assert names.count("launch decode") >= 5 and "launch prefill" in names


def test_a_checkpoint_is_measured_with_its_own_weights(tmp_path, capsys):
    path = make_checkpoint("llama", tmp_path)
    arguments = ["--model", str(path), "--context", "40", "--output-len", "4", "--mode", "resident,hf-static"]
    assert main([*arguments, "--no-progress", "--device", "cpu"]) == 0
    assert "hf-static" in capsys.readouterr().out


def test_a_case_that_cannot_fit_is_a_row_with_the_reason(capsys):
    case = ["--mode", "streamed", "--batch", "1", "--context", "64"]
    assert main([*TINY, *case, "--gpu-memory-limit", "1MiB", "--max-num-batched-tokens", "256"]) == 0
    printed = capsys.readouterr().out
    assert "is too small" in printed and "give at least" in printed


def test_a_context_that_cannot_fit_does_not_lose_the_shorter_ones():
    rows = rows_of("--context", "64,1k", "--batch", "1", "--mode", "streamed,resident", "--host-memory-limit", "3MiB")
    assert "for the KV cache of 1030 tokens, 4.12 MiB" in rows["streamed", 1, 1024].problem
    assert rows["streamed", 1, 1024].seconds_per_token is None
    assert rows["streamed", 1, 64].problem is None and rows["streamed", 1, 64].ratio_to_floor > 0
    assert rows["resident", 1, 64].check == "identical to streamed"


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--max-num-seqs", "2"], "max_num_seqs is 2, raise it"),
        (["--host-memory-limit", "1MiB"], "raise the host memory limit or lower the batch"),
        (["--output-len", "1"], "give an output length of at least 2"),
    ],
)
def test_a_batch_that_never_decodes_at_once_says_why(arguments, reason):
    row = rows_of("--context", "128", "--batch", "4", "--mode", "streamed", *arguments)["streamed", 4, 128]
    assert reason in row.problem and row.seconds_per_token is None and len(row.outputs) == 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nmany lines"), MemoryError("no more")])
def test_a_case_that_runs_out_of_memory_is_a_row_and_the_next_one_runs(error, monkeypatch):
    measure, calls = offload.measure, []

    def measure_or_fail(llm, lengths, *args, **kwargs):
        calls.append(lengths)
        if len(calls) == 2:  # the first one warms up
            raise error
        return measure(llm, lengths, *args, **kwargs)

    monkeypatch.setattr(offload, "measure", measure_or_fail)
    rows = rows_of("--batch", "1", "--mode", "resident")
    assert rows["resident", 1, 64].problem == str(error).splitlines()[0]
    assert rows["resident", 1, 300].problem is None and rows["resident", 1, 300].seconds_per_token > 0


@pytest.mark.parametrize("name", ["load_reference", "measure_reference"])
def test_an_error_of_transformers_does_not_lose_our_figures(name, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("this cache is not for this model")

    monkeypatch.setattr(offload, name, fail)
    rows = rows_of("--context", "64", "--batch", "1", "--mode", "hf,resident")
    assert rows["hf", 1, 64].problem == "this cache is not for this model"
    assert rows["resident", 1, 64].seconds_per_token > 0


def test_transformers_runs_the_same_random_weights():
    """Greedy tokens in float32: equal only if every weight and position table arrived."""
    rows = rows_of("--context", "64", "--mode", "resident,hf,hf-static", "--output-len", "8")
    for batch in (1, 2):
        ours = [tokens for tokens, _ in rows["resident", batch, 64].outputs]
        assert len(ours) == batch and len(ours[0]) == 8
        for mode in ("hf", "hf-static"):
            assert [tokens for tokens, _ in rows[mode, batch, 64].outputs] == ours


def test_the_check_can_be_left_out():
    rows = rows_of("--context", "64", "--batch", "1", "--no-check")
    assert len(rows) == 2 and all(row.check is None for row in rows.values())


def test_a_failed_case_leaves_no_request_behind(tmp_path):
    from nanoinfer import LLM
    from nanoinfer.measure.run import measure
    from nanoinfer.models.shapes import write_shape

    model = write_shape("tiny", tmp_path)
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", progress_bar=False, block_size=32)
    with LLM(model, max_model_len=100, max_num_seqs=2, **arguments) as llm:
        with pytest.raises(ValueError, match="max_model_len=100"):
            measure(llm, [50, 500], 4)  # the second prompt is refused after the first one was queued
        assert not llm.engine.has_work and llm.stats()["gpu_blocks_used"] == 0
        assert measure(llm, [50, 60], 4).seconds_per_token > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode", "ofload"], "'ofload' is not known (did you mean 'offload'?)"),
        (["--shape", "qwen3-4"], "shape 'qwen3-4' is not known (did you mean 'qwen3-4b'?)"),
        (["--context", "1q"], "--context '1q' must be whole numbers"),
        (["--batch", "0"], "--batch '0' must be whole numbers"),
        (["--output-len", "-3"], "--output-len -3 must be at least 1"),
        (["--output-len", "0"], "--output-len 0 must be at least 1"),
        (["--mode", ","], "--mode ',' names no mode"),
        (["--check", "--mode", "resident"], "--check compares our modes, --mode is resident: name two"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 must be a whole number of at least 1"),
        (["--num-ring-slots", "1"], "--num-ring-slots 1 must be a whole number of at least 2"),
        (["--attention-backend", "tritn"], "--attention-backend 'tritn' is not one of"),
        (["--gpu-memory-limit", "12Gib of it"], "--gpu-memory-limit '12Gib of it' is no size"),
        (["--model", "/no/such/model"], "model '/no/such/model' does not exist"),
        (["--json", "/no/such/directory/x.json"], "the directory of '/no/such/directory/x.json' does not exist"),
        (["--link-gbps", "0"], "--link-gbps 0 must be a positive number of GB/s"),
        (["--link-gbps", "25", "--mode", "streamed,hf"], "--mode is streamed,hf: leave hf out"),
        (["--link-gbps", "25", "--task", "recall"], "--link-gbps has no meaning with --task recall"),
        (["--device", "abacus"], "--device 'abacus' is no device"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_runs(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(bench_options.importlib.util, "find_spec", lambda name: None)
    assert main([*TINY, "--plot", "bench.png"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "bench_offload.py: --plot needs matplotlib: pip install matplotlib\n" and not printed.out


def test_a_difference_between_modes_is_shown():
    def answer(tokens, *logprobs):
        return Answer(tokens, [{token: number} for token, number in zip(tokens, logprobs, strict=True)])

    rows = [Row("offload", 1, 8, outputs=[answer([1, 2], 0.0, 0.0)]), Row("resident", 1, 8)]
    rows[1].outputs = [answer([1, 3], 0.0, 0.0)]
    compare(rows)
    assert rows[1].check == "DIFFERS from offload in sequence 0 at token 1" and rows[1].check in report(rows)
    rows[1].outputs = [answer([1, 2], 0.0, 1e-7)]
    compare(rows)
    assert rows[1].check == "DIFFERS from offload in sequence 0 at token 1", "one bit of a log-probability counts"
    rows[1].outputs = [answer([1], 0.0)]
    compare(rows)
    assert rows[1].check == "DIFFERS from offload in sequence 0 at token 1", "what is missing counts"
    rows[1].outputs = [answer([1, 2], 0.0, 0.0)]
    compare(rows)
    assert rows[1].check == "identical to offload"


def test_the_floor_is_the_slower_of_link_and_device():
    bandwidths = Floors(link=10.0, device=100.0)
    assert bandwidths.offload_step(streamed_bytes=50, read_bytes=200) == 5
    assert bandwidths.offload_step(streamed_bytes=0, read_bytes=200) == 2


@pytest.mark.parametrize("free_mib, copied_mib", [(80_000, 1024), (1200, 300), (100, 64)])
def test_floors_leave_room_beside_an_engine_that_fills_its_budget(free_mib, copied_mib, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_mib * 2**20, 2**36))
    assert floors.copy_bytes(torch.device("cuda", 0)) == copied_mib * 2**20


def test_bytes_read_count_windows_and_leave_out_unused_embeddings(tmp_path):
    from nanoinfer.weights.load import read_checkpoint, read_spec

    for tied in (False, True):
        path = make_checkpoint("mistral", tmp_path / str(tied), sliding_window=10, tied=tied)
        spec = read_spec(read_checkpoint(path), torch.float32)
        kv = 3 * (10 + 4) * 2 * 2 * 16 * 4
        embeddings = 0 if tied else 160 * 48 * 4
        assert bytes_read_per_step(spec, [50, 4]) == spec.weight_bytes - embeddings + kv


def test_bytes_read_count_the_experts_that_rows_choose_at_random(tmp_path):
    from nanoinfer.weights.load import read_checkpoint, read_spec

    path = make_checkpoint("qwen3_moe", tmp_path)
    spec = read_spec(read_checkpoint(path), torch.float32)
    experts = 3 * 8 * 3 * 24 * 48 * 4  # 3 layers of 8 experts, of which a row takes 3
    others = spec.weight_bytes - experts - 160 * 48 * 4
    kv = 3 * 2 * 2 * 16 * 4
    assert spec.sparse.expert_bytes == experts
    for lengths, share in (([50], 3 / 8), ([50, 4], 1 - (5 / 8) ** 2), ([1] * 100, 1)):
        assert abs(bytes_read_per_step(spec, lengths) - others - experts * share - sum(lengths) * kv) <= 1


def test_the_command_generates_and_reports_errors_in_one_line(tmp_path, capsys):
    assert cli.main(["bench", *TINY, "--mode", "resident"]) == 0
    assert "x floor" in capsys.readouterr().out
    assert cli.main(["generate", str(tmp_path / "nothing"), "--prompt", "hello"]) == 2
    assert capsys.readouterr().err.startswith("nanoinfer generate: model ")
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("nanoinfer 0.")


def test_the_benchmark_runs_as_a_program(monkeypatch, capsys):
    """In a process of its own it runs in test_command_line.py."""
    arguments = [*TINY[:2], "--context", "64", "--output-len", "4", "--no-progress", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["bench_offload.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "bench_offload.py"), run_name="__main__")
    assert end.value.code == 0 and "identical to streamed" in capsys.readouterr().out
