"""The sampler against naive references, and that a row's token depends on nothing but the row."""

import math
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything below

import numpy as np
import pytest
from sampling_cases import MIXED_ROWS, SETTINGS, build, check_rows, check_unsound_rows, make_state, random_logits
from transformers import RepetitionPenaltyLogitsProcessor

from nanoinfer.sampling import reference as sampler
from nanoinfer.sampling.reference import exponential_noise, logprobs_of, sample, workspace_bytes
from nanoinfer.sampling.settings import UNSOUND, RowSampling
from nanoinfer.sampling_params import SamplingParams


def assert_frequencies(tokens, probabilities):
    """Chi-square test; the draws are fixed by their seeds, so it either always passes or never does."""
    counts = np.bincount(tokens.numpy(), minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * len(tokens)
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 4, f"chi-square {statistic} for {degrees} degrees"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["step", "seed"])
@pytest.mark.parametrize("tile_tokens", [1, 3, 2048])
@pytest.mark.sampled("1-step-0.5", "3-seed-1.0", "2048-step-2.0")
def test_draws_follow_the_softmax_over_steps_and_over_seeds(monkeypatch, temperature, vary, tile_tokens, fuzz):
    monkeypatch.setattr(sampler, "TILE_TOKENS", tile_tokens)
    num_draws, logits = 20_000 if fuzz else 5_000, random_logits(1, 8, scale=1.0)
    rows = [RowSampling(temperature=temperature, **{"seed": 7, "step": 3, vary: i}) for i in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1).contiguous(), build(rows, 8))
    assert_frequencies(tokens, (logits[0].double() / temperature).softmax(-1).numpy())


@pytest.mark.parametrize("tile_tokens", [2, 2048])
def test_draws_after_cuts_follow_the_renormalised_softmax(monkeypatch, tile_tokens, fuzz):
    monkeypatch.setattr(sampler, "TILE_TOKENS", tile_tokens)
    num_draws = 20_000 if fuzz else 5_000
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    logits = probabilities.log().float().expand(num_draws, -1).contiguous()
    rows = [RowSampling(temperature=1.0, top_k=4, top_p=0.8, seed=5, step=i) for i in range(num_draws)]
    # Of the first four 0.95 is left, so 0.8 of that is reached by 0.4 + 0.3 + 0.15.
    kept = np.array([0.4, 0.3, 0.15, 0, 0])
    assert_frequencies(sample(logits, build(rows, 5)), kept / kept.sum())


def test_noise_is_exponential_and_uncorrelated_over_ids_steps_and_seeds():
    seeds, steps = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    ids = torch.arange(500)
    by_seed, by_step = exponential_noise(seeds, steps, ids), exponential_noise(steps, seeds, ids)
    for noise in (by_seed, by_step):
        assert abs(noise.mean().item() - 1) < 0.02 and abs(noise.var().item() - 1) < 0.04
        uniform = torch.exp(-noise.double())
        buckets = (uniform.flatten() * 64).long().clamp(max=63)
        assert_frequencies(buckets, np.full(64, 1 / 64))
        for left, right in [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[:, 16:], noise[:, :-16])]:
            correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(left.numel())
    assert not torch.equal(by_seed[1:], by_step[1:])


def test_all_64_bits_of_the_seed_and_the_step_count():
    logits = torch.zeros(1, 10_000)
    rows = [
        RowSampling(temperature=1.0, seed=seed, step=step)
        for seed in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)
        for step in (0, 1, 2**20)
    ]
    tokens = sample(logits.expand(len(rows), -1).contiguous(), build(rows, 10_000))
    assert len(set(tokens.tolist())) == len(rows)


def test_a_row_draws_the_same_token_alone_anywhere_in_a_batch_and_in_any_batch_size(fuzz):
    num_rows, vocab_size = len(MIXED_ROWS), 301
    logits = random_logits(num_rows, vocab_size)
    alone = [sample(logits[i : i + 1], build([row], vocab_size)).item() for i, row in enumerate(MIXED_ROWS)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20 if fuzz else 5):
        size = int(torch.randint(1, 3 * num_rows, (), generator=generator))
        picks = torch.randint(0, num_rows, (size,), generator=generator)
        batch = build([MIXED_ROWS[i] for i in picks], vocab_size)
        assert sample(logits[picks], batch).tolist() == [alone[i] for i in picks]


