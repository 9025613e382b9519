"""Experts that lie in host memory and come one by one, when a row chooses them: the same bits, whatever is there."""

import re
from dataclasses import replace

import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params, switching
from gguf_models import write_gguf
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer.common.units import format_size
from nanoinfer.engine.stats import bound_line
from nanoinfer.kernels.experts import reference
from nanoinfer.memory.setup import Setup
from nanoinfer.models import streamed
from nanoinfer.models.expert_slots import NUM_AREAS, pool_bytes
from offload.memory.pinned import PinError

FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "olmoe", "lfm2_moe", "qwen3_5_moe", "qwen3_next")
# Each has two sparse layers or more: the first of some is dense.
NUM_LAYERS = {"glm4_moe": 3, "lfm2_moe": 6}
# Layers that keep states: one begins the model, some follow each other, one ends it. All have experts.
STATEFUL = dict(num_layers=6, num_heads=2, num_kv_heads=1, head_dim=16, num_dense_layers=0)
LARGE = dict(hidden_size=128, intermediate_size=256, moe_intermediate_size=128)


def workload(seed, longest=90, tokens=10):
    """Prompts in large steps, whose experts come together, and steps of few rows."""
    return random_prompts(4, 10, longest, seed) + random_prompts(3, 1, 20, seed), some_params(7, tokens, logprobs=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", [None, "int4", "int8", "fp8"])
@pytest.mark.sampled(
    "None-qwen3_moe", "None-glm4_moe", "None-lfm2_moe", "int4-gpt_oss", "int4-lfm2_moe", "int8-mixtral", "fp8-olmoe"
)
def test_any_number_of_slots_gives_the_same_bits(path_of, family, quantization):
    settings = dict(quantization=quantization, dtype="float32" if quantization is None else "bfloat16")
    is_large = quantization == "int4" or family in ("gpt_oss", "glm4_moe")
    path = path_of(family, num_layers=NUM_LAYERS.get(family, 2), **(LARGE if is_large else {}))
    resident = make_engine(path, **settings)
    # One whose routers choose more experts than there are slots, in all families.
    wanted, sparse = run(resident, *workload(3, 40, 4)), resident.runner.spec.sparse
    assert not resident.stats()["expert_hits"] and resident.plan.expert_bytes == 0
    for slots, options in (
        (sparse.num_chosen, {}),
        (sparse.num_chosen + 1, dict(enable_cpu_offload=True)),
        (sparse.num_experts, dict(max_num_seqs=2)),
    ):
        engine = make_engine(path, expert_slots=slots, **settings, **options)
        assert run(engine, *workload(3, 40, 4)) == wanted, slots
        stats = engine.stats()
        assert stats["expert_fetches"] > 0 and stats["expert_hits"] > 0
        assert (stats["expert_evictions"] > 0) == (slots < sparse.num_experts)
        assert stats["streamed_bytes"] > 0, "experts of large steps come together"
        layers = stats["expert_slots_by_layer"].values()
        assert len(layers) == sparse.num_layers and sum(one["hits"] for one in layers) == stats["expert_hits"]
        assert_pools_as_before(engine)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe"])
@pytest.mark.sampled("qwen3_moe-3", "qwen3_moe-8", "lfm2_moe-1", "lfm2_moe-6")
def test_any_order_of_streams_gives_the_same(path_of, family, seed):
    """Decode, prefill and mixed steps, captured and not, beside KV that streams, and with switches between modes."""
    path = path_of(family, **(STATEFUL if family == "lfm2_moe" else SMALL | dict(num_layers=3)))
    modes = {3: "offload", 9: "resident", 14: "offload"}
    prompts, params = workload(seed, 70, 7)
    wanted = run(make_engine(path), prompts, params)
    graphs = dict(capture_num_tokens=[8, 24], enforce_eager=seed % 2 == 0)
    if family == "lfm2_moe":  # whose chunks of prompts have 64 tokens or more
        graphs |= dict(capture_num_tokens=[8, 72], max_num_batched_tokens=128)
    engine = make_engine(
        path, SimulatedRuntime(seed), expert_slots=3 + seed % 5, enable_cpu_offload="auto", max_num_seqs=4, **graphs
    )
    assert run(engine, prompts, params, switching(modes)) == wanted
    assert engine.stats()["num_mixed_steps"] and engine.stats()["expert_fetches"]
    assert_pools_as_before(engine)


@pytest.mark.parametrize(
    "options", [dict(capture_num_tokens=[8]), dict(capture_num_tokens=[], max_num_seqs=8)], ids=str
)
def test_a_step_of_as_many_rows_as_there_are_slots_for_brings_what_it_chose(path_of, options):
    """And one of more rows all experts, together."""
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3, **options)
    assert engine.plan.slot_rows == 8
    for num_tokens, comes_together in ((8, False), (9, True)):
        copied, before = engine.runner.offload.counters.streamed_bytes, engine.stats()["expert_fetches"]
        run(engine, random_prompts(1, num_tokens, num_tokens, seed=num_tokens), some_params(1, 1))
        assert (engine.runner.offload.counters.streamed_bytes > copied) == comes_together
        assert (engine.stats()["expert_fetches"] > before) != comes_together


