"""Pick the next tokens from the logits, on the device, without a host synchronisation.

A row's token depends only on that row's logits, settings, seed and step: never on its place in the batch, its
neighbours or the batch's size. So top_p sums integers, whose order does not matter, one program adds up a tile's
weights, and the noise is a hash of (seed, step, id) instead of a generator's next numbers.

Order, as in vLLM: limits (`nanoinfer.sampling.limits`), repetition penalty, frequency and presence penalty, and bans.
Then greedy rows take the argmax. The other rows are divided by the temperature, cut by min_p, top_k and top_p (each on
what the previous cut left), and drawn by exponential races: argmin(e / p) with standard exponential noise e is a sample
of p. This is the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014: argmax(log p - log e)) with one logarithm less.
The first race is between tiles of the vocabulary, by the sums of their weights, the second between the tokens of the
winning tile. So noise is drawn for few tokens.
"""

import torch
import torch.nn.functional as F

from nanoinfer.common.exact import elementwise
from nanoinfer.sampling.limits import BEGINS_WORD, LISTED_BITS, MAX_BAD_TOKENS, NO_SLOT
from nanoinfer.sampling.settings import (
    MAX_BANNED,
    MAX_COUNT,
    NOTHING_LEFT,
    TILE_TOKENS,
    UNSOUND,
    SamplingBatch,
    SettingsTable,
    limits_table,
)
from nanoinfer.sampling_params import GREEDY_TEMPERATURE

# Elements of the rows that are filtered at a time: 13 rows of a vocabulary of 150,000.
CHUNK_ELEMENTS = 2**21
# Per element of a chunk: its rows, sorted values and ids, fixed-point weights, their sums, and the sort's own buffers.
# `topk` of few rows sorts too.
_SORT_BYTES_PER_ELEMENT = 64
# Per element of all rows: logits in float32, a mask of unsound ones and, with penalties, the scores, the seen tokens
# and counts.
_REFERENCE_BYTES_PER_ELEMENT = 13
# Probabilities relative to the likeliest token's, in units of 2^-40; sums of up to 2^22 of them stay below 2^63.
_FIXED_POINT_ONE = 2.0**40
_MAX_VOCAB_SIZE = 2**22

