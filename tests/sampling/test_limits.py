"""logit_bias, allowed_token_ids and bad_words of rows, against what vLLM says they mean, step by step."""

import os
import random

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything below

import numpy as np
import pytest
from sampling_cases import MIXED_ROWS, build, check_limited_rows, check_rows, make_state, naive_limits, random_logits
from simulated import SimulatedRuntime

from nanoinfer.sampling import reference as sampler
from nanoinfer.sampling.limits import MAX_BAD_TOKENS, MAX_SLOTS, TokenLimits, line_words
from nanoinfer.sampling.reference import gather, sample
from nanoinfer.sampling.settings import NOTHING_LEFT, UNSOUND, RowSampling
from nanoinfer.sampling_params import MAX_BIASED

VOCAB_SIZE = 40  # one and a quarter words of the mask of allowed tokens


def random_limits(generator: random.Random) -> TokenLimits:
    ids = range(VOCAB_SIZE)
    words = [tuple(generator.choices(ids[:4], k=generator.choice((1, 2, 2, 3, 3, 5)))) for _ in range(12)]
    some = generator.sample(ids[4:], k=generator.randint(0, 20))
    return TokenLimits(
        bias=tuple((i, generator.uniform(-9, 9)) for i in sorted(generator.sample(ids, k=generator.randint(0, 25)))),
        allowed=tuple(generator.sample((0, 1, 2, 3, *some), k=4 + len(some))) if generator.random() < 0.5 else None,
        words=tuple(word for word in words if len(word) > 1 or generator.random() < 0.2),
    )


def test_each_step_bans_and_biases_what_the_tokens_before_it_ask_for():
    """And a row that comes back, with all of its tokens known, goes on as the one that stayed on the device."""
    generator, logits_of = random.Random(3), torch.Generator().manual_seed(3)
    limits, num_blocked = [random_limits(generator) for _ in range(24)], 0
    state, rows = make_state([RowSampling(temperature=1.0, seed=i, limits=one) for i, one in enumerate(limits)], 40)
    outputs, tokens = [[] for _ in limits], torch.zeros(len(limits), dtype=torch.int64)
    for step in range(30):
        logits = torch.randn(len(limits), VOCAB_SIZE, generator=logits_of)
        logits[:, :4] += 4  # these four make words
        want = torch.stack([naive_limits(*each) for each in zip(logits, limits, outputs, strict=True)])
        assert torch.equal(sampler.penalise(logits, gather(state, rows)), want)
        returned = [
            RowSampling(temperature=1.0, seed=i, step=step, output_token_ids=output, limits=one)
            for i, (one, output) in enumerate(zip(limits, outputs, strict=True))
        ]
        assert torch.equal(sampler.penalise(logits, build(returned, VOCAB_SIZE)), want)
        without = [naive_limits(logit, one, []) for logit, one in zip(logits, limits, strict=True)]
        num_blocked += int((want < torch.stack(without)).sum())
        state.sample(logits, rows, tokens)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)
    assert num_blocked > 200, "words of several tokens were hardly ever begun"


def test_a_bias_comes_before_the_penalties():
    """As in vLLM: a biased logit that is positive is divided, a negative one multiplied."""
    limits = TokenLimits(bias=((0, -3.0), (1, 3.0)))
    row = RowSampling(repetition_penalty=2.0, penalty_token_ids=(0, 1), limits=limits)
    assert sampler.penalise(torch.tensor([[1.0, -1.0, 0.5]]), build([row], 3)).tolist() == [[-4.0, 1.0, 0.5]]


def test_rows_with_limits_change_no_other_row():
    logits = random_logits(len(MIXED_ROWS), 301)
    plain = [i for i, row in enumerate(MIXED_ROWS) if row.limits is None]
    together, alone = (
        sample(logits, build(MIXED_ROWS, 301)),
        sample(logits[plain], build([MIXED_ROWS[i] for i in plain], 301)),
    )
    assert torch.equal(together[plain], alone) and len(plain) < len(MIXED_ROWS)


def test_what_forbids_every_token_is_told_from_logits_that_are_unsound():
    kinds = [
        {"limits": TokenLimits(allowed=(1, 2), words=((1,), (2,)))},
        {"limits": TokenLimits(allowed=(1,)), "banned_token_ids": (1,), "min_tokens": 3},
        {"limits": TokenLimits(allowed=(0,), words=((3, 0),)), "step": 1, "output_token_ids": [3]},
        {"banned_token_ids": range(4), "min_tokens": 1},
        {"limits": TokenLimits(allowed=(1,))},
        {},
    ]
    rows = [RowSampling(temperature=t, **kind) for kind in kinds for t in (0.0, 1.0)]
    logits = torch.zeros(len(rows), 4)
    assert sample(logits, build(rows, 4))[:-2].tolist() == [NOTHING_LEFT] * 8 + [1, 1]
    logits[-4:] = torch.nan
    assert sample(logits, build(rows, 4)).tolist() == [NOTHING_LEFT] * 8 + [UNSOUND] * 4


