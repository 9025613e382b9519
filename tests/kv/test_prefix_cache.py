"""Equal blocks behind different beginnings are different blocks: their KV depends on all that came before."""

import pytest
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
FIRST, OTHER, SHARED, END = random_prompts(4, 16, 16, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def ask(engine, prompt):
    """How many of its tokens a prompt finds in the cache, and what it gets."""
    before = engine.stats()["prefix_cache_hit_tokens"]
    (outcome,) = run(engine, [prompt], [PARAMS])
    return engine.stats()["prefix_cache_hit_tokens"] - before, outcome


@pytest.mark.parametrize("enable_cpu_offload", [False, True], ids=["resident", "offload"])
def test_an_equal_block_behind_another_beginning_is_not_shared(path, enable_cpu_offload):
    engine, fresh = (make_engine(path, enable_cpu_offload=enable_cpu_offload) for _ in range(2))
    assert ask(engine, FIRST + SHARED + END)[0] == 0
    assert ask(engine, OTHER + END)[0] == ask(fresh, OTHER + END)[0] == 0
    # Both beginnings are known, the shared block behind one of them only.
    found, wanted = (ask(each, OTHER + SHARED + END) for each in (engine, fresh))
    assert found == wanted and found[0] == 16
    assert ask(engine, FIRST + SHARED + END + END)[0] == 48, "behind its own beginning it is found"
    # Nor is it where only the first block is the same.
    assert ask(engine, FIRST + OTHER + END)[0] == 16
    found, wanted = (ask(each, FIRST + OTHER + SHARED + END)[0] for each in (engine, fresh))
    assert (found, wanted) == (32, 0)
    assert ask(engine, FIRST + END + OTHER)[0] == 16
    assert ask(engine, FIRST + END + SHARED + END)[0] == 32
    assert_pools_as_before(engine)


def test_an_equal_block_at_another_place_is_not_shared(path):
    engine = make_engine(path)
    ask(engine, SHARED + FIRST + END)
    assert ask(engine, SHARED + SHARED + FIRST + END)[0] == 16
    assert ask(engine, FIRST + SHARED + END)[0] == 0


@pytest.mark.parametrize(
    "mode", [{}, dict(enable_cpu_offload=True, resident_kv_limit=0), dict(enable_cpu_offload="auto")],
    ids=["resident", "streamed", "auto"],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.sampled("1-resident", "0-streamed", "1-auto")
def test_the_turns_of_a_chat_are_those_of_a_cold_start_to_the_bit(path, mode, temperature):
    """What decode has computed is not found: its attention rounds otherwise than that of prefill."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True, logprobs=3)
    engine, cold = make_engine(path, **mode), make_engine(path, **mode, enable_prefix_caching=False)
    prompt, last = FIRST + OTHER, 0
    for message in random_prompts(4, 7, 30, seed=3):
        prompt = prompt + message
        known = engine.stats()["prefix_cache_hit_tokens"]
        (answer,), (wanted,) = (run(each, [prompt], [params]) for each in (engine, cold))
        assert answer == wanted
        found = engine.stats()["prefix_cache_hit_tokens"] - known
        assert found == last // 16 * 16, "up to the last prompt's end"
        last, prompt = len(prompt), prompt + answer[0][0]
    assert_pools_as_before(engine)
