"""The kernel table of the GPU record, from traces written by hand, and its cases on the CPU."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from loading import loaded

from nanoinfer.memory.floors import bytes_read_per_step
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.headers import check_safetensors
from nanoinfer.weights.load import read_checkpoint, read_spec
from offload.runtime.cpu import CpuRuntime

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


kernels = load("gpu_kernels")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return read_spec(read_checkpoint(write_shape("qwen3-4b", tmp_path_factory.mktemp("shape"))), torch.bfloat16)


def span(category, name, begin, duration, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    return dict(ph="X", cat=category, name=name, ts=begin, dur=duration, args=arguments)


def trace(num_steps=6, with_launches=True):
    """Steps of 100 us: a copy, 80 us of kernels of one graph with a gap of 5, one kernel after it, 10 us until the
    next.

    The host is one step ahead, so what is launched in a call runs in the time of the next one.
    """
    events = [dict(ph="M", name="process_name", pid=0, args={"name": "python"})]
    for number in range(num_steps):
        call, begin, graph = 1000 + 100 * number, 1130 + 100 * number, 10 * number
        events.append(span("user_annotation", kernels.STEP, call, 95))
        if with_launches:
            events += [
                span("cuda_runtime", "cudaMemcpyAsync", call + 1, 1, graph),
                span("cuda_runtime", "cudaGraphLaunch", call + 2, 1, graph + 1),
                span("cuda_driver", "cuLaunchKernelEx", call + 3, 1, graph + 2),
            ]
        events += [
            span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin - 6, 2, graph),
            span("kernel", "rows_linear_kernel", begin, 40, graph + 1),
            span("kernel", "merge_kernel", begin + 30, 20, graph + 1),  # started early, waits for the one before
            span("kernel", "rows_linear_kernel", begin + 55, 20, graph + 1),  # after a gap of 5
            span("kernel", "void index_copy<float, int>(long)", begin + 75, 15, graph + 2),
            span("gpu_user_annotation", kernels.STEP, begin, 90),
        ]
    return events


def test_work_belongs_to_the_step_that_launched_it():
    steps = kernels.steps_of(trace(6))
    assert len(steps) == 4, "the first two are left out"
    assert [work.name for work in steps[0]] == [
        "Memcpy HtoD (Pinned -> Device)",
        "rows_linear_kernel",
        "merge_kernel",
        "rows_linear_kernel",
        "void index_copy<float, int>(long)",
    ]
    assert [work.begin for step in steps for work in step if work.is_kernel][::4] == [1330, 1430, 1530, 1630]


def test_gaps_within_and_between_steps():
    found = kernels.step_summary(trace(6))
    assert found["num_profiled_steps"] == 3 and found["num_kernels_per_step"] == 4
    assert found["profiled_step_seconds"] == pytest.approx(100e-6)
    assert found["gap_between_steps_seconds"] == pytest.approx(10e-6)
    assert found["gap_between_steps_share"] == pytest.approx(0.10)
    assert found["gaps_within_step_seconds"] == pytest.approx(5e-6)
    assert found["gaps_within_step_share"] == pytest.approx(0.05)
    assert found["busy_seconds_per_step"] == pytest.approx(85e-6)


def test_overlapping_kernels_share_the_time(spec):
    lines = {line["name"]: line for line in kernels.kernel_table(trace(6), spec, [1024], 4e12)}
    rows, vector = lines["rows_linear_kernel"], lines["merge_kernel"]
    assert rows["calls_per_step"] == 2 and rows["seconds_per_call"] == pytest.approx(30e-6)
    assert rows["share"] == pytest.approx(0.6)
    assert vector["calls_per_step"] == 1 and vector["seconds_per_call"] == pytest.approx(10e-6)
    assert vector["traced_seconds_per_call"] == pytest.approx(20e-6) and vector["share"] == pytest.approx(0.1)
    assert sum(line["share"] for name, line in lines.items() if "Memcpy" not in name) == pytest.approx(0.85)
    assert list(lines)[0] == "rows_linear_kernel", "the longest first"
    assert rows["ratio_to_floor"] == pytest.approx(rows["seconds_per_call"] / rows["floor_seconds"])
    assert "floor_seconds" not in lines["void index_copy<float, int>(long)"]


def test_a_kernel_of_little_time_has_no_line(spec):
    events = trace(6) + [span("kernel", "tiny", 1130 + 100 * number + 92, 0.4, 10 * number + 2) for number in range(6)]
    assert "tiny" not in {line["name"] for line in kernels.kernel_table(events, spec, [1024], 4e12)}


def test_a_trace_that_says_nothing_is_refused():
    with pytest.raises(RuntimeError, match="the profiler saw 6 steps and 0 kernels"):
        kernels.steps_of([event for event in trace(6) if event.get("cat") not in ("kernel", "gpu_memcpy")])
    with pytest.raises(RuntimeError, match="their launches are not in the trace"):
        kernels.steps_of(trace(6, with_launches=False))


def test_the_floors_of_a_step_add_up_to_its_bytes(spec):
    """36 layers with four products, the head with them or from the library, attention: all that a step must read."""
    for lengths in ([1024], [4096] * 8):

        def floor(name, calls, lengths=lengths):
            return kernels.kernel_floor(name, spec, lengths, 1.0, calls=calls)

        attention = 36 * floor("decode_partial_kernel", 36)
        with_head = 145 * floor("rows_linear_kernel", 145)
        apart = 144 * floor("tile_linear_kernel", 144) + floor("nvjet_tst_64x8", 1)
        assert with_head == pytest.approx(apart)
        wanted = bytes_read_per_step(spec, lengths)
        assert with_head + attention == pytest.approx(wanted, rel=1e-3), "but for norms, which are small"


def test_floors_by_name(spec):
    floor = kernels.kernel_floor
    assert floor("norm_rope_store_kernel", spec, [1024], 1.0) is None
    assert floor("cublasLt::splitKreduce_kernel", spec, [1024], 1.0) is None
    assert floor("nvjet_tst_128x8", spec, [550] * 256, 1.0, calls=28) is None, "which product it is nobody knows"
    layers = floor("tile_linear_kernel", spec, [550] * 256, 1.0)
    together = floor(kernels.LIBRARY_LAYERS, spec, [550] * 256, 1.0)
    weights = kernels.product_bytes(spec)
    assert layers == together == pytest.approx((sum(weights.values()) - weights["lm_head"]) / 4)
    # 4 + 5 splits of 256 tokens, 32 heads of 128 values and one exponent in float32
    assert floor("merge_kernel", spec, [1024, 1025], 10.0) == pytest.approx(9 * 32 * 129 * 4 / 10)
    assert floor("merge_kernel", spec, [1024], 1.0, block_size=512) == 2 * 32 * 129 * 4


def test_library_products_of_the_layers_have_one_line_together(spec):
    def events(last):
        found = []
        for number in range(5):
            found.append(span("user_annotation", kernels.STEP, 1000 * number, 900))
            found.append(span("cuda_runtime", "cudaGraphLaunch", 1000 * number + 1, 1, number))
            names = ["nvjet_a"] * 72 + ["nvjet_b"] * 36 + ["gemm_c"] * last + ["nvjet_head"]
            found += [span("kernel", name, 1000 * number + 100 + 5 * i, 5, number) for i, name in enumerate(names)]
        return found

    lines = {line["name"]: line for line in kernels.kernel_table(events(36), spec, [550] * 256, 4e12)}
    assert list(lines)[-1] == kernels.LIBRARY_LAYERS
    assert (
        lines[kernels.LIBRARY_LAYERS]["calls_per_step"] == 144 and lines[kernels.LIBRARY_LAYERS]["ratio_to_floor"] > 0
    )
    assert lines["nvjet_head"]["floor_seconds"] == kernels.product_bytes(spec)["lm_head"] / 4e12
    assert "floor_seconds" not in lines["nvjet_a"]
    some = {line["name"] for line in kernels.kernel_table(events(30), spec, [550] * 256, 4e12)}
    assert kernels.LIBRARY_LAYERS not in some, "something else computes a product, so the mean would be wrong"


def test_the_checkpoint_of_the_start_up_is_one_that_loads(tmp_path, monkeypatch):
    startup = load("gpu_startup")
    monkeypatch.setattr(startup, "SHARD_BYTES", 300_000)
    num_bytes = startup.write_checkpoint(tmp_path, "tiny", torch.device("cpu"))
    entries = check_safetensors(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.hf_config.max_position_embeddings == startup.MAX_POSITION
    read = loaded(checkpoint, max_position=16).checkpoint_views()
    made = loaded(checkpoint, max_position=16, seed=0).checkpoint_views()
    assert set(read) == set(made) == set(entries) and sum(view.nbytes for view in made.values()) == num_bytes
    assert all(torch.equal(read[name], made[name]) for name in made)


def start_once(start):
    figures = []

    def again(*args):
        figures[:] = figures or [start(*args)]
        return figures[0]

    return again


def test_products_are_timed_with_what_every_runtime_has(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    gpu_quantised, calls = load("gpu_quantised"), []
    monkeypatch.setattr(gpu_quantised, "CudaRuntime", lambda device: CpuRuntime())
    assert gpu_quantised.timed(lambda: calls.append(1), torch.device("cuda")) >= 0
    assert len(calls) == 1 + gpu_quantised.REPLAYS


@pytest.mark.sampled()
def test_cases_of_resident_mode_run_without_a_gpu(tmp_path, monkeypatch, capsys, fuzz):
    """Scaled down, for the code's sake: the figures mean nothing, and there is nothing to profile."""
    out, only = (
        tmp_path / "record.json",
        "resident,batch_throughput,arrivals,kernels,quantised,packed_products,start_up,sampling_fields",
    )
    arguments = ["--shape", "tiny", "--scale", "256", "--only", only, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", *arguments])
    gpu_bench = load("gpu_bench")
    if not fuzz:  # a start takes seconds, and the second is as the first
        gpu_resident = sys.modules["gpu_resident"]
        monkeypatch.setattr(gpu_resident, "start", start_once(gpu_resident.start))
    assert gpu_bench.main() == 0
    printed = capsys.readouterr().out
    assert "start_up (" in printed and "8 cases in " in printed
    cases = json.loads(out.read_text())["cases"]
    assert set(cases["resident"]) == {"1 x 64", "1 x 128", "1 x 512", "case_seconds"}
    assert cases["batch_throughput"]["tokens_per_second"] > 0 and cases["batch_throughput"]["output_tokens"] == 4 * 8
    assert set(cases["kernels"]) == {"1 x 1024", "1 x 32768", "8 x 4096", "0.6B, 256 x 550", "case_seconds"}
    for found in cases["kernels"].values():
        if isinstance(found, dict):
            assert found["num_steps"] == 40 and found["host_seconds_per_step"] > 0 and found["ratio_to_floor"] > 0
    formats = {name.rpartition(",")[0] for name in cases["quantised"] if name != "case_seconds"}
    assert formats == {"bf16", "int4", "int4, int8 head", "int8, int8 head", "fp8, int8 head"}
    steps = [found for found in cases["quantised"].values() if isinstance(found, dict)]
    assert all(found["weight_bytes"] < steps[0]["weight_bytes"] for found in steps[2:])
    products = {name: found for name, found in cases["packed_products"].items() if isinstance(found, dict)}
    assert len(products) == 4 * 4 and all(found["seconds"] > 0 for found in products.values())
    assert all(found["ratio_to_bf16"] == 1 for name, found in products.items() if name.startswith("bf16"))
    start = cases["start_up"]
    assert start["checkpoint_bytes"] > 10**6
    for name in ("cold", "warm"):
        assert 0 < start[name]["import_seconds"] < start[name]["seconds_to_first_token"]
        total = sum(start[name][part] for part in ("import_seconds", "constructor_seconds", "first_prompt_seconds"))
        assert total == pytest.approx(start[name]["seconds_to_first_token"], abs=0.5)
        assert start[name]["graph_batch_sizes"] == [1, 2, 4, 8, 16, 32, 48, 64], "the default below 32 GiB"


def test_a_start_that_fails_says_what_its_process_wrote(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    gpu_resident = load("gpu_resident")
    with pytest.raises(RuntimeError, match=r"ended with 1:\nfirst\n(.|\n)*ModuleNotFoundError: .*absent_module"):
        gpu_resident.output_of([sys.executable, "-c", "print('first'); import absent_module"], dict(os.environ))


def test_sparse_models_and_links_are_parts_of_the_record_that_keep_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    gpu_bench, out = load("gpu_bench"), tmp_path / "record.json"
    monkeypatch.setattr(gpu_bench, "CASES", {"dense": lambda bench: {"one": {"seconds_per_token": 1.0}}})
    monkeypatch.setattr(gpu_bench, "SPARSE", {"sparse": lambda bench: {"other": {"microseconds_per_layer": 46.25}}})
    monkeypatch.setattr(gpu_bench, "LINKS", {"links": lambda bench: {"more": {"case": "more", "link": "slow"}}})
    monkeypatch.setattr(gpu_bench, "WEIGHTS", {"weights": lambda bench: {"some": {"seconds": 1.0}}})
    for arguments in (["--part", "sparse"], ["--part", "links"], ["--part", "weights"], []):
        monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--scale", "256", "--out", str(out), *arguments])
        assert gpu_bench.main() == 0
    record = json.loads(out.read_text())
    assert set(record["cases"]) == {"dense"} and "--part" not in record["command"]
    assert set(record["sparse"]["cases"]) == {"sparse"} and "--part sparse" in record["sparse"]["command"]
    assert set(record["links"]["cases"]) == {"links"} and "--part links" in record["links"]["command"]
    assert set(record["weights"]["cases"]) == {"weights"}
    printed = capsys.readouterr().out
    assert re.search(r"^other +46\.2", printed, re.MULTILINE) and re.search(r"^more +slow", printed, re.MULTILINE)


def test_sparse_cases_run_without_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    load("gpu_sparse")
    from gpu_common import Bench

    bench = Bench(None, 256, torch.device("cpu"))
    (found,) = sys.modules["gpu_sparse"].sparse_gpt_oss(bench).values()
    assert found["microseconds_per_layer"] == found["seconds_per_token"] * 1e6 / 4


def test_slower_links_are_measured_without_a_gpu_until_the_time_is_over(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    links = load("gpu_links")
    from gpu_common import Bench

    bench = Bench(None, 256, torch.device("cpu"))
    found = links.LINKS["links_qwen3-8b_8gib"](bench)
    short, *long = found.values()
    assert short["link"] == "nothing streams" and short["streamed_bytes_per_step"] == 0
    own, *emulated = [case for case in long if case["case"] == "qwen3-8b, 8 GiB, 131,072 tokens"]
    assert "emulated_link_gbps" not in own and own["link"].endswith(" GB/s") and own["kv_resident_share"] == 0.5
    assert [case["link"].split(",")[1] for case in emulated] == [" emulated"] * 2
    for case, rate in zip(emulated, links.RATES, strict=True):
        assert case["forecast_seconds"] == case["floor_seconds"] == case["streamed_bytes_per_step"] / (rate / 256)
    assert len(links.report(found).splitlines()) == 2 + len(found)
    monkeypatch.setattr(links, "SLOWER_PREFILL", float("inf"))
    left_out = links.LINKS["links_qwen3-8b_8gib"](bench)
    assert ["skipped" in case for case in left_out.values()] == [False, True, True], "after the first there is a rate"
    monkeypatch.setattr(links, "MOST_SECONDS", 0)
    found = links.LINKS["links_qwen3-4b_12gib"](bench)
    assert [case["skipped"] for case in found.values()] == ["0 s for all were over"] * 3
    assert "qwen3-4b, 12 GiB, 131,072 tokens" in links.report(found)