def full_limits(vocab_size: int) -> TokenLimits:
    """As many ids and tokens as a row has room for, in slots of their own; the last is also the vocabulary's last."""
    ends = [vocab_size - 1 - i for i in range(MAX_BAD_TOKENS // 2)]
    return TokenLimits(
        bias=tuple((i, 40.0 + i % 13) for i in range(MAX_BIASED)),
        words=tuple((i % 5, end) for i, end in enumerate(ends)),
    )


def test_the_largest_limits_have_room():
    limits = full_limits(5001)
    assert len(limits.listed) == MAX_SLOTS and limits.num_bad_tokens == MAX_BAD_TOKENS // 2
    logits, output = random_logits(1, 5001), [3]
    row = RowSampling(limits=limits, step=1, output_token_ids=output)
    assert torch.equal(sampler.penalise(logits, build([row], 5001))[0], naive_limits(logits[0], limits, output))
    long = TokenLimits(words=(tuple(i % 7 for i in range(MAX_BAD_TOKENS)),))
    row = RowSampling(limits=long, step=MAX_BAD_TOKENS - 1, output_token_ids=long.words[0][:-1])
    banned = sampler.penalise(logits, build([row], 5001))[0] == -torch.inf
    assert banned.nonzero()[:, 0].tolist() == [long.words[0][-1]]


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 31, 33, 301])
def test_the_masks_of_any_vocabulary_reach_its_last_token(vocab_size):
    last = vocab_size - 1
    rows = [
        RowSampling(limits=TokenLimits(allowed=(last,))),
        RowSampling(limits=TokenLimits(bias=((last, 100.0),))),
        RowSampling(limits=TokenLimits(bias=((0, 100.0),))),
    ]
    assert sample(random_logits(3, vocab_size), build(rows, vocab_size)).tolist() == [last, last, 0]
    assert make_state(rows, vocab_size)[0].limits.words.shape[1] == line_words(vocab_size)


def test_each_row_gets_its_own_line_and_equal_ones_are_uploaded_once(monkeypatch):
    kinds = [TokenLimits(allowed=(i,)) for i in range(7)]
    rows = [RowSampling(limits=kinds[i % 7]) for i in range(20)]
    made, line = [], TokenLimits.line
    monkeypatch.setattr(TokenLimits, "line", lambda self, *given: made.append(self) or line(self, *given))
    runtime = SimulatedRuntime(seed=0)
    state, batch_rows = make_state(rows, VOCAB_SIZE, runtime=runtime)
    assert made == kinds
    assert sample(random_logits(20, VOCAB_SIZE), gather(state, batch_rows)).tolist() == [i % 7 for i in range(20)]


def test_a_row_that_had_limits_has_none_for_the_next_sequence():
    state, rows = make_state([RowSampling(limits=TokenLimits(allowed=(3,), bias=((3, 9.0),), words=((3, 3),)))], 40)
    runtime = SimulatedRuntime()
    state.update(runtime.stream("compute"), [(0, RowSampling())])
    runtime.synchronize()
    logits = random_logits(1, VOCAB_SIZE)
    assert sample(logits, gather(state, rows)).tolist() == logits.argmax(-1).tolist() != [3]
    assert gather(state, rows).limited_rows.tolist() == []


def test_rows_without_limits_read_no_line():
    """No bit, no launch and no upload of theirs depends on what lies there."""
    state, rows = make_state(MIXED_ROWS[:14], 301)
    assert all(row.limits is None for row in MIXED_ROWS[:14])
    state.limits.words.fill_(-1)
    logits = random_logits(14, 301)
    tokens = torch.zeros(14, dtype=torch.int64)
    state.sample(logits, rows, tokens)
    assert torch.equal(tokens, sample(logits, build(MIXED_ROWS[:14], 301)))
    assert (state.limits.words == -1).all()


@pytest.fixture
def kernels():
    if torch.cuda.is_available():
        pytest.skip("the Triton interpreter is for machines without CUDA; tests/gpu has the compiled kernels' tests")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from nanoinfer.kernels.step import sample as module

    if not isinstance(module.tl.max, interpreter.InterpretedFunction):  # which is decided when triton is imported
        pytest.skip("triton was imported before this module could choose its interpreter: set TRITON_INTERPRET=1")
    return module


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_kernels_limit_rows_as_the_reference(kernels, monkeypatch):
    monkeypatch.setattr(sampler, "TILE_TOKENS", 16)  # three tiles a row, and of a row's places
    check_limited_rows(VOCAB_SIZE, steps=6)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_kernels_take_the_largest_limits_and_no_line_of_rows_without(kernels):
    limits = full_limits(5001)
    logits = random_logits(3, 5001)
    logits[0, 3], logits[0, 5000 - 3] = 200.0, 199.0  # token 3 comes first, then what it would complete is second
    rows = [RowSampling(limits=limits), RowSampling(temperature=1.0, limits=limits), RowSampling(temperature=1.0)]
    check_rows(rows, logits, steps=2)
    state, batch_rows = make_state([RowSampling()], 5001, kernels)
    state.limits.words.fill_(-1)
    tokens = torch.zeros(1, dtype=torch.int64)
    state.sample(logits[1:2].clone(), batch_rows, tokens)
    assert tokens.tolist() == logits[1:2].argmax(-1).tolist() and (state.limits.words == -1).all()


def test_kernels_tell_what_forbids_every_token(kernels):
    rows = [
        RowSampling(limits=TokenLimits(allowed=(1,), words=((1,),))),
        RowSampling(banned_token_ids=range(5), min_tokens=1),
    ]
    state, batch_rows = make_state(rows, 5, kernels)
    tokens = torch.zeros(2, dtype=torch.int64)
    state.sample(torch.zeros(2, 5), batch_rows, tokens)
    assert tokens.tolist() == [NOTHING_LEFT] * 2 and state.rows.token.tolist()[:2] == [0, 0]
    assert np.all(state.rows.length[:2].numpy() == 2)
