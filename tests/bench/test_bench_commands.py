"""`nanoinfer bench latency` and `bench throughput`, on the CPU with the tiny shape."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from fused import fuse
from quantised import CASES, write
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench import latency, throughput
from nanoinfer.bench.hf import load_reference
from nanoinfer.bench.throughput import make_load, run_load
from nanoinfer.commands import main as cli
from nanoinfer.measure.run import Row, random_prompts
from nanoinfer.memory.floors import Floors, bytes_read_per_step
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.load import read_checkpoint, read_spec

ENGINE = ["--shape", "tiny", "--device", "cpu", "--block-size", "32", "--no-progress"]
LATENCY = ["bench", "latency", *ENGINE, "--input-len", "40", "--output-len", "8"]
THROUGHPUT = ["bench", "throughput", *ENGINE, "--num-prompts", "6", "--input-len", "20-90", "--output-len", "4-9"]


def spec_of(shape, directory):
    return read_spec(read_checkpoint(write_shape(shape, directory)), "auto")


def test_latency_times_every_iteration_and_step(tmp_path, capsys):
    out = tmp_path / "latency.json"
    arguments = ["--batch-size", "2", "--num-iters", "3", "--mode", "streamed", "--output-json", str(out)]
    assert cli.main([*LATENCY, *arguments]) == 0
    printed = capsys.readouterr().out
    for name in ("time to first token", "time per output token", "floor per token", "total latency", "p99"):
        assert name in printed
    assert "tiny shape, random weights, offload mode: 2 x 40 tokens in, 8 out, 3 times" in printed
    figures = json.loads(out.read_text())
    assert figures["command"].startswith("nanoinfer bench latency --shape tiny ")
    assert len(figures["latencies"]) == len(figures["times_to_first_token"]) == figures["num_iters"] == 3
    assert figures["num_steps"] == 3 * 4, "7 decode steps, of which the first 3 warm up"
    assert min(figures["latencies"]) <= figures["avg_latency"] <= max(figures["latencies"])
    assert 0 < figures["seconds_per_token"] <= figures["seconds_per_token_p99"]
    assert all(
        first < total for first, total in zip(figures["times_to_first_token"], figures["latencies"], strict=True)
    )
    assert figures["streamed_bytes_per_step"] == 4 * 2 * 1 * (2 * 32 * 4 * 32 * 4), "layers, rows, full blocks, bytes"
    assert figures["read_bytes_per_step"] == bytes_read_per_step(spec_of("tiny", tmp_path), [44, 44])
    assert figures["ratio_to_floor"] == pytest.approx(figures["seconds_per_token"] / figures["floor_seconds"])


def test_latency_pools_the_steps_of_all_iterations():
    rows = []
    for number, steps in enumerate(([1.0, 1.0, 1.0], [3.0, 3.0, 100.0])):
        row = Row("resident", 1, 64, time_to_first_token=0.5 + number, total_seconds=4.0 + number)
        row.steps, row.streamed_bytes_per_step, row.least_bytes = steps, 0, (0, 3e6)
        rows.append(row)
    found = latency.summary(rows, 10, Floors(1e9, 1e9), Floors(1e9, 2e9))
    assert found["seconds_per_token"] == 2 and found["num_steps"] == 6 and 90 < found["seconds_per_token_p99"] < 100
    assert found["floor_seconds"] == found["read_bytes_per_step"] / 2e9 == 0.0015, "the better of both bandwidths"
    assert found["avg_latency"] == 4.5 and found["percentiles"]["50"] == 4.5 and found["time_to_first_token"] == 1.0


def test_warm_up_iterations_do_not_count_and_prompts_differ(monkeypatch, capsys):
    seeds, measure = [], latency.measure

    def noting(llm, lengths, output_len, *, seed, **options):
        seeds.append(seed)
        return measure(llm, lengths, output_len, seed=seed, **options)

    monkeypatch.setattr(latency, "measure", noting)
    assert cli.main([*LATENCY, "--num-iters", "2", "--num-iters-warmup", "3", "--seed", "7"]) == 0
    assert seeds == [7, 8, 9, 10, 11] and "2 times" in capsys.readouterr().out


def test_throughput_counts_what_it_was_given(tmp_path, capsys):
    out = tmp_path / "throughput.json"
    assert cli.main([*THROUGHPUT, "--output-json", str(out), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    for name in ("requests", "output tokens", "all tokens", "prefill", "decode", "one decode step"):
        assert f"\n  {name} " in printed
    figures, load = json.loads(out.read_text()), make_load(6, (20, 90), (4, 9), seed=3)
    assert figures["num_requests"] == 6 and figures["num_preemptions"] == 0
    assert figures["prompt_tokens"] == load.num_prompt_tokens and figures["output_tokens"] == load.num_output_tokens
    seconds = figures["seconds"]
    assert figures["requests_per_second"] * seconds == pytest.approx(6)
    assert figures["output_tokens_per_second"] * seconds == pytest.approx(load.num_output_tokens)
    total = load.num_output_tokens + load.num_prompt_tokens
    assert figures["total_tokens_per_second"] * seconds == pytest.approx(total)
    # A prompt's first token is no decode step's; a step that was launched before an end was read has one row too many.
    decoded = figures["mean_batch"] * figures["num_decode_steps"]
    assert load.num_output_tokens - 6 <= decoded <= load.num_output_tokens
    assert 0 < figures["host_seconds_per_step"] <= figures["step_seconds"]
    assert figures["prefill_seconds"] + figures["decode_seconds"] <= seconds
    assert "floors" not in figures


def test_the_default_load_is_that_of_the_gpu_record():
    """Written out as the record's first version had it: another load would be another figure."""
    generator = random.Random(0)
    lengths = [generator.randint(100, 1024) for _ in range(256)]
    outputs = [generator.randint(100, 1024) for _ in range(256)]
    load = make_load()
    assert load.prompts == random_prompts(2000, lengths, seed=0)
    assert [param.max_tokens for param in load.params] == outputs
    assert all(param.temperature == 0.6 and param.ignore_eos for param in load.params)
    assert load.max_model_len == max(map(sum, zip(lengths, outputs, strict=True)))
    assert make_load(seed=1).prompts[0] != load.prompts[0]


