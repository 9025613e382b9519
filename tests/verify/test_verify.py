"""`nanoinfer verify`: clean engines are identical, planted faults are found, and nothing is left out in silence."""

import math

import pytest
import torch
from engines import make_engine
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.commands import main as cli
from nanoinfer.common.exact import linear
from nanoinfer.execution.mixed import MixedStep
from nanoinfer.kv.prefix_cache import PrefixCache
from nanoinfer.measure.logits import LogitsRecorder
from nanoinfer.models.logits import Logits
from nanoinfer.models.streamed import WeightRun
from nanoinfer.requests.sequence import Sequence
from nanoinfer.verify import RunReport, Verdict, check, verify
from nanoinfer.verify.report import Answer, compare
from nanoinfer.verify.runs import WIDE_ROWS, make_runs
from nanoinfer.verify.workload import make_workload
from offload import CpuRuntime, KVGroups, KVKind, OffloadEngine

MODELS = {
    "qwen3": dict(family="qwen3"),
    "gemma3": dict(family="gemma3", sliding_window=24, head_dim=64),
    "llama": dict(family="llama"),
}
SMALL = dict(context=48, output_len=4, device="cpu", block_size=16, ring_slot_bytes=2**13, num_ring_slots=2, seed=3)
WIDE = SMALL | dict(ring_slot_bytes=2**15)  # for gemma3
PLACES = ["resident", "streamed", "mixture", "switch", "auto", "weights"]
RUNS = [*PLACES, "alone", "pairs", "chunk", "eager", "prefix", "preempted", "n=2"]
LAYERS = 2
LAYER_BLOCK_BYTES = 2 * 16 * 2 * 16 * 4
BLOCK_BYTES = LAYERS * LAYER_BLOCK_BYTES


@pytest.fixture(scope="module", autouse=True)
def many_small_runs():
    """Threads cost more than they bring here."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def only(monkeypatch):
    """Leaves out all runs but these: for a test of some, the others take time."""

    def only(*names):
        monkeypatch.setattr(check, "make_runs", lambda *args: [run for run in make_runs(*args) if run.name in names])

    return only


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    paths = {}
    for name, arguments in MODELS.items():
        arguments = dict(arguments)
        paths[name] = make_checkpoint(
            arguments.pop("family"), tmp_path_factory.mktemp(name), num_layers=LAYERS, **arguments
        )
    return paths


def test_how_long_all_runs_take_is_said_after_the_first_if_that_is_long(paths, only, monkeypatch):
    only("resident", "streamed")
    happened = []

    def told(seconds):
        happened.clear()
        monkeypatch.setattr(check, "SAID_SECONDS", seconds)
        verify(paths["llama"], tell=lambda text: happened.append("told"), note=happened.append, **SMALL)
        return happened

    assert told(1e9) == ["told"] * 3
    setting, first, note, second = told(0.0)
    assert [setting, first, second] == ["told"] * 3 and note.startswith("all 2 runs take about 0 minutes, as the first")


def test_a_bar_shows_how_far_the_runs_are(paths, only, capsys):
    only("resident", "streamed")
    verify(paths["llama"], progress=True, tell=print, **SMALL)
    told, bars = capsys.readouterr()
    assert "verify:  50%" in bars and "1/2 [" in bars and told.count("identical") == 1
    verify(paths["llama"], **SMALL)
    assert capsys.readouterr().err == ""


class CorruptingRuntime(SimulatedRuntime):
    """Spoils host blocks: calls `spoil(written)` after each copy to the host, with all destinations so far."""

    def __init__(self, spoil):
        super().__init__(poison=True)
        self.spoil = spoil

    def stream(self, name):
        stream = super().stream(name)
        if name == "write":
            copy, written = stream.copy, []

            def copy_and_spoil(destination, source):
                copy(destination, source)
                written.append(destination)
                self.spoil(written)

            stream.copy = copy_and_spoil
        return stream


def swap_two_blocks(written):
    """The first layer of the first two blocks that arrive in different steps: copies go layer by layer."""
    if len(written) == LAYERS + 1:
        first, second = written[0][0], written[LAYERS][0]
        content = first.clone()
        first.copy_(second)
        second.copy_(content)


def corrupt_one_byte(written):
    """The exponent of one key's first element, once."""
    if len(written) == 5:
        corrupt_one_byte_of_each(written)


