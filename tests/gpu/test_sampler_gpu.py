"""The sampler on CUDA against the CPU reference, its memory, and that it never waits for the GPU."""

import pytest
import torch

from nanoinfer import sampler
from nanoinfer.sampler import RowSampling, SamplingBatch, logprobs_of, sample, workspace_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

VOCAB_SIZE = 20_011


def mixed_rows(num_rows):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "penalty_token_ids": range(0, VOCAB_SIZE, 7)},
        {"temperature": 1.0, "banned_token_ids": (1, 2), "min_tokens": 10_000},
    ]
    return [
        RowSampling(seed=(i * 0x9E3779B97F4A7C15) % 2**64, step=i, **kinds[i % len(kinds)]) for i in range(num_rows)
    ]


def random_logits(num_rows, vocab_size=VOCAB_SIZE):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


def test_cuda_draws_the_tokens_of_the_cpu_reference():
    rows, logits = mixed_rows(140), random_logits(140)
    expected = sample(logits, SamplingBatch.build(rows, "cpu", VOCAB_SIZE))
    drawn = sample(logits.cuda(), SamplingBatch.build(rows, "cuda", VOCAB_SIZE)).cpu()
    # Noise differs by ulps between the two logarithms, so two scores may swap; that is one draw in many thousands.
    assert (drawn == expected).sum() >= 139


def test_compiled_noise_decides_as_the_reference_where_all_scores_are_equal():
    num_rows = 512
    rows = [RowSampling(temperature=1.0, seed=2**64 - 1 - i, step=3 * i) for i in range(num_rows)]
    logits = torch.zeros(num_rows, VOCAB_SIZE)
    expected = sample(logits, SamplingBatch.build(rows, "cpu", VOCAB_SIZE))
    drawn = sample(logits.cuda(), SamplingBatch.build(rows, "cuda", VOCAB_SIZE)).cpu()
    assert (drawn == expected).sum() >= num_rows - 2


def test_a_row_draws_the_same_token_alone_anywhere_in_a_batch_and_in_any_batch_size_on_cuda():
    rows, logits = mixed_rows(28), random_logits(28).cuda()
    alone = [
        sample(logits[i : i + 1], SamplingBatch.build([row], "cuda", VOCAB_SIZE)).item() for i, row in enumerate(rows)
    ]
    for size in (2, 3, 7, 64, 257):
        picks = torch.randint(0, 28, (size,), generator=torch.Generator().manual_seed(size))
        batch = SamplingBatch.build([rows[i] for i in picks], "cuda", VOCAB_SIZE)
        assert sample(logits[picks.cuda()], batch).tolist() == [alone[i] for i in picks]


def test_logprobs_have_the_same_bits_in_any_batch_size_on_cuda():
    logits, tokens = random_logits(64).cuda(), torch.arange(64, device="cuda")
    whole = logprobs_of(logits, tokens, 5)
    for i in (0, 31, 63):
        for part, alone in zip(whole, logprobs_of(logits[i : i + 1], tokens[i : i + 1], 5), strict=True):
            assert torch.equal(part[i : i + 1], alone)
    torch.testing.assert_close(whole[0].cpu(), logits.cpu().log_softmax(-1)[range(64), range(64)])


def test_a_step_never_waits_for_the_gpu():
    rows, logits = mixed_rows(14), random_logits(14).cuda()
    sample(logits, SamplingBatch.build(rows, "cuda", VOCAB_SIZE))  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = SamplingBatch.build(rows, "cuda", VOCAB_SIZE)
        for _ in range(3):
            tokens = sample(logits, batch)
            logprobs_of(logits, tokens, 5)
            batch = batch.advance(tokens)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert tokens.shape == (14,)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 151_936), (64, 151_936), (16, 32_000)])
def test_memory_stays_below_the_stated_workspace(num_rows, vocab_size):
    logits = random_logits(num_rows, vocab_size).cuda()
    rows = [
        RowSampling(
            temperature=1.0,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            penalty_token_ids=range(100),
            seed=i,
        )
        for i in range(num_rows)
    ]
    batch = SamplingBatch.build(rows, "cuda", vocab_size)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs_of(logits, sample(logits, batch), 20)
    slack = 2 * 2**20  # the allocator rounds each tensor up
    assert torch.cuda.max_memory_allocated() - before <= workspace_bytes(num_rows, vocab_size) + slack


def test_tile_kernel_is_compiled_once_for_all_batch_sizes():
    from nanoinfer.kernels import sample as kernels

    kernel = kernels._tile_argmax_kernel
    logits = random_logits(9).cuda()
    sample(logits[:1], SamplingBatch.build([RowSampling(temperature=1.0)], "cuda", VOCAB_SIZE))
    device_caches = getattr(kernel, "device_caches", None)
    if device_caches is None:
        pytest.skip("this triton keeps its compiled kernels elsewhere")
    compiled = device_caches[torch.cuda.current_device()][0]
    num_compiled = len(compiled)
    for size in range(1, 10):
        rows = [RowSampling(temperature=1.0, seed=i) for i in range(size)]
        sampler.sample(logits[:size], SamplingBatch.build(rows, "cuda", VOCAB_SIZE))
    assert len(compiled) == num_compiled
