"""What `plan` proposes where a model does not fit, or streams: true, complete, and never nothing."""

import re
import shlex

import pytest
from published_configs import PUBLISHED, write_published

import nanoinfer
from nanoinfer.commands.main import main, make_parser
from nanoinfer.common.units import GIB
from nanoinfer.options.engine import engine_arguments

# What cards called so many GB leave to an engine: a 12 GB card has 11.6 GiB, and the process's context takes some.
CARDS = {8: 7.1, 12: 11.1, 16: 15.0, 24: 23.0}
HOST = dict(host_memory="32GiB")


def forecast_of_command(command):
    """Return what `plan` says of the settings that a proposed command gives to the engine."""
    program, *words = shlex.split(command)
    options = make_parser().parse_args(words)
    assert program == "nanoinfer" and options.command == "serve"
    arguments = engine_arguments(options)
    limits = {name: arguments.pop(f"{name}_limit") for name in ("gpu_memory", "host_memory")}
    context, batch = arguments.pop("max_model_len"), arguments.pop("max_num_seqs")
    return nanoinfer.plan(options.model, context=context, batch=batch, **limits, **arguments)


def check_proposals(forecast, path, is_whole):
    """Each proposal has what its command then has, and stays within the limits."""
    assert forecast.proposals and "nanoinfer serve" in forecast.report()
    for proposal in forecast.proposals if is_whole else forecast.proposals[:1]:
        made = forecast_of_command(proposal.command)
        assert made.fits and made.model == str(path), made.problem
        assert made.memory.total_bytes == proposal.memory_bytes <= made.budget_bytes == forecast.budget_bytes
        assert made.streamed_bytes_per_step == proposal.streamed_bytes_per_step
        is_less = {"max_model_len", "max_num_seqs"} & proposal.changes.keys()
        assert is_less or (made.context, made.batch) == (forecast.context, forecast.batch)


def check_least(forecast, path):
    """The last line names memory with which these settings fit; with a tenth of a GiB less they do not."""
    found = re.fullmatch(
        r"at the least [\d.]+ GiB more GPU memory \(in all ([\d.]+) GiB\), with (.*)", forecast.advice[-1]
    )
    words = {
        "weights in int4": dict(quantization="int4"),
        "head and embeddings in int8": dict(head_quantization="int8"),
        "KV in fp8 (needs compute capability 8.9)": dict(kv_cache_dtype="fp8"),
    }
    settings = {name: value for word in found[2].split(", ") for name, value in words[word].items()}
    limit = float(found[1])
    common = dict(context=forecast.context, batch=forecast.batch, **HOST, **settings)
    assert nanoinfer.plan(path, gpu_memory=f"{limit}GiB", **common).fits
    assert not nanoinfer.plan(path, gpu_memory=f"{limit - 0.1}GiB", **common).fits


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sampled("Qwen/Qwen3-8B", "mistralai/Mistral-Small-24B-Instruct-2501")
def test_a_published_model_fits_or_a_proposal_does_or_the_least_memory_is_named(name, tmp_path, fuzz):
    path = write_published(name, tmp_path)
    for gigabytes in CARDS if fuzz else [8 if "24B" in name else 12]:
        forecast = nanoinfer.plan(path, gpu_memory=f"{CARDS[gigabytes]}GiB", **HOST)
        if forecast.fits:
            assert not forecast.streamed_bytes_per_step or forecast.proposals
        elif forecast.proposals:
            check_proposals(forecast, path, fuzz)
        else:
            check_least(forecast, path)


def test_proposals_come_in_the_order_of_what_they_lose():
    forecast = nanoinfer.plan("qwen3-8b", gpu_memory="10GiB", context=32_768, **HOST)
    changes = [one.changes for one in forecast.proposals]
    assert changes[0] == {"quantization": "int8"}
    assert changes.index({"quantization": "fp8"}) < changes.index({"quantization": "int4"})
    assert changes[-1] == {"quantization": "int4", "kv_cache_dtype": "fp8"} and not forecast.proposals[-1].ms_per_token
    times = [one.ms_per_token for one in forecast.proposals]
    assert times[0] > times[changes.index({"quantization": "int4"})] > 0
    assert "Qwen/Qwen3-8B" in forecast.proposals[0].command, "the checkpoint that has the shape"


def test_what_costs_time_alone_comes_first():
    asked = dict(gpu_memory="9GiB", context=4096, enable_cpu_offload=False, max_num_batched_tokens=8192, **HOST)
    forecast = nanoinfer.plan("qwen3-4b", **asked)
    first, second, *_ = forecast.proposals
    assert not forecast.fits and first.changes.keys() == {"max_num_batched_tokens"}
    assert first.changes["max_num_batched_tokens"] < 8192 and "--max-num-batched-tokens" in first.command
    assert first.memory_bytes <= 9 * GIB and second.changes.keys() != first.changes.keys()
    less = nanoinfer.plan("qwen3-4b", **asked | dict(context=32_768))
    assert less.proposals[0].changes == {"enable_cpu_offload": True, "max_num_batched_tokens": 4096}


def test_where_the_host_is_too_small_fewer_tokens_and_sequences_are_proposed():
    forecast = nanoinfer.plan("qwen3-4b", context=32_768, batch=4, gpu_memory="11GiB", host_memory="16GiB")
    fewer = {name: one for one in forecast.proposals for name in one.changes if name.startswith("max_")}
    assert fewer["max_model_len"].changes == {"max_model_len": forecast.longest_context}
    assert fewer["max_num_seqs"].changes == {"max_num_seqs": 3}
    assert list(forecast.proposals[-2:]) == list(fewer.values()), "behind all that holds what was asked for"


def test_what_streams_is_told_what_would_be_faster():
    forecast = nanoinfer.plan("qwen3-4b", context=32_768, gpu_memory="11GiB", **HOST)
    assert forecast.fits and forecast.proposals[0].changes == {"max_num_batched_tokens": 2048}
    times = [one.ms_per_token or 0.0 for one in forecast.proposals[1:]]
    assert times == sorted(times, reverse=True) and times[0] < forecast.ms_per_token and times[-1] == 0
    assert "what is faster" in forecast.report()
    quiet = nanoinfer.plan("qwen3-4b", context=4096, gpu_memory="11GiB", **HOST)
    assert not quiet.streamed_bytes_per_step and not quiet.proposals


def test_a_checkpoint_that_is_quantised_is_offered_what_it_can_have():
    forecast = nanoinfer.plan("qwen3-8b", gpu_memory="6.5GiB", context=32_768, quantization="int8", **HOST)
    assert not forecast.fits and forecast.proposals
    assert all(one.changes["quantization"] == "int4" for one in forecast.proposals)
    less = nanoinfer.plan(
        "qwen3-8b", gpu_memory="2GiB", context=32_768, quantization="int4", kv_cache_dtype="fp8", **HOST
    )
    assert not less.proposals and "with head and embeddings in int8" in less.advice[-1]


def test_the_report_in_options_has_commands_that_can_be_pasted(capsys):
    assert main(["plan", "qwen3-8b", "--gpu-memory", "7.1GiB", "--host-memory", "32GiB", "--context", "32k"]) == 1
    printed = capsys.readouterr().out
    commands = [line.strip() for line in printed.splitlines() if line.strip().startswith("nanoinfer serve")]
    assert commands and "what fits, from the least loss" in printed
    for command in commands:
        arguments = engine_arguments(make_parser().parse_args(shlex.split(command)[1:]))
        assert arguments["gpu_memory_limit"] == "7.1GiB" and arguments["max_model_len"] == 32_768
        assert arguments["enable_cpu_offload"] is True
