"""What steps sample comes to the host behind them, through buffers of which one is written while the other is read."""

import pytest
import torch
from simulated import SimulatedRuntime

from nanoinfer.execution.read_back import ReadBack
from nanoinfer.sampling.reference import logprobs_of
from nanoinfer.sampling.settings import UNSOUND
from nanoinfer.sampling_params import MAX_LOGPROBS
from offload import CpuRuntime

NUM_ROWS, VOCAB_SIZE = 5, 40
# How many tokens each step samples, and which of them want how many log-probabilities.
STEPS = [
    (3, {0: 2, 2: 0}),
    (2, {}),
    (5, {1: MAX_LOGPROBS, 3: 1, 4: 3}),
    (5, {1: 0, 3: 0, 4: 0}),  # the places of the step before
    (0, {}),
    (4, {3: 5}),
    (5, dict.fromkeys(range(5), MAX_LOGPROBS)),
    (1, {0: 0}),
]


def sampled(step):
    """Logits and tokens of a step; one row's token could not be drawn."""
    generator = torch.Generator().manual_seed(step)
    count = STEPS[step][0]
    logits = torch.randn(count, VOCAB_SIZE, generator=generator)
    tokens = torch.randint(VOCAB_SIZE, (count,), generator=generator)
    if step == 2:
        tokens[3] = UNSOUND
    return logits, tokens


def wanted(step):
    logits, tokens = sampled(step)
    places, top = list(STEPS[step][1]), max(STEPS[step][1].values(), default=0)
    logprobs = [None] * len(tokens)
    for place in places:
        found = logprobs_of(logits[place : place + 1], tokens[place : place + 1].clamp(min=0), top)
        logprobs[place] = tuple(tensor[0].tolist() for tensor in found)
    return [(int(token), found, token == UNSOUND) for token, found in zip(tokens, logprobs, strict=True)]


def play(seed, dropped_rule=None, num_buffers=2):
    """What the host reads of each step once the next one was launched; logits and tokens keep their addresses."""
    runtime = SimulatedRuntime(seed, dropped_rule)
    compute = runtime.stream("compute")
    read_back = ReadBack(runtime, compute, NUM_ROWS, "unsound")
    while len(read_back.buffers) > num_buffers:
        read_back.buffers.pop()
    logits_of_step, tokens_of_step = torch.zeros(NUM_ROWS, VOCAB_SIZE), torch.zeros(NUM_ROWS, dtype=torch.int64)
    found, pending = [], None

    def read():
        found.append([(token, logprobs, error is not None) for token, logprobs, error in pending.read()])

    for step, (count, num_logprobs) in enumerate(STEPS):
        logits, tokens = sampled(step)
        compute.copy(logits_of_step[:count], logits)
        compute.copy(tokens_of_step[:count], tokens)
        sent = read_back.send(tokens_of_step[:count], logits_of_step[:count], num_logprobs)
        if pending is not None:
            read()
        pending = sent
    read()
    runtime.synchronize()
    return found


@pytest.mark.parametrize("seed", [None, *range(30)])
def test_the_host_reads_what_was_sampled_in_any_order_of_the_streams(seed):
    assert play(seed) == [wanted(step) for step in range(len(STEPS))]


@pytest.mark.parametrize("arguments", [dict(dropped_rule="host.read_after_step"), dict(num_buffers=1)], ids=str)
def test_a_buffer_is_read_behind_its_event_and_not_written_before(arguments):
    for seed in range(30):
        found = play(seed, **arguments)
        assert found != [wanted(step) for step in range(len(STEPS))]


def test_a_model_without_experts_read_none(monkeypatch):
    def staging(self, num_elements, dtype):
        return torch.full((num_elements,), 7, dtype=dtype)  # what memory held before

    monkeypatch.setattr(CpuRuntime, "staging", staging)
    runtime = CpuRuntime()
    read_back = ReadBack(runtime, runtime.stream("compute"), NUM_ROWS, "unsound")
    for _ in range(3):
        pending = read_back.send(torch.zeros(1, dtype=torch.int64), torch.zeros(1, VOCAB_SIZE), {})
        pending.read()
        assert pending.experts_read == 0
