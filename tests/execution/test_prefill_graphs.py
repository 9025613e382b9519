"""Small prefill steps, padded and from graphs: the same bits in every mode, and no trace of the padding."""

import math

import pytest
import torch
from engines import (
    BLOCK_BYTES,
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    random_prompts,
    run,
    some_params,
    switching,
)
from prefill_graphs import CHUNKED, COUNTS, WarmUpRuntime, engine_with_graphs, prefill_counters
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams

NUM_PIECES = SMALL["num_layers"] + 1
EVERY_LENGTH = [prompt[:length] for length, prompt in enumerate(random_prompts(40, 40, 40, seed=1), start=1)]
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
CHUNKS = CHUNKED[:3], some_params(3, max_tokens=6)
VARIANTS = {
    "eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, two ring slots of one block": dict(
        enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=LAYER_BLOCK_BYTES
    ),
    "offload, eager": dict(enable_cpu_offload=True, enforce_eager=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return make_checkpoint("gemma3", tmp_path_factory.mktemp("windowed"), sliding_window=24, num_layers=2)


def prefill_pieces_of(engine):
    return engine.runner.prefill_program.pieces


def pieces_of(engine):
    """For each token count the graphs of its pieces."""
    return {key[1]: graphs for key, graphs in engine.runner.graphs.captured.items() if key[0] == "prefill"}


# Those at the edges of what is captured, and of blocks.
SOME_LENGTHS = [EVERY_LENGTH[length - 1] for length in (1, 4, 5, 16, 17, 24, 25, 32, 33, 40)]


def whole_load(engine, is_brief: bool) -> list:
    """Every length alone, in batches, in chunks, and again with all of these in the prefix cache.

    is_brief: some lengths, a third of the batches, and fewer chunks.
    """
    outcomes, chunked = [], CHUNKED[:3] if is_brief else CHUNKED
    for _ in range(2):
        outcomes += [run(engine, [prompt], [FIRST_TOKEN]) for prompt in (SOME_LENGTHS if is_brief else EVERY_LENGTH)]
        for i in range(0, 36, 18 if is_brief else 6):
            outcomes.append(run(engine, EVERY_LENGTH[i : i + 6], some_params(6, max_tokens=6)))
        outcomes.append(run(engine, chunked, some_params(len(chunked), max_tokens=6)))
    assert_pools_as_before(engine)
    return outcomes


@pytest.fixture(scope="module")
def chunked(path):
    return run(engine_with_graphs(path), *CHUNKS)


@pytest.fixture(scope="module")
def expected(path, windowed, fuzz):
    outcomes = {}
    for model in (path, windowed):
        engine = engine_with_graphs(model)
        outcomes[model] = whole_load(engine, not fuzz)
        graph_steps, eager_steps, padded, rate = prefill_counters(engine)
        assert graph_steps > (80 if fuzz else 20) and eager_steps > 5 and padded > 100 and 0.7 < rate < 1
        assert engine.stats()["streamed_bytes"] == 0
    return outcomes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("offload, two ring slots of one block", "offload, eager")
def test_every_mode_gives_equal_bits(path, expected, variant, fuzz):
    engine = engine_with_graphs(path, **VARIANTS[variant])
    assert whole_load(engine, not fuzz) == expected[path]
    stats = engine.stats()
    assert (stats["prefill_graph_steps"] == 0) == ("eager" in variant)
    if "offload" in variant:
        assert stats["streamed_bytes"] > stats["decode_streamed_bytes"], "no history came through the ring in prefill"
    engine.close()


def test_windows_of_several_kinds_give_equal_bits(windowed, expected, fuzz):
    assert whole_load(engine_with_graphs(windowed, enable_cpu_offload=True), not fuzz) == expected[windowed]


def test_eager_and_offload_form_the_same_padded_steps(path):
    """Equal bits alone would not show it where the matrix library rounds one row as many."""
    found = set()
    for arguments in ({}, *VARIANTS.values()):
        engine = engine_with_graphs(path, **arguments)
        run(engine, EVERY_LENGTH[:8], [FIRST_TOKEN] * 8)
        graph_steps, eager_steps, padded, _ = prefill_counters(engine)
        found.add((graph_steps + eager_steps, padded))
    assert len(found) == 1 and next(iter(found))[1] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("enable_cpu_offload", [False, True])
@pytest.mark.sampled("False-0", "True-1")
def test_any_order_of_the_streams_gives_equal_bits(path, seed, enable_cpu_offload):
    prompts, params = CHUNKED[:1] + EVERY_LENGTH[:3], some_params(4, max_tokens=4)
    arguments = dict(capture_num_tokens=[4, 24, 64])  # all steps come from graphs
    wanted = run(engine_with_graphs(path, **arguments), prompts, params)
    arguments |= dict(enable_cpu_offload=enable_cpu_offload)
    engine = engine_with_graphs(path, WarmUpRuntime(seed=seed), **arguments)
    assert run(engine, prompts, params) == wanted
    assert engine.stats()["prefill_graph_hit_rate"] == 1
    assert_pools_as_before(engine)


@pytest.mark.parametrize(
    "start, modes", [(False, {1: "offload", 4: "resident"}), (True, {2: "resident", 5: "offload"})]
)
def test_a_switch_between_two_chunks_changes_no_bit(path, chunked, start, modes):
    engine = engine_with_graphs(path, enable_cpu_offload=start)
    captured = pieces_of(engine)[4]
    assert run(engine, *CHUNKS, switching(modes)) == chunked
    assert prefill_counters(engine)[1] > max(modes), "the switches came behind the prompts"
    assert pieces_of(engine)[4] is captured, "the pieces are the same in both modes, and were captured again"


def test_a_capture_between_two_steps_leaves_running_sequences_alone(path, chunked):
    """Its warm-up run writes keys and values: not to the slots of the step before."""

    def recapture(engine, _):
        engine.runner.graphs.captured.clear()
        with torch.inference_mode():
            engine.runner.capture(engine.mode == "offload")

    assert run(engine_with_graphs(path), *CHUNKS, recapture) == chunked


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_nothing_in_the_padding_reaches_a_result(path, enable_cpu_offload, monkeypatch):
    load = EVERY_LENGTH[:30:6], some_params(5, max_tokens=4)
    arguments = dict(enable_cpu_offload=enable_cpu_offload)
    wanted = run(engine_with_graphs(path, **arguments), *load)
    engine = engine_with_graphs(path, **arguments)
    pieces, num_poisoned = prefill_pieces_of(engine), 0
    begin = pieces.begin

    def poisoned(num_tokens, places):
        nonlocal num_poisoned
        tensors = begin(num_tokens, places)
        for buffer in (pieces.buffers.x, pieces.buffers.queries, pieces.buffers.attention):
            buffer.fill_(math.nan)
        num_poisoned += len(tensors) - num_tokens
        return tensors

    monkeypatch.setattr(pieces, "begin", poisoned)
    assert run(engine, *load) == wanted
    assert num_poisoned > 0 and pieces.buffers.attention.isnan().any(), "the poison was not there to the end"


@torch.inference_mode()
def test_padding_is_stored_nowhere_in_the_pool(path):
    """Not even in the scratch block, where it could do no harm today."""
    engine = engine_with_graphs(path)
    runner = engine.runner
    pool = runner.spec.attention.part.view(runner.gpu_kv)
    pool[:, 0] = 7.0  # padding of decode, run before its capture, has left there what padding of ours would
    before = pool.clone()
    run(engine, [EVERY_LENGTH[16]], [FIRST_TOKEN])
    written = (pool != before).flatten(4).any(-1)  # [layers, blocks, 2, block_size]
    assert prefill_counters(engine) == [1, 0, 24 - 17, 1.0]
    assert written.sum().item() == 17 * 2 * SMALL["num_layers"] and not written[:, 0].any()


def test_the_step_reads_token_0_at_position_0_without_a_slot_as_padding(path, monkeypatch):
    engine = engine_with_graphs(path)
    pieces, seen = prefill_pieces_of(engine), []
    begin = pieces.begin

    def watched(num_tokens, places):
        tensors = begin(num_tokens, places)
        padding = slice(num_tokens, None)
        seen.append([t[..., padding].tolist() for t in (tensors.token_ids, tensors.given_positions, tensors.slots)])
        return tensors

    monkeypatch.setattr(pieces, "begin", watched)
    run(engine, [EVERY_LENGTH[21]], [FIRST_TOKEN])
    assert seen == [[[0, 0], [0, 0], [[-1, -1]]]]


@pytest.mark.parametrize("counts", [[1, 2, 3], [7, 33], [64], [5, 5, 1, 61]], ids=str)
@pytest.mark.sampled("[7, 33]", "[5, 5, 1, 61]")
def test_padding_changes_nothing_but_the_rounding(path, counts, fuzz):
    """Against an engine without padding, for counts that are odd, repeated, unsorted or as large as a step."""
    plain = make_engine(path)
    engine = engine_with_graphs(path, capture_num_tokens=counts)
    for prompts in ([prompt] for prompt in (EVERY_LENGTH if fuzz else SOME_LENGTHS) + CHUNKED[:1]):
        (((tokens, logprobs, _),),) = run(engine, prompts, [FIRST_TOKEN])
        (((wanted, wanted_logprobs, _),),) = run(plain, prompts, [FIRST_TOKEN])
        assert tokens == wanted
        assert logprobs[0][tokens[0]].logprob == pytest.approx(wanted_logprobs[0][tokens[0]].logprob, abs=1e-4)
    assert prefill_counters(plain)[2] == 0 and prefill_counters(engine)[0] > 0


@pytest.fixture(scope="module")
def greedy(path):
    """Prompts, and the tokens that transformers gives them."""
    lengths = [1, 4, 5, 24, 25, 40, 41, 64, 65, 130]
    prompts = [prompt[:length] for prompt, length in zip(random_prompts(10, 130, 130, seed=3), lengths, strict=True)]
    return prompts, reference_tokens(path, prompts, 3)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_greedy_tokens_equal_transformers(path, greedy, enable_cpu_offload):
    prompts, wanted = greedy
    engine = engine_with_graphs(path, enable_cpu_offload=enable_cpu_offload)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    alone = [run(engine, [prompt], [params])[0][0][0] for prompt in prompts]
    together = [completions[0][0] for completions in run(engine, prompts, [params] * len(prompts))]
    assert alone == wanted and together == wanted


@pytest.mark.parametrize(
    "length, counters",
    [
        (1, [1, 0, 3]),
        (4, [1, 0, 0]),
        (5, [1, 0, 19]),
        (40, [1, 0, 0]),
        (41, [0, 1, 0]),
        (64, [0, 1, 0]),
        (70, [1, 1, 18]),
    ],
)
def test_counters_at_the_edges(path, length, counters):
    runtime = WarmUpRuntime()
    engine = engine_with_graphs(path, runtime)
    assert prefill_counters(engine) == [0, 0, 0, 0.0]
    before = runtime.num_replays
    run(engine, random_prompts(1, length, length), [FIRST_TOKEN])
    assert prefill_counters(engine) == [*counters, counters[0] / (counters[0] + counters[1])]
    assert runtime.num_replays - before == NUM_PIECES * counters[0]


def test_each_piece_of_each_count_is_captured_once(path):
    plain, runtime = WarmUpRuntime(), WarmUpRuntime()
    make_engine(path, plain)
    engine = engine_with_graphs(path, runtime)
    assert runtime.num_captures - plain.num_captures == NUM_PIECES * len(COUNTS)
    num_captures = runtime.num_captures
    engine.runner.capture(engine.mode == "offload")
    assert runtime.num_captures == num_captures
    assert list(pieces_of(engine)) == COUNTS[::-1], "the largest first: later ones find room in its memory"


def test_graphs_read_and_write_the_same_addresses_in_every_step(path):
    """The simulated runtime would forgive other ones: its graphs are functions."""

    def addresses():
        names = ("token_ids", "given_positions", "slots", "positions", "x", "queries", "attention")
        return [
            [getattr(tensors, name).data_ptr() for name in names]
            for tensors in prefill_pieces_of(engine).fixed.values()
        ]

    engine = make_engine(path, SimulatedRuntime(), capture_num_tokens=COUNTS)
    before = addresses()
    for mode in ("resident", "offload"):
        engine.switch_mode(mode)
        for length in (*COUNTS, 100):
            run(engine, random_prompts(1, length, length), some_params(1, max_tokens=4))
    assert addresses() == before and prefill_counters(engine)[0] >= 2 * len(COUNTS)


@pytest.mark.parametrize("arguments", [{}, dict(capture_num_tokens=[]), dict(capture_num_tokens=None)])
def test_without_counts_every_step_is_eager_and_unpadded(path, arguments):
    engine = make_engine(path, **arguments)
    run(engine, EVERY_LENGTH[:3], [FIRST_TOKEN] * 3)
    assert prefill_counters(engine) == [0, 1, 0, 0.0]


@pytest.mark.parametrize(
    "counts, message",
    [
        ([0], r"capture_num_tokens=\[0\] must be None, \[\] for none, or a list of whole numbers of at least 1"),
        ([16, -1], r"capture_num_tokens=\[16, -1\] must be"),
        ([16.0], r"capture_num_tokens=\[16.0\] must be"),
        ([True], r"capture_num_tokens=\[True\] must be"),
        ((16, 32), r"capture_num_tokens=\(16, 32\) must be"),
        (16, "capture_num_tokens=16 must be"),
        ("16", "capture_num_tokens='16' must be"),
        (
            [65, 8],
            r"=\[65, 8\] holds 65, .* at most max_num_batched_tokens=64 tokens: lower the one or raise the other",
        ),
    ],
)
def test_bad_counts_are_refused(path, counts, message):
    with pytest.raises(ValueError, match=message):
        make_engine(path, capture_num_tokens=counts)


def test_counts_beyond_any_step_are_refused_and_others_keep_the_steps_large_enough(path):
    with pytest.raises(
        ValueError, match=r"=\[4096\] holds 4096, .* at most 2048 tokens here: lower .* or set max_num_ba"
    ):
        make_engine(path, capture_num_tokens=[4096], max_num_batched_tokens=None)
    limits = dict(max_num_batched_tokens=None, gpu_memory_limit="1500KiB", max_num_seqs=1, enable_cpu_offload=True)
    small = make_engine(path, **limits).plan.max_num_batched_tokens
    assert small == 512
    with pytest.raises(ValueError, match="too small"):
        make_engine(path, capture_num_tokens=[1024], **limits)
    assert make_engine(path, capture_num_tokens=[small], **limits).plan.max_num_batched_tokens == small


def test_the_plan_counts_the_fixed_buffers(path):
    plain, engine = make_engine(path), engine_with_graphs(path)
    buffers = prefill_pieces_of(engine).buffers
    num_bytes = sum(t.nbytes for t in (buffers.positions, buffers.x, buffers.queries, buffers.attention))
    assert engine.plan.workspace_bytes - plain.plan.workspace_bytes == num_bytes > 0
    assert engine.plan.block_bytes == BLOCK_BYTES


@pytest.mark.parametrize("piece", range(NUM_PIECES))
@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_an_exception_inside_a_graph_ends_its_requests_only(path, enable_cpu_offload, piece):
    arguments = dict(enable_cpu_offload=enable_cpu_offload, enable_prefix_caching=False, max_num_seqs=2)
    engine = engine_with_graphs(path, **arguments)
    prompts, params = EVERY_LENGTH[10:13], some_params(3, max_tokens=6)
    wanted = run(engine, prompts[2:], params[2:])
    requests = [engine.add_request(f"r{i}", *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]

    def broken():
        raise RuntimeError("out of luck")

    graphs = pieces_of(engine).values()
    intact = [captured[piece] for captured in graphs]
    for captured in graphs:
        captured[piece] = broken
    with pytest.raises(RuntimeError, match="out of luck"):
        while engine.has_work:
            engine.step()
    for captured, work in zip(graphs, intact, strict=True):
        captured[piece] = work
    assert [request.is_finished for request in requests] == [True, True, False]
    assert engine.abort("r2")
    assert_pools_as_before(engine)
    assert run(engine, prompts[2:], params[2:]) == wanted, "the engine goes on as if nothing had happened"
    engine.close()


def test_an_abort_in_the_middle_of_a_prompt_and_close_give_everything_back(path):
    engine = engine_with_graphs(path, enable_cpu_offload=True)
    for name in ("a", "b"):
        engine.add_request(name, CHUNKED[0], some_params(1)[0])
    engine.step()
    assert engine.abort("a") and engine.abort("b")
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)
    engine.add_request("c", CHUNKED[1], some_params(1)[0])
    engine.step()
    engine.close()
    assert "runner" not in vars(engine)


def test_a_finished_step_holds_no_activations(path, monkeypatch):
    """Logits come after it, and are planned to find the memory free."""
    engine, steps = engine_with_graphs(path, enable_cpu_offload=True, resident_kv_limit=0), []
    program, begin = engine.runner.prefill_program, engine.runner.prefill_program.begin
    monkeypatch.setattr(program, "begin", lambda *given: steps.append(begin(*given)) or steps[-1])
    run(engine, [EVERY_LENGTH[3]], [FIRST_TOKEN])
    run(engine, [CHUNKED[0][:60]], [FIRST_TOKEN])
    assert [step.num_tokens for step in steps] == [4, 60]
    run(engine, [CHUNKED[0]], [FIRST_TOKEN])
    assert any(any(step.chunks) for step in steps), "a state was needed"
    assert all(step.tensors is None and step.states is None for step in steps)
    assert all(torch.isfinite(step.last_normed).all() for step in steps)
