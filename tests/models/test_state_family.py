"""The made-up family with large states: what a state holds is a function of its sequence alone, in every mode."""

import pytest
import state_family
import torch
from engines import LAYER_BLOCK_BYTES, assert_pools_as_before, make_engine, random_prompts, run, some_params
from guessing import Right, guess
from simulated import SimulatedRuntime

from nanoinfer import SamplingParams

STATE_BYTES = 2**16
COMMON = dict(load_format="dummy", enable_prefix_caching=False, max_num_seqs=3, capture_num_tokens=[8, 24])
OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)
ENGINES = {
    "resident": {},
    "gives way": dict(num_gpu_blocks_override=12, max_model_len=140),
    "offload": OFFLOAD,
    "fewer slots than rows": dict(state_slots=2),
}


@pytest.fixture
def path(tmp_path):
    with state_family.registered(STATE_BYTES):
        yield state_family.write_model(tmp_path)


@pytest.mark.parametrize("name", ENGINES)
def test_every_mode_has_the_bits_of_a_sequence_alone(path, name):
    options = COMMON | dict(dtype="bfloat16" if name == "offload" else "float32")
    prompts, params = random_prompts(4, 60, 99) + random_prompts(1, 1, 20), some_params(5, max_tokens=16)
    alone = make_engine(path, **options)
    wanted = [run(alone, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    engine = make_engine(path, SimulatedRuntime(1), **options | ENGINES[name])
    assert run(engine, prompts, params) == wanted
    stats = engine.stats()
    assert (stats["num_preemptions"] > 0) == (name == "gives way")
    assert (stats["streamed_bytes"] > 0) == (name == "offload")
    assert engine.runner.spec.state_bytes >= STATE_BYTES
    assert stats["state_slots_total"] == engine.plan.num_state_slots > 0 == stats["state_slots_used"]
    assert_pools_as_before(engine)


def tensors_of(engine):
    """Layer and name -> the tensor of all slots."""
    of_layer = engine.runner.decode_program.resources.states.of_layer
    return {(layer, name): values for layer, tensors in of_layer.items() for name, values in tensors.items()}


def test_one_wrong_number_anywhere_in_a_state_changes_the_answer(path):
    (prompt,), params = (
        random_prompts(1, 40, 40),
        SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True),
    )
    engine = make_engine(path, **COMMON)
    (wanted,) = run(engine, [prompt], [params])
    for place, values in tensors_of(engine).items():

        def spoil(engine, step, values=values):
            if step == 3:
                with torch.inference_mode():
                    values.view(len(values), -1)[:, -1] += 1

        assert run(engine, [prompt], [params], spoil) != [wanted], place


def test_the_order_of_the_oldest_tokens_counts(path):
    """Behind 60 tokens that are the same."""
    engine, (prompt,) = make_engine(path, **COMMON), random_prompts(1, 64, 64)
    states = []
    for start in ([5, 9], [9, 5]):
        run(engine, [start + prompt[2:]], [SamplingParams(temperature=0, max_tokens=1)])
        states.append(tensors_of(engine)[0, "sums"].clone())
    assert not torch.equal(*states)


def test_drafts_take_the_slots_that_nobody_has_and_no_more(tmp_path):
    """Of a small share of the memory, in which each drafted token needs a state."""
    requests = list(zip(random_prompts(3, 40, 70), some_params(3, max_tokens=30), strict=True))
    with state_family.registered(2**20):
        path = state_family.write_model(tmp_path)
        options = COMMON | dict(max_num_seqs=2, gpu_memory_limit=2**27)
        drafts = dict(speculative_config=dict(method="suffix", num_speculative_tokens=5))
        plain, engine = make_engine(path, **options), make_engine(path, **options | drafts)
        assert (engine.plan.max_running, engine.plan.num_slots, plain.plan.num_slots) == (2, 7, 2)
        wanted, used = guess(engine, plain, requests, Right()), []
        found = run(engine, *map(list, zip(*requests, strict=True)), lambda *_: used.append(engine.stats()))
    assert found == wanted and engine.drafts.num_accepted > 20
    assert max(one["state_slots_used"] for one in used) == 2 and engine.drafts.num_drafted == engine.drafts.num_accepted
    assert_pools_as_before(engine)
