"""Short prompts beside long ones: they share prefill steps, and the oldest always moves on."""

import pytest
from engines import BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, outcome, random_prompts
from hollow import hollow
from request_helpers import Script, Waited, play, play_in_steps, record_batches, shrink_gpu_pool
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams

STEP = 64  # tokens of a prefill step
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def engine_of(path, **arguments):
    return make_engine(path, **dict(enable_prefix_caching=False, capture_num_tokens=[]) | arguments)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    return [random_prompts(1, length, length, seed=seed + i)[0] for i, length in enumerate(lengths)]


def chunks_of_steps(batches: list) -> list[list[int]]:
    """How many tokens each chunk of each prefill step has."""
    return [[end - begin for begin, end in batch] for batch in batches if isinstance(batch, list)]


def played(engine, arrivals: dict[int, list[list[int]]]) -> tuple[list[Waited], list[list[int]]]:
    batches = record_batches(engine)
    waited = play_in_steps(engine, [(step, prompt, GREEDY) for step, all in arrivals.items() for prompt in all])
    assert_pools_as_before(engine)
    return waited, chunks_of_steps(batches)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_short_prompt_waits_for_few_steps_behind_many_long_ones(path, enable_cpu_offload):
    *long, short = prompts_of(*[320] * 6, 20)
    engine = hollow(engine_of(path, enable_cpu_offload=enable_cpu_offload))
    waited, _ = played(engine, {0: long, 2: [short]})
    assert waited[-1].first_token <= 3
    alone, _ = played(hollow(engine_of(path)), {0: long})
    delays = [beside.first_token - before.first_token for before, beside in zip(alone, waited[:-1], strict=True)]
    assert max(delays) <= 2, "20 tokens delay the others by one step, and by the one in which the short one decodes"


def test_the_oldest_has_at_least_half_of_each_step_and_the_next_oldest_follows_it(path):
    """However many short ones come, enough to fill every step, so that the first of them never has least left."""
    short = prompts_of(*[150, 150], *[30] * 38, seed=9)
    engine = hollow(engine_of(path, max_num_seqs=16))
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts_of(320, 310))]
    schedule, oldest = engine.scheduler.schedule, []

    def recorded():
        waiting = [one for request in requests for one in request.sequences if not one.num_sampled]
        batch = schedule()
        if batch is not None and batch.chunks and waiting:
            oldest.append((batch.chunks[0].sequence is waiting[0], batch.chunks[0].end - batch.chunks[0].begin))
            oldest[-1] += (batch.chunks[0].is_last,)
        return batch

    engine.scheduler.schedule = recorded
    for step in range(40):
        engine.add_request(f"short {step}", short[step], GREEDY)
        engine.step()
    assert not any(request.first_token is None for request in requests)
    for is_oldest, num_tokens, is_last in oldest:
        assert is_oldest and (num_tokens >= STEP // 2 or is_last), oldest
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


def test_who_has_least_left_goes_first_and_who_has_more_than_half_as_much_waits(path):
    oldest, middle, half, small = prompts_of(320, 170, 100, 20)
    _, chunks = played(hollow(engine_of(path)), {0: [oldest, middle, half, small]})
    assert chunks[0] == [32, 20, 12], "the oldest, the small one whole, and the one with less than half"
    assert chunks[1] == [32, 20, 12], "it goes on, to the edge of a block; the rest goes to who came next"


def test_what_fits_into_one_step_is_computed_in_the_order_in_which_it_came(path):
    _, chunks = played(hollow(engine_of(path)), {0: prompts_of(40, 15, 5)})
    assert chunks == [[40, 15, 5]]


def test_what_is_found_does_not_count_as_left(path):
    known, long = prompts_of(200, 320)
    engine = hollow(engine_of(path, enable_prefix_caching=True))
    played(engine, {0: [known]})
    waited, _ = played(engine, {0: [long], 1: [known[:192] + [7] * 10]})
    assert waited[1].first_token <= 3


@pytest.mark.parametrize("shared", [96, 256])
def test_a_short_prompt_does_not_compute_what_a_long_one_is_about_to(path, shared):
    """Its tokens are the long one's, but for some: it waits until these are found, and no longer."""
    (long,) = prompts_of(370)
    engine = hollow(engine_of(path, enable_prefix_caching=True))
    short = long[:shared] + [7] * 9
    waited, chunks = played(engine, {0: [long], 1: [short]})
    assert sum(map(sum, chunks)) == 370 + 9 and waited[1].first_token <= 2 + shared // 64


def test_completions_of_one_long_prompt_do_not_begin_with_what_a_short_one_left_of_a_step(path):
    long, short = prompts_of(310, 20)
    engine = hollow(engine_of(path, enable_prefix_caching=True))
    batches = record_batches(engine)
    request = engine.add_request("two", long, SamplingParams(temperature=0, n=2, max_tokens=2, ignore_eos=True))
    engine.add_request("short", short, GREEDY)
    while engine.has_work:
        engine.step()
    assert chunks_of_steps(batches)[0] == [32, 20]
    assert request.sequences[1].num_cached == 288, "it begins in the step that computes the rest of the first one"


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_who_passes_leaves_room_for_those_that_it_passes(path, enable_cpu_offload):
    """There is room for the two long ones and not for the short one, too: it waits, and delays neither."""
    (*long, short), params = prompts_of(310, 318, 20), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    limits = dict(host_memory_limit=40 * BLOCK_BYTES) if enable_cpu_offload else {}
    engine = hollow(engine_of(path, enable_cpu_offload=enable_cpu_offload, **limits))
    if not enable_cpu_offload:
        shrink_gpu_pool(engine, 41)
    arrivals = [(0, long[0], params), (0, long[1], GREEDY), (1, short, GREEDY)]
    alone, beside = play_in_steps(engine, arrivals[:2]), play_in_steps(engine, arrivals)
    assert [one.first_token for one in beside[:2]] == [one.first_token for one in alone]
    assert alone[0].end > alone[1].first_token, "the first one's room is not free before"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("arguments", [dict(), dict(enable_cpu_offload=True), dict(enable_cpu_offload="auto")])
def test_shared_steps_are_the_same_in_every_mode_and_change_no_bit(path, arguments):
    lengths = 250, 90, 20, 300, 5, 60, 130
    pairs = [(prompt, GREEDY) for prompt in prompts_of(*lengths)]
    found = play(engine_of(path, **arguments), Script({0: pairs[:4], 2: pairs[4:6], 3: pairs[6:]}))
    assert any(len(step) > 2 for step in chunks_of_steps(found.batches))
    resident = play(engine_of(path), Script({0: pairs[:4], 2: pairs[4:6], 3: pairs[6:]}))
    assert found == resident
    for prompt, wanted in zip((prompt for prompt, _ in pairs), found.outcomes, strict=True):
        engine = engine_of(path)
        request = engine.add_request("alone", prompt, GREEDY)
        while engine.has_work:
            engine.step()
        assert outcome(request) == wanted