@pytest.mark.parametrize("rule", ["place.piece_after_fill", "place.fill_after_last_piece"])
@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe"])
def test_the_waits_of_large_steps_are_needed(path_of, family, rule):
    path = path_of(family, **(STATEFUL if family == "lfm2_moe" else SMALL | dict(num_layers=4)))
    prompts, params = workload(0, 40, 6)
    wanted = run(make_engine(path), prompts, params)
    for seed in range(20):
        engine = make_engine(path, SimulatedRuntime(seed, dropped_rule=rule), expert_slots=3, max_num_seqs=4)
        try:
            if run(engine, prompts, params) != wanted:
                return
        except Exception:  # a race that was reported, or nonsense that no sampler takes
            return
    pytest.fail(f"20 seeds ran without {rule!r} and nothing went wrong")


def _is_not_forgotten(ids, slots):
    """The expert that had to go is still said to be there."""
    before = slots.held.clone()
    found = reference.place_experts(ids, slots)
    slots.held[(slots.held < 0) & (before >= 0)] = before[(slots.held < 0) & (before >= 0)]
    return found


def _is_not_fetched(ids, slots):
    pool = slots.pool.clone()
    found = reference.place_experts(ids, slots)
    slots.pool.copy_(pool)
    return found


def _spare_is_kept(ids, slots):
    """What lies in a spare place is said to be there in the next step, too."""
    found = reference.place_experts(ids, slots)
    slots.held[found >= 0] = found[found >= 0]
    return found


@pytest.mark.parametrize("wrong", [_is_not_forgotten, _is_not_fetched, _spare_is_kept])
def test_each_rule_is_needed(path_of, monkeypatch, wrong):
    path = path_of("qwen3_moe", **SMALL | dict(num_layers=4))
    wanted = run(make_engine(path), *workload(0, 40, 6))
    engine = make_engine(path, expert_slots=3, max_num_seqs=4)
    for layer in engine.runner.model.layers:
        monkeypatch.setattr(layer.mlp.experts, "operations", _Changed(layer.mlp.experts.operations, wrong))
    try:
        found = run(engine, *workload(0, 40, 6))
    except Exception:
        return
    assert found != wanted


class _Changed:
    def __init__(self, operations, place_experts):
        self._operations, self.place_experts = operations, place_experts

    def __getattr__(self, name):
        return getattr(self._operations, name)


def test_after_an_exception_nothing_is_said_to_lie_in_a_slot(path_of, monkeypatch):
    """A table was written, and the copies behind it were not."""
    path = path_of("qwen3_moe", **SMALL | dict(num_layers=3))
    prompts, params = workload(2, 30, 6)
    wanted = run(make_engine(path), prompts, params)
    engine = make_engine(path, expert_slots=4)
    experts = engine.runner.model.layers[1].mlp.experts
    calls = []

    def interrupted(ids, slots):
        calls.append(1)
        if len(calls) == 3:
            home, slots.home = slots.home, torch.full_like(slots.home, 255)
            reference.place_experts(ids, slots)
            slots.home = home
            raise KeyboardInterrupt
        return reference.place_experts(ids, slots)

    with monkeypatch.context() as patch:
        patch.setattr(experts, "operations", _Changed(experts.operations, interrupted))
        with pytest.raises(KeyboardInterrupt):
            run(engine, prompts, params)
        while engine.has_work:
            engine.step()
    assert run(engine, prompts, params) == wanted
    assert_pools_as_before(engine)