def test_a_small_vocabulary_bounds_the_prompts():
    assert max(map(max, make_load(20, vocab_size=50).prompts)) < 50


def test_a_load_is_counted_without_what_ran_before(tmp_path):
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", progress_bar=False, block_size=32)
    load = make_load(3, (30, 30), (5, 5))
    with LLM(write_shape("tiny", tmp_path), max_model_len=64, max_num_seqs=4, **arguments) as llm:
        first, second = run_load(llm, load), run_load(llm, load)
    for name in ("num_prefill_steps", "num_decode_steps", "mean_batch"):
        assert first[name] == second[name] > 0
    assert second["prefill_seconds"] < second["seconds"]


def test_throughput_says_what_prefix_cache_and_prefill_graphs_did(tmp_path, capsys):
    out = tmp_path / "throughput.json"
    arguments = [*THROUGHPUT, "--output-json", str(out)]
    assert cli.main(arguments) == 0
    printed, figures = capsys.readouterr().out, json.loads(out.read_text())
    assert figures["prefix_cache_hit_rate"] == figures["prefill_graph_hit_rate"] == 0
    assert "prefix cache" not in printed and "prefill graphs" not in printed
    more = ["--enable-prefix-caching", "--capture-num-tokens", "16,64,128", "--prefill-chunk", "128"]
    # The first prompt has run before.
    assert cli.main([*arguments, *more, "--num-prompts", "1"]) == 0
    printed, figures = capsys.readouterr().out, json.loads(out.read_text())
    assert 0 < figures["prefix_cache_hit_rate"] < 1 and figures["prefill_graph_hit_rate"] == 1
    assert "\n  prefix cache " in printed and "100.0% of the prefill steps" in printed


