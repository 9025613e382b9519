"""Forecasts: against arithmetic by hand, at their edges, and against what an engine then has."""

import json

import pytest
from described import without_proposals
from engines import COMMON, make_engine, random_prompts
from tiny_models import make_checkpoint

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.commands.main import main
from nanoinfer.common.units import GIB
from nanoinfer.memory.streamed import num_streamed
from nanoinfer.models.shapes import UNLIMITED
from nanoinfer.weights import find

QWEN3_4B = dict(gpu_memory="12GiB", host_memory="64GiB", hf_overrides=UNLIMITED)
BLOCK_BYTES = 36 * 2 * 256 * 8 * 128 * 2  # layers, K and V, tokens, heads, head size, bf16


def test_figures_of_a_known_shape_by_hand():
    forecast = nanoinfer.plan("qwen3-4b", context=131_072, batch=3, link_gbps=25, device_gbps=1000, **QWEN3_4B)
    assert forecast.fits and forecast.kv_bytes == 3 * 512 * BLOCK_BYTES
    pool = forecast.memory.num_gpu_blocks - 1
    resident = pool - 3  # a tail for each sequence
    assert forecast.resident_kv_bytes == resident * BLOCK_BYTES
    assert forecast.streamed_bytes_per_step == (3 * 512 - resident) * BLOCK_BYTES
    assert forecast.ms_per_token == pytest.approx(forecast.streamed_bytes_per_step / 25e6)
    assert forecast.bound == "link" and forecast.memory.total_bytes <= 12 * GIB
    assert forecast.longest_context == 64 * GIB // BLOCK_BYTES // 3 * 256


def test_a_slow_device_bounds_the_step_instead_of_the_link():
    forecast = nanoinfer.plan("qwen3-4b", context=32_768, gpu_memory="24GiB", host_memory="64GiB", device_gbps=450)
    assert forecast.streamed_bytes_per_step == 0 and forecast.bound == "device memory" and forecast.resident_share == 1
    assert forecast.ms_per_token == pytest.approx((8.044e9 + 32_768 * 147_456) / 450e6, rel=0.01)
    unknown = nanoinfer.plan("qwen3-4b", context=32_768, gpu_memory="24GiB", host_memory="64GiB")
    assert unknown.ms_per_token is None and "state device_gbps" in unknown.report()


def test_layers_with_a_window_stream_what_it_sees(tmp_path):
    path = make_checkpoint("gemma3", tmp_path, sliding_window=24)
    common = dict(gpu_memory="1GiB", host_memory="1GiB", context=400, batch=4, block_size=16, enable_cpu_offload=True)
    forecast = nanoinfer.plan(path, **common, resident_kv_limit=0, max_num_batched_tokens=64)
    types = json.loads((path / "config.json").read_text())["layer_types"]
    num_full, num_windowed = types.count("full_attention"), types.count("sliding_attention")
    of_layer = forecast.memory.block_bytes // forecast.memory.groups.num_places
    # Of 24 tokens before a row's 401st, those of its 400 tokens that lie in full blocks: 377 to 399.
    assert (
        num_full
        and num_windowed
        and forecast.streamed_bytes_per_step == 4 * of_layer * (25 * num_full + 2 * num_windowed)
    )


@pytest.mark.parametrize("offload", [True, "auto", False])
def test_the_limits_that_it_names_are_tight(offload, monkeypatch):
    without_proposals(monkeypatch)
    common = dict(gpu_memory="600MiB", host_memory="800MiB", enable_cpu_offload=offload)
    forecast = nanoinfer.plan("tiny", context=8192, batch=2, **common)
    longest, largest = forecast.longest_context, forecast.largest_batch
    assert nanoinfer.plan("tiny", context=longest, batch=2, **common).fits
    assert not nanoinfer.plan("tiny", context=longest + 512, batch=2, **common).fits
    assert nanoinfer.plan("tiny", context=8192, batch=largest, **common).fits
    assert not nanoinfer.plan("tiny", context=8192, batch=largest + 1, **common).fits
    resident = nanoinfer.plan("tiny", context=forecast.longest_resident_context, batch=2, **common)
    assert resident.streamed_bytes_per_step == 0
    if offload is not False:
        beyond = nanoinfer.plan("tiny", context=forecast.longest_resident_context + 512, batch=2, **common)
        assert beyond.streamed_bytes_per_step > 0


