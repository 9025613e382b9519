"""A cut that is no attention: vectors pass through the ring, and to places of their own, beside KV that streams."""

from dataclasses import replace

import pytest
from cut_model import Brought, Resident
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import tiny_config

from nanoinfer.models import registry

COMMON = dict(load_format="dummy", capture_num_tokens=[8, 24], max_num_seqs=5, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
AUTO = dict(enable_cpu_offload="auto", num_gpu_blocks_override=14)
MODES = {"resident": {}, "offload": dict(enable_cpu_offload=True), "auto": AUTO}


@pytest.fixture
def engine_of(tmp_path, monkeypatch):
    """An engine of one of the two models, whose other weights are the same."""
    registry.supported_architectures()  # has the families register themselves where they stay
    monkeypatch.setattr(registry, "_MODELS", {model.__name__: model for model in (Resident, Brought)})

    def make(name, runtime=None, **arguments):
        tiny_config("qwen3", architectures=[name], **SMALL).save_pretrained(tmp_path / name)
        return make_engine(tmp_path / name, runtime, **COMMON | arguments)

    return make


def workload(seed, longest=99):
    prompts = random_prompts(4, 20, longest, seed) + random_prompts(3, 1, 20, seed)
    params = [replace(params, max_tokens=6 + row) for row, params in enumerate(some_params(7, logprobs=3))]
    return prompts, params  # they end one by one: a short prompt begins while others decode, in a mixed step


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled("resident-1", "offload-2", "auto-3")
def test_vectors_that_are_brought_change_no_bit(engine_of, mode, seed):
    """In decode, prefill and mixed steps, captured and not."""
    wanted = run(engine_of("Resident"), *workload(seed or 0))
    engine = engine_of("Brought", SimulatedRuntime(seed), **MODES[mode])
    assert run(engine, *workload(seed or 0)) == wanted
    stats, places, ring = engine.stats(), engine.runner.places.bytes, engine.runner.ring.bytes
    own = sum(transfer.num_bytes(None) for cut in engine.runner.offload.cuts for transfer in cut.transfers)
    beside = stats["streamed_bytes"] - own * (stats["num_decode_steps"] + stats["num_prefill_steps"])
    assert 0 <= beside <= own if mode == "resident" else beside > own, "KV streams beside; or what was prefetched last"
    assert stats["num_mixed_steps"] and stats["prefill_graph_steps"] and stats["num_decode_steps"]
    assert len(places) == 2 and min(map(len, places)) > ring.shape[1]
    assert engine.plan.ring_bytes == ring.nbytes + sum(map(len, places))
    assert_pools_as_before(engine)


@pytest.mark.parametrize("rule", ["place.piece_after_fill", "place.fill_after_last_piece", "ring.attention_after_fill"])
def test_the_waits_are_needed(engine_of, rule):
    wanted = run(engine_of("Resident"), *workload(0, 60))
    for seed in range(20):
        engine = engine_of("Brought", SimulatedRuntime(seed, dropped_rule=rule))
        try:
            if run(engine, *workload(0, 60)) != wanted:
                return
        except Exception:  # a race that was reported, or nonsense that no sampler takes
            return
    pytest.fail(f"20 seeds ran without {rule!r} and nothing went wrong")


def test_which_graphs_there_are_follows_from_the_cuts_that_bring_something(engine_of):
    pieces = {name: engine_of(name).runner.decode_program.resources.pieces for name in ("Resident", "Brought")}
    assert len(pieces["Resident"].whole) == 1 and len(pieces["Brought"].whole) == 1 + SMALL["num_layers"]
    assert len(pieces["Resident"].cut) == 1 + SMALL["num_layers"] and len(pieces["Brought"].cut) == len(
        pieces["Brought"]
    )


def test_a_transfer_larger_than_a_ring_slot_is_not_begun(engine_of, monkeypatch):
    monkeypatch.setattr(Resident, "num_rows", (1000, 70))
    with pytest.raises(AssertionError, match="a ring slot holds less than that"):
        run(engine_of("Brought"), *workload(0))
