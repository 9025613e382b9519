"""Rows of all kinds, and the kernels against the reference on them, for the interpreter and for a GPU."""

import random

import torch
from simulated import SimulatedRuntime

from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.tables import RowState
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.reference import gather, sample
from nanoinfer.sampling.settings import NOTHING_LEFT, RowSampling, SamplingBatch

MIXED_ROWS = [
    RowSampling(),
    RowSampling(temperature=1.0, seed=1),
    RowSampling(temperature=0.7, top_k=5, seed=2, step=9),
    RowSampling(temperature=1.5, top_p=0.7, seed=3, step=1),
    RowSampling(temperature=1.0, min_p=0.05, seed=4, step=2),
    RowSampling(temperature=0.9, top_k=20, top_p=0.8, min_p=0.01, seed=2**64 - 5, step=100),
    RowSampling(temperature=1.0, repetition_penalty=1.3, penalty_token_ids={1, 5, 7}, seed=6),
    RowSampling(repetition_penalty=2.0, penalty_token_ids=range(0, 300, 2)),
    RowSampling(temperature=2.0, banned_token_ids=(3, 4), min_tokens=4, step=3, seed=8),
    RowSampling(frequency_penalty=0.8),
    RowSampling(temperature=1.0, presence_penalty=2.0, seed=9),
    RowSampling(
        temperature=0.6, presence_penalty=-0.5, frequency_penalty=0.3, output_token_ids=[9, 9, 300, 4], seed=10,
    ),
    RowSampling(
        temperature=1.2, top_k=15, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=-0.2,
        penalty_token_ids=range(30), output_token_ids=range(10, 40), seed=11, step=30,
    ),
    RowSampling(
        temperature=0.8, frequency_penalty=-1e-4, output_token_ids=[7] * 40_000 + [8] * 3, banned_token_ids=(8,),
        min_tokens=99, seed=12,
    ),
    RowSampling(limits=TokenLimits(allowed=(3, 31, 32, 200, 300))),
    RowSampling(temperature=1.0, seed=13, limits=TokenLimits(bias=((0, 4.5), (15, -100.0), (16, 3.0), (299, 5.0)))),
    RowSampling(
        temperature=1.1, seed=14, step=3, output_token_ids=[5, 5, 6],
        limits=TokenLimits(words=(*(((6, i), (5, 6, i + 1))[i % 2] for i in range(0, 250)), (9,), (6, 7, 8))),
    ),
    RowSampling(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.2, seed=15, step=2,
        penalty_token_ids=range(0, 300, 3), output_token_ids=[4, 9], banned_token_ids=(9, 12), min_tokens=4,
        limits=TokenLimits(
            bias=tuple((i, (i % 7) - 3.0) for i in range(0, 301, 4)), allowed=tuple(range(0, 301, 2)),
            words=((4, 9, 16), (9, 20), (300,)),
        ),
    ),
]  # fmt: skip

SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature in (0.3, 2.0)
    for top_k in (0, 1, 7, 60)
    for top_p in (1e-9, 0.3, 0.95, 1.0)
    for min_p in (0.0, 0.02)
]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def naive_limits(logits: torch.Tensor, limits: TokenLimits, output: list[int]) -> torch.Tensor:
    """A row's logits after allowed_token_ids, bad_words and logit_bias, in vLLM's order and in the plainest way."""
    result = logits.clone()
    if limits.allowed is not None:
        result[[i for i in range(len(result)) if i not in limits.allowed]] = -torch.inf
    for word in limits.words:
        if len(word) <= len(output) + 1 and list(word[:-1]) == output[len(output) - len(word) + 1 :]:
            result[word[-1]] = -torch.inf
    for token_id, bias in limits.bias:
        result[token_id] += bias
    return result


def make_state(
    settings: list[RowSampling], vocab_size: int, kernels=None, runtime=None
) -> tuple[SamplingState, torch.Tensor]:
    """A state in which row i is sampled as settings[i], and these rows as a batch."""
    runtime = SimulatedRuntime() if runtime is None else runtime
    rows = RowState(runtime, len(settings), 1)
    state = SamplingState(runtime, rows, vocab_size, max(1, len(settings)))
    state.counts.fill_(-99)  # rows without a penalty never look at them, others begin at zero
    runtime.synchronize()
    stream = runtime.stream("compute")
    if settings:
        state.update(stream, list(enumerate(settings)))
    runtime.synchronize()
    if kernels is not None:
        rows.operations = kernels
    return state, torch.arange(len(settings), dtype=torch.int32, device=runtime.device)


def build(settings: list[RowSampling], vocab_size: int) -> SamplingBatch:
    state, rows = make_state(settings, vocab_size)
    return gather(state, rows)