def test_advice_is_computed_and_true():
    forecast = nanoinfer.plan("qwen3-4b", context=32_768, batch=2, **QWEN3_4B)
    assert forecast.advice[0].endswith(f"instead of {forecast.ms_per_token:.1f} ms")
    one = next(text for text in forecast.advice if text.startswith("1 GiB more GPU memory"))
    more = nanoinfer.plan("qwen3-4b", context=32_768, batch=2, gpu_memory="13GiB", host_memory="64GiB")
    assert f"{more.ms_per_token:.1f} ms instead" in one and more.ms_per_token < forecast.ms_per_token


def test_experts_that_are_missed_bound_a_step_and_more_memory_is_counted_with_them():
    """All KV is on the GPU, so nothing else passes."""
    given = dict(quantization="int4", host_memory="64GiB", gpu_memory="8GiB", context=2048, batch=1, link_gbps=25)
    found = nanoinfer.plan("qwen3-30b-a3b", **given, device_gbps=500)
    memory, missed = found.memory, found.streamed_bytes_per_step / 25e6
    read = found.read_bytes_per_step / 500e6
    assert 8 <= memory.num_expert_slots < 128 and found.resident_share == 1 and missed > read
    assert found.bound == "link" and found.ms_per_token == pytest.approx(read + missed + 48 * 0.035)
    assert not found.is_floor and "about" in found.report() and "at least" not in found.report()
    last = int(found.advice[-1].partition(" GiB more GPU memory")[0])
    assert last >= memory.expert_bytes // GIB
    more = nanoinfer.plan("qwen3-30b-a3b", **given | dict(gpu_memory=f"{8 + last}GiB"))
    assert not more.streamed_bytes_per_step
    slow = nanoinfer.plan("qwen3-30b-a3b", **given, device_gbps=0.3 * read / missed * 500)
    assert slow.bound == "device memory" and slow.ms_per_token > found.ms_per_token


def test_what_does_not_fit_says_why_and_what_would():
    forecast = nanoinfer.plan("qwen3-4b", context=131_072, batch=4, **QWEN3_4B)
    assert not forecast.fits and "need 72.00 GiB of host memory" in forecast.problem
    assert {"max_num_seqs": 3} in [proposal.changes for proposal in forecast.proposals]
    assert forecast.advice == ("8 GiB more host memory (in all 72.00 GiB)",)
    assert "does not fit" in forecast.report() and "what would help" in forecast.report()
    assert nanoinfer.plan("qwen3-4b", context=131_072, batch=3, **QWEN3_4B).fits
    # The least, in tenths of a GiB, and not the next power of two.
    little = dict(gpu_memory="12GiB", host_memory="46.8GiB", hf_overrides=UNLIMITED)
    said = nanoinfer.plan("qwen3-4b", context=131_072, batch=4, **little).advice[0]
    assert said == "25.2 GiB more host memory (in all 72.00 GiB)"


def test_a_step_of_which_nothing_streams_is_told_without_the_link():
    fits = dict(context=1024, batch=1, gpu_memory="12GiB", host_memory="8GiB")
    assert (
        'decode step        nothing streams; name the card, such as gpu="RTX 4070", or state device_gbps for the time'
        in (nanoinfer.plan("qwen3-4b", **fits).report() + "\n")
    )
    line = next(line for line in nanoinfer.plan("qwen3-4b", **fits, device_gbps=300).report().splitlines()
                if line.startswith("decode step"))  # fmt: skip
    assert line.endswith("(device memory), at 300 GB/s on the device")


def test_beyond_the_models_positions_no_memory_is_recommended():
    limits = dict(gpu_memory="12GiB", host_memory="640GiB")
    forecast = nanoinfer.plan("recall", context=131_072, **limits)
    assert "beyond the model's own limit of 66560 tokens" in forecast.problem
    assert [one.changes for one in forecast.proposals] == [{"max_model_len": 66_560}] and not forecast.advice
    assert nanoinfer.plan("recall", context=66_560, **limits).fits and forecast.longest_context == 66_560
    # Less memory than the model's own limit needs: what fits is less, too, and is said.
    forecast = nanoinfer.plan("recall", context=131_072, batch=1, gpu_memory="200MiB", host_memory="100MiB")
    longest = forecast.longest_context
    assert 0 < longest < 66_560 and not forecast.advice
    assert [one.changes for one in forecast.proposals] == [{"max_model_len": longest}]
    # Not even one block: what the model's own limit needs is said.
    forecast = nanoinfer.plan("recall", context=131_072, batch=1, gpu_memory="20MiB", host_memory="1MiB")
    assert not forecast.proposals and forecast.advice[0].endswith("for 66,560 tokens")


