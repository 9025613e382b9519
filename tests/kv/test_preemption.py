"""Who gives way when the GPU pool is full, in which order they come back, and that they find what is theirs."""

import pytest
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run
from request_helpers import Script, play, record_batches, shrink_gpu_pool
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.requests.sequence import SequenceState

PLAIN = dict(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(outcomes):
    return [completions[0][0] for completions in outcomes]


def test_who_came_first_gives_way_last_and_comes_back_first(path):
    """Four run in a pool for about two; a fifth waits, and stays behind all of them."""
    prompts, params = random_prompts(5, 20, 20, seed=1), [greedy(40)] * 5
    engine = make_engine(path, max_num_seqs=4, **PLAIN)
    give_back = shrink_gpu_pool(engine, 9)
    requests = [engine.add_request(str(i), prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params))]
    finished, num_saved = [], 0
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
        queue = [sequence.request_id for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]]
        assert queue == sorted(queue), "who came first stands first"
        num_saved = max(num_saved, sum(sequence.saved is not None for sequence in engine.scheduler.waiting))
    assert finished == ["0", "1", "2", "3", "4"] and num_saved == 2
    give_back()
    assert_pools_as_before(engine)
    wanted = run(make_engine(path, max_num_seqs=4, **PLAIN), prompts, params)
    assert [request.sequences[0].output_token_ids for request in requests] == tokens_of(wanted)


def test_one_long_row_that_gives_way_makes_room_for_all_who_decode(path):
    """Of a step that prompts could share: nobody else gives way, and no prompt takes up what was freed for others."""
    arguments = dict(max_num_batched_tokens=70, capture_num_tokens=[40], **PLAIN)
    short, (first, second, last) = random_prompts(2, 13, 13, seed=2), random_prompts(3, 135, 135, seed=3)
    # Two that decode, a prompt that has 7 tokens to compute when they begin a block, and one that is far from its end.
    arrivals = {0: [(prompt, greedy(30)) for prompt in short], 2: [(first, greedy(8)), (second, greedy(8))]}
    arrivals[4] = [(last[:20], greedy(8))]
    engine = make_engine(path, **arguments)
    batches, found, schedule = record_batches(engine), [], engine.scheduler.schedule

    def observed():
        scheduler = engine.scheduler
        num_preemptions, running, waiting = scheduler.num_preemptions, list(scheduler.running), list(scheduler.waiting)
        states = [sequence.state for sequence in running]
        batch = schedule()
        if scheduler.num_preemptions > num_preemptions:
            assert scheduler.running == running[:-1], "one gave way"
            assert list(scheduler.waiting) == [running[-1], *waiting], "and is the next to come back"
            found.append((states, batches[-1]))
        return batch

    engine.scheduler.schedule = observed
    played = play(engine, Script(arrivals, num_gpu_blocks=1 + 1 + 9 + 9))
    # The step has a token of each that decodes, and no chunk of a prompt.
    assert found == [([SequenceState.DECODE] * 2 + [SequenceState.PREFILL] * 2, 2)]
    assert_pools_as_before(engine)
    wanted = play(make_engine(path, **arguments), Script(arrivals))
    assert tokens_of(played.outcomes) == tokens_of(wanted.outcomes)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_row_that_is_used_again_at_the_same_length_reads_the_blocks_of_its_new_owner(path, enable_cpu_offload):
    prompts, params = random_prompts(2, 40, 40, seed=4), [greedy(6)]
    arguments = dict(max_num_seqs=1, enable_cpu_offload=enable_cpu_offload, **PLAIN)
    engine = make_engine(path, **arguments)
    held, outcomes = [], []

    def at_step(engine, step):
        (sequence,) = engine.scheduler.running or [None]
        if sequence is not None and step == 3:
            row = engine.kv_cache.gpu_table[sequence.row]
            held.append({int(block) for block in row if block >= 0})

    for prompt in prompts:
        outcomes += run(engine, [prompt], params, at_step)
        pool = engine.kv_cache.gpu_blocks
        taken = pool.allocate(3)  # the next one gets others
    pool.release(taken)
    assert held[0] and held[1] and not held[0] & held[1]
    fresh = [run(make_engine(path, **arguments), [prompt], params)[0] for prompt in prompts]
    assert outcomes == fresh and tokens_of(fresh)[0] != tokens_of(fresh)[1]