def test_a_capture_leaves_no_trace_in_slots(path_of):
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3, capture_num_tokens=[8])
    tables = [layer.mlp.experts.slots for layer in engine.runner.model.layers]
    with torch.inference_mode():
        for one in tables:
            one.held.fill_(one.first_slot)
        engine.runner.graphs.captured.clear()
        engine.runner.capture(False)
    engine.runner.runtime.synchronize()
    assert all((one.held == -1).all() and (one.owner == -1).all() and not one.used.any() for one in tables)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_the_plan_has_what_the_pools_take(path_of, family):
    engine = make_engine(path_of(family, num_layers=4, **LARGE), expert_slots=4)
    model, plan, sparse = engine.runner.model, engine.plan, engine.runner.spec.sparse
    owners = [layer.mlp.experts for layer in model.layers if hasattr(layer.mlp, "experts")]
    pools = {one.pool.data_ptr(): one.pool.nbytes for one in owners}
    assert sum(pools.values()) == plan.landing_bytes == pool_bytes(sparse.strides, sparse.num_experts, 4)
    on_gpu = sum(one.nbytes for one in model.parameters())
    assert abs(on_gpu + plan.expert_bytes - engine.runner.spec.weight_bytes) < 2**12, "tables alone"
    assert len(engine.runner.landing_buffers.bytes) == NUM_AREAS * len(set(sparse.strides))
    for one in owners:
        begins = sorted((one.slots.first_slot, one.slots.first_spare, int(one.table[0])))
        assert len(set(begins)) == 3 and one.slots.first_slot + 4 <= len(one.pool)
    spans = sorted((one.pool.data_ptr(), one.slots.first_slot) for one in owners)
    assert len(set(spans)) == len(spans), "two layers share slots"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(expert_slots=1), r"expert_slots=1: a layer has 8 experts, and a token takes 3 .* from 3 to 8"),
        (dict(expert_slots=9), r"expert_slots=9: a layer has 8 experts"),
        (dict(expert_slots=0), r"expert_slots=0"),
        (dict(expert_slots=4, resident_weights_limit=0), r"expert_slots=4 brings experts one by one"),
        (dict(expert_slots=4, cpu_offload_gb=0), r"expert_slots=4 brings experts one by one"),
        (
            dict(expert_slots=4, host_memory_limit="1KiB"),
            r"host_memory_limit='1KiB' is too small for .*that(?s:.*)give at least \"1MiB\" of host",
        ),
    ],
)
def test_what_cannot_be_is_refused(path_of, options, words):
    path = path_of("qwen3_moe", num_experts=8, num_chosen=3)
    with pytest.raises(ValueError, match=words):
        make_engine(path, **options)


def test_a_dense_model_has_no_slots(path_of):
    with pytest.raises(ValueError, match="has no experts: leave it out"):
        make_engine(path_of("qwen3", **SMALL), expert_slots=4)


@pytest.fixture
def no_pinning(monkeypatch):
    """The plan chooses slots where it may, and host memory for them cannot be pinned."""
    plan, arena = Setup.plan, streamed.HostArena

    def chosen(self, config=None, may_pin=True):
        slots = dict(expert_slots=4) if may_pin else dict(resident_weights_limit=0)
        return plan(self, replace(config or self.config, **slots), may_pin)

    class Arena(arena):
        def __init__(self, *args, require_pin, **kwargs):
            super().__init__(*args, require_pin=require_pin, **kwargs)
            if require_pin:
                raise PinError("the system refused")

    monkeypatch.setattr(Setup, "plan", chosen)
    monkeypatch.setattr(streamed, "HostArena", Arena)


def test_where_pinning_is_refused_whole_layers_stream(path_of, no_pinning):
    prompts, params = workload(2, 30, 6)
    with pytest.warns(UserWarning, match="cannot be pinned here.*whole layers are streamed"):
        engine = make_engine(path_of("qwen3_moe", **SMALL))
    assert engine.plan.num_expert_slots == 0 and engine.plan.streamed_pieces
    assert len(run(engine, prompts, params)) == len(prompts)


def test_where_pinning_is_refused_slots_that_were_asked_for_are_refused(path_of, no_pinning):
    with pytest.raises(PinError, match="expert_slots=4 needs pinned host memory: leave it out"):
        make_engine(path_of("qwen3_moe", **SMALL), expert_slots=4)
    with pytest.raises(PinError, match="the system refused"):
        make_engine(path_of("qwen3_moe", **SMALL), pin_host_memory="require")


