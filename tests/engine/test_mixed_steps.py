"""Steps of prompts and running sequences together: who shares one, and the same bits in every mode."""

import numpy as np
import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, some_params
from prefill_graphs import WarmUpRuntime, prefill_counters
from request_helpers import Script, play
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams
from nanoinfer.execution.tables import DeviceTable

COUNTS = [4, 24, 40]  # below the 64 tokens of a step, so that larger steps occur, too
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
# Short and long prompts that arrive while others run.
PROMPTS = random_prompts(2, 90, 130, seed=32) + random_prompts(8, 5, 35, seed=31) + random_prompts(1, 90, 100, seed=33)
PAIRS = list(zip(PROMPTS, some_params(11, max_tokens=16), strict=True))
STAGGERED = Script({0: PAIRS[:2], **{7 + i: PAIRS[i : i + 1] for i in range(2, 11)}}, aborts={12: 3})
VARIANTS = {
    "eager": dict(enforce_eager=True),
    "offload": dict(enable_cpu_offload=True),
    "offload, eager, two ring slots": dict(enable_cpu_offload=True, enforce_eager=True, num_ring_slots=2),
    "offload, half of it on the GPU": dict(enable_cpu_offload=True, resident_kv_limit=2**14),
}


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def path(request, tmp_path_factory):
    fields = SMALL | (dict(sliding_window=24) if request.param == "gemma3" else {})
    return make_checkpoint(request.param, tmp_path_factory.mktemp("model"), **fields)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), **SMALL)


def mixing_engine(path, runtime=None, **arguments):
    return make_engine(path, runtime or WarmUpRuntime(), **(dict(capture_num_tokens=COUNTS) | arguments))


def played(engine, script=STAGGERED):
    found = play(engine, script)
    assert_pools_as_before(engine)
    return found


@pytest.fixture(scope="module")
def wanted(path):
    engine = mixing_engine(path)
    found = played(engine)
    stats = engine.stats()
    assert stats["num_mixed_steps"] > 4 and stats["num_mixed_tokens"] > stats["num_mixed_steps"]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled("qwen3-offload, eager, two ring slots", "gemma3-offload, half of it on the GPU")
def test_every_mode_forms_the_same_steps_and_gives_equal_bits(path, wanted, variant):
    engine = mixing_engine(path, **VARIANTS[variant])
    assert played(engine) == wanted
    assert (engine.stats()["streamed_bytes"] > 0) == ("offload" in variant)
    assert (prefill_counters(engine)[0] == 0) == ("eager" in variant)


@pytest.mark.parametrize("modes", [{2: "offload", 6: "resident", 10: "offload"}, {4: "offload"}])
@pytest.mark.sampled("qwen3-modes0")
def test_a_switch_between_two_mixed_steps_changes_no_bit(path, wanted, modes):
    script = Script(STAGGERED.arrivals, STAGGERED.aborts, modes)
    assert played(mixing_engine(path), script) == wanted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled("gemma3-1")
def test_any_order_of_the_streams_gives_equal_bits(path, wanted, seed):
    engine = mixing_engine(path, WarmUpRuntime(seed=seed), enable_cpu_offload=True, num_ring_slots=2)
    assert played(engine) == wanted


def test_who_shares_a_step(qwen3):
    engine = mixing_engine(qwen3, enable_prefix_caching=False)
    prompts = random_prompts(4, 60, 60)
    running = [(prompts[0][:8], GREEDY), (prompts[1][:8], GREEDY)]
    script = Script({0: running, 2: [(prompts[2][:38], GREEDY)], 4: [(prompts[3][:39], GREEDY)]})
    batches = played(engine, script).batches
    assert batches[:2] == [[(0, 8), (0, 8)], 2]
    assert batches[2] == ([(0, 38)], 2), "38 and 2 tokens are the 40 of the largest count"
    assert batches[3] == 3
    assert batches[4:6] == [[(0, 39)], 4], "39 and 3 are too many: they take turns"
    assert prefill_counters(engine)[:2] == [3, 0]
    stats = engine.stats()
    assert (stats["num_mixed_steps"], stats["num_mixed_tokens"], stats["num_prefill_steps"]) == (1, 2, 3)
    assert stats["num_decode_tokens"] + stats["num_mixed_tokens"] + 4 == 4 * GREEDY.max_tokens


