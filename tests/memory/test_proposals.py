"""What `plan` proposes where a model does not fit, or streams: true, complete, and never nothing."""

import shlex
from types import SimpleNamespace

from described import without_proposals

import nanoinfer
from nanoinfer.commands.main import main, make_parser
from nanoinfer.common.units import GIB
from nanoinfer.config import EngineConfig
from nanoinfer.memory.proposals import Proposer
from nanoinfer.options.engine import engine_arguments
from nanoinfer.step.memory_plan import MemoryPlan

HOST = dict(host_memory="32GiB")


def test_proposals_come_in_the_order_of_what_they_lose():
    forecast = nanoinfer.plan("qwen3-8b", gpu_memory="10GiB", context=32_768, cpu_offload_gb=0, **HOST)
    changes = [one.changes for one in forecast.proposals]
    assert changes[0] == {"quantization": "int8"}
    assert changes.index({"quantization": "fp8"}) < changes.index({"quantization": "int4"})
    assert changes[-1] == {"quantization": "int4", "kv_cache_dtype": "int8"} and not forecast.proposals[-1].ms_per_token
    times = [one.ms_per_token for one in forecast.proposals]
    assert times[0] > times[changes.index({"quantization": "int4"})] > 0
    assert "Qwen/Qwen3-8B" in forecast.proposals[0].command, "the checkpoint that has the shape"


def test_what_costs_time_alone_comes_first():
    asked = dict(gpu_memory="9GiB", context=4096, enable_cpu_offload=False, max_num_batched_tokens=8192, **HOST)
    asked |= dict(cpu_offload_gb=0, batch=1)
    forecast = nanoinfer.plan("qwen3-4b", **asked)
    first, second, *_ = forecast.proposals
    assert not forecast.fits and first.changes.keys() == {"max_num_batched_tokens"}
    assert first.changes["max_num_batched_tokens"] < 8192 and "--max-num-batched-tokens" in first.command
    assert first.memory_bytes <= 9 * GIB and second.changes.keys() != first.changes.keys()
    less = nanoinfer.plan("qwen3-4b", **asked | dict(context=32_768))
    assert less.proposals[0].changes.keys() == {"enable_cpu_offload", "max_num_batched_tokens"}


def test_a_smaller_prefill_step_has_the_figures_of_the_size_that_is_named(monkeypatch, fuzz):
    asked = dict(gpu_memory="1060MiB", host_memory="64GiB", quantization="int4", max_num_batched_tokens=4096)
    forecast = nanoinfer.plan("qwen3-4b", **asked)
    assert forecast.proposals and "max_num_batched_tokens" in forecast.proposals[0].changes
    without_proposals(monkeypatch)
    for one in forecast.proposals if fuzz else forecast.proposals[::3]:
        made = nanoinfer.plan("qwen3-4b", **asked | one.changes)
        assert made.fits and made.memory.total_bytes == one.memory_bytes, made.problem


def test_where_the_host_is_too_small_fewer_tokens_and_sequences_are_proposed():
    forecast = nanoinfer.plan("qwen3-4b", context=32_768, batch=4, gpu_memory="11GiB", host_memory="16GiB")
    fewer = {name: one for one in forecast.proposals for name in one.changes if name.startswith("max_")}
    assert fewer["max_model_len"].changes == {"max_model_len": forecast.longest_context}
    assert fewer["max_num_seqs"].changes == {"max_num_seqs": 3}
    assert list(forecast.proposals[-2:]) == list(fewer.values()), "behind all that holds what was asked for"


def test_what_streams_is_told_what_would_be_faster():
    asked = dict(context=32_768, gpu_memory="11GiB", max_num_batched_tokens=8192)
    forecast = nanoinfer.plan("qwen3-4b", **asked, **HOST)
    assert forecast.fits and forecast.proposals[0].changes.keys() == {"max_num_batched_tokens"}
    assert forecast.proposals[0].changes["max_num_batched_tokens"] < 8192
    shorter = [one for one in forecast.proposals if "max_model_len" in one.changes]
    times = [one.ms_per_token or 0.0 for one in forecast.proposals[1 + len(shorter) :]]
    assert shorter == list(forecast.proposals[1 : 1 + len(shorter)]) != [], "which costs less than formats"
    assert times == sorted(times, reverse=True) and times[0] < forecast.ms_per_token and times[-1] == 0
    assert "what would help, cheapest first" in forecast.report()
    quiet = nanoinfer.plan("qwen3-4b", context=4096, gpu_memory="11GiB", **HOST)
    assert not quiet.streamed_bytes_per_step and not quiet.proposals


def test_a_format_that_loses_more_is_named_only_where_it_is_faster():
    times = {None: 40.0, "int8": 20.0, "fp8": 19.5, "int4": 30.0}

    def step(config):
        seconds = times[config.quantization] if config.head_quantization is None else 45.0
        known = dict(context=32_768, batch=1, longest_resident_context=None)
        known |= dict(streamed_bytes_per_step=1, ms_per_token=seconds, is_floor=True)
        return SimpleNamespace(fits=True, memory=MemoryPlan(), **known)

    config = EngineConfig(model="qwen3-4b", enable_cpu_offload="auto")
    proposer = Proposer(config, step=step, longest=lambda config: 32_768)
    assert [one.changes for one in proposer.to_be_faster(step(config))] == [{"quantization": "int8"}]


def test_a_checkpoint_that_is_quantised_is_offered_what_it_can_have():
    asked = dict(gpu_memory="6.5GiB", context=32_768, quantization="int8", cpu_offload_gb=0, **HOST)
    forecast = nanoinfer.plan("qwen3-8b", **asked)
    assert not forecast.fits and forecast.proposals
    assert all(one.changes["quantization"] == "int4" for one in forecast.proposals)
    asked |= dict(gpu_memory="2GiB", quantization="int4", kv_cache_dtype="fp8")
    less = nanoinfer.plan("qwen3-8b", **asked)
    assert not less.proposals and "with head and embeddings in int8" in less.advice[-1]


def test_the_report_in_options_has_commands_that_can_be_pasted(capsys):
    asked = ["plan", "qwen3-8b", "--gpu-memory", "7.1GiB", "--host-memory", "32GiB", "--context", "32k"]
    assert main([*asked, "--cpu-offload-gb", "0"]) == 1
    printed = capsys.readouterr().out
    commands = [line.strip() for line in printed.splitlines() if line.strip().startswith("nanoinfer serve")]
    assert commands and "what would help, cheapest first" in printed
    for command in commands:
        arguments = engine_arguments(make_parser().parse_args(shlex.split(command)[1:]))
        assert arguments["gpu_memory_limit"] == "7.1GiB" and arguments["max_model_len"] == 32_768
        assert arguments["enable_cpu_offload"] == "auto"


def test_formats_that_save_nothing_of_what_is_missing_are_not_named():
    asked = dict(gpu_memory="7GiB", host_memory="2GiB", context=32_768, quantization="int4", kv_cache_dtype="fp8")
    forecast = nanoinfer.plan("qwen3-8b", **asked, batch=1, enable_cpu_offload=True)
    assert forecast.advice == ("0.3 GiB more host memory (in all 2.30 GiB)",)