def test_rows_filtered_in_small_chunks_draw_the_same_tokens(monkeypatch):
    logits = random_logits(len(MIXED_ROWS), 301)
    batch = build(MIXED_ROWS, 301)
    tokens, logprobs = sample(logits, batch), logprobs_of(logits, torch.arange(len(MIXED_ROWS)), 3)
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 2 * 301)
    assert torch.equal(sample(logits, batch), tokens)
    for part, expected in zip(logprobs_of(logits, torch.arange(len(MIXED_ROWS)), 3), logprobs, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("rows", [MIXED_ROWS, *([row] for row in MIXED_ROWS)])
def test_logits_are_not_changed(rows):
    logits = random_logits(len(rows), 301)
    before = logits.clone()
    sample(logits, build(rows, 301))
    logprobs_of(logits, torch.zeros(len(rows), dtype=torch.int64), 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 9e-6, 1e-300])
@pytest.mark.parametrize("neighbour", [None, RowSampling(temperature=1.0)])
def test_greedy_takes_the_argmax_and_the_first_of_equals(temperature, neighbour):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-1.0, -1.0, -1.0, -1.0], [5.0, -torch.inf, 5.0, 6.0], [0, 0, 0, 0]])
    rows = [RowSampling(temperature=temperature)] * 3 + [neighbour or RowSampling()]
    assert sample(logits, build(rows, 4))[:3].tolist() == [1, 0, 3]


def naive_kept(logits, row):
    """Token ids that stay, in float64 and in the plainest way: min_p, then top_k, then top_p on what is left."""
    probabilities = np.exp((logits - logits.max()) / row.temperature)
    kept = {i for i, p in enumerate(probabilities) if p >= row.min_p * probabilities.max()}
    if row.top_k > 0:
        kth = sorted((logits[i] for i in kept), reverse=True)[: row.top_k][-1]
        kept = {i for i in kept if logits[i] >= kth}
    total, reached, result = sum(probabilities[i] for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: (-logits[i], i)):
        if row.top_p < 1 and result and reached >= row.top_p * total:
            break
        result.add(i)
        reached += probabilities[i]
    return result


def kept_by_sampler(logits, rows):
    cut = sampler.cut(logits, build(rows, logits.shape[1]), owned=False)
    kept = cut != -torch.inf
    assert torch.equal(cut[kept], logits[kept])
    return [set(row.nonzero()[:, 0].tolist()) for row in kept]


def test_cuts_keep_what_a_naive_reference_keeps():
    rows = [
        RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.3, 1.0, 4.0)
        for top_k in (-1, 0, 1, 7, 60, 1000)
        for top_p in (1e-9, 0.3, 0.95, 1.0)
        for min_p in (0.0, 0.02, 1.0)
    ]
    logits = random_logits(len(rows), 60)
    for row, values, kept in zip(rows, logits.double().numpy(), kept_by_sampler(logits, rows), strict=True):
        assert kept == naive_kept(values, row), row


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (RowSampling(temperature=1.0, top_k=2), {0, 1, 3}),  # what equals the second stays, as in vLLM
        (RowSampling(temperature=1.0, top_k=1), {1}),
        (RowSampling(temperature=1.0, top_p=0.6), {0, 1}),  # of equal ones top_p takes the lower id first
        (RowSampling(temperature=1.0, top_p=0.4), {1}),
        (RowSampling(temperature=1.0, min_p=0.5), {0, 1, 3}),
        (RowSampling(temperature=1.0, min_p=1.0), {1}),
        (RowSampling(temperature=1.0, top_k=3, top_p=0.99, min_p=0.3), {0, 1, 3}),
    ],
)
def test_cuts_between_equal_scores(row, kept):
    logits = torch.tensor([[0.0, math.log(2), -1.0, 0.0]])  # relative to the largest: 0.5, 1, 0.18, 0.5
    assert kept_by_sampler(logits, [row]) == [kept]


def test_top_p_of_a_flat_row_keeps_exactly_its_share():
    logits = torch.zeros(1, 1000)
    assert kept_by_sampler(logits, [RowSampling(temperature=1.0, top_p=0.25)]) == [set(range(250))]


def test_only_rows_that_need_it_are_sorted():
    rows = [
        RowSampling(top_k=3, top_p=0.5, min_p=0.1),
        RowSampling(temperature=1.0, top_k=10),
        RowSampling(temperature=1.0, top_k=9),
        RowSampling(temperature=1.0, top_p=0.9, min_p=0.2),
    ]
    batch = build(rows, 10)
    assert batch.sort_rows.tolist() == [2, 3] and batch.min_p_rows.tolist() == [3]


