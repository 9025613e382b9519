"""Small pools: what a mode cannot hold is refused with the numbers, what it holds runs to the end in both modes."""

import re

import pytest
from engines import assert_pools_as_before, make_engine, random_prompts, run, switching
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.requests.sequence import SequenceState

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # 2 layers, K and V, 16 tokens, 2 heads of 16, float32
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=2)


def smallest_engine(path, **arguments):
    """An engine with the smallest GPU limit that its own error message names."""
    arguments = dict(ring_slot_bytes=4096, num_ring_slots=2) | arguments
    with pytest.raises(ValueError, match="too small") as error:
        make_engine(path, gpu_memory_limit="10KiB", **arguments)
    limit = re.search(r'give at least "(\d+MiB)"', str(error.value))[1]
    return make_engine(path, gpu_memory_limit=limit, **arguments)


def small_gpu_pool(path):
    """In offload mode, with a host pool for 1,024 blocks and a GPU pool for far fewer; and what that one can hold."""
    engine = smallest_engine(
        path,
        enable_cpu_offload=True,
        host_memory_limit=1024 * BLOCK_BYTES,
        max_num_seqs=2,
        max_model_len=4000,
        enable_prefix_caching=False,
    )
    gpu_tokens = engine.kv_cache.tables.gpu_blocks.num_blocks * 16
    assert gpu_tokens < 1000, "the GPU pool is not small"
    return engine, gpu_tokens


def small_host_pool(path):
    """In resident mode, with room for 20 blocks on the host; and what that room can hold, the tail on the GPU."""
    engine = make_engine(
        path,
        gpu_memory_limit="8MiB",
        host_memory_limit=20 * BLOCK_BYTES,
        max_num_seqs=2,
        max_model_len=None,
        enable_prefix_caching=False,
    )
    return engine, 20 * 16 + 15


POOLS = {"resident": small_gpu_pool, "offload": small_host_pool}  # by the mode that is short of blocks


@pytest.mark.parametrize("mode", POOLS)
@pytest.mark.parametrize("state", [SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE])
@pytest.mark.sampled(
    "SequenceState.WAITING-resident", "SequenceState.PREFILL-offload", "SequenceState.DECODE-offload",
)  # fmt: skip
def test_a_switch_is_refused_for_a_sequence_that_fits_now_and_cannot_end_there(path, mode, state):
    engine, capacity = POOLS[mode](path)
    start = engine.mode
    prompt = random_prompts(1, capacity - 9, capacity - 9)
    params = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)]  # one token too many
    wanted = run(engine, prompt, params)
    refused = []

    def at_step(engine, step):
        (sequence,) = (*engine.scheduler.waiting, *engine.scheduler.running)
        if sequence.state is state and not refused:
            refused.append(step)
            limit = {"resident": "gpu_memory_limit", "offload": "host_memory_limit"}[mode]
            numbers = f"can grow to {capacity + 1} tokens, the {mode} mode's pool holds {capacity}: raise {limit}"
            with pytest.raises(ValueError, match=f"switch to {mode} refused: .*{numbers}"):
                engine.switch_mode(mode)
            assert engine.mode == start

    assert run(engine, prompt, params, at_step) == wanted
    assert len(refused) == 1
    engine.switch_mode(mode)
    assert engine.mode == mode, "an idle engine can switch"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("mode", POOLS)
def test_a_request_beyond_the_mode_is_refused_and_the_longest_within_it_runs(path, mode):
    engine, capacity = POOLS[mode](path)
    engine.switch_mode(mode)
    before = engine.stats()
    prompt = random_prompts(1, capacity - 4, capacity - 4)[0]
    limit = "host_memory_limit" if mode == "offload" else "gpu_memory_limit"
    message = f"has {capacity - 3} tokens and may grow by 4, the KV cache holds {capacity}: lower .* raise {limit}$"
    with pytest.raises(ValueError, match=message):
        engine.add_request("too long", [5, *prompt], GREEDY)
    assert engine.stats() == before and not engine.has_work
    outcomes = run(engine, [prompt], [GREEDY])
    assert len(outcomes[0][0][0]) == 4 and outcomes[0][0][2] == "length"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
