"""Sampling in four launches, whatever the rows' settings, so that it can be the tail of a captured step.

`nanoinfer.sampling.reference` is the reference and says what the settings mean. No row is sorted. Instead, the score of
the last token that top_k or top_p keeps is found three bits at a time, from the highest. Each three bits take one pass
over the row, without the tiles whose scores all lie below what is known. Rows that keep every token skip the work of
launches 2 and 3.

    1. one program per tile: its largest score, after penalties and bans; if every token is kept, the sum of its weights
    2. one program per row: the lowest score that is kept, and the last token id kept among equal scores
    3. for each tile the sum of the weights of its kept tokens
    4. one program per row: draw the tile, then the token in it, and advance the row's state
"""

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.attention.online_softmax import finite
from nanoinfer.kernels.launch.sizes import next_power_of_2
from nanoinfer.kernels.step.scores import (
    MIN_P,
    NUM_BAD_TOKENS,
    SEED,
    STEP,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    advance_words,
    load_scores,
    real,
    scoring,
    wide,
)
from nanoinfer.sampling import reference as sampler
from nanoinfer.sampling.settings import MAX_COUNT, NOTHING_LEFT, UNSOUND
from nanoinfer.sampling_params import GREEDY_TEMPERATURE

# Programs per row in launch 3, which weighs tiles after a cut. In rows without a cut they end at once, but still have
# to start.
CUT_PROGRAMS = 32


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
def noise(seed, step, ids):
    """Standard exponential noise, neither 0 nor infinite: float32 [n], as `sampler.exponential_noise` has it.

    seed, step: int64 scalars; ids: [n].
    """
    key = _splitmix64(_splitmix64(seed.to(tl.uint64)) + (step.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    bits = _fmix32(ids.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32))
    bits = _fmix32(bits ^ (key >> 32).to(tl.uint32))
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32, 1 - 2^-24
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1 - u))


@triton.jit
def order(score):
    """Map float32 to int32 so that the order stays the same."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def guesses(known, shift):
    """Put each of the eight values of the three bits at `shift` into `known`, the bits that are found so far.

    known: int64 in [0, 2^32). Returns int32 [8], in `order`'s range.
    """
    values = known | (tl.arange(0, 8).to(tl.int64) << shift)
    return tl.where(values < 4294967296, values - 2147483648, 2147483647).to(tl.int32)


@triton.jit
def scaled_by(score, high, temperature):
    """(score - high) / temperature as in sampler._scaled, with one division per row instead of one per score.

    high: the largest score of the row or tile.
    """
    return tl.where(score == high, 0.0, (score - high) * tl.div_rn(1.0, temperature))


@triton.jit
def weigh(source, ids, peak, temperature, min_p, least, VOCAB_SIZE: tl.constexpr):
    """Return (order, weight) of token ids.

    Weights are probabilities relative to the peak's, in units of 2^-40, int64. A weight is 0 if min_p drops the token
    or its order is below `least`. source: `scoring` of the row.
    """
    score = load_scores(source, ids, VOCAB_SIZE)
    relative = tl.exp(scaled_by(score, peak, temperature))
    rank = order(score)
    stays = (relative >= min_p) & (rank >= least)
    return rank, tl.where(stays, (relative * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def row_peak(tile_max, index, num_tiles, TILES: tl.constexpr):
    """The row's largest score; 0 for a row of -inf only."""
    tiles = tl.arange(0, TILES)
    return finite(tl.max(tl.load(tile_max + index * num_tiles + tiles, mask=tiles < num_tiles, other=-float("inf")), 0))


@triton.jit
def keeps_all(settings, VOCAB_SIZE: tl.constexpr):
    """Whether no cut drops a token. settings: pointer to a row's."""
    top_k = tl.load(settings + TOP_K)
    return ((top_k <= 0) | (top_k >= VOCAB_SIZE)) & (real(settings, TOP_P) >= 1.0) & (real(settings, MIN_P) <= 0.0)


@triton.jit
def keeps(score, ids, peak, temperature, min_p, last, last_id):
    """Whether the cuts keep a token. peak: the row's largest score; last, last_id: what `_cut_kernel` found."""
    rank = order(score)
    by_rank = (rank > last) | ((rank == last) & (ids <= last_id))
    return by_rank & (tl.exp(scaled_by(score, peak, temperature)) >= min_p)


@triton.jit
def winner(arrival, ids, last):
    """Return the id with the largest arrival, the lowest id among equals; `last` if all are NaN."""
    return tl.min(tl.where(arrival == tl.max(arrival, 0), ids, last), 0)