def test_preempted_requests_and_experts_share_the_limit_of_host_memory(path_of):
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3, host_memory_limit="1MiB")
    assert engine.runner.offload.host.max_bytes == 2**20 - engine.plan.expert_bytes


def test_layers_with_experts_of_unlike_types_have_pools_of_their_own(tmp_path):
    """A GGUF file, whose layers have runs of three lengths; two lengths belong to two layers each."""
    pytest.importorskip("gguf")
    sizes = dict(hidden_size=256, moe_intermediate_size=256, intermediate_size=256)
    sizes |= dict(num_experts=4, num_experts_per_tok=2)
    directory = make_checkpoint("qwen3_moe", tmp_path / "wide", num_layers=5, **sizes)
    of_layer = [("Q4_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_0", "Q8_0"), ("Q8_0", "Q4_0"), ("Q4_0", "Q5_0")]

    def type_of(name):
        found = re.match(r"blk\.(\d+)\.ffn_(gate|up|down)_exps", name)
        return of_layer[int(found[1])][found[2] == "down"] if found else "F32"

    path = write_gguf("qwen3_moe", directory, tmp_path / "model.gguf", type_of=type_of)
    prompts, params = workload(3, 30, 4)
    resident = make_engine(path)
    wanted, sparse = run(resident, prompts, params), resident.runner.spec.sparse
    assert len(set(sparse.strides)) >= 3
    for seed in range(2):
        options = dict(expert_slots=sparse.num_chosen + seed, max_num_seqs=3, capture_num_tokens=[8])
        engine = make_engine(path, SimulatedRuntime(seed), **options)
        assert run(engine, prompts, params) == wanted
        assert len(engine.runner.model.streamed.slot_sets) == len(set(sparse.strides))
        assert engine.plan.landing_bytes == pool_bytes(sparse.strides, sparse.num_experts, options["expert_slots"])
        assert_pools_as_before(engine)


def test_the_advice_is_about_experts_that_are_waited_for(path_of, monkeypatch):
    prompts, params = workload(2, 30, 6)
    engine = make_engine(path_of("qwen3_moe", **SMALL), expert_slots=3, enable_cpu_offload=False, max_num_seqs=4)
    run(engine, prompts, params)
    assert "as there is no GPU" in engine.stats()["advice"]
    monkeypatch.setattr(type(engine.runner.device), "is_host", False)
    times = engine.meter.times
    one_more = format_size(engine.plan.expert_bytes / engine.runner.spec.sparse.num_experts)
    wanted = f"experts that are not on the GPU, {format_size(times.fetched_bytes / times.num_steps)} of them: raise "
    wanted += f"gpu_memory_limit, by {one_more} for one more of each layer"
    for share, is_waited_for in ((0.05, False), (0.2, True), (0.9, True)):
        times.fetch_seconds = share * times.seconds
        assert (wanted in engine.stats()["advice"]) == is_waited_for, share
        assert (engine.stats()["bound"] == "link") == (share > 0.5)
    step_ms = times.seconds / times.num_steps * 1e3
    waited = f"steps of {step_ms:.1f} ms wait {0.9 * step_ms:.1f} ms"
    assert waited in engine.stats()["advice"] and "link busy 90% of the time" in bound_line(engine)


def test_each_sparse_layer_between_two_attentions_is_a_piece_whose_experts_come_by_themselves(path_of):
    engine = make_engine(path_of("lfm2_moe", **STATEFUL), expert_slots=4)
    model, spec, pieces = engine.runner.model, engine.runner.spec, engine.runner.decode_program.resources.pieces
    assert spec.attention_layers == (1, 4) and spec.own_pieces == (0, 2, 3, 5)
    # the embeddings; layer 0 and queries of 1; the rest of 1; 2; 3 and queries of 4; the rest of 4; 5; then the head
    assert pieces.attention_at == [None, 0, None, None, 1, None, None, None] and len(pieces) == 7
    streamed = model.streamed
    assert [streamed.piece_of[layer.mlp.experts] for layer in model.layers] == [1, 2, 3, 4, 5, 6]
    assert pieces.ends_without_kv == (7,), "steps of few rows are one graph"
    assert pieces.ends_with_kv == (1, 4, 7)


def test_a_dense_layer_with_a_state_lies_inside_a_piece(path_of):
    engine = make_engine(path_of("lfm2_moe", **STATEFUL | dict(num_dense_layers=4)))
    assert engine.runner.spec.own_pieces == (5,) and len(engine.runner.spec.piece_bytes) == 4