@pytest.mark.parametrize(
    "row",
    [
        RowSampling(temperature=1.0),
        RowSampling(temperature=1.0, top_k=2),
        RowSampling(temperature=1.0, top_p=0.5),
        RowSampling(temperature=1.0, min_p=0.5),
        RowSampling(temperature=1e300),
        RowSampling(temperature=1e-5),
        RowSampling(temperature=1.0, top_k=2, top_p=1e-30, min_p=1.0),
        RowSampling(),
    ],
)
def test_infinite_scores_and_extreme_settings_give_a_token_that_may_come(row):
    inf = torch.inf
    logits = torch.tensor([[-inf, -inf, 1.0, -inf], [-inf, 3e38, -3e38, -inf], [0.0, inf, 1.0, -inf], [-inf] * 4])
    for step in range(20):
        tokens = sample(logits, build([RowSampling(**{**vars(row), "step": step})] * 4, 4)).tolist()
        assert tokens[0] == 2 and tokens[1] in (1, 2) and tokens[2:] == [UNSOUND] * 2
        assert row.temperature > 1 or tokens[1] == 1


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_equals_that_of_transformers(penalty):
    logits = random_logits(2, 50)
    seen = [[4, 7, 7, 9], [0, 49, 1, 1]]
    rows = [RowSampling(repetition_penalty=penalty, penalty_token_ids=ids) for ids in seen]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(seen), logits.clone())
    assert torch.equal(sampler.penalise(logits, build(rows, 50)), expected)
    assert torch.equal(sample(logits, build(rows, 50)), expected.argmax(-1))


def test_a_sampled_token_is_penalised_from_the_next_step_on():
    logits = torch.tensor([[3.0, 2.0, 1.0, 2.5]] * 2)
    state, rows = make_state([RowSampling(repetition_penalty=3.0, penalty_token_ids=[3]), RowSampling()], 4)
    tokens, seen = torch.zeros(2, dtype=torch.int64), []
    for _ in range(4):
        state.sample(logits, rows, tokens)
        seen.append(tokens.tolist())
    assert seen == [[0, 0], [1, 0], [0, 0], [0, 0]] and state.settings["step"][:2].tolist() == [4, 4]


def test_banned_tokens_do_not_come_before_min_tokens_and_may_afterwards():
    logits = torch.tensor([[9.0, 8.0, 7.0], [9.0, 8.0, 7.0]])
    params = SamplingParams(temperature=0, min_tokens=2)
    settings = [RowSampling.from_params(params, seed=0, step=step, end_token_ids=(0, 1, 99)) for step in (0, 1)]
    state, rows = make_state(settings, 3)
    tokens, seen = torch.zeros(2, dtype=torch.int64), []
    for _ in range(3):
        state.sample(logits, rows, tokens)
        seen.append(tokens.tolist())
    assert seen == [[2, 2], [2, 0], [0, 0]]


def test_only_real_rows_grow():
    state, rows = make_state([RowSampling(), RowSampling()], 4)
    lengths = state.rows.length
    before, padding = lengths.clone(), len(lengths) - 1
    batch_rows = torch.tensor([1, padding, padding], dtype=torch.int32)
    state.sample(torch.randn(3, 4), batch_rows, torch.zeros(3, dtype=torch.int64))
    assert (lengths - before).tolist() == [0, 1, 0]


def test_a_row_from_params_carries_all_of_them():
    penalties = dict(repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.3)
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, min_tokens=2, **penalties)
    ids = dict(penalty_token_ids={5}, output_token_ids=[5, 5], end_token_ids=(6,))
    row = RowSampling.from_params(params, seed=9, step=1, **ids)
    assert row == RowSampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        **penalties,
        seed=9,
        step=1,
        penalty_token_ids={5},
        output_token_ids=[5, 5],
        banned_token_ids=(6,),
        min_tokens=2,
    )
    later = RowSampling.from_params(SamplingParams(), seed=9, step=2, **ids)
    assert later.banned_token_ids == ()
    assert row.counts_output and not later.counts_output


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_equal_log_softmax_of_the_raw_logits(top):
    logits = random_logits(4, 30)
    tokens = torch.tensor([3, 29, 0, int(logits[3].argmax())])
    chosen, rank, top_values, top_ids = logprobs_of(logits, tokens, top)
    reference = logits.log_softmax(-1)
    assert torch.equal(chosen, reference[torch.arange(4), tokens])
    order = logits.argsort(dim=-1, descending=True)
    assert rank.tolist() == [order[i].tolist().index(token) + 1 for i, token in enumerate(tokens.tolist())]
    assert torch.equal(top_ids, order[:, :top]) and torch.equal(top_values, reference.gather(1, order[:, :top]))
    assert chosen.dtype == top_values.dtype == torch.float32 and rank.dtype == top_ids.dtype == torch.int64


def test_an_empty_batch_gives_no_tokens():
    assert sample(torch.zeros(0, 5), build([], 5)).shape == (0,)


def test_wrong_dtypes_and_shapes_are_refused():
    with pytest.raises(AssertionError, match="sampler takes float32"):
        sample(torch.zeros(1, 5, dtype=torch.bfloat16), build([RowSampling()], 5))
    with pytest.raises(AssertionError, match=r"logits have shape \(2, 5\), the batch is 1 x 5"):
        sample(torch.zeros(2, 5), build([RowSampling()], 5))


