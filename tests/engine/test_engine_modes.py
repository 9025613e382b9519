"""The same bits in every mode: resident, offload, switched half-way, any ring, graphs or eager."""

import pytest
from engines import COMMON, assert_pools_as_before, make_engine, random_prompts, run, some_params, switching
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.attention.torch_backend import TorchBackend

MODELS = {
    "qwen3": dict(family="qwen3", num_heads=2, num_kv_heads=1),
    "gemma3": dict(family="gemma3", num_heads=2, num_kv_heads=1, sliding_window=24),
    "mistral": dict(family="mistral", sliding_window=40, num_heads=3, num_kv_heads=1),
}
NUM_LAYERS = 2
LAYER_BLOCK_BYTES = 2 * 16 * 16 * 4
PROMPTS = random_prompts(5, 1, 100)
# The last two with all penalties, of unequal strength.
PARAMS = (
    some_params(5, 18)[:3]
    + some_params(5, 18, repetition_penalty=1.1, presence_penalty=-0.4, frequency_penalty=0.7)[3:]
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: _checkpoint(tmp_path_factory, name, arguments) for name, arguments in MODELS.items()}


def _checkpoint(tmp_path_factory, name, arguments):
    return make_checkpoint(directory=tmp_path_factory.mktemp(name), num_layers=NUM_LAYERS, **arguments)


@pytest.fixture(scope="module")
def expected(paths):
    outcomes = {}
    for name, path in paths.items():
        engine = make_engine(path)
        outcomes[name] = run(engine, PROMPTS, PARAMS)
        assert outcomes[name][::-1] != outcomes[name] != outcomes["qwen3"] or name == "qwen3", (
            "all outputs are the same"
        )
        assert engine.stats()["streamed_bytes"] == 0 and engine.stats()["graph_replays"] > 0
    return outcomes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ring_slots, blocks_per_slot", [(2, 1), (2, 7), (3, 2), (5, 1)])
@pytest.mark.sampled("2-1-qwen3", "3-2-gemma3")
def test_offload_equals_resident_for_every_ring(paths, expected, name, num_ring_slots, blocks_per_slot):
    engine = make_engine(
        paths[name],
        enable_cpu_offload=True,
        num_ring_slots=num_ring_slots,
        ring_slot_bytes=blocks_per_slot * LAYER_BLOCK_BYTES,
    )
    assert run(engine, PROMPTS, PARAMS) == expected[name]
    assert engine.stats()["streamed_bytes"] > 0 and engine.stats()["written_bytes"] > 0
    assert_pools_as_before(engine)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("enable_cpu_offload", [False, True])
@pytest.mark.sampled("False-mistral", "True-gemma3")
def test_eager_equals_graphs(paths, expected, name, enable_cpu_offload):
    engine = make_engine(paths[name], enforce_eager=True, enable_cpu_offload=enable_cpu_offload)
    assert run(engine, PROMPTS, PARAMS) == expected[name]
    assert engine.stats()["graph_replays"] == 0 and engine.stats()["eager_steps"] > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "start_in_offload, modes",
    [
        (False, {1: "offload"}),  # in the middle of the chunked prefill
        (False, {12: "offload"}),
        (True, {1: "resident"}),
        (True, {14: "resident"}),
        (False, {2: "offload", 5: "resident", 6: "offload", 13: "resident", 20: "offload"}),
    ],
)
@pytest.mark.sampled("False-modes0-qwen3", "True-modes3-gemma3", "False-modes4-mistral")
def test_switching_half_way_changes_no_bit(paths, expected, name, start_in_offload, modes):
    engine = make_engine(paths[name], enable_cpu_offload=start_in_offload)
    assert run(engine, PROMPTS, PARAMS, switching(modes)) == expected[name]
    assert engine.mode == list(modes.values())[-1]
    assert_pools_as_before(engine)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled("gemma3")
def test_shared_prefixes_give_the_same_bits_in_both_modes(paths, name):
    common = random_prompts(1, 90, 90, seed=5)[0]
    prompts = [common + tail for tail in random_prompts(5, 1, 40, seed=6)]
    outcomes = []
    for enable_cpu_offload in (False, True):
        engine = make_engine(paths[name], enable_cpu_offload=enable_cpu_offload)
        first = run(engine, prompts[:1], PARAMS[:1])
        outcomes.append(first + run(engine, prompts[1:], PARAMS[1:5]))
        requests = engine.stats()["num_prefill_tokens"]
        assert requests < sum(map(len, prompts)), "the common prefix was computed again"
        assert_pools_as_before(engine)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled("gemma3")
