"""Gumbel-max draw in one pass over the logits; `nanoinfer.sampler.gumbel_noise` is the reference of the noise."""

import torch
import triton
import triton.language as tl

from nanoinfer.sampling_params import GREEDY_TEMPERATURE

# Tokens per program: a vocabulary of 150,000 gives 74 programs a row, enough to fill a GPU with two rows.
TILE_TOKENS = 2048


@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fmix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_bits(seed, step, token_ids):
    """seed, step: uint64 scalars; token_ids: uint32 [n]. Returns uint32 [n], as sampler._noise_bits has them."""
    key = _splitmix64(_splitmix64(seed) + (step + 1) * 0x9E3779B97F4A7C15)
    bits = _fmix32(token_ids * 0x9E3779B1 + key.to(tl.uint32))
    return _fmix32(bits ^ (key >> 32).to(tl.uint32))


@triton.jit
def gumbel_from_bits(bits):
    """uint32 [n] -> float32 [n]; see sampler.gumbel_noise for why the small u matter."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1 - u)))


# Row vectors are pieces of one upload: their alignment changes with the batch size, the compiled kernel must not.
@triton.jit(do_not_specialize_on_alignment=["row_max", "temperature", "seed", "step"])
def _tile_argmax_kernel(
    scores,  # [B, V] float32
    row_max,  # [B] float32
    temperature,  # [B] float32
    seed,  # [B] int64
    step,  # [B] int64
    best_score,  # [B, num_tiles] float32, out
    best_id,  # [B, num_tiles] int64, out
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    score = tl.load(
        scores + row.to(tl.int64) * vocab_size + token_ids, mask=token_ids < vocab_size, other=-float("inf")
    )
    high = tl.load(row_max + row)
    high = tl.where(high == -float("inf"), 0.0, high)
    scale = tl.load(temperature + row)
    scale = tl.where(scale < GREEDY, 1.0, scale)
    scaled = tl.where(score == high, 0.0, (score - high) / scale)
    bits = noise_bits(tl.load(seed + row).to(tl.uint64), tl.load(step + row).to(tl.uint64), token_ids.to(tl.uint32))
    noisy = scaled + gumbel_from_bits(bits)  # the noise is finite: -inf, as beyond the vocabulary, stays -inf
    best = tl.max(noisy, axis=0)
    # The lowest id among equals; a tile of NaN matches none, and must not name a token that does not exist.
    first = tl.min(tl.where(noisy == best, token_ids, vocab_size - 1), axis=0)
    tl.store(best_score + row.to(tl.int64) * num_tiles + tile, best)
    tl.store(best_id + row.to(tl.int64) * num_tiles + tile, first.to(tl.int64))


def gumbel_argmax(
    scores: torch.Tensor,
    row_max: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
) -> torch.Tensor:
    """argmax over the vocabulary of (score - row_max) / temperature + Gumbel noise(seed, step, token id).

    scores: [B, V] float32; row_max, temperature: [B] float32; seed, step: [B] int64; all on one GPU.
    Returns: [B] int64. Rows with a temperature below 1e-5 are drawn at temperature 1, for the caller to replace.
    """
    num_rows, vocab_size = scores.shape
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    best_score = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=scores.device)
    best_id = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=scores.device)
    _tile_argmax_kernel[(num_rows, num_tiles)](
        scores.contiguous(),
        row_max,
        temperature,
        seed,
        step,
        best_score,
        best_id,
        vocab_size,
        num_tiles,
        TILE=TILE_TOKENS,
        GREEDY=GREEDY_TEMPERATURE,
    )
    return best_id.gather(1, best_score.argmax(dim=-1, keepdim=True))[:, 0]