def check_rows(settings: list[RowSampling], logits: torch.Tensor, steps: int, runtime=None, wrong: int = 0) -> None:
    """The kernels' tokens over a few steps, against the reference on the CPU; up to `wrong` rows may differ in a
    step."""
    from nanoinfer.kernels.step import sample as kernels

    vocab_size = logits.shape[1]
    reference, rows = make_state(settings, vocab_size)
    state, device_rows = make_state(settings, vocab_size, kernels, runtime)
    want, got = torch.zeros(len(settings), dtype=torch.int64), torch.zeros_like(device_rows, dtype=torch.int64)
    on_device = logits.to(device_rows.device)
    for _ in range(steps):
        batch = gather(reference, rows)
        assert torch.equal(sample(logits.float(), batch), sample(logits.float(), batch))
        reference.sample(logits, rows, want)
        state.sample(on_device, device_rows, got)
        assert (got.cpu() != want).sum() <= wrong, (got.cpu() != want).nonzero()
        if wrong:  # go on from the same tokens
            return
        for name in ("seen", "counts"):
            assert torch.equal(getattr(state, name).cpu(), getattr(reference, name)), name
        assert torch.equal(state.settings.words.cpu(), reference.settings.words)
        assert torch.equal(state.limits.words.cpu(), reference.limits.words)
        assert torch.equal(state.rows.token.cpu(), reference.rows.token)


def check_limited_rows(vocab_size: int, steps: int, runtime=None) -> None:
    """Over steps in which bad words of up to five tokens begin and end. Rows are greedy: no draw is close."""
    generator, last = random.Random(1), vocab_size - 1
    words = (*((i, i) for i in range(6)), *(tuple(generator.choices(range(6), k=2 + i % 4)) for i in range(60)))
    limits = [
        TokenLimits(words=words),
        TokenLimits(words=(*words[:12], (3,)), bias=((0, -2.0), (1, 4.0), (5, 2.5)), allowed=tuple(range(40))),
        TokenLimits(bias=((0, 1.0), (last, 100.0))),
        TokenLimits(allowed=(last,)),
        TokenLimits(allowed=(2,), words=((2,),)),
        None,
    ]
    rows, logits = [RowSampling(limits=one) for one in limits], random_logits(len(limits), vocab_size)
    logits[:, :6] += 20
    check_rows(rows, logits, steps, runtime)
    state, batch_rows = make_state(rows, vocab_size)
    drawn, tokens = [], torch.zeros(len(rows), dtype=torch.int64)
    for _ in range(steps):
        state.sample(logits, batch_rows, tokens)
        drawn.append(tokens.tolist())
    by_row = [set(column) for column in zip(*drawn, strict=True)]
    assert min(len(by_row[0]), len(by_row[1])) > 1, "words were hardly ever banned"
    assert by_row[2:] == [{last}, {last}, {NOTHING_LEFT}, {int(logits[5].argmax())}]


def check_unsound_rows(runtime=None, *, is_brief: bool = False) -> None:
    """No kind of row draws from logits that are NaN, infinite or all -infinity; others in the batch are as before.

    is_brief: one step, and each kind of row with every third of the logits.
    """
    inf, vocab_size = torch.inf, 70
    logits = random_logits(9, vocab_size)
    logits[1, 69] = logits[2, 3] = torch.nan  # 3 is banned in some rows
    logits[3, 40] = inf
    logits[4], logits[5] = torch.nan, -inf
    logits[6, ::2] = -inf
    logits[7, 3], logits[8, 4] = -3e38, 3e38
    is_unsound = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
    kinds = [
        {"temperature": 0.0},
        {"limits": TokenLimits(bias=((3, -100.0), (4, 100.0)), words=((5,), (0, 3)))},
        {"top_k": 3},
        {"top_p": 0.5, "top_k": 30},
        {"min_p": 0.2, "temperature": 1e-5},
        {"banned_token_ids": (3,), "min_tokens": 9},
        {"repetition_penalty": 1e-30, "penalty_token_ids": (3, 4), "temperature": 0.0},
        {"frequency_penalty": -2.0, "output_token_ids": (4, 4)},
    ]
    pairs = [(k, i) for k in range(len(kinds)) for i in range(len(logits)) if not is_brief or (i - k) % 3 == 0]
    pairs += [(6, 7), (6, 8)] * is_brief  # whose penalties overflow
    rows = [RowSampling(**{"temperature": 1.0, "seed": 7, **kinds[k]}) for k, _ in pairs]
    chosen = [i for _, i in pairs]
    logits, is_unsound = logits[chosen], is_unsound[chosen]
    check_rows(rows, logits, steps=1 if is_brief else 2, runtime=runtime)
    state, batch_rows = make_state(rows, vocab_size)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    state.sample(logits, batch_rows, tokens)
    assert torch.equal(tokens < 0, is_unsound) and (state.rows.token[batch_rows[is_unsound]] == 0).all()
    assert (logits[~is_unsound, tokens[~is_unsound]] > -inf).all()
