"""Log-probabilities of prompts come to the host slice by slice, through buffers of which one is written while the other
is read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulated import SimulatedRuntime

from nanoinfer.execution.prompt_logprobs import PromptLogprobs
from nanoinfer.execution.read_back import ReadBack
from nanoinfer.sampling.reference import logprobs_of
from nanoinfer.sampling_params import MAX_LOGPROBS
from nanoinfer.step.plan import PromptChunk

SIZE, VOCAB_SIZE, SLICE_ROWS, MAX_ROWS = 8, 50, 32, 96
HEAD = torch.randn(VOCAB_SIZE, SIZE, generator=torch.Generator().manual_seed(0))
MODEL = SimpleNamespace(logits=lambda normed: normed @ HEAD.T)
# Of each chunk of a step its tokens, how many of them are scored, and how many top values are wanted.
STEPS = [
    [(5, 4, 2)],
    [(SLICE_ROWS + 30, SLICE_ROWS + 29, 0), (7, 0, 9), (20, 20, 3)],
    [(9, 0, 0)],
    [(MAX_ROWS, MAX_ROWS, MAX_LOGPROBS)],
    [(1, 1, 1), (SLICE_ROWS, SLICE_ROWS, 0)],
]


def drawn(number):
    """What the head reads of a step's tokens, and its chunks."""
    generator = torch.Generator().manual_seed(number)
    normed = torch.randn(sum(count for count, _, _ in STEPS[number]), SIZE, generator=generator)
    chunks = []
    for count, num_scored, top in STEPS[number]:
        ids = torch.randint(VOCAB_SIZE, (num_scored,), generator=generator).numpy().astype(np.int32)
        chunks.append(PromptChunk(0, 0, count, np.zeros(count, np.int32), True, ids, top))
    return normed, chunks


def wanted(number):
    normed, chunks = drawn(number)
    scored, found, begin = [chunk for chunk in chunks if len(chunk.next_token_ids)], [], 0
    top = max((chunk.num_logprobs for chunk in scored), default=0)
    for chunk in chunks if scored else ():
        ids = torch.from_numpy(chunk.next_token_ids).long()
        rows = logprobs_of(MODEL.logits(normed[begin : begin + len(ids)]), ids, top)
        chosen, ranks, values, top_ids = (tensor.tolist() for tensor in rows)
        found.append(([[a, *b] for a, b in zip(chosen, values)], [[a, *b] for a, b in zip(ranks, top_ids)]))
        found[-1] = found[-1] if len(ids) else None
        begin += chunk.end
    return found


def play(seed, dropped_rule=None, num_buffers=2, is_fast=False):
    """What the host reads of each step once the next one was launched, and on a fast device has run; steps read and
    leave the same addresses."""
    runtime = SimulatedRuntime(seed, dropped_rule)
    compute = runtime.stream("compute")
    read_back = ReadBack(runtime, compute, 1, "unsound")
    prompts = PromptLogprobs(runtime, compute, MODEL, MAX_ROWS, SLICE_ROWS)
    normed_of_step, scored, scored_by = torch.zeros(MAX_ROWS, SIZE), *torch.zeros(2, MAX_ROWS, dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, VOCAB_SIZE), {}
    found, pending = [], None

    def read():
        pending.read()
        found.append([one and one[0] for one in pending.read_prompts()])

    for number in range(len(STEPS)):
        normed, chunks = drawn(number)
        begins = np.cumsum([0] + [chunk.end for chunk in chunks])
        rows = np.concatenate([begin + np.arange(len(chunk.next_token_ids)) for begin, chunk in zip(begins, chunks)])
        ids = np.concatenate([chunk.next_token_ids for chunk in chunks])
        compute.copy(normed_of_step[: len(normed)], normed)
        compute.copy(scored[: len(rows)], torch.from_numpy(rows.astype(np.int32)))
        compute.copy(scored_by[: len(ids)], torch.from_numpy(ids))
        step = SimpleNamespace(normed=normed_of_step, scored=scored[: len(rows)], scored_by=scored_by[: len(ids)])
        launched = prompts.launch(step, chunks)
        while len(prompts.buffers) > num_buffers:
            prompts.buffers.pop()
        sent = read_back.send(*nothing, launched)
        if is_fast:
            runtime.synchronize()
        if pending is not None:
            read()
        pending = sent
    read()
    runtime.synchronize()
    return found


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_the_host_reads_what_each_chunk_wanted_in_any_order_of_the_streams(seed):
    found, expected = play(seed, is_fast=seed == 9), [wanted(number) for number in range(len(STEPS))]
    for step, expected_step in zip(found, expected, strict=True):
        assert [one is None for one in step] == [one is None for one in expected_step]
        for (values, ids), (expected_values, expected_ids) in zip(filter(None, step), filter(None, expected_step)):
            assert ids == expected_ids and torch.allclose(torch.tensor(values), torch.tensor(expected_values))


@pytest.mark.parametrize(
    "fault", [dict(dropped_rule="host.read_after_step"), dict(num_buffers=1, is_fast=True)], ids=str
)
def test_a_buffer_is_read_behind_its_event_and_not_written_before(fault):
    right = play(None)
    for seed in range(10):
        assert play(seed, **fault) != right
