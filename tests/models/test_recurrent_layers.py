"""Layers declare what they keep: a layer that nobody in the engine knows keeps a state for each row, in every mode."""

from contextlib import nullcontext

import pytest
import torch
from dense_model import dense_logits
from engines import (
    LAYER_BLOCK_BYTES,
    SMALL,
    assert_pools_as_before,
    make_engine,
    outcome,
    random_prompts,
    run,
    some_params,
    switching,
)
from simulated import SimulatedRuntime
from tiny_models import tiny_config

from nanoinfer import SamplingParams
from nanoinfer.execution.states import States
from nanoinfer.kv.admission import Verdict
from nanoinfer.kv.transfers import Transfers
from nanoinfer.layers.linear import Linear
from nanoinfer.models import registry
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import DecoderLayer
from nanoinfer.models.states import RecurrentState, StateTensor

TOY = dict(load_format="dummy", enable_prefix_caching=False, max_num_seqs=3, capture_num_tokens=[8, 24])
OFFLOAD = dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES)


class DecayedSum(torch.nn.Module):
    """x + a sum over all tokens so far, in which a token counts for half as much with each that follows, and how many
    there are."""

    def __init__(self, spec, traits, *, device):
        super().__init__()
        self.input_layernorm = traits.norm(spec.hidden_size, traits.norm_eps, dtype=spec.dtype, device=device)
        self.proj = Linear(spec.hidden_size, spec.hidden_size, bias=False, dtype=spec.dtype, device=device)

    def recur(self, x, normed, runs, state, norm, num_live):
        sums, counts = state["sum"], state["count"]
        for i, value in enumerate(8 * self.proj(normed)):
            slot = runs.slots[i : i + 1].long()
            counts.index_add_(0, slot, torch.ones(1, 1, dtype=counts.dtype))
            sums.index_copy_(0, slot, 0.5 * sums.index_select(0, slot) + value + counts.index_select(0, slot) % 3)
            x[i] += sums.index_select(0, slot)[0]
        return norm(x)


class Toy(Decoder):
    model_type = "llama"
    layer_classes = {AttentionState: DecoderLayer, RecurrentState: DecayedSum}

    @classmethod
    def layer_states(cls, hf_config):
        of_sum = StateTensor("sum", (hf_config.hidden_size,), torch.float32)
        state = RecurrentState((of_sum, StateTensor("count", (1,), torch.int64)))
        return state, AttentionState(), AttentionState(window=40), state, state


@pytest.fixture
def path(tmp_path, monkeypatch):
    known = {name: registry.find_class([name]) for name in registry.supported_architectures()}
    monkeypatch.setattr(registry, "_MODELS", known)
    registry.register("ToyForCausalLM")(Toy)
    tiny_config("llama", architectures=["ToyForCausalLM"], **SMALL | dict(num_layers=5)).save_pretrained(tmp_path)
    return tmp_path


def toy_engine(path, runtime=None, **arguments):
    """Three rows, so that they are used again and again; steps that are padded, captured, chunked and mixed."""
    return make_engine(path, runtime, **(TOY | arguments))