_MASK_32 = 0xFFFFFFFF


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Next tokens, on the current stream.

    logits: [B, V] float32; not changed.
    Returns: [B] int64, on the same device; `UNSOUND` for a row with a logit of NaN or infinity, or without any above
    -infinity; `NOTHING_LEFT` where bans and limits left none above -infinity.
    """
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}, the sampler takes float32"
    num_rows = len(batch.settings.words)
    assert logits.shape == (num_rows, batch.vocab_size), (
        f"logits have shape {tuple(logits.shape)}, the batch is {num_rows} x {batch.vocab_size}"
    )
    scores = penalise(logits, batch)
    greedy = tokens = scores.argmax(dim=-1)
    best = scores.gather(1, greedy[:, None])[:, 0]
    without = torch.where((best == -torch.inf) & batch.is_narrowed, NOTHING_LEFT, UNSOUND)
    if not batch.is_greedy.all():
        scores = cut(scores, batch, owned=scores is not logits)
        tokens = torch.where(batch.is_greedy, greedy, _draw(scores, batch))
    return torch.where(best.isfinite(), tokens, without)


def sample_rows(logits: torch.Tensor, rows: torch.Tensor, state, tokens: torch.Tensor) -> None:
    """Sample the next token of each row, as the kernels do it (`nanoinfer.kernels.step.sample`).

    logits: [B, vocab_size]; rows: [B] int32, rows of `state` (a `SamplingState`); tokens: [B] int64, out, as `sample`
    returns; a row without one goes on with token 0.
    """
    batch, rows = gather(state, rows), rows.long()
    tokens.copy_(sample(logits.float(), batch))
    tokens = tokens.clamp(min=0)
    state.rows.token.index_copy_(0, rows, tokens)
    state.settings["step"].index_copy_(0, rows, batch.settings["step"] + 1)
    for row in batch.penalty_rows.tolist():
        token = int(tokens[row])
        bit = token % 32
        state.seen[rows[row], token // 32] |= 1 << bit if bit < 31 else -(2**31)  # as an int32
    if len(batch.counted_rows):
        counted = rows[batch.counted_rows], tokens[batch.counted_rows]
        state.counts[counted] = (state.counts[counted].int() + 1).clamp(max=MAX_COUNT).to(torch.int16)
    for row in batch.limited_rows.tolist():
        step, num_bad_tokens = (int(batch.settings[name][row]) for name in ("step", "num_bad_tokens"))
        _advance_words(state.limits, int(rows[row]), int(tokens[row]), step, num_bad_tokens)
    lengths, is_real = state.rows.length, (rows != state.rows.padding_row).to(torch.int32)
    lengths.index_copy_(0, rows, lengths[rows] + is_real)


def apply_masks(logits: torch.Tensor, lines: torch.Tensor) -> None:
    """Put -infinity into the logits of tokens that may not come, as `nanoinfer.kernels.step.masks` does."""
    lines = lines[lines[:, 0] >= 0]
    rows = lines[:, 0].long()
    chosen = logits[rows]
    stays = _bits(lines[:, 1:])[:, : logits.shape[1]] | ~(chosen < torch.inf)
    logits[rows] = chosen.masked_fill_(~stays, -torch.inf)


def gather(state, rows: torch.Tensor) -> SamplingBatch:
    """Return rows of `state` (a `SamplingState`), [B] int32. This reads the state, so it waits for the device."""
    rows, vocab_size = rows.long(), state.counts.shape[1]
    settings = SettingsTable(state.settings.words[rows])
    penalised = (settings["repetition_penalty"] != 1).nonzero()[:, 0]
    counted = settings["is_counted"].nonzero()[:, 0]
    listed = torch.arange(MAX_BANNED, device=rows.device) < settings["num_banned"][:, None]
    banned = (listed & (settings["step"] < settings["banned_until"])[:, None]).nonzero()
    limited = ((settings["is_masked"] != 0) | (settings["num_listed"] > 0)).nonzero()[:, 0]
    return SamplingBatch(
        vocab_size=vocab_size,
        settings=settings,
        penalty_rows=penalised,
        seen=_bits(state.seen[rows[penalised]])[:, :vocab_size],
        counted_rows=counted,
        counts=state.counts[rows[counted]],
        banned_rows=banned[:, 0],
        banned_ids=settings["banned_ids"][banned[:, 0], banned[:, 1]].long(),
        limited_rows=limited,
        limits=limits_table(state.limits.words[rows[limited]], vocab_size),
    )


def _advance_words(limits: SettingsTable, row: int, token: int, step: int, num_bad_tokens: int) -> None:
    """Note in a row's line which bad words its next token would complete, behind the token that `step` has drawn."""
    bad_tokens, blocks = limits["bad_tokens"][row, :num_bad_tokens], limits["blocks"][row, :num_bad_tokens].long()
    matched = limits["matched"][row].view(2, MAX_BAD_TOKENS)[:, :num_bad_tokens]
    begins = bad_tokens >= BEGINS_WORD
    goes_on = F.pad(matched[step % 2], (1, 0))[:-1] != 0
    matches = (bad_tokens - begins.int() * BEGINS_WORD == token) & (begins | goes_on)
    matched[(step + 1) % 2].copy_(matches)
    limits["blocked_at"][row][blocks[matches & (blocks != NO_SLOT)]] = step + 1