def test_host_memory_is_what_is_needed_and_not_the_limit():
    def line(**arguments):
        arguments = dict(gpu_memory="24GiB", host_memory="64GiB", hf_overrides=UNLIMITED, batch=1) | arguments
        report = nanoinfer.plan("qwen3-4b", **arguments).report()
        return next(line for line in report.splitlines() if line.startswith("host memory"))

    each_full_block = line(context=32_768, enable_cpu_offload=True)
    assert each_full_block == "host memory        4.50 of 64.00 GiB", "though nothing streams"
    assert line(context=32_768) == "host memory        none is needed"
    assert line(context=131_072) == "host memory        18.00 of 64.00 GiB"


def test_an_engine_has_what_was_forecast(tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    arguments = {name: COMMON[name] for name in ("block_size", "max_num_batched_tokens", "num_ring_slots", "dtype")}
    forecast = nanoinfer.plan(
        path, gpu_memory="300MiB", host_memory="8MiB", context=384, batch=8, **arguments, ring_slot_bytes=2**15
    )
    engine = make_engine(
        path, gpu_memory_limit="6MiB", host_memory_limit="8MiB", enable_cpu_offload=True, resident_kv_limit=None
    )
    # The forecast is for CUDA: libraries and graphs take room there.
    made, plan = engine.plan, forecast.memory
    for name in ("weight_bytes", "ring_bytes", "block_bytes", "split_bytes", "blocks_per_slot", "num_host_blocks"):
        assert getattr(made, name) == getattr(plan, name), name
    assert forecast.kv_bytes == 8 * 24 * made.block_bytes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(link_gbps=0), "link_gbps=0 must be a positive number"),
        (dict(device_gbps=-1.0), "device_gbps=-1.0 must be a positive number"),
        (dict(batch=0), "batch=0 must be a whole number"),
        (dict(tokens_per_pass=0.5), "tokens_per_pass=0.5 must be a number from 1, which is without drafts, to 17"),
        (dict(tokens_per_pass=True), "tokens_per_pass=True must be a number"),
        (dict(tokens_per_pass=float("nan")), "tokens_per_pass=nan must be a number"),
        (dict(context=1.5), "max_model_len=1.5 must be a whole number"),
        (dict(max_num_batched_token=5), "did you mean 'max_num_batched_tokens'"),
        (dict(gpu_memory=None), 'no GPU .*: name the card that it is for, gpu="RTX 4070", or state gpu_memory_limit'),
        (dict(gpu_memory="12 apples"), "is no size"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nanoinfer.plan("qwen3-4b", **(QWEN3_4B | arguments))


def test_tokens_a_pass_are_an_assumption_that_is_named(capsys, monkeypatch):
    given = dict(quantization="int4", host_memory="64GiB", gpu_memory="8GiB", context=16_384, batch=2, link_gbps=25)
    plain, three = (nanoinfer.plan("qwen3-30b-a3b", tokens_per_pass=number, **given) for number in (1, 3))
    assert three.streamed_bytes_per_step > plain.streamed_bytes_per_step, "each drafted token chooses its experts"
    assert three.tokens_per_second == 2 * 3 / three.ms_per_token * 1e3 > plain.tokens_per_second
    assert "a pass" not in plain.report() and " 3 tokens a pass, which drafts bring" in three.report()
    without_proposals(monkeypatch)
    words = ["plan", "qwen3-4b", "--host-memory-limit", "64GiB", "--context", "32k", "--tokens-per-pass", "2.5"]
    assert main([*words, "--gpu", "RTX 3060"]) == 0 and "2.5 tokens a pass" in capsys.readouterr().out
    assert main([*words, "--compare-gpus"]) == 0 and "; 2.5 tokens a pass are assumed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "model, near",
    [
        ("qwen4-8b", "such as qwen3-8b or "),
        ("lama-3.1-8b", "such as llama3.1-8b or "),
        ("Qwen/Qwen9-14B", "such as qwen3-14b or "),
        ("zzz", "or give a shape (nanoinfer plan"),
    ],
)
def test_a_name_of_no_model_is_told_the_nearest_shapes(model, near, monkeypatch):
    monkeypatch.setattr(find, "snapshot_download", lambda *_, **__: open("/nowhere/at/all"))  # no network
    with pytest.raises(ValueError, match="nanoinfer plan --help lists them") as refusal:
        nanoinfer.plan(model, **QWEN3_4B)
    assert near in str(refusal.value)


def test_without_a_gpu_the_command_names_the_option_for_a_card(capsys):
    assert main(["plan", "qwen3-4b"]) == 2
    assert '--gpu "RTX 4070", or state --gpu-memory-limit "12GiB"' in capsys.readouterr().err


