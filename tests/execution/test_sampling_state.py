"""What the rows' sampling state holds: counts of generated tokens, their penalties, and how much memory that takes."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything below

import numpy as np
import pytest
from sampling_cases import MIXED_ROWS, build, check_rows, make_state, random_logits
from simulated import SimulatedRuntime
from torch.profiler import ProfilerActivity, profile

from nanoinfer.sampling import reference as sampler
from nanoinfer.sampling.settings import MAX_COUNT, RowSampling

VOCAB_SIZE = 40


def row_settings(row: int, output: list[int], **params) -> tuple[int, RowSampling]:
    return row, RowSampling(output_token_ids=output, **params)


def counted(*tokens: int) -> list[int]:
    return np.bincount(tokens, minlength=VOCAB_SIZE).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(frequency_penalty=0.5), [3.0, 2.5, 2.0, -2.0]),
        (dict(presence_penalty=1.0), [3.0, 2.0, 2.0, -2.0]),
        (dict(presence_penalty=1.0, frequency_penalty=0.5), [2.0, 1.5, 2.0, -2.0]),
        (dict(presence_penalty=-2.0, frequency_penalty=-0.25), [6.5, 5.25, 2.0, -2.0]),
        # The repetition penalty first, of the prompt's tokens too.
        (dict(frequency_penalty=1.0, repetition_penalty=2.0, penalty_token_ids={0, 1, 3}), [0.0, 0.5, 2.0, -4.0]),
        (dict(frequency_penalty=-2.0, banned_token_ids=(1,), min_tokens=5, step=3), [8.0, -torch.inf, 2.0, -2.0]),
        (dict(), [4.0, 3.0, 2.0, -2.0]),
    ],
)
def test_penalties_follow_the_formula(settings, expected):
    """Tokens 0, 0 and 1 were generated. score - frequency_penalty * count - presence_penalty * (count > 0)."""
    row = RowSampling(output_token_ids=[0, 1, 0], **settings)
    logits = torch.tensor([[4.0, 3.0, 2.0, -2.0], [9.0, 9.0, 9.0, 9.0]])
    scores = sampler.penalise(logits, build([row, RowSampling()], 4))
    assert scores.tolist() == [expected, [9.0] * 4]


def test_a_generated_token_counts_from_the_next_step_on_and_the_prompt_never():
    logits = torch.tensor([[3.0, 2.2, 1.0]] * 3)
    settings = [
        RowSampling(frequency_penalty=0.5, penalty_token_ids=[0, 0, 0]),
        RowSampling(presence_penalty=1.0),
        RowSampling(),
    ]
    state, rows = make_state(settings, 3)
    tokens, steps = torch.zeros(3, dtype=torch.int64), []
    for _ in range(6):
        state.sample(logits, rows, tokens)
        steps.append(tokens.tolist())
    # Row 0: 3.0, 2.5, 2.0 < 2.2, 2.0 > 1.7, ... Row 1: each of the first two once, then the larger of 2.0 and 1.2.
    assert [step[0] for step in steps] == [0, 0, 1, 0, 1, 0]
    assert [step[1] for step in steps] == [0, 1, 0, 0, 0, 0]
    assert [step[2] for step in steps] == [0] * 6
    assert state.counts[:2].tolist() == [[4, 2, 0], [5, 1, 0]]


def test_counts_end_at_the_largest_int16():
    settings = [RowSampling(frequency_penalty=-2.0, output_token_ids=[5] * tokens) for tokens in (32_766, 70_000)]
    state, rows = make_state(settings, VOCAB_SIZE)
    tokens = torch.zeros(2, dtype=torch.int64)
    for _ in range(3):
        state.sample(torch.zeros(2, VOCAB_SIZE), rows, tokens)
        assert tokens.tolist() == [5, 5]
    assert state.counts[:2, 5].tolist() == [MAX_COUNT, MAX_COUNT] == [32_767, 32_767]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_row_begins_at_zero_and_a_sequence_that_comes_back_with_its_output(seed):
    runtime = SimulatedRuntime(seed)
    state, _ = make_state([RowSampling()] * 6, VOCAB_SIZE, runtime=runtime)
    stream = runtime.stream("compute")
    on = dict(presence_penalty=0.5)
    new, plain = row_settings(0, [], **on), row_settings(1, [4, 5])
    back = [row_settings(row, [row, 7, 7], frequency_penalty=-1) for row in (2, 3, 4)]
    state.update(stream, [new, plain, *back])
    runtime.synchronize()
    assert state.counts[0].tolist() == counted() and set(state.counts[1].tolist()) == {-99}
    assert [state.counts[row].tolist() for row in (2, 3, 4)] == [counted(row, 7, 7) for row in (2, 3, 4)]
    assert state.settings["is_counted"].tolist() == [1, 0, 1, 1, 1, 0, 0]
    # Rows change hands: one's counts are not the next one's.
    again, other = row_settings(3, [9] * 5, **on), row_settings(2, [], **on)
    state.update(stream, [new, again, other])
    runtime.synchronize()
    assert [state.counts[row].tolist() for row in (3, 2)] == [counted(*[9] * 5), counted()]
    state.update(stream, [row_settings(0, [])])
    runtime.synchronize()
    assert state.settings["is_counted"][0] == 0


def test_kernels_penalise_as_the_reference_in_any_combination(fuzz, monkeypatch):
    """Several tiles, random rows with and without each penalty, over enough steps for tokens to come again."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from nanoinfer.kernels.step import sample as kernels

    if not isinstance(kernels.tl.max, interpreter.InterpretedFunction):  # which is decided when triton is imported
        pytest.skip("triton was imported before this module could choose its interpreter: set TRITON_INTERPRET=1")
    monkeypatch.setattr(sampler, "TILE_TOKENS", 16)
    generator = np.random.default_rng(0)
    rows = [
        RowSampling(
            temperature=generator.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=int(generator.choice([0, 0, 5])),
            top_p=generator.choice([1.0, 0.8]),
            min_p=generator.choice([0.0, 0.0, 0.05]),
            repetition_penalty=generator.choice([1.0, 1.0, 1.4]),
            presence_penalty=generator.choice([0.0, 0.0, -2.0, 0.4]),
            frequency_penalty=generator.choice([0.0, 0.0, 1.1, -0.3]),
            penalty_token_ids=generator.integers(VOCAB_SIZE, size=20).tolist(),
            output_token_ids=generator.integers(VOCAB_SIZE, size=int(generator.choice([0, 15]))).tolist(),
            seed=i,
        )
        for i in range(16 if fuzz else 8)
    ]
    logits = random_logits(len(rows), VOCAB_SIZE, scale=1.0)
    logits[::4, 3] = torch.nan
    logits[1::4] = (logits[1::4] * 4).round() / 4  # many equal scores
    check_rows(rows, logits, steps=3 if fuzz else 2)


def peak_bytes(work) -> int:
    """What torch allocates at most while `work` runs, in its operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes, "the profiler saw no memory"
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_rows", [4, 1000])
def test_the_reference_stays_below_the_stated_workspace(monkeypatch, dtype, chunk_rows):
    vocab_size, num_rows = 20_000, 26
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", chunk_rows * vocab_size)
    everything = RowSampling(
        temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, frequency_penalty=1.0,
        penalty_token_ids=range(vocab_size), output_token_ids=range(vocab_size),
    )  # fmt: skip
    logits, tokens = random_logits(num_rows, vocab_size).to(dtype), torch.zeros(num_rows, dtype=torch.int64)
    for settings in ([everything] * num_rows, (MIXED_ROWS * 2)[:num_rows]):
        state, rows = make_state(settings, vocab_size)
        used = peak_bytes(lambda state=state, rows=rows: state.sample(logits, rows, tokens))
        assert used <= sampler.workspace_bytes(num_rows, vocab_size)
    wide = logits.float()
    assert peak_bytes(lambda: sampler.logprobs_of(wide, tokens, 20)) <= sampler.logprobs_bytes(num_rows, vocab_size)
