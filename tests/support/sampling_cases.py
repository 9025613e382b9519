"""Rows of all kinds, and the kernels against the reference on them, for the interpreter and for a GPU."""

import torch
from simulated import SimulatedRuntime

from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.tables import RowState
from nanoinfer.sampling.reference import gather, sample
from nanoinfer.sampling.settings import UNSOUND, RowSampling, SamplingBatch

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
        assert torch.equal(state.rows.token.cpu(), reference.rows.token)


def check_unsound_rows(runtime=None) -> None:
    """No kind of row draws from logits that are NaN, infinite or all -infinity; others in the batch are as before."""
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
        {"top_k": 3},
        {"top_p": 0.5, "top_k": 30},
        {"min_p": 0.2, "temperature": 1e-5},
        {"banned_token_ids": (3,), "min_tokens": 9},
        {"repetition_penalty": 1e-30, "penalty_token_ids": (3, 4), "temperature": 0.0},
        {"frequency_penalty": -2.0, "output_token_ids": (4, 4)},
    ]
    rows = [RowSampling(**{"temperature": 1.0, "seed": 7, **kind}) for kind in kinds for _ in logits]
    logits, is_unsound = logits.repeat(len(kinds), 1), is_unsound.repeat(len(kinds))
    check_rows(rows, logits, steps=2, runtime=runtime)
    state, batch_rows = make_state(rows, vocab_size)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    state.sample(logits, batch_rows, tokens)
    assert torch.equal(tokens == UNSOUND, is_unsound) and (state.rows.token[batch_rows[is_unsound]] == 0).all()
    assert (logits[~is_unsound, tokens[~is_unsound]] > -inf).all()