def test_the_command_prints_a_table_or_json(capsys):
    words = ["plan", "qwen3-4b", "--gpu-memory-limit", "12GiB", "--host-memory-limit", "64GiB", "--context", "131072"]
    words += ["--hf-overrides", json.dumps(UNLIMITED)]
    assert main([*words, "--batch", "2", "--device-gbps", "450"]) == 0
    printed = capsys.readouterr().out
    for part in ("weights", "ring", "KV cache", "graphs", "buffers", "streamed per step", "longest context",
                 "largest batch", "decode step", "what would help"):  # fmt: skip
        assert part in printed, part
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["memory"]["ring_bytes"] == 128 * 2**20
    assert '"link_gbps": 25.0,' in printed  # by default as where it is given: never an integer
    assert main([*words, "--batch", "40"]) == 1 and "does not fit" in capsys.readouterr().out
    assert main(["plan", "qwen3-40b", "--gpu-memory-limit", "12GiB"]) == 2 and capsys.readouterr().err


def test_an_option_that_is_given_reaches_the_forecast_and_others_have_the_functions_default(capsys, monkeypatch):
    without_proposals(monkeypatch)

    def forecast(*options):
        limits = ("--gpu-memory-limit", "1GiB", "--host-memory-limit", "1GiB", "--context", "8k")
        main(["plan", "tiny", *limits, "--json", *options])
        return json.loads(capsys.readouterr().out)

    plain = forecast()
    limits = dict(gpu_memory="1GiB", host_memory="1GiB", context=8192)
    assert plain == json.loads(nanoinfer.plan("tiny", **limits).to_json())
    for option in ("--context 4k", "--batch 2", "--link-gbps 50", "--device-gbps 450", "--offload off",
                   "--resident-kv 0", "--dtype bfloat16", "--kv-cache-dtype fp8", "--block-size 128",
                   "--prefill-chunk 2k", "--num-ring-slots 6", "--ring-slot-bytes 64MiB"):  # fmt: skip
        assert forecast(*option.split()) != plain, option


@pytest.fixture(scope="module")
def long_path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), max_position=2048)


@pytest.mark.parametrize("batch, length", [(1, 900), (3, 300), (8, 150)])
def test_a_step_streams_what_was_forecast(long_path, batch, length):
    """Of sequences that are decoded since their prompts: what is left in the pool is theirs."""
    limit = f"{1300 + 33 * (batch + 1)}KiB"  # each row has a line of limits
    limits = dict(gpu_memory_limit=limit, host_memory_limit="64MiB", resident_kv_limit=None, max_model_len=1024)
    engine = make_engine(long_path, **limits, enable_cpu_offload=True, max_num_seqs=batch, max_num_batched_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    (prompt,) = random_prompts(1, length, length)
    requests = [engine.add_request(str(i), [i, *prompt], params) for i in range(batch)]
    compared = 0
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        if len(running) == batch and all(request.first_token for request in requests):
            lengths = [sequence.num_computed for sequence in running]
            forecast = num_streamed(engine.config, engine.runner.spec, engine.plan, lengths)
            compared += bool(forecast)
            assert engine.stats()["kv_blocks_streamed"] == forecast, lengths
    assert compared > 5


def test_as_many_sequences_fit_as_are_let_in_at_once(tmp_path):
    """Windows see a block more on the way than at the end, and steps have a reserve."""
    path, most = make_checkpoint("gemma3", tmp_path, sliding_window=40), {}
    sizes = dict(block_size=16, max_num_batched_tokens=64, enable_cpu_offload=False, dtype="float32", device="cpu")

    def fits(num_blocks: int) -> bool:
        options = dict(num_gpu_blocks_override=num_blocks, host_memory="1MiB", gpu_memory="1GiB")
        return nanoinfer.plan(path, context=320, batch=4, **options, **sizes).fits

    least = next(count for count in range(40, 400) if fits(count))
    for num_blocks in (least - 1, least):
        sizes |= dict(num_gpu_blocks_override=num_blocks, max_num_seqs=4, max_model_len=320, host_memory_limit=2**20)
        engine = make_engine(path, **sizes)
        for number, prompt in enumerate(random_prompts(4, 300, 300, seed=1)):
            engine.add_request(str(number), prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        most[num_blocks] = 0
        while engine.has_work:
            engine.step()
            most[num_blocks] = max(most[num_blocks], len(engine.scheduler.running))
    assert most == {least - 1: 3, least: 4}