def _narrow(scores: torch.Tensor, limits: SettingsTable, row: int, step: torch.Tensor, is_masked: torch.Tensor) -> None:
    """Add a row's biases to its scores, and put -infinity where it may not draw. scores: [V]; row: of the limits."""
    listed = limits["listed"][row][:, None] >> torch.arange(LISTED_BITS, device=scores.device) & 1
    ids = listed.flatten().nonzero()[:, 0]  # in the order of their slots
    scores[ids] += limits["bias"][row, : len(ids)]
    scores[ids[limits["blocked_at"][row, : len(ids)] == step]] = -torch.inf
    if is_masked:
        scores[~_bits(limits["allowed"][row][None])[0, : len(scores)]] = -torch.inf


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities from the raw logits (before penalties, temperature and cuts), as vLLM returns them.

    logits: [B, V] float32; tokens: [B] int64, the sampled ones; top: how many of the likeliest tokens, 0 for none.
    Returns:
        chosen [B] float32; rank [B] int64, 1 for the likeliest; top_values [B, top] float32, descending;
        top_ids [B, top] int64.
    """
    parts, num_chunk_rows = [], _chunk_rows(logits.shape[1])
    for chunk, chunk_tokens in zip(logits.split(num_chunk_rows), tokens.split(num_chunk_rows), strict=True):
        # Not logsumexp: how its reduction on CUDA is split, and so rounded, depends on the number of rows. That of
        # log_softmax depends on where a row begins: at a multiple of 16 bytes, if need be by tokens that never come.
        num_more = -logits.shape[1] % 4
        padded = F.pad(chunk, (0, num_more), value=-torch.inf) if num_more else chunk
        logprobs = torch.log_softmax(padded, dim=-1)[:, : logits.shape[1]]
        chosen = logprobs.gather(1, chunk_tokens[:, None])
        # The rank comes from the logits: log_softmax may round two of them to one value.
        rank = (chunk > chunk.gather(1, chunk_tokens[:, None])).sum(dim=-1) + 1
        top_ids = _sort_keys(logprobs).topk(top, dim=-1).indices
        parts.append((chosen[:, 0], rank, logprobs.gather(1, top_ids), top_ids))
    chosen, rank, top_values, top_ids = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, rank, top_values, top_ids


def _sort_keys(values: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of `values`; of equal values the lower id has the larger: [B, V] float32 -> int64.

    Without this, which of equal values `topk` takes depends on how many it takes, and so on what other rows ask for.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers: the larger the magnitude, the smaller
    return (bits.long() << 32) - torch.arange(values.shape[1], device=values.device)


def sampling_workspace(max_batch: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate what the kernels' launches pass to each other, for batches of up to `max_batch` rows."""
    by_tile = max_batch, -(-vocab_size // TILE_TOKENS)
    floats, integers = dict(dtype=torch.float32, device=device), dict(dtype=torch.int32, device=device)
    return {
        "tile_max": torch.empty(by_tile, **floats),
        "tile_weight": torch.empty(by_tile, **floats),
        "peak": torch.empty(max_batch, **floats),
        "cut": torch.empty(max_batch, **integers),
        "cut_id": torch.empty(max_batch, **integers),
    }


def workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the most bytes that `sample` takes temporarily, beside logits of any type; the kernels need none."""
    return _REFERENCE_BYTES_PER_ELEMENT * num_rows * vocab_size + logprobs_bytes(num_rows, vocab_size)


def logprobs_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the most bytes that `logprobs_of` takes temporarily, beside the float32 logits."""
    return _SORT_BYTES_PER_ELEMENT * min(num_rows, _chunk_rows(vocab_size)) * vocab_size


def exponential_noise(seed: torch.Tensor, step: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard exponential noise, a pure function of (seed, step, id); the reference of the Triton kernel.

    seed, step: [B] int64; ids: [n] or [B, n] int64, below 2^32: token ids, followed by tile ids. Returns: [B, n]
    float32.
    """
    bits = _noise_bits(seed, step, ids)
    # u in (0, 1). -log(1 - u): the smallest noise, which decides the draw, comes from small u, where floats are dense;
    # near 1 they would have steps of 6e-8, and large vocabularies would draw ties.
    u = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))  # of -log(1 - u); its error at 2^-6 is below 2e-8
    return torch.where(u < 2.0**-6, series, -elementwise(torch.log, 1 - u))


def _bits(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of each row, the lowest of the first word first: [n, words] int32 -> [n, 32 * words] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (words.view(torch.uint8)[:, :, None] >> shifts).bitwise_and_(1).flatten(1).view(torch.bool)


def _chunk_rows(vocab_size: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab_size)


def penalise(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Apply limits, repetition penalty (CTRL, section 4.1), frequency and presence penalty and bans.

    The score of a logit of NaN or infinity is infinity, banned or not, and no other one is.
    Returns `logits` itself if there is nothing to apply.
    """
    is_unsound = (logits < torch.inf).logical_not_()
    applied = batch.penalty_rows, batch.counted_rows, batch.banned_ids, batch.limited_rows
    if not any(map(len, applied)) and not is_unsound.any():
        return logits
    scores, settings = logits.clone(), batch.settings
    num_chunk_rows = _chunk_rows(batch.vocab_size)
    for index, row in enumerate(batch.limited_rows.tolist()):
        _narrow(scores[row], batch.limits, index, settings["step"][row], settings["is_masked"][row])
    for rows, seen in zip(batch.penalty_rows.split(num_chunk_rows), batch.seen.split(num_chunk_rows), strict=True):
        score, penalty = scores[rows], settings["repetition_penalty"][rows, None]
        scores[rows] = torch.where(seen, torch.where(score > 0, score / penalty, score * penalty), score)
    for rows, counts in zip(batch.counted_rows.split(num_chunk_rows), batch.counts.split(num_chunk_rows), strict=True):
        score = scores[rows] - settings["frequency_penalty"][rows, None] * counts.float()
        scores[rows] = torch.where(counts > 0, score - settings["presence_penalty"][rows, None], score)
    scores[batch.banned_rows, batch.banned_ids] = -torch.inf
    return scores.clamp_(max=torch.finfo(scores.dtype).max).masked_fill_(is_unsound, torch.inf)


def cut(scores: torch.Tensor, batch: SamplingBatch, owned: bool) -> torch.Tensor:
    """Put -inf where min_p, top_k or top_p drop a token; in place if `scores` is `owned`."""
    min_p_rows, sort_rows, settings = batch.min_p_rows, batch.sort_rows, batch.settings
    if not len(min_p_rows) and not len(sort_rows):
        return scores
    if not owned:
        scores = scores.clone()
    num_chunk_rows = _chunk_rows(batch.vocab_size)
    # Chunks of rows: a sort takes many times the memory of its input.
    for rows in min_p_rows.split(num_chunk_rows) if len(min_p_rows) else ():
        scores[rows] = _cut_min_p(scores[rows], settings["temperature"][rows], settings["min_p"][rows])
    for rows in sort_rows.split(num_chunk_rows) if len(sort_rows) else ():
        temperature, top_k, top_p = (settings[name][rows] for name in ("temperature", "top_k", "top_p"))
        scores[rows] = _cut_top_k_top_p(scores[rows], temperature, top_k.long(), top_p)
    return scores


def _scaled(scores: torch.Tensor, row_max: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(scores - row_max) times 1 / temperature: at most 0, never NaN. The difference comes first, so nothing cancels.

    scores: [R, V]; row_max: [R, 1]; temperature: [R].
    """
    row_max = torch.where(row_max == -torch.inf, 0, row_max)  # a row of only -inf stays one
    temperature = torch.where(temperature < GREEDY_TEMPERATURE, 1, temperature)  # greedy rows: the result is unused
    return torch.where(scores == row_max, 0, (scores - row_max) * (1 / temperature)[:, None])


def _cut_min_p(scores: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """scores: [R, V]; temperature, min_p: [R]. Keeps probabilities of at least min_p times the largest one."""
    relative = elementwise(torch.exp, _scaled(scores, scores.amax(dim=-1, keepdim=True), temperature))
    return scores.masked_fill_(relative < min_p[:, None], -torch.inf)


def _cut_top_k_top_p(
    scores: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """scores: [R, V]; the others: [R].

    top_k keeps what equals the k-th score, as vLLM does; of equal scores top_p takes lower token ids first.
    """
    vocab_size = scores.shape[1]
    assert vocab_size <= _MAX_VOCAB_SIZE, f"sums over {vocab_size} tokens may overflow, {_MAX_VOCAB_SIZE} do not"
    # Only a stable sort has one right answer, whatever the number of rows.
    ordered, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k <= 0, vocab_size, top_k.clamp(max=vocab_size))
    kth_score = ordered.gather(1, k[:, None] - 1)
    ordered.masked_fill_(ordered < kth_score, -torch.inf)
    # Fixed point: how a float sum on CUDA is split, and so rounded, depends on the number of rows.
    relative = elementwise(torch.exp, _scaled(ordered, ordered[:, :1], temperature))
    weights = relative.mul_(_FIXED_POINT_ONE).to(torch.int64)
    sum_before = weights.cumsum(dim=-1)
    total = sum_before[:, -1].to(torch.float64)
    sum_before -= weights
    # A token stays if those before it have not reached top_p; the first one always stays.
    limit = (top_p.to(torch.float64) * total).ceil().to(torch.int64).clamp(min=1)
    limit = torch.where(top_p >= 1, torch.iinfo(torch.int64).max, limit)
    ordered.masked_fill_(sum_before >= limit[:, None], -torch.inf)
    return scores.scatter_(1, token_ids, ordered)


def _draw(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw from softmax(scores / temperature): [B] int64."""
    values = scores, *(batch.settings[name] for name in ("temperature", "seed", "step"))
    chunks = (value.split(_chunk_rows(batch.vocab_size)) for value in values)
    return torch.cat([_race(*chunk) for chunk in zip(*chunks, strict=True)])


def _race(scores: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the winning token of each row's winning tile. scores: [R, V]; other arguments and result: [R]."""
    num_rows, vocab_size = scores.shape
    width = min(TILE_TOKENS, vocab_size)
    num_tiles = -(-vocab_size // width)
    beyond = num_tiles * width - vocab_size
    tiles = F.pad(scores, (0, beyond), value=-torch.inf).view(num_rows, num_tiles, width)
    highs = tiles.amax(dim=-1)
    scaled = _scaled(tiles.flatten(0, 1), highs.view(-1, 1), temperature.repeat_interleave(num_tiles)).view_as(tiles)
    tile = torch.zeros_like(seed)
    if num_tiles > 1:
        shares = elementwise(torch.exp, _scaled(highs, highs.amax(dim=-1, keepdim=True), temperature))
        weights = elementwise(torch.exp, scaled).sum(dim=-1) * shares
        tile_ids = torch.arange(vocab_size, vocab_size + num_tiles, device=scores.device)
        tile = (exponential_noise(seed, step, tile_ids) / weights).argmin(dim=-1)
    ids = tile[:, None] * width + torch.arange(width, device=scores.device)
    chosen = scaled[torch.arange(num_rows, device=scores.device), tile]
    token = (exponential_noise(seed, step, ids) * elementwise(torch.exp, -chosen)).argmin(dim=-1)
    return tile * width + token


def _noise_bits(seed: torch.Tensor, step: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """32 random bits per (seed, step, id), as [B, n] int64 in [0, 2^32).

    The row's key is two steps of splitmix64 (Steele et al., 2014); its halves key two rounds of murmur3's 32-bit
    finaliser (Appleby, 2011) over the id.
    """
    key = _splitmix64(_splitmix64(seed) + _signed(0x9E3779B97F4A7C15) * (step + 1))
    low, high = key & _MASK_32, (key >> 32) & _MASK_32
    bits = _fmix32((ids * 0x9E3779B1 + low[:, None]) & _MASK_32)
    return _fmix32(bits ^ high[:, None])


def _signed(value: int) -> int:
    """Return the 64 bits of an unsigned constant as torch's int64 holds them; int64 arithmetic wraps around."""
    return value - 2**64 if value >= 2**63 else value


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    # >> copies the sign bit, so what came from it is masked away.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def _fmix32(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK_32
    return x ^ (x >> 16)