def test_workspace_stops_growing_with_sorted_rows_beyond_a_chunk():
    growth = workspace_bytes(65, 150_000) - workspace_bytes(64, 150_000)
    assert growth == 13 * 150_000
    assert workspace_bytes(1, 1000) == (13 + 64) * 1000


@pytest.fixture
def kernels():
    if torch.cuda.is_available():
        pytest.skip("the Triton interpreter is for machines without CUDA; tests/gpu has the compiled kernels' tests")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from nanoinfer.kernels.step import sample as module

    if not isinstance(module.tl.max, interpreter.InterpretedFunction):  # which is decided when triton is imported
        pytest.skip("triton was imported before this module could choose its interpreter: set TRITON_INTERPRET=1")
    return module


@pytest.mark.parametrize("vocab_size", [1, 300, 2048, 5001])
def test_kernels_take_the_tokens_of_the_reference(kernels, vocab_size):
    rows = [
        RowSampling(temperature=t, seed=seed, step=step)
        for seed in (0, 2**64 - 1, 12345)
        for step in (0, 77)
        for t in (0.0, 0.3, 1.5)
    ]
    logits = random_logits(len(rows), vocab_size) - 50  # all below 0: lanes beyond the vocabulary must not win
    logits[:, ::3] = -torch.inf if vocab_size > 1 else 0
    check_rows(rows, logits, steps=1)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_kernels_cut_penalise_and_ban_as_the_reference(kernels, fuzz):
    check_rows(MIXED_ROWS, random_logits(len(MIXED_ROWS), 301), steps=3 if fuzz else 2)


def test_kernels_keep_what_the_reference_keeps_at_every_setting(kernels, fuzz, monkeypatch):
    monkeypatch.setattr(sampler, "TILE_TOKENS", 64)  # three tiles a row
    monkeypatch.setattr(kernels, "CUT_PROGRAMS", 2)  # one has two of them
    rows = [RowSampling(seed=i, **settings) for i, settings in enumerate(SETTINGS if fuzz else SETTINGS[::5])]
    logits = random_logits(len(rows), 150)
    logits[::2] = (logits[::2] * 2).round() / 2  # many equal scores
    check_rows(rows, logits, steps=1)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_kernels_draw_no_token_from_logits_that_are_nan_or_infinite(kernels, fuzz, monkeypatch):
    monkeypatch.setattr(sampler, "TILE_TOKENS", 32)  # three tiles a row
    monkeypatch.setattr(kernels, "CUT_PROGRAMS", 2)  # one has two of them
    check_unsound_rows(is_brief=not fuzz)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("vocab_size", [5, 37, 64])
@pytest.mark.sampled("37")
def test_kernels_race_over_tiles_of_any_scores_as_the_reference(kernels, fuzz, monkeypatch, vocab_size):
    """A tile's weights count from its own largest score, which may be any number or none."""
    monkeypatch.setattr(sampler, "TILE_TOKENS", 16)
    inf, scores = torch.inf, random_logits(9, vocab_size)
    scores[1, ::2] = -inf
    scores[2, : vocab_size // 2] = -inf  # tiles of nothing beside others
    scores[3] = -inf
    scores[4, vocab_size // 3] = inf
    scores[5] *= 1e37
    scores[6] = 1.5  # equal largest scores in all tiles
    scores[7, -1] = 60.0
    scores[8] = -3e38
    settings = [{}, {"temperature": 1e-5}, {"temperature": 3e38}, {"temperature": 0.5, "top_k": 3}, {"min_p": 0.2}]
    # Without a setting all scores, with each other one every second.
    pairs = [(kind, i) for k, kind in enumerate(settings) for i in range(9) if fuzz or k == 0 or (i + k) % 2]
    rows = [RowSampling(**{"temperature": 1.0, "seed": 7, **kind}) for kind, _ in pairs]
    check_rows(rows, scores[[i for _, i in pairs]], steps=1)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_kernels_take_the_lowest_id_of_equal_logits_and_of_nan_what_the_reference_takes(kernels, monkeypatch):
    monkeypatch.setattr(sampler, "TILE_TOKENS", 16)
    logits = random_logits(6, 50).round().clamp(-2, 2)  # the largest many times, in several tiles
    logits[1] = 0.0
    logits[2], logits[3, 20:40], logits[4, 49] = torch.nan, torch.nan, torch.nan
    logits[5] = -torch.inf
    logits[5, [18, 30, 31, 45]] = 7.0
    assert (logits[0] == logits[0].max()).sum() > 1
    check_rows([RowSampling()] * 6 + [RowSampling(temperature=0.8, seed=3)] * 6, logits.repeat(2, 1), steps=2)