@triton.jit
def _tile_kernel(
    logits,  # [B, VOCAB_SIZE]
    rows,  # [B] int32
    settings, seen, counts, limits,  # SamplingState, by row
    tile_max,  # [B, num_tiles] float32, out
    tile_weight,  # [B, num_tiles] float32, out, for rows that keep every token: relative to the tile's largest score
    num_tiles,
    VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    source = scoring(logits, rows, settings, seen, counts, limits, index, VOCAB_SIZE, SEEN_WORDS)
    own = source[1]
    heat = real(own, TEMPERATURE)
    is_free = keeps_all(own, VOCAB_SIZE)
    score = load_scores(source, tile * TILE + tl.arange(0, TILE), VOCAB_SIZE)
    at = index * num_tiles + tile
    high = tl.max(score, 0)
    tl.store(tile_max + at, high)
    if (heat >= GREEDY) & is_free:
        tl.store(tile_weight + at, tl.sum(tl.exp(scaled_by(score, finite(high), heat)), 0))


@triton.jit
def _cut_kernel(
    logits, rows, settings, seen, counts, limits, tile_max,
    peak,  # [B] float32, out: the row's largest score, as `row_peak` has it
    cut,  # [B] int32, out: order of the last score that is kept
    cut_id,  # [B] int32, out: last token id that is kept among those with that score; -1: no cut
    num_tiles,
    VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    source = scoring(logits, rows, settings, seen, counts, limits, index, VOCAB_SIZE, SEEN_WORDS)
    own = source[1]
    heat = real(own, TEMPERATURE)
    k = tl.load(own + TOP_K)
    p = real(own, TOP_P)
    high = row_peak(tile_max, index, num_tiles, TILES)
    tl.store(peak + index, high)
    last = tl.full([], -2147483648, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    wants_k = (k > 0) & (k < VOCAB_SIZE)
    if (heat >= GREEDY) & (wants_k | (p < 1.0)):
        floor = real(own, MIN_P)
        lane = tl.arange(0, TILE)
        eight = tl.arange(0, 8)
        peaks = tile_max + index * num_tiles
        last_id = tl.full([], VOCAB_SIZE, tl.int32)
        if wants_k:
            # Find the largest value that at least k scores reach. A tile whose scores all lie below what is known is
            # skipped. The tiles' own largest scores give a bound from the start.
            tiles = tl.arange(0, TILES)
            ranks = order(tl.load(peaks + tiles, mask=tiles < num_tiles, other=-float("inf")))
            ordered = tl.sort(tl.where(tiles < num_tiles, ranks, -2147483648), descending=True)
            bound = tl.max(tl.where(tiles == tl.minimum(k, TILES) - 1, ordered, -2147483648), 0)
            bound = tl.where(k <= num_tiles, bound, -2147483648)
            if floor > 0:  # min_p may drop a tile's largest score
                bound = tl.full([], -2147483648, tl.int32)
            known = tl.full([], 0, tl.int64)
            for digit in range(11):
                guess = guesses(known, 30 - 3 * digit)
                reach = tl.maximum((known - 2147483648).to(tl.int32), bound)
                count = tl.zeros([8, TILE], tl.int32)
                for tile in range(num_tiles):
                    if order(tl.load(peaks + tile)) >= reach:
                        score = load_scores(source, tile * TILE + lane, VOCAB_SIZE)
                        if floor > 0:
                            stays = tl.exp(scaled_by(score, high, heat)) >= floor
                            score = tl.where(stays, score, -float("inf"))
                        rank = tl.where(tile * TILE + lane < VOCAB_SIZE, order(score), -2147483648)
                        count += (rank[None, :] >= guess[:, None]).to(tl.int32)
                best = tl.max(tl.where(tl.sum(count, 1) >= k, eight, 0), 0)
                known = known | (best.to(tl.int64) << (30 - 3 * digit))
            last = (known - 2147483648).to(tl.int32)
        if p < 1.0:
            last_of_k = last
            total = tl.zeros([TILE], tl.int64)
            for tile in range(num_tiles):
                if order(tl.load(peaks + tile)) >= last_of_k:
                    _, weight = weigh(source, tile * TILE + lane, high, heat, floor, last_of_k, VOCAB_SIZE)
                    total += weight
            limit = tl.ceil(p.to(tl.float64) * tl.sum(total, 0).to(tl.float64)).to(tl.int64)
            limit = tl.maximum(limit, 1)
            # Find the largest value such that the weights of scores at or above it reach the limit.
            known = tl.full([], 0, tl.int64)
            for digit in range(11):
                guess = guesses(known, 30 - 3 * digit)
                reach = tl.maximum((known - 2147483648).to(tl.int32), last_of_k)
                weights = tl.zeros([8, TILE], tl.int64)
                for tile in range(num_tiles):
                    if order(tl.load(peaks + tile)) >= reach:
                        rank, weight = weigh(source, tile * TILE + lane, high, heat, floor, last_of_k, VOCAB_SIZE)
                        weights += tl.where(rank[None, :] >= guess[:, None], weight[None, :], 0)
                best = tl.max(tl.where(tl.sum(weights, 1) >= limit, eight, 0), 0)
                known = known | (best.to(tl.int64) << (30 - 3 * digit))
            last = (known - 2147483648).to(tl.int32)
            # Of the tokens with the last score, keep as many as it takes to reach the limit, lower ids first.
            above = tl.zeros([TILE], tl.int64)
            each = tl.zeros([TILE], tl.int64)
            for tile in range(num_tiles):
                if order(tl.load(peaks + tile)) >= last:
                    rank, weight = weigh(source, tile * TILE + lane, high, heat, floor, last_of_k, VOCAB_SIZE)
                    above += tl.where(rank > last, weight, 0)
                    each = tl.maximum(each, tl.where(rank == last, weight, 0))
            one = tl.maximum(tl.max(each, 0), 1)
            wanted = (limit - tl.sum(above, 0) + one - 1) // one
            last_id = tl.full([], 0, tl.int32)
            for digit in range(8):
                bound = last_id | (eight << (21 - 3 * digit))
                equal = tl.zeros([8, TILE], tl.int32)
                for tile in range(num_tiles):
                    if order(tl.load(peaks + tile)) >= last:
                        ids = tile * TILE + lane
                        score = load_scores(source, ids, VOCAB_SIZE)
                        is_last = (order(score) == last) & (ids < VOCAB_SIZE)
                        equal += (is_last[None, :] & (ids[None, :] < bound[:, None])).to(tl.int32)
                best = tl.max(tl.where(tl.sum(equal, 1) < wanted, eight, 0), 0)
                last_id = last_id | (best << (21 - 3 * digit))
    tl.store(cut + index, last)
    tl.store(cut_id + index, last_id)


@triton.jit
def _cut_weight_kernel(
    logits, rows, settings, seen, counts, limits, tile_max, peak, cut, cut_id,
    tile_weight,  # [B, num_tiles] float32, out, for rows with a cut: relative to the row's largest score
    num_tiles,
    VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    source = scoring(logits, rows, settings, seen, counts, limits, index, VOCAB_SIZE, SEEN_WORDS)
    own = source[1]
    heat = real(own, TEMPERATURE)
    if (heat >= GREEDY) & (keeps_all(own, VOCAB_SIZE) == 0):
        floor = real(own, MIN_P)
        high = tl.load(peak + index)
        last = tl.load(cut + index)
        last_id = tl.load(cut_id + index)
        for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            at = index * num_tiles + tile
            weight = tl.full([], 0.0, tl.float32)
            if order(tl.load(tile_max + at)) >= last:
                ids = tile * TILE + tl.arange(0, TILE)
                score = load_scores(source, ids, VOCAB_SIZE)
                stays = keeps(score, ids, high, heat, floor, last, last_id)
                weight = tl.sum(tl.where(stays, tl.exp(scaled_by(score, high, heat)), 0.0), 0)
            tl.store(tile_weight + at, weight)


@triton.jit
def _choose_kernel(
    logits, rows, settings, seen, counts, limits, tile_max, peak, cut, cut_id, tile_weight,
    tokens,  # [B] int64, out; `NO_TOKEN` where no token can be drawn, `NOTHING` where none is left
    row_tokens,  # [rows] int64, out
    row_lengths,  # [rows] int32, counted up
    num_tiles, padding_row,
    VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr,
    MAX_COUNT: tl.constexpr, NO_TOKEN: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    source = scoring(logits, rows, settings, seen, counts, limits, index, VOCAB_SIZE, SEEN_WORDS)
    _, own_settings, own_seen, own_counts, penalty, is_counted, num_banned, own_limits, is_masked, num_listed = source
    heat = real(own_settings, TEMPERATURE)
    high = tl.load(peak + index)
    now = wide(own_settings, STEP)
    noise_seed = wide(own_settings, SEED)
    tiles = tl.arange(0, TILES)
    listed = tiles < num_tiles
    highs = tl.load(tile_max + index * num_tiles + tiles, mask=listed, other=-float("inf"))
    arrival = highs
    if heat >= GREEDY:
        weight = tl.load(tile_weight + index * num_tiles + tiles, mask=listed, other=0.0)
        has_any = listed & (weight > 0)
        time = noise(noise_seed, now, VOCAB_SIZE + tiles) / tl.where(has_any, weight, 1.0)
        if keeps_all(own_settings, VOCAB_SIZE):
            time *= tl.exp(-scaled_by(highs, high, heat))  # from the tile's largest score to the row's
        arrival = tl.where(has_any, -time, -float("inf"))
    tile = winner(arrival, tiles, num_tiles - 1)
    ids = tile * TILE + tl.arange(0, TILE)
    score = load_scores(source, ids, VOCAB_SIZE)
    if heat >= GREEDY:
        own = finite(tl.max(tl.where(tiles == tile, highs, -float("inf")), 0))
        stays = keeps(score, ids, high, heat, real(own_settings, MIN_P), tl.load(cut + index), tl.load(cut_id + index))
        time = noise(noise_seed, now, ids) * tl.exp(-scaled_by(score, own, heat))
        score = tl.where(stays, -time, -float("inf"))
    # A tile's largest score says what is wrong with any of its logits, so looking for it reads nothing more.
    best = tl.max(highs, 0)
    is_sound = (best > -float("inf")) & (best < float("inf"))
    token = tl.where(is_sound, winner(score, ids, VOCAB_SIZE - 1), 0)
    is_narrowed = (num_banned > 0) | (is_masked != 0) | (num_listed > 0)
    without = tl.where((best == -float("inf")) & is_narrowed, NOTHING, NO_TOKEN)
    tl.store(tokens + index, tl.where(is_sound, token, without).to(tl.int64))
    tl.store(row_tokens + row, token.to(tl.int64))
    tl.store((own_settings + STEP).to(tl.pointer_type(tl.int64)), now + 1)
    if penalty != 1.0:
        word = own_seen + token // 32
        tl.store(word, tl.load(word) | (1 << (token % 32)))
    if is_counted != 0:
        own_count = own_counts + token
        tl.store(own_count, tl.minimum(tl.load(own_count).to(tl.int32) + 1, MAX_COUNT).to(tl.int16))
    num_bad_tokens = tl.load(own_settings + NUM_BAD_TOKENS)
    if num_bad_tokens > 0:
        advance_words(own_limits, token, now, num_bad_tokens, TILE)
    if row != padding_row:
        tl.store(row_lengths + row, tl.load(row_lengths + row) + 1)


def sample_rows(logits: torch.Tensor, rows: torch.Tensor, state, tokens: torch.Tensor) -> None:
    """Sample the next token of each row, and advance the rows' step, seen tokens, counts and bad words.

    logits: [B, vocab_size], packed; rows: [B] int32, rows of `state` (a `SamplingState`); tokens: [B] int64, out, also
    written to the rows' own tokens, but where there is none: a row goes on with token 0 then. The rows' lengths
    are incremented, except that of the last row, which is for padding.
    """
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and rows.dtype == torch.int32 and tokens.is_contiguous()
    # Another alignment would be another binary, and might sum in another order.
    assert logits.data_ptr() % 16 == 0, "logits must be aligned"
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(vocab_size, sampler.TILE_TOKENS)
    tile_max, tile_weight, *cuts = (state.space[name] for name in ("tile_max", "tile_weight", "peak", "cut", "cut_id"))
    sizes = dict(
        VOCAB_SIZE=vocab_size,
        SEEN_WORDS=state.seen.shape[1],
        TILE=sampler.TILE_TOKENS,
        GREEDY=GREEDY_TEMPERATURE,
        enable_fp_fusion=True,
    )
    tiles = dict(TILES=next_power_of_2(num_tiles))
    common = logits, rows, state.settings.words, state.seen, state.counts, state.limits.words, tile_max
    _tile_kernel[(num_rows, num_tiles)](*common, tile_weight, num_tiles, **sizes)
    _cut_kernel[(num_rows,)](*common, *cuts, num_tiles, **sizes, **tiles, num_warps=16)
    _cut_weight_kernel[(num_rows, min(CUT_PROGRAMS, num_tiles))](*common, *cuts, tile_weight, num_tiles, **sizes)
    _choose_kernel[(num_rows,)](
        *common, *cuts, tile_weight, tokens, state.rows.token, state.rows.length, num_tiles, state.rows.padding_row,
        **sizes, **tiles, MAX_COUNT=MAX_COUNT, NO_TOKEN=UNSOUND, NOTHING=NOTHING_LEFT,
    )  # fmt: skip