def corrupt_one_byte_of_each(written):
    written[-1].view(torch.uint8).reshape(-1)[3] ^= 0x7F


def only_in(name, make):
    """For `make_runtime`: a faulty runtime in one run, clean ones in the others."""
    return lambda run: make() if run == name else SimulatedRuntime(poison=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled("gemma3")
def test_clean_engines_are_identical_in_every_run(paths, name):
    verdict = verify(paths[name], **WIDE | dict(context=64))  # so that all stream enough to be printed
    assert verdict.is_identical and [run.name for run in verdict.runs] == RUNS, verdict.report()
    assert all(run.left_out is None for run in verdict.runs), verdict.report()
    tokens, greedy = 2 + 3 * 4, 2 + 4
    wanted = {run: tokens for run in RUNS} | {"n=2": tokens + greedy}
    assert {run.name: run.num_tokens for run in verdict.runs} == wanted
    assert {run.name: run.num_logits for run in verdict.runs} == {run: count * 160 for run, count in wanted.items()}
    num_compared = 12 * tokens + greedy
    assert verdict.line() == f"identical: {num_compared} tokens and {num_compared * 160:,} logits in 13 runs"
    assert [run.name for run in verdict.runs if run.is_reference] == ["resident"]
    assert "\nvaried: where KV blocks lie, " in verdict.report()
    facts = {run.name: run.facts for run in verdict.runs}
    assert all(facts[run][0] != "0.0 MiB streamed" for run in PLACES if run != "resident")
    assert facts["streamed"][1] == "at most 0 full blocks stayed on the GPU"
    assert int(facts["mixture"][1].split()[2]) > 1
    assert [fact.split()[1] for fact in facts["switch"][2:]] == ["offload", "resident", "offload"]
    assert facts["switch"][2].endswith("(1 in prefill)")
    assert [run for run in RUNS if any("mixed step" in fact for fact in facts[run])] == ["chunk"]
    assert [run for run in RUNS if any("prefix cache" in fact for fact in facts[run])] == ["prefix", "n=2"]
    assert [run for run in RUNS if any("preemption" in fact for fact in facts[run])] == ["preempted"]
    assert all(not facts[run] for run in ("resident", "alone", "pairs", "eager"))


@pytest.mark.parametrize("num_requests", [1, 2, 6])
@pytest.mark.sampled("1")
def test_any_number_of_requests_can_be_compared(paths, num_requests):
    verdict = verify(paths["qwen3"], **SMALL | dict(output_len=6), num_requests=num_requests)
    left_out = [run.name for run in verdict.runs if run.left_out is not None]
    assert verdict.is_identical and left_out == (["preempted"] if num_requests == 2 else []), verdict.report()


@pytest.mark.parametrize(
    "name, spoil",
    [
        ("streamed", swap_two_blocks),
        ("streamed", corrupt_one_byte),
        ("mixture", corrupt_one_byte_of_each),
        ("switch", corrupt_one_byte_of_each),
        ("auto", corrupt_one_byte_of_each),
    ],
)
@pytest.mark.sampled("streamed-swap_two_blocks")
def test_a_spoiled_host_block_is_found(paths, only, name, spoil):
    only("resident", name)
    verdict = verify(paths["qwen3"], **SMALL, make_runtime=only_in(name, lambda: CorruptingRuntime(spoil)))
    assert verdict.line() == f"DIFFERENT in {name}", verdict.report()
    wrong = verdict.runs[1]
    assert wrong.mismatches[0].position is not None and " instead of " in wrong.mismatches[0].text
    assert str(wrong.mismatches[0]) in verdict.report()


def test_a_spoiled_weight_in_host_memory_is_found(paths, only, monkeypatch):
    only("resident", "weights")
    copies = WeightRun.copies

    def spoiled(self, target, host):
        if self.piece == 2:
            self.home[7] ^= 0x40
        return copies(self, target, host)

    monkeypatch.setattr(WeightRun, "copies", spoiled)
    assert verify(paths["qwen3"], **SMALL).line() == "DIFFERENT in weights"


def test_products_that_depend_on_the_number_of_rows_are_found(paths, only, monkeypatch, fuzz):
    """As a library's that rounds otherwise for another number of rows."""
    different = ["auto", "alone", "pairs", "chunk", "prefix", "preempted", "n=2"] if fuzz else ["alone", "chunk"]
    only(*different, *(RUNS if fuzz else ["resident", "streamed"]))
    monkeypatch.setattr("nanoinfer.common.exact.linear", lambda x, *others: linear(x, *others) + 1e-6 * len(x))
    verdict = verify(paths["qwen3"], **SMALL)
    # Two or one at a time, other chunks, prompts of which part is there already. Where KV lies changes no product.
    assert verdict.line() == f"DIFFERENT in {', '.join(different)}", verdict.report()


def test_a_fault_of_wide_steps_is_found_in_pairs(paths, only, monkeypatch):
    only("resident", "alone", "pairs", "auto")
    of_slice = Logits.of_slice

    def logits_by_rows(self, number, normed, out):
        of_slice(self, number, normed, out)
        if len(normed) == WIDE_ROWS:
            out.mul_(1 + 1e-6)

    monkeypatch.setattr(Logits, "of_slice", logits_by_rows)
    assert verify(paths["qwen3"], **SMALL).line() == "DIFFERENT in pairs"


def test_a_fault_of_mixed_steps_is_found_in_chunk(paths, only, monkeypatch):
    only("resident", "eager", "chunk")
    # The running sequences' rows hold token 0 then, in place of their newest.
    monkeypatch.setattr(MixedStep, "_copy_inputs", lambda self: None)
    assert verify(paths["qwen3"], **SMALL).line() == "DIFFERENT in chunk"


def test_a_graph_that_differs_from_its_pieces_is_found_in_eager(paths, only, monkeypatch):
    only("resident", "eager")
    capture = CpuRuntime.capture

    def capture_for_a_while(self, stream, work):
        """A graph that computes nothing from its fourth replay on."""
        times = iter(range(3))
        return capture(self, stream, lambda: None if next(times, None) is None else work())

    monkeypatch.setattr(CpuRuntime, "capture", capture_for_a_while)
    assert verify(paths["qwen3"], **SMALL).line() == "DIFFERENT in eager"


def test_a_wrong_block_from_the_prefix_cache_is_found(paths, only, monkeypatch):
    find = PrefixCache.find
    only("resident", "prefix", "n=2")
    backwards = lambda hits: hits._replace(blocks=[blocks[::-1] for blocks in hits.blocks])  # noqa: E731
    monkeypatch.setattr(PrefixCache, "find", lambda *args: backwards(find(*args)))
    # Long enough for both completions to find more than one block.
    assert verify(paths["qwen3"], **SMALL | dict(context=96, output_len=6)).line() == "DIFFERENT in prefix, n=2"


def test_kv_that_comes_back_wrong_after_preemption_is_found(paths, only, monkeypatch):
    only("resident", "prefix", "preempted")
    load = OffloadEngine.load
    monkeypatch.setattr(OffloadEngine, "load", lambda self, pairs, operation: load(self, [], operation))
    assert verify(paths["qwen3"], **SMALL).line() == "DIFFERENT in preempted"


def test_completions_that_differ_from_a_single_one_are_found(paths, only, monkeypatch):
    only("resident", "prefix", "n=2")
    # The second completion's seed for the first.
    monkeypatch.setattr(
        "nanoinfer.engine.intake.Sequence",
        lambda *args, **options: Sequence(*args[:5], args[5] + (args[4].n == 2), args[6], **options),
    )
    verdict = verify(paths["qwen3"], **SMALL)
    assert verdict.line() == "DIFFERENT in n=2" and {m.request for m in verdict.runs[2].mismatches} == {1, 3}


def test_a_reference_that_is_not_finite_is_found_in_itself(paths, only):
    only("streamed", "mixture")
    spoiled = only_in("streamed", lambda: CorruptingRuntime(lambda written: written[-1].fill_(255)))
    verdict = verify(paths["qwen3"], **SMALL, make_runtime=spoiled)
    assert verdict.line().startswith("DIFFERENT in streamed"), verdict.report()
    assert "not finite; the reference itself: try another dtype, or memory was read" in verdict.report()


@pytest.mark.parametrize(
    "rule",
    [
        "gpu_block.reuse_after_write_through",
        "host.read_after_step",
        # host_block.reuse_after_copies needs more requests that come and go: tests/engine/test_engine_simulated.py
        "ring.attention_after_fill",
        "ring.fill_after_attention",
        "ring.fill_after_write_through",
        "write_through.after_kv_is_written",
    ],
)
@pytest.mark.sampled("host.read_after_step", "ring.fill_after_attention")
def test_a_dropped_wait_is_found_and_named(paths, only, rule):
    only("resident", "streamed")
    for seed in range(8):
        runtime = only_in("streamed", lambda seed=seed: SimulatedRuntime(seed, dropped_rule=rule))
        verdict = verify(paths["qwen3"], **SMALL, make_runtime=runtime)
        if not verdict.is_identical:
            assert verdict.line() == "DIFFERENT in streamed", verdict.report()
            return
    pytest.fail(f"8 seeds ran without {rule!r} and verify called them identical")


def collect_while_a_step_runs(path, seed, dropped_rule=None):
    """Rows of logits after a few steps, the newest of which the engine has not read; in order: what they are."""
    engine = make_engine(path, SimulatedRuntime(seed, dropped_rule))
    recorder = LogitsRecorder(engine)
    engine.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine.live.in_flight is not None
    recorder.collect(keep=0)
    return torch.stack(recorder.rows["r", 0])


def test_logits_are_fetched_once_their_step_has_run(paths, fuzz):
    wanted = collect_while_a_step_runs(paths["qwen3"], None)
    assert len(wanted) == 4
    for seed in range(10 if fuzz else 3):
        assert torch.equal(collect_while_a_step_runs(paths["qwen3"], seed), wanted)
    with pytest.raises(IndexError):  # the copy is not there yet
        for seed in range(10):
            collect_while_a_step_runs(paths["qwen3"], seed, "verify.read_after_step")


def test_every_legal_order_of_the_streams_is_identical(paths, only, fuzz):
    only(*(RUNS if fuzz else PLACES))
    for seed in range(3 if fuzz else 1):
        verdict = verify(paths["gemma3"], **WIDE, make_runtime=lambda name, seed=seed: SimulatedRuntime(seed))
        assert verdict.is_identical, verdict.report()


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_freed_blocks_hold_nan_without_a_seed(paths, enable_cpu_offload):
    config = EngineConfig(
        model=paths["qwen3"],
        device="cpu",
        block_size=16,
        max_model_len=128,
        max_num_seqs=1,
        enable_cpu_offload=enable_cpu_offload,
        enable_prefix_caching=False,
        progress_bar=False,
    )
    engine = LLMEngine(config, SimulatedRuntime(poison=True))
    engine.add_request("a", list(range(3, 80)), SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    engine.stats()  # reclaims what the last step released
    offload, kv = engine.runner.offload, engine.runner.gpu_kv
    num_freed = (kv == 255).all(dim=2).sum(dim=1)  # of each layer
    assert num_freed.tolist() == [5] * LAYERS
    if offload.host.num_bytes:
        assert all((offload.host.block(layer, block) == 255).all() for layer in range(LAYERS) for block in range(4))
    assert not SimulatedRuntime().poisons and not CpuRuntime().poisons


def test_a_resident_pool_that_is_too_small_is_left_out_and_said(paths, only):
    only("resident", "streamed", "switch", "prefix")
    # A budget that a resident pool of 3 x 192 tokens does not fit into.
    arguments = SMALL | dict(context=176, gpu_memory_limit=650_000, host_memory_limit=128 * BLOCK_BYTES)
    verdict = verify(paths["qwen3"], **arguments)
    runs = {run.name: run for run in verdict.runs}
    assert verdict.is_identical and runs["streamed"].is_reference, verdict.report()
    assert "fit" in runs["resident"].left_out or "too small" in runs["resident"].left_out
    assert runs["switch"].left_out is not None
    assert "(left out: resident, switch)" in verdict.line(), "what needs no room is compared: the others stream"
    assert f"left out: {runs['resident'].left_out}" in verdict.report()


def test_where_the_first_run_fails_the_next_one_is_the_reference(paths, only):
    only("streamed", "mixture", "eager")

    def fail(written):
        raise RuntimeError("a device error")

    verdict = verify(paths["qwen3"], **SMALL, make_runtime=only_in("streamed", lambda: CorruptingRuntime(fail)))
    assert verdict.line() == "DIFFERENT in streamed" and "FAILED: RuntimeError: a device error" in verdict.report()
    assert [run.is_reference for run in verdict.runs] == [False, True, False]
    assert "no CUDA graphs: identical" in verdict.report()


def test_the_default_context_is_what_resident_mode_holds(paths, only):
    only("resident", "switch", "auto")
    arguments = {key: value for key, value in SMALL.items() if key != "context"}
    small = verify(paths["qwen3"], **arguments, gpu_memory_limit=1_150_000)
    assert small.is_identical and all(run.left_out is None for run in small.runs), small.report()


def test_runs_in_which_nothing_happens_are_left_out_and_said(paths, only):
    only("resident", "auto", "prefix", "preempted")
    verdict = verify(paths["qwen3"], **(SMALL | dict(output_len=2)))
    assert verdict.is_identical and verdict.line().endswith("in 2 runs (left out: auto, preempted)")
    assert "the GPU pool did not fill up" in verdict.report() and "no sequence was preempted" in verdict.report()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(context=20), r"context=20 must be from 32 \(two KV blocks"),
        (dict(context=5000), r"to 4092 \(the model's 4096 positions"),
        (dict(context=96.0), "context=96.0 must be a whole number"),
        (dict(output_len=1), "output_len=1 must be a whole number of at least 2"),
        (dict(num_requests=0), "num_requests=0 must be a whole number of at least 1"),
        (dict(enable_cpu_offload=True), "enable_cpu_offload=True: verify chooses it for each run"),
        (dict(num_ring_slot=3), "num_ring_slot"),
        (dict(host_memory_limit=BLOCK_BYTES), "host_memory_limit=.* is too small for the KV cache of"),
        (dict(block_size=4096), "the model allows 4096 positions, .* needs 8196: lower block_size or output_len"),
    ],
)
def test_bad_arguments_are_refused(paths, arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(paths["qwen3"], **(SMALL | arguments))


def test_more_logits_than_the_host_should_keep_are_refused(paths, monkeypatch):
    monkeypatch.setattr("nanoinfer.measure.logits.MAX_LOGITS_BYTES", 14 * 160 * 4 - 1)
    with pytest.raises(ValueError, match="14 generated tokens have .* ask for fewer requests or a shorter output"):
        verify(paths["qwen3"], **SMALL)


def test_requests_differ_in_length_and_fill_a_block_while_they_decode():
    for num_requests in (1, 2, 4, 9):
        for output_len in (4, 32, 100):
            workload = make_workload(160, num_requests, 96, output_len, KVGroups.of([KVKind(None, 16)]), 0)
            for prompt, params in zip(workload.prompts, workload.params, strict=True):
                assert 1 <= len(prompt) <= 96
                steps = params.max_tokens - 1
                assert (len(prompt) + steps) // 16 > (len(prompt) - 1) // 16, "no block is filled"
            if num_requests >= 4:
                assert len({len(prompt) for prompt in workload.prompts}) >= 4
                assert {params.is_greedy for params in workload.params} == {True, False}


def rows(*values):
    return [torch.tensor(value) for value in values]


def answers(*pairs):
    """(tokens, rows of logits) of each request."""
    return [Answer(number, *pair) for number, pair in enumerate(pairs)]


def compared(wanted, got, tolerance=None):
    report = RunReport(name="x", what="x")
    compare(wanted, got, report, tolerance)
    return report


def test_one_bit_of_one_logit_is_a_difference_with_place_and_values():
    wanted = answers(([1, 2], rows([0.5, 1.0], [0.25, 2.0])), ([1], rows([0.5, 1.0])))
    got = answers(([1, 2], rows([0.5, 1.0], [0.25000003, 2.0])), ([1], rows([0.5, 1.0])))
    report = compared(wanted, got)
    assert [str(m) for m in report.mismatches] == [
        "request 0, generated token 1: logit of token 0 is 0.2500000298023224 instead of 0.25, 1 of 2 logits differ"
    ]
    assert compared(wanted, wanted).num_logits == 6 and not compared(wanted, wanted).mismatches
    # To rounding: allowed, and noted.
    report = compared(wanted, got, tolerance=1e-4)
    assert not report.mismatches and 0 < report.largest_difference < 1e-6


def test_nan_is_never_equal_and_missing_rows_are_found():
    nan = answers(([1], rows([math.nan, 1.0])))
    assert "logit of token 0 is nan" in str(compared(nan, nan).mismatches[0])
    wanted = answers(([1], rows([0.5, 1.0])))
    assert "is nan" in str(compared(wanted, nan, tolerance=0.1).mismatches[0])
    assert "1 tokens with 0 rows" in str(compared(wanted, answers(([1], []))).mismatches[0])


def test_to_rounding_a_tie_may_fall_the_other_way_and_larger_differences_may_not():
    wanted = answers(([1, 0], rows([0.99999, 1.0], [1.0, 0.0])))
    tied = answers(([0, 1], rows([1.0, 0.99999], [0.0, 1.0])))
    assert not compared(wanted, tied, tolerance=1e-3).mismatches
    assert compared(wanted, tied).mismatches[0].text.startswith("token 0 instead of 1; logit of token 0 is 1.0")
    far = answers(([1, 0], rows([0.5, 1.0], [1.0, 0.0])))
    assert "logit of token 0 is 0.5" in compared(wanted, far, tolerance=1e-3).mismatches[0].text


def test_without_fixed_splits_the_report_claims_rounding_only():
    reports = [RunReport(name="resident", what="a", is_reference=True), RunReport(name="streamed", what="b")]
    verdict = Verdict(setting=[], runs=reports, is_exact=False)
    assert verdict.line().startswith("equal to rounding: ") and "identical" not in verdict.report()


def test_a_backend_without_fixed_splits_is_compared_to_rounding(paths, only, monkeypatch, fuzz):
    def decode_rows(self, q, kv, block_table, seq_lens, out, window):
        for row, length in enumerate(seq_lens.tolist()):
            k, v = kv[block_table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            k, v = (part.repeat_interleave(self.spec.group_size, dim=1) for part in (k, v))  # [length, heads, head_dim]
            scores = torch.einsum("hd,thd->ht", q[row], k) * self.spec.scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), v)

    monkeypatch.setattr(TorchBackend, "exact_splits", False)
    monkeypatch.setattr(TorchBackend, "decode_rows", decode_rows)
    only(*(RUNS if fuzz else ["resident", "streamed", "chunk"]))
    verdict = verify(paths["llama"], **SMALL)
    assert verdict.is_identical and verdict.line().startswith("equal to rounding: "), verdict.report()
    assert "to rounding only: the attention backend 'torch' has no fixed splits" in verdict.report()
    runs = {run.name: run for run in verdict.runs}
    assert 0 < runs["streamed"].largest_difference < 1e-4, "the rows are not computed in another way"
    only("resident", "streamed")
    runtime = only_in("streamed", lambda: CorruptingRuntime(swap_two_blocks))
    assert verify(paths["llama"], **SMALL, make_runtime=runtime).line() == "DIFFERENT in streamed"