ENGINES = {
    "resident": {},
    "gives way": dict(num_gpu_blocks_override=22, max_model_len=140),
    "offload": OFFLOAD,
    "offload by itself": OFFLOAD | dict(enable_cpu_offload="auto", num_gpu_blocks_override=18),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.sampled("gives way-4", "offload by itself-4")
def test_states_are_those_of_each_sequence_alone(path, name, seed):
    prompts, params = random_prompts(4, 60, 99, seed) + random_prompts(2, 1, 20, seed), some_params(6, max_tokens=24)
    wanted = [run(toy_engine(path), [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    engine = toy_engine(path, SimulatedRuntime(seed), **ENGINES[name])
    assert run(engine, prompts, params) == wanted
    stats = engine.stats()
    assert (stats["streamed_bytes"] > 0) == ("offload" in name)
    is_full = name != "gives way" or seed in (1, 4)  # in so few blocks the others' rows come one after the other
    assert stats["num_mixed_steps"] > 0 or not is_full
    assert (stats["num_preemptions"] > 0) == (name == "gives way") or not is_full
    assert_pools_as_before(engine)


def test_tokens_are_those_of_the_whole_sequence_at_once(path):
    engine = toy_engine(path)
    prompts = random_prompts(3, 20, 60)
    outcomes = run(engine, prompts, [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3)
    for prompt, [(tokens, _, _)] in zip(prompts, outcomes, strict=True):
        with torch.inference_mode():
            logits = dense_logits(engine.runner.model, prompt + tokens[:-1])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled("1")
def test_states_stay_where_they_are_over_switches(path, seed):
    prompts, params = random_prompts(5, 1, 100, seed), some_params(5, max_tokens=20)
    wanted = run(toy_engine(path), prompts, params)
    engine = toy_engine(path, SimulatedRuntime(seed), **OFFLOAD | dict(num_gpu_blocks_override=60))
    modes, seen = {4: "resident", 9: "offload", 13: "resident", 24: "offload"}, []
    switch = switching(modes)
    assert run(engine, prompts, params, lambda *at: (seen.append(at[1]), switch(*at))) == wanted
    assert modes.keys() <= set(seen)
    assert_pools_as_before(engine)


@pytest.mark.parametrize("arguments", [{}, OFFLOAD, dict(max_num_seqs=1)])
def test_kernels_are_compiled_beside_the_engines_own_rows_and_states(path, arguments, monkeypatch):
    """Nothing is compiled here, but all else runs as it does on a GPU, in programs that are thrown away."""
    monkeypatch.setattr("nanoinfer.kernels.launch.compile_ahead.compile_ahead", lambda device: nullcontext())
    prompts, params = random_prompts(4, 20, 40), some_params(4, 6)
    engine, wanted = toy_engine(path, **arguments), run(toy_engine(path, **arguments), prompts, params)
    program = engine.runner.decode_program
    with torch.inference_mode():
        engine.runner.compile_kernels()
    assert engine.runner.decode_program is program and run(engine, prompts, params) == wanted
    assert_pools_as_before(engine)


def test_completions_of_one_prompt_have_states_of_their_own(path):
    (prompt,), params = random_prompts(1, 40, 40), SamplingParams(temperature=1, seed=3, n=3, max_tokens=9, logprobs=1)
    found = run(toy_engine(path), [prompt], [params])[0]
    alone = [SamplingParams(temperature=1, seed=3 + i, max_tokens=9, logprobs=1) for i in range(3)]
    assert found == [run(toy_engine(path), [prompt], [param])[0][0] for param in alone]


def test_states_are_planned(path):
    plans = [toy_engine(path, max_num_seqs=rows).plan for rows in (3, 4)]
    spec = toy_engine(path).runner.spec
    assert spec.state_bytes == 3 * (128 + 128)  # 4 * 24 and 8 bytes, each up to a multiple of 128
    assert spec.kv_layers == (1, 2) and spec.windows == (None, 40)
    assert plans[1].workspace_bytes - plans[0].workspace_bytes > spec.state_bytes


def test_a_state_comes_back_to_a_row_only_behind_the_step_of_who_had_the_row_before(path):
    """A request is aborted while a step in flight writes its state, and who gave way gets its row at once."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    prompts = random_prompts(2, 80, 90)
    wanted = run(toy_engine(path), prompts[1:], [params])[0]
    engine = toy_engine(path, SimulatedRuntime(0), **ENGINES["gives way"] | dict(num_gpu_blocks_override=23))
    engine.add_request("first", prompts[0], params)
    second = engine.add_request("second", prompts[1], params)
    while not engine.scheduler.num_preemptions:
        engine.step()
    (running,), (waiting,) = engine.scheduler.running, engine.scheduler.waiting
    row = running.row
    assert (running.request_id, waiting.request_id) == ("first", "second")
    assert engine.live.in_flight.batch.sampled == [running]
    while not engine.mover.transfers.is_idle:
        engine.mover.transfers.wait()  # nobody waits for that step
    engine.abort("first")
    engine.step()
    assert waiting.row == row
    while engine.has_work:
        engine.step()
    assert outcome(second) == wanted
    assert_pools_as_before(engine)


@pytest.fixture(scope="module")
def known_alone():
    """What the sequences of the next test are alone, which its first case finds out."""
    return []


@pytest.mark.parametrize("name", ["reset", "store_state", "load_state"])
@pytest.mark.sampled("reset", "load_state")
def test_an_interrupt_harms_no_other_sequence(path, known_alone, name, monkeypatch):
    owner = States if name == "reset" else Transfers
    prompts, params = random_prompts(8, 20, 99), some_params(8, max_tokens=30)
    if not known_alone:
        known_alone += [run(toy_engine(path), [one], [param])[0] for one, param in zip(prompts, params, strict=True)]
    several_give_way = dict(num_gpu_blocks_override=19, max_model_len=140, max_num_seqs=6)
    engine, calls, original = toy_engine(path, **several_give_way), [], getattr(owner, name)

    def interrupted(*arguments):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        assert all(sequence.kept_state for sequence in engine.mover.away)
    found = [outcome(request) for request in requests]
    harmed = [i for i, (one, other) in enumerate(zip(found, known_alone, strict=True)) if one != other]
    assert num_interrupts == 1 and len(harmed) < 7 and all(found[i][0][2] == "abort" for i in harmed)
    assert_pools_as_before(engine)


@pytest.mark.parametrize("place", ["a step that fails", "giving way"])
def test_after_an_exception_only_the_states_of_those_that_gave_way_are_kept(path, place, monkeypatch):
    """As long as one of them is kept, nothing else would forget the others."""
    engine = toy_engine(path, max_num_seqs=4)
    for number, n in enumerate((1, 2, 1)):  # the second one's completions: one runs when the other has given way
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=n)
        engine.add_request(str(number), random_prompts(3, 40, 40)[number], params)
    while not all(sequence.num_generated > 2 for sequence in engine.live.sequences):
        engine.step()
    preempt = torch.inference_mode()(engine.scheduler.preempt_youngest)
    preempt()
    if place == "giving way":
        store_state = engine.mover.transfers.store_state
        monkeypatch.setattr(engine.mover.transfers, "store_state", lambda *given: interrupt(store_state(*given)))
        with pytest.raises(KeyboardInterrupt), engine.changing():
            preempt()
    else:
        preempt()
        monkeypatch.setattr(engine.admission, "admit", lambda *_: Verdict.REFUSED)
        monkeypatch.setattr(engine.runner, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    monkeypatch.undo()
    host = engine.kv_cache.tables.lifetimes.host_blocks
    (gave_way,) = engine.mover.away
    assert gave_way.kept_state and host.num_used == len({*gave_way.kept_blocks, *gave_way.kept_state})
    while engine.has_work:
        engine.step()
    assert_pools_as_before(engine)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ENGINES)
def test_requests_wait_for_a_slot(path, name):
    """More rows than slots: as many requests run as there are slots, and the others wait their turn."""
    prompts, params = random_prompts(6, 20, 90), some_params(6, max_tokens=12)
    wanted = run(toy_engine(path), prompts, params)
    engine, most = toy_engine(path, state_slots=2, **ENGINES[name] | dict(max_num_seqs=4)), []
    found = run(engine, prompts, params, lambda *_: most.append(len(engine.scheduler.running)))
    assert found == wanted and max(most) == 2
    assert_pools_as_before(engine)


def test_as_many_states_are_planned_as_there_are_slots(path):
    four, two = (toy_engine(path, max_num_seqs=4, state_slots=slots).plan for slots in (None, 2))
    state_bytes = toy_engine(path).runner.spec.state_bytes
    assert (four.num_state_slots, two.num_state_slots) == (4, 2)
    assert four.workspace_bytes - two.workspace_bytes == 2 * state_bytes


@pytest.mark.parametrize("name", ENGINES)
def test_chunks_of_prompts_end_on_multiples_of_64(path, name):
    lengths = [1, 63, 64, 65, 127, 128, 129, 5, 100, 30, 191]
    prompts = [random_prompts(1, length, length, length)[0] for length in lengths]
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * len(prompts)
    most = dict(max_model_len=200, max_num_batched_tokens=100) | dict(num_gpu_blocks_override=32)
    engine = toy_engine(path, **ENGINES[name] | most | dict(max_num_seqs=6, state_slots=5))
    chunks, execute = [], engine.runner.execute
    engine.runner.execute = lambda plan, *more: (chunks.extend(plan.chunks), execute(plan, *more))[1]
    alone = [run(toy_engine(path, max_model_len=200), [prompt], params[:1])[0] for prompt in prompts]
    assert run(engine, prompts, params) == alone
    assert all(chunk.is_last or chunk.end % 64 == 0 for chunk in chunks)
    assert all(chunk.begin % 64 == 0 for chunk in chunks) and any(not chunk.is_last for chunk in chunks)
    assert_pools_as_before(engine)


def test_steps_below_64_tokens_are_refused(path):
    with pytest.raises(ValueError, match="max_num_batched_tokens=63 is too small for ToyForCausalLM, .* 64 or more"):
        toy_engine(path, max_num_batched_tokens=63)


def test_blocks_whose_edges_lie_between_these_multiples_hold_no_prompt_up(path):
    engine = toy_engine(path, block_size=48, max_model_len=240, max_num_batched_tokens=64)
    request = engine.add_request("0", random_prompts(1, 200, 200)[0], SamplingParams(temperature=0, max_tokens=1))
    for _ in range(6):
        engine.step()
    assert request.is_finished
