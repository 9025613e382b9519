"""The measured tables of the documents are those of the record, and the record is one of these sources."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from nanoinfer.commands.recall import checkpoint_sha256
from nanoinfer.weights.find import PACKAGED

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MARK = re.compile(r"^<!-- measured: (.*) -->$", re.MULTILINE)
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if MARK.search(path.read_text())]


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_the_tables_are_those_of_the_newest_record(path):
    measured = load("measured")
    record, text = measured.read_record(), path.read_text()
    assert measured.fill_in(text, record) == text, "run python tools/measured.py"


def test_every_mark_on_a_page_names_a_part():
    """What is misspelt would stay as it is, whatever is measured."""
    shown = {name for path in PAGES for name in MARK.findall(path.read_text())}
    assert {"offload_steps", "resident", "serve", "sparse"} <= shown
    assert [name for name in sorted(shown) if not hasattr(load("measured").PARTS, name)] == []


def test_the_recall_figures_are_of_the_packaged_checkpoint():
    found = json.loads((ROOT / "docs" / "measurements" / "recall" / "eval.json").read_text())
    packaged = checkpoint_sha256(PACKAGED["recall"])
    assert found.get("checkpoint_sha256") == packaged, "run nanoinfer eval recall --json and put its file there"


def test_the_recall_table_shows_errors_and_streamed_bytes_of_all_lengths():
    def scores(errors, streamed):
        return dict(accuracy=[[1, 0.5], [1, 1]], equal_answers=7, largest_logprob_error=errors, streamed_bytes=streamed)

    results = {"hf": scores([None, None], [0, 0]), "streamed fp8": scores([0.25, 1.5], [3 * 10**9, 10**9])}
    found = dict(command="c", versions=dict(device="d", torch="t"), lengths=[1024, 2048], questions=8, results=results)
    text = load("measured").part("recall_modes", {"recall": {"eval": found}})
    assert "| hf | 0.50 | 1.00 | 7 of 8 | - | 0.0 |" in text
    assert "| streamed fp8 | 0.50 | 1.00 | 7 of 8 | 1.5000 | 4.0 |" in text


def test_a_table_follows_the_record():
    measured = load("measured")
    record = json.loads(measured.LATEST.read_text())
    record["cases"]["resident"]["1 x 1024"]["seconds_per_token"] = 0.123456
    text = "before\n<!-- measured: resident -->\nold\n<!-- end -->\nafter\n"
    found = measured.fill_in(text, record)
    assert "| 1 x 1024 | 123.46 |" in found and "old" not in found
    assert found.startswith("before\n<!-- measured: resident -->\n") and found.endswith("\n<!-- end -->\nafter\n")


def test_steps_over_slower_links_are_named_emulated_and_what_is_left_out_says_so():
    measured, step = load("measured"), dict(bound="link", kv_resident_share=0.25, ratio_to_forecast=1.02)
    cases = {
        "a": dict(case="4B, 8 GiB, 131,072 tokens", link="25 GB/s, emulated", seconds_per_token=0.6001,
                  tokens_per_second=1.67, forecast_seconds=0.5883) | step,
        "b": dict(case="8B, 8 GiB, 131,072 tokens", link="-", skipped="over"),
        "case_seconds": 1.5,
    }  # fmt: skip
    text = measured.part("links", {"links": {"versions": {"device": "GPU"}, "cases": {"one": cases}}})
    assert text.startswith('One GPU, `make gpu-bench ARGS="--part links"`:')
    assert "| 4B, 8 GiB, 131,072 tokens | 25 GB/s, emulated | 600.1 | 1.7 | link | 25% | 588.3 | 1.020 |" in text
    assert "| 8B, 8 GiB, 131,072 tokens | - | left out |" in text
    assert measured.part("links", {}) == ""


def steps(milliseconds):
    return dict(seconds_per_token=milliseconds / 1e3, floor_seconds=0.002, ratio_to_floor=milliseconds / 2)


def small_record():
    """Only what the parts on resident mode show."""
    profile = dict(
        seconds_per_token=0.004,
        host_seconds_per_step=0.0011,
        busy_seconds_per_step=0.0035,
        gap_between_steps_share=0.0123,
        gap_between_steps_seconds=49.2e-6,
        gaps_within_step_share=0.05,
        num_kernels_per_step=290,
        kernels=[
            dict(name="rows_linear_kernel", calls_per_step=72.0, seconds_per_call=20e-6, floor_seconds=16e-6,
                 ratio_to_floor=1.25, share=0.36),
            dict(name="void at::native::index<4, int>(float*, a|b)", calls_per_step=1, seconds_per_call=2e-6,
                 share=0.02),
        ],
    )  # fmt: skip
    start = dict(constructor_seconds=5.5, seconds_to_first_token=12.25, graph_bytes=300 * 2**20)
    cases = {
        "one_sequence_32k": {
            "resident": dict(time_to_first_token=1.25, prefill_tokens_per_second=26214.4),
            "12 GiB limit": dict(time_to_first_token=1.5, prefill_tokens_per_second=21845.3),
        },
        "resident": {"1 x 1024": steps(2.5), "1 x 131072": steps(7.5), "case_seconds": 3},
        "batch_throughput": {"tokens_per_second": 12345.6, "max_num_batched_tokens": 16384, "case_seconds": 3},
        "arrivals": {
            "mixed": dict(
                seconds_between_tokens=0.0034,
                longest_seconds_between_tokens=0.0125,
                seconds_to_first_token_of_a_prompt=0.0077,
                tokens_per_second=2345.6,
            ),
            "case_seconds": 3,
        },
        "kernels": {"1 x 1024": profile, "0.6B, 256 x 550": dict(profile), "case_seconds": 3},
        "start_up": {
            "checkpoint_bytes": 8.04e9,
            "cold": start | dict(seconds_to_first_token=40.0),
            "warm": start | dict(graph_batch_sizes=[1, 2, 256]),
        },
    }
    return {"cases": cases}


@pytest.mark.parametrize(
    "name, lines",
    [
        ("resident", ["| 1 x 1024 | 2.50 | 2.00 | 1.250 |", "| 1 x 131072 | 7.50 | 2.00 | 3.750 |"]),
        ("prefill_32k", ["| resident | 1.250 | 26,214 | 1.000 |", "| 12 GiB limit | 1.500 | 21,845 | 1.200 |"]),
        (
            "latency",
            [
                "1.2% of a step passes between its last kernel and the next one's first (49 µs), "
                "5.0% between its 290 k",
                "1.10 ms of a step of 4.00 ms, in which the GPU works 3.50 ms.",
                "8.0 GB of weights in the page cache, modules compiled to bytecode: first token 12.2 s after the "
                "process began, of which `LLM(...)` takes 5.5 s; 40.0 s and 5.5 s the first time",
                "300 MiB for 3 batch sizes up to 256.",
            ],
        ),
        ("other", ["temperature 0.6, prefill steps of up to 16,384 tokens): 12,346 output tokens/s."]),
        ("arrivals", ["| mixed | 3.40 | 12.5 | 7.7 | 2,346 |"]),
        (
            "kernels",
            [
                "| 1 x 1024 | `rows_linear_kernel` | 72 | 20.0 | 16.0 | 1.25 | 36.0% |",
                "| 0.6B, 256 x 550 | `at::native::index` | 1 | 2.0 | - | - | 2.0% |",
            ],
        ),
    ],
)
def test_parts_on_resident_mode_show_the_record(name, lines):
    found = load("measured").fill_in(f"<!-- measured: {name} -->\n<!-- end -->", small_record())
    assert all(line in found for line in lines), found


@pytest.mark.parametrize("name", ["prefill_32k", "latency", "arrivals", "kernels", "other"])
def test_a_part_that_was_not_measured_is_empty(name):
    text = f"before\n<!-- measured: {name} -->\nold\n<!-- end -->\nafter"
    expected = text.replace("old\n", "")
    measured = load("measured")
    assert measured.fill_in(text, {"cases": {}}) == expected
    failed = {"cases": {case: {"failed": "RuntimeError: no", "case_seconds": 1} for case in small_record()["cases"]}}
    assert measured.fill_in(text, failed) == expected
    assert measured.fill_in(expected, small_record()) != expected, "and it comes back"


def test_skipped_and_partly_measured_cases_show_what_there_is():
    measured, record = load("measured"), small_record()
    record["cases"]["start_up"] = {"skipped": "3 GiB free"}
    for profile in record["cases"]["kernels"].values():
        if isinstance(profile, dict):  # as without a GPU
            del profile["gap_between_steps_share"], profile["busy_seconds_per_step"], profile["kernels"]
    assert measured.part("kernels", record) == ""
    text = measured.part("latency", record)
    assert text.count("\n") == 0 and "1.10 ms of a step of 4.00 ms." in text


def test_a_figure_that_a_line_needs_is_missed_and_no_table_is_without_rows():
    measured, record = load("measured"), small_record()
    del record["cases"]["resident"]["1 x 1024"]["seconds_per_token"]
    with pytest.raises(UndefinedError, match="no attribute 'seconds_per_token'"):
        measured.part("resident", record)
    assert measured.part("resident", {"cases": {"resident": {"failed": "no", "case_seconds": 1}}}) == ""


def test_a_part_of_another_tool_stays_as_it_is():
    text = "<!-- measured: somebody_elses -->\nkept\n<!-- end -->"
    assert load("measured").fill_in(text, {"cases": {}}) == text


def test_llama_cpp_stands_beside_our_figures_of_the_same_run():
    measured = load("measured")
    wide = steps(2.0) | dict(prefill_tokens_per_second=3000.0)
    ours = {"quantised": {f"{name}, 1 x {context}": wide for name in ("bf16", "int4") for context in (1024, 32768)}}
    ours["curve"] = {"streamed, 8192": steps(24.0)}
    keys = [f"{kind}, {depth}" for kind in ("f16", "Q4_K_M") for depth in (1024, 32768)] + ["f16, KV on the host, 8192"]
    theirs = {key: dict(seconds_per_token=0.048) for key in keys}
    theirs |= {"f16, prefill, 32768": dict(prefill_tokens_per_second=1000.0), "build": 11434}
    file = {"Q4_0, 1 x 1024": steps(2.0) | dict(llama_cpp_seconds_per_token=0.003, times_as_fast=1.5)}
    file |= {"Q4_0, start": dict(seconds_to_first_token=20.0), "case_seconds": 1.0}
    beside = dict(prefill_tokens_per_second=900.0, llama_cpp_prefill_tokens_per_second=300.0, times_as_fast=3.0)
    files = {"gguf_sparse": file, "gguf_streamed": {"Q4_0, experts on the host, prefill of 8192": beside}}
    peers = {"versions": {"device": "a GPU"}, "cases": ours | {"llama_cpp": theirs}}
    peers["files"] = {"versions": {"device": "another"}, "cases": files}
    text = measured.part("beside_llama_cpp", {"cases": {}, "peers": peers})
    assert "| decode step, 16 bits, all KV on the host, 1 x 8k | 48.00 ms | 24.00 ms | 2.00 |" in text
    assert "| prefill of 32k, 16 bits | 1,000 tokens/s | 3,000 tokens/s | 3.00 |" in text
    assert "llama.cpp b11434" in text and "a GPU" in text
    text = measured.part("files_beside_llama_cpp", {"cases": {}, "peers": peers})
    assert "| decode step, 30B-A3B, Q4_0, 1 x 1024 | 3.00 ms | 2.00 ms | 1.50 |" in text
    assert "| 30B-A3B, Q4_0, experts on the host, prefill of 8192 | 300 tokens/s | 900 tokens/s | 3.00 |" in text
    assert "another" in text and "start" not in text
    assert [measured.part(name, {"cases": {}}) for name in ("beside_llama_cpp", "files_beside_llama_cpp")] == ["", ""]


def test_the_picture_has_a_line_for_each_mode_and_peer(tmp_path, monkeypatch):
    measured, drawn = load("measured"), {}
    monkeypatch.setattr(measured, "draw_steps", lambda path, lines: drawn.update(lines))
    cases = {
        "curve": {"streamed, 1024": steps(3.0), "streamed, 8192": steps(22.0), "case_seconds": 1.0},
        "hf_offloaded": {"hf, 1024": steps(50.0), "hf": steps(50.0), "hf-static, 1024": steps(40.0)},
        "llama_cpp": {"f16, 1024": dict(seconds_per_token=0.004), "f16, KV on the host, 1024": steps(30.0)},
    }
    measured.draw({"peers": {"cases": cases}}, tmp_path / "steps.png")
    assert drawn["all streamed"] == [(1024, 0.003, 0.002), (8192, 0.022, 0.002)]
    assert drawn["transformers, offloaded cache"] == [(1024, 0.05, None)]
    assert drawn["llama.cpp, all on the GPU"] == [(1024, 0.004, None)]
    assert drawn["llama.cpp, KV on the host"] == [(1024, 0.03, None)]