def test_blocks_cut_into_splits_give_the_same_bits_in_every_mode(paths, expected, name, fuzz, monkeypatch):
    """As the Triton backend cuts the blocks of a step that reads few: whole blocks follow as the sequences grow."""
    prompts = [PROMPTS[0][:60], PROMPTS[1][:20]]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1)] * 2
    whole = run(make_engine(paths[name]), prompts, params)
    monkeypatch.setattr(TorchBackend, "tiles_per_block", 4)
    monkeypatch.setattr("nanoinfer.execution.splits.MAX_TILES_APART", 36)
    want = run(make_engine(paths[name]), prompts, params)
    assert [[c[0] for c in o] for o in want] == [[c[0] for c in o] for o in whole]
    assert want != whole, "the blocks were not cut"
    settings = [
        dict(enforce_eager=True),
        dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=LAYER_BLOCK_BYTES),
        dict(enable_cpu_offload=True, ring_slot_bytes=7 * LAYER_BLOCK_BYTES),
        dict(enable_cpu_offload=True, resident_kv_limit=8 * LAYER_BLOCK_BYTES * NUM_LAYERS),
    ]
    for arguments in settings if fuzz else [settings[list(MODELS).index(name)]]:
        engine = make_engine(paths[name], **arguments)
        assert run(engine, prompts, params) == want, arguments
        assert_pools_as_before(engine)
    engine = make_engine(paths[name])
    assert run(engine, prompts, params, switching({6: "offload", 14: "resident", 22: "offload"})) == want


def test_triton_backend_in_the_interpreter_gives_equal_bits_in_both_modes(paths):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    prompts = [PROMPTS[0][:40], PROMPTS[1][:5]]
    params = some_params(2, max_tokens=3)
    outcomes = []
    for enable_cpu_offload in (False, True):
        engine = make_engine(paths["qwen3"], attention_backend="triton", enable_cpu_offload=enable_cpu_offload)
        outcomes.append(run(engine, prompts, params))
    assert outcomes[0] == outcomes[1]
    reference = run(make_engine(paths["qwen3"]), prompts, params)
    assert [[c[0] for c in completions] for completions in reference] == [[c[0] for c in o] for o in outcomes[0]]


def test_switch_to_offload_is_refused_with_the_numbers_when_it_cannot_fit(paths, expected):
    block_bytes = NUM_LAYERS * LAYER_BLOCK_BYTES
    engine = make_engine(paths["qwen3"], host_memory_limit=12 * block_bytes)

    def at_step(engine, step):
        if step == 10:
            with pytest.raises(
                ValueError, match=r"can grow to a KV cache of .* MiB, the host has .* MiB free for it: raise host_"
            ):
                engine.switch_mode("offload")
            assert engine.mode == "resident"
            assert engine.runner.offload.host.num_bytes == 0, "a switch that is refused takes no memory"

    assert run(engine, PROMPTS, PARAMS, at_step) == expected["qwen3"]
    assert_pools_as_before(engine)


def test_switch_to_resident_is_refused_with_the_numbers_when_it_cannot_fit(paths):
    arguments = dict(max_num_batched_tokens=32, max_num_seqs=3, enable_prefix_caching=False)
    prompts, params = random_prompts(3, 100, 130, seed=2), some_params(3)
    wanted = run(make_engine(paths["qwen3"], **arguments), prompts, params)
    engine = make_engine(paths["qwen3"], enable_cpu_offload=True, **arguments)
    pool = engine.kv_cache.tables.gpu_blocks
    taken = pool.allocate(pool.num_free - 6)  # a pool too small for resident mode

    def at_step(engine, step):
        if step == 20:
            with pytest.raises(
                ValueError, match=r"still need a KV cache of .* MiB, the GPU has .* free for it: raise gpu_"
            ):
                engine.switch_mode("resident")
            assert engine.mode == "offload"

    assert run(engine, prompts, params, at_step) == wanted
    pool.release(taken)
    assert_pools_as_before(engine)


def test_unknown_mode_is_refused(paths):
    with pytest.raises(ValueError, match="mode 'ofload' is not one of resident, offload"):
        make_engine(paths["qwen3"]).switch_mode("ofload")


def test_batches_beyond_the_largest_graph_run_eagerly(paths):
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 5
    engine = make_engine(paths["qwen3"], cuda_graph_batch_sizes=[1, 2])
    tokens = [completions[0][0] for completions in run(engine, PROMPTS, params)]
    assert engine.stats()["eager_steps"] > 0
    wanted = run(make_engine(paths["qwen3"]), PROMPTS, params)
    assert tokens == [completions[0][0] for completions in wanted]


def test_streamed_bytes_are_what_the_plan_says(paths):
    """One sequence of 50 tokens: decode steps stream its 3 full blocks once per layer, plus the prefetch in flight."""
    engine = make_engine(paths["qwen3"], enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=LAYER_BLOCK_BYTES)
    prompt = random_prompts(1, 50, 50)
    run(engine, prompt, [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)])
    in_decode = 5 * NUM_LAYERS * 3 * LAYER_BLOCK_BYTES
    stats = engine.stats()
    assert stats["decode_streamed_bytes"] == in_decode + 2 * LAYER_BLOCK_BYTES
    assert stats["discarded_prefetch_bytes"] == 2 * LAYER_BLOCK_BYTES, "the end drops what was prefetched"
    assert stats["written_bytes"] == 3 * NUM_LAYERS * LAYER_BLOCK_BYTES
    assert COMMON["block_size"] == 16