@pytest.mark.sampled("True")
def test_rows_that_share_a_long_prefix_never_attend_to_more_splits_than_there_is_room_for(path, enable_cpu_offload):
    """32 rows of 31 blocks each, nearly all shared: few blocks, but more splits than the pools have blocks."""
    engine = smallest_engine(
        path,
        enable_cpu_offload=enable_cpu_offload,
        host_memory_limit=66 * BLOCK_BYTES + 2**17,  # embeddings may lie there
        max_num_seqs=32,
        max_model_len=1008,
    )
    prefix = random_prompts(1, 480, 480)[0]
    assert engine.plan.max_splits < 32 * 31, "the case is too small to show anything"
    run(engine, [[*prefix, 5]], [GREEDY])
    prompts = [[*prefix, 5 + i, 9] for i in range(32)]
    num_running = []
    together = run(engine, prompts, [GREEDY] * 32, lambda e, step: num_running.append(len(e.scheduler.running)))
    assert max(num_running) > 1, "nothing ran together"
    alone = [run(engine, [prompt], [GREEDY])[0] for prompt in prompts[::16]]
    assert [outcome[0][0] for outcome in alone] == [outcome[0][0] for outcome in together[::16]]
    assert_pools_as_before(engine)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_many_rows_with_a_history_share_one_prefill_step(path, enable_cpu_offload):
    """Ring slots of one block and a shared prefix: every row brings a ring chunk for each block of it."""
    engine = make_engine(
        path, enable_cpu_offload=enable_cpu_offload, max_num_seqs=16, ring_slot_bytes=4096, num_ring_slots=2
    )
    prefix = random_prompts(1, 160, 160)[0]
    run(engine, [[*prefix, 5]], [GREEDY])
    prompts = [[*prefix, 5 + i, 9] for i in range(16)]
    before = engine.stats()["num_prefill_steps"]
    together = run(engine, prompts, [GREEDY] * 16)
    assert engine.stats()["num_prefill_steps"] == before + 1, "the rows did not come together in one step"
    other = make_engine(path)
    for prompt, outcomes in list(zip(prompts, together, strict=True))[::8]:
        assert run(other, [prompt], [GREEDY])[0][0][0] == outcomes[0][0]
    assert_pools_as_before(engine)


@pytest.mark.parametrize("modes", [{}, {1: "resident"}, {3: "resident", 4: "offload", 8: "resident", 9: "offload"}])
def test_rows_that_share_blocks_and_completions_of_one_prompt_survive_switches(path, modes):
    """Blocks held by several rows at once move with each of them; every kind of sampling sees the same bits."""
    prefix = random_prompts(1, 100, 100, seed=3)[0]
    prompts = [[*prefix, *tail] for tail in random_prompts(4, 1, 40, seed=4)]
    common = dict(max_tokens=10, ignore_eos=True, logprobs=5)
    params = [
        SamplingParams(temperature=1.1, top_p=0.8, top_k=30, seed=1, n=2, **common),
        SamplingParams(
            temperature=0.7, min_p=0.02, seed=2, repetition_penalty=1.3, n=2, presence_penalty=0.6, **common
        ),
        SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.4, **common),
        SamplingParams(temperature=1.4, seed=4, min_tokens=3, stop_token_ids=[30, 31, 32], **common),
    ]
    outcomes = []
    for engine, at_step in (
        (make_engine(path), None),
        (make_engine(path, enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=4096), switching(modes)),
    ):
        run(engine, [prefix], [GREEDY])
        outcomes.append(run(engine, prompts, params, at_step))
        assert engine.stats()["num_prefill_tokens"] < 100 + sum(map(len, prompts)), "nothing was shared"
        assert_pools_as_before(engine)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_cached_block_is_taken_only_behind_the_same_beginning_and_in_the_same_place(path, enable_cpu_offload):
    """Equal tokens in another place or behind other tokens have other KV."""
    first, second, other = random_prompts(3, 16, 16, seed=9)
    prompts = [[*first, *second, 5], [*second, *first, 5], [*other, *second, 5], [*first, *other, *second, 5]]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)]
    cached = make_engine(path, enable_cpu_offload=enable_cpu_offload)
    plain = make_engine(path, enable_cpu_offload=enable_cpu_offload, enable_prefix_caching=False)
    for prompt in prompts[:3]:
        assert run(cached, [prompt], params) == run(plain, [prompt], params)
    assert cached.stats()["num_prefill_tokens"] == 3 * 33, "blocks of another beginning were taken up"
    assert run(cached, prompts[3:], params) == run(plain, prompts[3:], params)
    assert cached.stats()["num_prefill_tokens"] == 3 * 33 + 49 - 16, "the common first block was not taken up"
    assert_pools_as_before(cached)
