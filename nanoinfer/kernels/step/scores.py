"""The settings of a row as the sampling kernels read them, and the scores of its tokens before any cut."""

import numpy as np
import torch
import triton
import triton.language as tl

from nanoinfer.sampling.limits import BEGINS_WORD, LISTED_BITS, MAX_BAD_TOKENS, line_type
from nanoinfer.sampling.settings import ROW, ROW_WORDS


def _offset(name: str, line: np.dtype = ROW) -> tl.constexpr:
    """Return where a field of a row's settings lies, or of its limits, in words of 32 bits."""
    return tl.constexpr(line.fields[name][1] // 4)


SEED = _offset("seed")
STEP = _offset("step")
TEMPERATURE = _offset("temperature")
TOP_P = _offset("top_p")
MIN_P = _offset("min_p")
REPETITION_PENALTY = _offset("repetition_penalty")
PRESENCE_PENALTY = _offset("presence_penalty")
FREQUENCY_PENALTY = _offset("frequency_penalty")
TOP_K = _offset("top_k")
IS_COUNTED = _offset("is_counted")
BANNED_UNTIL = _offset("banned_until")
NUM_BANNED = _offset("num_banned")
BANNED_IDS = _offset("banned_ids")
IS_MASKED = _offset("is_masked")
NUM_LISTED = _offset("num_listed")
NUM_BAD_TOKENS = _offset("num_bad_tokens")
ROW_STRIDE = tl.constexpr(ROW_WORDS)
_LINE = line_type(1)  # of any vocabulary: the masks come last, the one of listed tokens behind that of allowed ones
BIAS = _offset("bias", _LINE)
BLOCKED_AT = _offset("blocked_at", _LINE)
BAD_TOKENS = _offset("bad_tokens", _LINE)
BLOCKS = _offset("blocks", _LINE)
MATCHED = _offset("matched", _LINE)
ALLOWED = _offset("allowed", _LINE)
MATCHED_STRIDE = tl.constexpr(MAX_BAD_TOKENS)
LISTED_WIDTH = tl.constexpr(LISTED_BITS)
BEGINS = tl.constexpr(BEGINS_WORD)
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def real(settings, FIELD: tl.constexpr):
    """Load a float32 field. settings: pointer to a row's."""
    return tl.load(settings + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def wide(settings, FIELD: tl.constexpr):
    """Load an int64 field. settings: pointer to a row's."""
    return tl.load((settings + FIELD).to(tl.pointer_type(tl.int64)))


@triton.jit
def scoring(logits, rows, settings, seen, counts, limits, index, VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr):
    """Return what `load_scores` reads for a row of the batch: its logits, settings, seen tokens, counts and limits."""
    LIMIT_WORDS: tl.constexpr = ALLOWED + (VOCAB_SIZE + 31) // 32 + (VOCAB_SIZE + LISTED_WIDTH - 1) // LISTED_WIDTH
    row = tl.load(rows + index).to(tl.int64)
    own = settings + row * ROW_STRIDE
    is_banning = wide(own, STEP) < tl.load(own + BANNED_UNTIL)
    num_banned = tl.where(is_banning, tl.load(own + NUM_BANNED), 0)
    return (
        logits + index * VOCAB_SIZE, own, seen + row * SEEN_WORDS, counts + row * VOCAB_SIZE,
        real(own, REPETITION_PENALTY), tl.load(own + IS_COUNTED), num_banned,
        limits + row * LIMIT_WORDS, tl.load(own + IS_MASKED), tl.load(own + NUM_LISTED),
    )  # fmt: skip


@triton.jit
def _count_bits(x):
    """How many of the lowest 16 bits are set; the others must not be."""
    x = x - ((x >> 1) & 0x5555)
    x = (x & 0x3333) + ((x >> 2) & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
def advance_words(limits, token, step, num_bad_tokens, TILE: tl.constexpr):
    """Note which bad words the next token of a row would complete, behind the token that `step` has drawn.

    limits: pointer to a row's. Matches of even steps and of odd ones lie apart, so nothing is read that is written.
    """
    matched = (limits + MATCHED).to(tl.pointer_type(tl.int8))
    before = matched + (step % 2) * MATCHED_STRIDE
    after = matched + ((step + 1) % 2) * MATCHED_STRIDE
    for begin in range(0, num_bad_tokens, TILE):
        at = begin + tl.arange(0, TILE)
        inside = at < num_bad_tokens
        bad_token = tl.load(limits + BAD_TOKENS + at, mask=inside, other=0)
        begins = bad_token >= BEGINS
        goes_on = tl.load(before + at - 1, mask=inside & (at > 0), other=0) != 0
        matches = inside & (bad_token == tl.where(begins, token + BEGINS, token)) & (begins | goes_on)
        tl.store(after + at, matches.to(tl.int8), mask=inside)
        slot = tl.load((limits + BLOCKS).to(tl.pointer_type(tl.int16)) + at, mask=matches, other=-1).to(tl.int32)
        tl.store(limits + BLOCKED_AT + slot, (step + 1).to(tl.int32), mask=slot >= 0)


@triton.jit
def load_scores(source, ids, VOCAB_SIZE: tl.constexpr):
    """Scores of token ids after limits, repetition penalty (Keskar et al., 2019, section 4.1), frequency and presence
    penalty and bans; -inf beyond the vocabulary, and +inf for a logit of NaN or +inf and for no other one.

    source: `scoring` of the row.
    """
    logits, settings, seen, counts, penalty, is_counted, num_banned, limits, is_masked, num_listed = source
    inside = ids < VOCAB_SIZE
    logit = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    score = logit
    if num_listed > 0:
        word = tl.load(limits + ALLOWED + (VOCAB_SIZE + 31) // 32 + ids // LISTED_WIDTH, mask=inside, other=0)
        bit = ids % LISTED_WIDTH
        is_listed = ((word >> bit) & 1) != 0
        slot = (word >> LISTED_WIDTH) + _count_bits(word & ((1 << bit) - 1))
        bias = tl.load(limits.to(tl.pointer_type(tl.float32)) + BIAS + slot, mask=is_listed, other=0.0)
        step = tl.load(limits + BLOCKED_AT + slot, mask=is_listed, other=-1)
        is_blocked = is_listed & (step == wide(settings, STEP))
        score = tl.where(is_blocked, -float("inf"), score + bias)
    if is_masked != 0:
        word = tl.load(limits + ALLOWED + ids // 32, mask=inside, other=0)
        score = tl.where(((word >> (ids % 32)) & 1) != 0, score, -float("inf"))
    if penalty != 1.0:
        word = tl.load(seen + ids // 32, mask=inside, other=0)
        is_seen = ((word >> (ids % 32)) & 1) != 0
        score = tl.where(is_seen, tl.where(score > 0, score / penalty, score * penalty), score)
    if is_counted != 0:
        count = tl.load(counts + ids, mask=inside, other=0)
        # The fma keeps the compiler from choosing between one rounding and two: every launch must find the same score.
        score = tl.fma(count.to(tl.float32), -real(settings, FREQUENCY_PENALTY), score)
        score = tl.where(count > 0, score - real(settings, PRESENCE_PENALTY), score)
    if num_banned > 0:  # an empty loop would cost registers
        for i in range(num_banned):
            score = tl.where(ids == tl.load(settings + BANNED_IDS + i), -float("inf"), score)
    # -0.0 and 0.0 are one score. A penalty that makes a score too large must not make it +inf.
    return tl.where(logit < float("inf"), tl.minimum(score + 0.0, FLOAT32_MAX), float("inf"))