def test_the_command_prints_the_report_and_returns_zero(paths, only, capsys, monkeypatch):
    only("resident", "streamed")
    arguments = ["verify", str(paths["llama"]), "--device", "cpu", "--context", "512", "--output-len", "2"]
    assert cli.main([*arguments, "--requests", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith("LlamaForCausalLM")
    assert "bit for bit" in printed.out and printed.out.splitlines()[-1].startswith("identical: ")
    monkeypatch.setattr("nanoinfer.devices.cpu.CpuRuntime", lambda poison: CorruptingRuntime(corrupt_one_byte_of_each))
    assert cli.main([*arguments, "--requests", "2"]) == 1
    assert "DIFFERENT in " in capsys.readouterr().out.splitlines()[-1]


def test_the_report_is_told_run_by_run(paths, only):
    names = ["resident", "streamed", "mixture"]
    only(*names)
    told, events = [], []

    def make_runtime(name):
        events.append((name, len(told)))
        return SimulatedRuntime(poison=True)

    verdict = verify(paths["llama"], **SMALL, make_runtime=make_runtime, tell=told.append)
    assert events == [(name, 1 + number) for number, name in enumerate(names)]
    assert "\n".join([*told, "", verdict.line()]) == verdict.report()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give either a model"),
        (["--shape", "tinny"], "did you mean 'tiny'?"),
        (["--shape", "tiny", "--device", "cpu", "--context", "12"], "--context 12 must be from 512"),
    ],
)
def test_errors_of_the_user_give_exit_code_two(capsys, arguments, message):
    assert cli.main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nanoinfer verify: ") and message in error and error.count("\n") == 1
