"""Weights that lie in host memory and pass to the GPU before each piece: the same bits, in any order of streams."""

import os

import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params, switching
from simulated import SimulatedRuntime

from nanoinfer.execution.activations import Activations
from nanoinfer.layers import linear
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.linear import Embedding, Head, Linear
from nanoinfer.models.streamed import ALIGNMENT, landing_sizes, spread

# Dense and sparse, experts apart and fused, merged projections, norms behind, biases, a first dense layer.
FAMILIES = ("llama", "qwen2", "gemma3", "phi3", "starcoder2", "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "olmoe")
FAMILIES += ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
ALL = dict(resident_weights_limit=0)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Streamed heads are cut into several slices."""
    monkeypatch.setattr(linear, "HEAD_BLOCK", 16)


def workload(seed, longest=90, tokens=12):
    return random_prompts(4, 10, longest, seed) + random_prompts(3, 1, 20, seed), some_params(7, tokens, logprobs=3)


def own_weights(model):
    """The modules whose weights may be streamed."""
    return [
        one for one in model.modules() if isinstance(one, Linear | Experts) and not isinstance(one, Head | Embedding)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", [None, "int4", "int8", "fp8"])
@pytest.mark.sampled(
    "None-llama", "int4-gpt_oss", "int8-phi3", "fp8-glm4_moe", "int4-lfm2", "int8-lfm2_moe", "fp8-qwen3_5",
    "int4-qwen3_next",
)  # fmt: skip
def test_streamed_weights_change_no_bit(path_of, family, quantization):
    settings = dict(quantization=quantization, dtype="float32" if quantization is None else "bfloat16")
    if quantization == "int4" or family in ("gpt_oss", "glm4_moe"):
        path = path_of(family, hidden_size=128, intermediate_size=256, moe_intermediate_size=128)
    else:
        path = path_of(family)
    wanted = run(make_engine(path, **settings), *workload(1, 40, 4))
    some = dict(resident_weights_limit=2**14)
    for count, streaming in enumerate((ALL, some, ALL | dict(enable_cpu_offload=True))):
        engine = make_engine(path, **settings, **streaming)
        assert run(engine, *workload(1, 40, 4)) == wanted, streaming
        plan, runs = engine.plan, engine.runner.model.streamed.runs
        assert tuple(runs) == plan.streamed_pieces and 0 < len(runs) <= engine.runner.spec.attention.num_q_heads
        assert count == 1 or len(runs) == len(engine.runner.spec.piece_bytes) - 1
        of_pieces = sum(len(one.buffer) for one in runs.values())
        assert engine.stats()["streamed_bytes"] >= plan.streamed_bytes == of_pieces + plan.head_bytes
        assert (engine.runner.model.streamed.head is not None) == (plan.head_bytes > 0)
        assert plan.head_bytes or count == 1
        assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "lfm2_moe"])
@pytest.mark.sampled("qwen3-1", "qwen3_moe-2", "lfm2_moe-0", "lfm2_moe-3")
def test_any_order_of_streams_gives_the_same(path_of, family, seed):
    """Decode, prefill and mixed steps, captured and not, beside KV that streams, and with switches between modes."""
    own = dict(num_layers=6, num_dense_layers=seed % 2) if family == "lfm2_moe" else {}
    path, modes = path_of(family, **SMALL | own), {3: "offload", 9: "resident", 14: "offload"}
    prompts, params = workload(seed, 70, 8)
    wanted = run(make_engine(path), prompts, params)
    graphs = dict(capture_num_tokens=[8, 24], enforce_eager=seed % 2 == 0)
    # Who does not foresee offload mode captures its graphs at the switch, which overwrites what was fetched ahead; the
    # next step would take that up, where no KV comes before it.
    mode = dict(enable_cpu_offload=False, resident_kv_limit=None) if seed % 4 == 1 else dict(enable_cpu_offload="auto")
    engine = make_engine(path, SimulatedRuntime(seed), **ALL, max_num_seqs=4, **graphs, **mode)
    assert run(engine, prompts, params, switching(modes)) == wanted
    stats = engine.stats()
    assert stats["num_mixed_steps"] and stats["streamed_bytes"] > stats["num_decode_steps"] * engine.plan.streamed_bytes
    assert_pools_as_before(engine)


@pytest.mark.parametrize("rule", ["place.piece_after_fill", "place.fill_after_last_piece"])
def test_the_waits_are_needed(path_of, rule):
    path = path_of("qwen3", **SMALL)
    prompts, params = workload(0, 40, 6)
    wanted = run(make_engine(path), prompts, params)
    for seed in range(20):
        engine = make_engine(path, SimulatedRuntime(seed, dropped_rule=rule), **ALL)
        try:
            if run(engine, prompts, params) != wanted:
                return
        except Exception:  # a race that was reported, or nonsense that no sampler takes
            return
    pytest.fail(f"20 seeds ran without {rule!r} and nothing went wrong")


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "glm4_moe", "lfm2_moe"])
def test_a_run_holds_what_its_piece_reads_and_nothing_twice(path_of, family):
    engine = make_engine(path_of(family, num_layers=4), **ALL)
    model, spec = engine.runner.model, engine.runner.spec
    streamed, places = model.streamed, engine.runner.landing_buffers.bytes
    assert [len(place) for place in places] == landing_sizes(spec.run_bytes(tuple(streamed.runs), True))
    assert engine.plan.landing_bytes == sum(map(len, places))
    assert len({place.data_ptr() for place in places}) == len(places) == 2
    turns = [one.landing.place for one in (*streamed.runs.values(), *streamed.head.slices)]
    assert turns == [turn % 2 for turn in range(len(turns))], "no run waits for the place of the one before it"
    taken = {piece: [] for piece in streamed.runs}
    for module in own_weights(model):
        tensors = [module.pool] if isinstance(module, Experts) else list(module.parameters())
        if module not in streamed.piece_of:
            first = model.layers[0]
            of_first = first.modules() if family == "lfm2_moe" else [first.self_attn.qkv_proj]
            of_next = [model.layers[1].self_attn.qkv_proj] if family == "lfm2_moe" else []
            assert module in {*of_first, *of_next}, "no cut lies before the first piece"
            continue
        run = streamed.runs[streamed.piece_of[module]]
        first = run.buffer.data_ptr()
        assert run.buffer.data_ptr() == places[run.landing.place].data_ptr()
        for tensor in tensors:
            begin = tensor.data_ptr() - first
            assert begin % ALIGNMENT == 0 and begin + tensor.nbytes <= len(run.buffer)
            taken[run.piece].append((begin, begin + tensor.nbytes))
    for piece, spans in taken.items():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), piece
        assert sum(-(-(end - begin) // ALIGNMENT) * ALIGNMENT for begin, end in spans) == spec.piece_bytes[piece]
    on_host = [*streamed.piece_of, streamed.head.head]
    on_gpu = sum(one.nbytes for one in model.parameters()) - sum(
        one.nbytes for module in on_host for one in module.parameters()
    )
    assert abs(on_gpu - (spec.weight_bytes - engine.plan.streamed_bytes)) < 50 * ALIGNMENT


def test_pieces_that_run_outside_of_steps_find_zeros_in_their_places(path_of, monkeypatch):
    """What another piece left there would lead a table of indices out of the memory."""
    engine = make_engine(path_of("qwen3", **SMALL), **ALL, enable_cpu_offload="auto")
    runner, places = engine.runner, engine.runner.landing_buffers.bytes

    @torch.inference_mode()
    def soil():
        for place in places:
            place.fill_(127)

    def is_clear():
        return not any(place.any() for place in places)

    soil()
    with torch.inference_mode():
        Activations(runner.decode_program.resources, memory_before=0).run_each_kind()
    assert is_clear()
    soil()
    seen = []
    monkeypatch.setattr(runner.graphs, "captured", {})
    monkeypatch.setattr(runner.graphs, "capture", lambda work: seen.append(is_clear()))
    runner.capture(True)
    assert seen and all(seen)


def test_random_weights_are_the_same_wherever_they_lie(path_of):
    path = path_of("qwen3_moe", **SMALL)
    resident, streaming = (make_engine(path, load_format="dummy", **given) for given in ({}, ALL))
    for module, other in zip(own_weights(resident.runner.model), own_weights(streaming.runner.model), strict=True):
        with torch.inference_mode():
            streaming.runner.model.streamed.bring(other)
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        if isinstance(module, Experts):
            first = module.table[0]
            pairs = [(module.pool[first : first + module.num_experts], other.pool)]
        assert all(torch.equal(one, same) for one, same in pairs)


@pytest.mark.parametrize("num_pieces", [2, 3, 5, 37, 49])
def test_streamed_pieces_are_spread_over_the_model(num_pieces):
    for count in range(num_pieces):
        found = spread(num_pieces, count)
        assert len(set(found)) == count and list(found) == sorted(found)
        assert not found or 1 <= found[0] and found[-1] < num_pieces
        gaps = [second - first for first, second in zip(found, found[1:], strict=False)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_failure_while_weights_are_read_leaves_no_host_memory_behind(path_of, monkeypatch):
    from nanoinfer.models import streamed

    made, failing = [], []

    class Arena(streamed.HostArena):
        def __init__(self, *args, **kwargs):
            if len(made) == 2:
                failing.append(True)
                raise MemoryError("no more")
            super().__init__(*args, **kwargs)
            made.append(self._release)

    monkeypatch.setattr(streamed, "HostArena", Arena)
    with pytest.raises(MemoryError, match="no more"):
        make_engine(path_of("qwen3", num_layers=4), **ALL)
    import gc

    gc.collect()
    assert failing and all(not one.alive for one in made)


def test_where_host_memory_is_gone_when_weights_are_read_fewer_of_them_are_advised(path_of, monkeypatch):
    monkeypatch.setattr("offload.memory.pinned.memory_available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"are available: have fewer weights streamed \(resident_weights_limit"):
        make_engine(path_of("qwen3", **SMALL), **ALL)


def test_close_gives_the_host_memory_back(path_of):
    engine = make_engine(path_of("qwen3", **SMALL), **ALL)
    arenas = list(engine.runner.model.streamed.arenas.values())
    assert len(arenas) == len(engine.plan.streamed_pieces) and all(arena.num_ready for arena in arenas)
    engine.close()
    assert not any(arena.num_ready for arena in arenas)


@pytest.mark.parametrize("available, is_dropped", [(2**40, False), (2**16, True)])
def test_files_leave_the_page_cache_where_memory_is_short_of_both(path_of, monkeypatch, available, is_dropped):
    """A cgroup counts the cache, too: files as large as the weights beside them would be twice their bytes."""
    dropped = []
    monkeypatch.setattr("nanoinfer.weights.fill.memory_available_bytes", lambda: available)
    monkeypatch.setattr("nanoinfer.weights.read.os.posix_fadvise", lambda *given: dropped.append(given[1:]))
    engine = make_engine(path_of("qwen3", num_layers=4), **ALL)
    groups = 1 + len(engine.runner.model.streamed.runs) + 1  # and the head
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)] * (groups if is_dropped else 0)
    make_engine(path_of("qwen3", num_layers=4))
    assert len(dropped) == (groups if is_dropped else 0), "weights that stay on the device"


def test_streamed_weights_leave_less_of_the_limit_to_sequences_that_gave_way(path_of):
    path = path_of("qwen3")
    before = make_engine(path, **ALL).plan
    limit = before.host_weight_bytes + 3 * before.block_bytes + 1
    host = make_engine(path, **ALL, enable_cpu_offload=False, host_memory_limit=limit).runner.offload.host
    assert host.num_blocks == 3
    host.borrow(3)
    with pytest.raises(MemoryError, match="above host_memory_limit"):
        host.borrow(1)
