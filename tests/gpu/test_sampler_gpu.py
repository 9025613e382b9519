"""The sampling kernels on CUDA against the CPU reference, in graphs, and that they never wait for the GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.reference import logprobs_bytes, logprobs_of
from nanoinfer.sampling.settings import RowSampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

VOCAB_SIZE = 20_011
LIMITS = TokenLimits(
    bias=tuple((i, 3.0 - i % 7) for i in range(1024)),
    allowed=tuple(range(0, VOCAB_SIZE, 2)),
    words=(*((i, (7 * i) % VOCAB_SIZE) for i in range(512)), *((i,) for i in range(0, VOCAB_SIZE, 10))),
)


@pytest.fixture
def runtime():
    from offload import CudaRuntime

    return CudaRuntime(torch.device("cuda", 0))


def mixed_rows(num_rows):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "penalty_token_ids": range(0, VOCAB_SIZE, 7)},
        {"temperature": 1.0, "banned_token_ids": (1, 2), "min_tokens": 10_000},
        {
            "temperature": 0.0,
            "frequency_penalty": 0.9,
            "output_token_ids": [3] * 40_000 + list(range(0, VOCAB_SIZE, 5)),
        },
        {"temperature": 0.9, "top_p": 0.9, "presence_penalty": -0.7, "frequency_penalty": 0.2},
        {"temperature": 1.0, "limits": TokenLimits(allowed=tuple(range(3, VOCAB_SIZE, 5)))},
        {"temperature": 0.0, "limits": TokenLimits(bias=tuple((i, (i % 31) - 15.0) for i in range(0, 20_000, 20)))},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "limits": LIMITS},
    ]
    return [
        RowSampling(seed=(i * 0x9E3779B97F4A7C15) % 2**64, step=i, **kinds[i % len(kinds)]) for i in range(num_rows)
    ]


def random_logits(num_rows, vocab_size=VOCAB_SIZE):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


def test_cuda_draws_no_token_from_logits_that_are_nan_or_infinite(runtime):
    from sampling_cases import check_unsound_rows

    check_unsound_rows(runtime)


def make_cuda_state(rows, runtime, vocab_size=VOCAB_SIZE):
    from sampling_cases import make_state

    from nanoinfer.kernels.step import sample as kernels

    return make_state(rows, vocab_size, kernels, runtime)


def tokens_of(state, logits, rows):
    tokens = torch.zeros(len(rows), dtype=torch.int64, device="cuda")
    state.sample(logits, rows, tokens)
    return tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_takes_the_tokens_of_the_cpu_reference(runtime, dtype):
    from sampling_cases import check_rows

    # Noise and sums of tiles differ by ulps between the two, so two of them may swap; that is one draw in many
    # thousands.
    check_rows(mixed_rows(140), random_logits(140).to(dtype), steps=1, runtime=runtime, wrong=1)


def test_cuda_keeps_what_the_reference_keeps_at_every_setting(runtime):
    from sampling_cases import SETTINGS, check_rows

    rows = [RowSampling(seed=i, **settings) for i, settings in enumerate(SETTINGS)]
    logits = (random_logits(len(rows)) * 4).round() / 4  # many equal scores
    check_rows(rows, logits, steps=1, runtime=runtime, wrong=1)


def test_compiled_noise_decides_as_the_reference_where_all_scores_are_equal(runtime):
    from sampling_cases import check_rows

    rows = [RowSampling(temperature=1.0, seed=2**64 - 1 - i, step=3 * i) for i in range(512)]
    check_rows(rows, torch.zeros(512, VOCAB_SIZE), steps=1, runtime=runtime, wrong=2)


def test_a_row_draws_the_same_token_alone_anywhere_in_a_batch_and_in_any_batch_size(runtime):
    settings, logits = mixed_rows(28), random_logits(28).cuda()
    alone = []
    for i, row in enumerate(settings):
        state, rows = make_cuda_state([row], runtime)
        alone += tokens_of(state, logits[i : i + 1].clone(), rows)
    for size in (2, 3, 7, 64, 257):
        picks = torch.randint(0, 28, (size,), generator=torch.Generator().manual_seed(size))
        state, rows = make_cuda_state([settings[i] for i in picks], runtime)
        assert tokens_of(state, logits[picks.cuda()].contiguous(), rows) == [alone[i] for i in picks]


def test_a_captured_step_draws_what_eager_ones_draw(runtime):
    settings, logits = mixed_rows(24), random_logits(24).cuda()
    eager, rows = make_cuda_state(settings, runtime)
    want = [tokens_of(eager, logits, rows) for _ in range(4)]
    state, rows = make_cuda_state(settings, runtime)
    tokens = torch.zeros(24, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.sample(logits, rows, tokens)
    got = []
    for _ in range(4):
        graph.replay()
        got.append(tokens.tolist())
    assert got == want and len({tuple(step) for step in got}) > 1, "the steps must not all draw the same"


def test_compiled_kernels_count_what_they_draw(runtime):
    """And only in rows with a penalty; a count ends at the largest int16."""
    kinds = [{"frequency_penalty": -2.0}, {"presence_penalty": 2.0, "temperature": 1.0}, {"temperature": 1.0}]
    kinds.append({"frequency_penalty": -1e-3, "output_token_ids": [6] * 32_766})
    settings, logits = [RowSampling(seed=i, **kind) for i, kind in enumerate(kinds)], random_logits(4).cuda()
    state, rows = make_cuda_state(settings, runtime)
    want = state.counts.cpu()
    assert want[3, 6] == 32_766 and (want[2] == -99).all()
    drawn = [tokens_of(state, logits, rows) for _ in range(5)]
    for step in drawn:
        for i in (0, 1, 3):
            want[i, step[i]] = min(want[i, step[i]].item() + 1, 32_767)
    assert torch.equal(state.counts.cpu(), want)
    assert {step[3] for step in drawn} == {6} and len({step[0] for step in drawn}) == 1, "an encouraged token stays"
    assert len({step[1] for step in drawn}) > 1


def test_compiled_kernels_limit_rows_as_the_reference(runtime):
    from sampling_cases import check_limited_rows

    check_limited_rows(VOCAB_SIZE, steps=25, runtime=runtime)
    check_limited_rows(40, steps=5, runtime=runtime)


def test_rows_without_limits_read_nothing_of_them(runtime):
    settings = [row for row in mixed_rows(24) if row.limits is None]
    logits = random_logits(len(settings)).cuda()
    state, rows = make_cuda_state(settings, runtime)
    want = tokens_of(state, logits, rows)
    state, rows = make_cuda_state(settings, runtime)
    state.limits.words.fill_(-1)
    assert tokens_of(state, logits, rows) == want and (state.limits.words == -1).all()


def test_logprobs_have_the_same_bits_in_any_batch_size_on_cuda():
    logits, tokens = random_logits(64).cuda(), torch.arange(64, device="cuda")
    whole = logprobs_of(logits, tokens, 5)
    for i in (0, 31, 63):
        for part, alone in zip(whole, logprobs_of(logits[i : i + 1], tokens[i : i + 1], 5), strict=True):
            assert torch.equal(part[i : i + 1], alone)
    torch.testing.assert_close(whole[0].cpu(), logits.cpu().log_softmax(-1)[range(64), range(64)])


def test_a_step_never_waits_for_the_gpu_and_takes_no_memory(runtime):
    state, rows = make_cuda_state(mixed_rows(24), runtime)
    logits, tokens = random_logits(24).cuda(), torch.zeros(24, dtype=torch.int64, device="cuda")
    state.sample(logits, rows, tokens)  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            state.sample(logits, rows, tokens)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (64, 151_936), (16, 32_000)])
def test_logprobs_stay_below_the_stated_workspace(num_rows, vocab_size):
    logits = random_logits(num_rows, vocab_size).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs_of(logits, logits.argmax(-1), 20)
    slack = 2 * 2**20  # the allocator rounds each tensor up
    assert torch.cuda.max_memory_allocated() - before <= logprobs_bytes(num_rows, vocab_size) + slack