def test_a_stream_gets_a_token_in_every_step_while_short_prompts_arrive(qwen3):
    engine = mixing_engine(qwen3)
    prompts = random_prompts(8, 20, 30, seed=4)
    first = engine.add_request("first", prompts[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    for step, prompt in enumerate(prompts[1:6]):
        engine.add_request(f"r{step}", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        engine.step()
    assert first.sequences[0].num_sampled == 7


def test_without_counts_nothing_is_mixed(qwen3):
    engine = make_engine(qwen3)
    played(engine)
    assert engine.stats()["num_mixed_steps"] == 0


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_greedy_tokens_equal_transformers(qwen3, enable_cpu_offload):
    prompts = random_prompts(6, 5, 30, seed=8)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = mixing_engine(qwen3, enable_cpu_offload=enable_cpu_offload)
    found = played(engine, Script({2 * i: [(prompt, params)] for i, prompt in enumerate(prompts)}))
    assert engine.stats()["num_mixed_steps"] > 3
    assert [completions[0][0] for completions in found.outcomes] == reference_tokens(qwen3, prompts, 8)


def test_preemption_beside_mixed_steps_loses_nothing(qwen3):
    engine = mixing_engine(qwen3, max_num_seqs=3, enable_prefix_caching=False)
    pairs = [(prompt, GREEDY) for prompt in random_prompts(5, 30, 31, seed=9)]
    found = played(engine, Script({0: pairs[:2], 2: pairs[2:]}, num_gpu_blocks=7))
    stats = engine.stats()
    assert stats["num_preemptions"] > 0 and stats["num_mixed_steps"] > 0
    large = mixing_engine(qwen3, max_num_seqs=3, enable_prefix_caching=False)
    large = played(large, Script({0: pairs[:2], 2: pairs[2:]}))
    assert [completions[0][0] for completions in found.outcomes] == [c[0][0] for c in large.outcomes]


def test_running_sequences_get_the_last_block_before_a_prompt_does(qwen3):
    """Both who run begin a block in the step in which a short prompt arrives, and one block is free."""
    engine = mixing_engine(qwen3, enable_prefix_caching=False)
    running = [(prompt, GREEDY) for prompt in random_prompts(2, 30, 30, seed=12)]
    script = {0: running, 3: [(random_prompts(1, 9, 9, seed=13)[0], GREEDY)]}
    found = played(engine, Script(script, num_gpu_blocks=5))
    assert found.batches[:4] == [[(0, 30), (0, 30)], 2, 2, 1] and engine.stats()["num_preemptions"] == 1
    large = played(mixing_engine(qwen3, enable_prefix_caching=False), Script(script))
    assert [completions[0][0] for completions in found.outcomes] == [c[0][0] for c in large.outcomes]


def whole_row_attention(backend):
    """`decode_rows` of a backend without fixed splits."""

    def decode_rows(q, kv, block_table, seq_lens, out, window):
        group = q.shape[1] // kv.shape[3]
        for row, length in enumerate(seq_lens.tolist()):
            blocks = kv[block_table[row, : -(-length // kv.shape[2])].long()]  # [blocks, 2, block_size, Hkv, D]
            keys, values = (blocks[:, i].flatten(0, 1)[:length].repeat_interleave(group, 1) for i in (0, 1))
            scores = torch.einsum("hd,thd->ht", q[row], keys) * backend.spec.scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)

    return decode_rows


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_backend_that_attends_to_whole_rows_does_so_in_mixed_steps(qwen3, enable_cpu_offload, monkeypatch):
    """In offload mode, too, where nothing streams."""
    script = Script({2 * i: [(prompt, GREEDY)] for i, prompt in enumerate(random_prompts(6, 5, 30, seed=8))})
    wanted = played(mixing_engine(qwen3), script)
    engine = mixing_engine(qwen3, enforce_eager=True, enable_cpu_offload=enable_cpu_offload, resident_kv_limit=None)
    backend, num_calls = engine.runner.backends[0], []
    decode_rows = whole_row_attention(backend)
    monkeypatch.setattr(engine.runner.decode_program.attention, "whole_rows", True)
    monkeypatch.setattr(backend, "decode_rows", lambda *args: num_calls.append(1) or decode_rows(*args), raising=False)
    found = played(engine, script)
    assert [completions[0][0] for completions in found.outcomes] == [c[0][0] for c in wanted.outcomes]
    num_steps = sum(not isinstance(batch, list) for batch in found.batches)  # with rows that decode
    assert engine.stats()["num_mixed_steps"] > 3 and len(num_calls) == num_steps * SMALL["num_layers"]


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_mixed_step_that_fails_ends_its_requests_only(qwen3, enable_cpu_offload, monkeypatch):
    engine = mixing_engine(qwen3, enable_cpu_offload=enable_cpu_offload, enable_prefix_caching=False, max_num_seqs=3)
    prompts = random_prompts(4, 10, 20, seed=10)
    requests = [engine.add_request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts[:2])]
    engine.step()
    engine.step()
    requests += [engine.add_request(f"r{i}", prompts[i], GREEDY) for i in (2, 3)]

    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.runner.decode_program.attention, "begin", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        while engine.has_work:
            engine.step()
    monkeypatch.undo()
    assert [request.is_finished for request in requests] == [True, True, True, False]
    while engine.has_work:
        engine.step()
    alone = mixing_engine(qwen3)
    (completion,) = play(alone, Script({0: [(prompts[3], GREEDY)]})).outcomes
    assert requests[3].sequences[0].output_token_ids == completion[0][0]
    assert_pools_as_before(engine)


def test_a_table_that_the_device_changed_is_uploaded_again():
    table = DeviceTable(SimulatedRuntime(), 8)
    stream = SimulatedRuntime().stream("compute")
    values = np.arange(6, dtype=np.int32)
    table.set(stream, values)
    stream.synchronize()
    table.tensor[2] = 99
    table.set(stream, values)
    stream.synchronize()
    assert table.tensor[2] == 99, "an equal table is not uploaded twice"
    table.forget()
    table.set(stream, values)
    stream.synchronize()
    assert torch.equal(table.tensor[:6], torch.arange(6, dtype=torch.int32))