def test_on_a_cpu_the_defaults_end_soon_and_on_a_gpu_they_are_those_of_others(tmp_path, capsys, monkeypatch):
    path = str(make_checkpoint("llama", tmp_path, num_layers=1))
    options = ["bench", "throughput", path, "--no-progress"]
    assert cli.main([*options, "--device", "cpu", "--num-prompts", "2"]) == 0
    assert "2 requests of 16-64 tokens in and 16-64 out" in capsys.readouterr().out
    assert throughput.DEFAULTS_ON_HOST["num_prompts"] * 64 < 2048
    asked = {}
    monkeypatch.setattr(throughput, "device_of", lambda place: SimpleNamespace(is_host=False))
    monkeypatch.setattr(throughput, "check_at_least", lambda options, **_: asked.update(vars(options)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(options)
    assert asked["num_prompts"] == 256 and asked["input_len"] == asked["output_len"] == "100-1024"


def test_throughput_says_how_many_experts_were_read(tmp_path, capsys):
    out, path = tmp_path / "throughput.json", str(make_checkpoint("qwen3_moe", tmp_path / "model", num_layers=1))
    lengths = ["--input-len", "20", "--output-len", "4", "--num-prompts", "1", "--device", "cpu", "--no-progress"]
    assert cli.main(["bench", "throughput", "--model", path, *lengths, "--output-json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["experts_read_per_layer"] == 3, "those that one row takes"
    assert figures["expert_bytes_per_step"] == 3 * (3 * 48 * 24 * 4)
    printed = capsys.readouterr().out
    assert "\n  experts " in printed and "over the link" not in printed and figures["expert_fetches"] == 0
    slots = ["--expert-slots", "3", "--output-json", str(out)]
    assert cli.main(["bench", "throughput", "--model", path, *lengths, *slots]) == 0
    figures, printed = json.loads(out.read_text()), capsys.readouterr().out
    of_decode = figures["streamed_bytes_per_step"] * figures["num_decode_steps"]
    assert 0 < of_decode <= figures["expert_fetched_bytes"] <= figures["streamed_bytes"]
    assert "\n  over the link " in printed and "\n  found experts " in printed


@pytest.mark.parametrize("command", [["bench", "latency"], ["bench", "offload"], ["serve", "x"]])
def test_the_engines_settings_are_options(command, capsys):
    given = ["--capture-num-tokens", "none", "--cuda-graph-batch-sizes", "staged", "--gpu-memory-utilization", "0.5"]
    assert cli.main([*command, *given, "--num-ring-slots", "1"]) == 2
    assert "--num-ring-slots 1 must be" in capsys.readouterr().err
    assert cli.main([*command, "--cuda-graph-batch-sizes", "1,0"]) == 2
    assert "--cuda-graph-batch-sizes [1, 0] must be" in capsys.readouterr().err
    assert cli.main([*command, "--gpu-memory-utilization", "1.5"]) == 2
    assert "--gpu-memory-utilization 1.5 must be" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*command, "--capture-num-tokens", "16,many"])
    assert "'16,many' must be whole numbers, such as 16,64,256, or \"none\"" in capsys.readouterr().err


def test_a_checkpoint_is_given_as_in_vllm(tmp_path, capsys):
    path = str(make_checkpoint("llama", tmp_path))
    lengths = ["--input-len", "20", "--output-len", "4", "--device", "cpu", "--no-progress"]
    assert cli.main(["bench", "latency", path, *lengths, "--num-iters", "1"]) == 0
    assert cli.main(["bench", "throughput", "--model", path, *lengths, "--num-prompts", "2"]) == 0
    assert cli.main(["bench", "offload", path, "--context", "20", "--output-len", "4", *lengths[4:]]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{path}, resident mode") == 2 and "identical to streamed" in printed


def test_without_a_word_it_is_the_offload_benchmark(capsys):
    arguments = [*ENGINE, "--context", "64", "--output-len", "4", "--mode", "resident"]
    for command in (["bench"], ["bench", "offload"]):
        assert cli.main([*command, *arguments]) == 0
        assert "x floor" in capsys.readouterr().out


def test_help_names_all_benchmarks(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"\n    {name}" in printed for name in ("latency", "throughput", "offload"))


def test_an_unknown_benchmark_is_refused_and_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "latencies"])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and "'latencies'" in printed and "throughput" in printed


def test_a_full_gpu_is_one_line(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmany lines")

    monkeypatch.setattr(latency, "measure", fail)
    assert cli.main(LATENCY) == 2
    said = capsys.readouterr().err
    assert said.startswith("nanoinfer bench latency: the GPU's memory is full: CUDA out of memory: lower --gpu-")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("latency", ["--output-len", "1"], "--output-len 1 must be at least 2"),
        ("latency", ["--batch-size", "0"], "--batch-size 0 must be at least 1"),
        ("latency", ["--num-iters-warmup", "-1"], "--num-iters-warmup -1 must be at least 0"),
        ("latency", ["--mode", "ofload"], "--mode 'ofload' is not known (did you mean 'offload'?)"),
        ("latency", ["--mode", "hf"], "--mode 'hf' is not known"),
        (
            "latency",
            ["--output-json", "/no/such/place/x.json"],
            "the directory of '/no/such/place/x.json' does not exist",
        ),
        ("latency", ["--max-num-seqs", "0"], "--max-num-seqs 0 must be a whole number of at least 1"),
        (
            "latency",
            ["--max-num-seqs", "1", "--batch-size", "2", "--shape", "tiny", "--input-len", "20", "--output-len", "4"],
            "--max-num-seqs is 1, raise it",
        ),
        ("throughput", ["--num-prompts", "0"], "--num-prompts 0 must be at least 1"),
        ("throughput", ["--input-len", "9-3"], "--input-len '9-3' must be a number of at least 1 or a range"),
        ("throughput", ["--input-len", "1-2-3"], "--input-len '1-2-3' must be a number of at least 1 or a range"),
        ("throughput", ["--output-len", "0"], "--output-len '0' must be a number of at least 1 or a range"),
        ("throughput", ["--output-len", "-3"], "--output-len '-3' must be a number of at least 1 or a range"),
        ("throughput", ["--temperature", "-1"], "temperature"),
        ("throughput", ["--shape", "tinny"], "shape 'tinny' is not known (did you mean 'tiny'?)"),
        ("throughput", ["/no/such/model"], "model '/no/such/model' does not exist"),
        ("throughput", ["--gpu-memory-limit", "much"], "--gpu-memory-limit 'much' is no size"),
        ("throughput", ["--device", "abacus"], "--device 'abacus' is no device"),
    ],
)
def test_a_bad_option_is_one_line(command, arguments, message, capsys):
    assert cli.main(["bench", command, "--no-progress", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_random_experts_are_given_to_transformers(tmp_path):
    path, options = str(write_shape("tiny-sparse", tmp_path)), dict(load_format="dummy", dtype="float32", seed=0)
    model, _ = load_reference(path, device=torch.device("cpu"), **options)
    prompt = list(range(5, 25))
    (found,) = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False).tolist()
    with LLM(path, skip_tokenizer_init=True, progress_bar=False, device="cpu", **options) as llm:
        (wanted,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert found[20:] == wanted.outputs[0].token_ids


def test_random_weights_of_a_quantised_config_are_not_given_to_transformers(tmp_path):
    packed, _ = write(tmp_path, CASES["gptq-int4"]())
    options = dict(dtype="auto", device=torch.device("cpu"), seed=0)
    with pytest.raises(ValueError, match="random weights of a quantised config cannot be given to transformers"):
        load_reference(packed, load_format="dummy", **options)


def test_random_weights_of_a_checkpoint_with_merged_projections_are_given_to_transformers(tmp_path):
    path = fuse(make_checkpoint("qwen3", tmp_path))
    options = dict(dtype="auto", device=torch.device("cpu"), seed=0)
    model, _ = load_reference(str(path), load_format="dummy", **options)
    assert 0.01 < model.model.layers[0].self_attn.k_proj.weight.std() < 0.03
