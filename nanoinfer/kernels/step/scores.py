"""The settings of a row as the sampling kernels read them, and the scores of its tokens before any cut."""

import torch
import triton
import triton.language as tl

from nanoinfer.sampling.settings import ROW, ROW_WORDS


def _place(name: str) -> tl.constexpr:
    """Where a field of a row's settings lies, in words of 32 bits."""
    return tl.constexpr(ROW.fields[name][1] // 4)


SEED = _place("seed")
STEP = _place("step")
TEMPERATURE = _place("temperature")
TOP_P = _place("top_p")
MIN_P = _place("min_p")
REPETITION_PENALTY = _place("repetition_penalty")
PRESENCE_PENALTY = _place("presence_penalty")
FREQUENCY_PENALTY = _place("frequency_penalty")
TOP_K = _place("top_k")
IS_COUNTED = _place("is_counted")
BANNED_UNTIL = _place("banned_until")
NUM_BANNED = _place("num_banned")
BANNED_IDS = _place("banned_ids")
ROW_STRIDE = tl.constexpr(ROW_WORDS)
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
def scoring(logits, rows, settings, seen, counts, index, VOCAB_SIZE: tl.constexpr, SEEN_WORDS: tl.constexpr):
    """Return what `load_scores` reads for a row of the batch: its logits, settings, seen tokens and counts."""
    row = tl.load(rows + index).to(tl.int64)
    own = settings + row * ROW_STRIDE
    is_banning = wide(own, STEP) < tl.load(own + BANNED_UNTIL)
    num_banned = tl.where(is_banning, tl.load(own + NUM_BANNED), 0)
    return (
        logits + index * VOCAB_SIZE, own, seen + row * SEEN_WORDS, counts + row * VOCAB_SIZE,
        real(own, REPETITION_PENALTY), tl.load(own + IS_COUNTED), num_banned,
    )  # fmt: skip


@triton.jit
def load_scores(source, ids, VOCAB_SIZE: tl.constexpr):
    """Scores of token ids after repetition penalty (Keskar et al., 2019, section 4.1), frequency and presence penalty
    and bans; -inf beyond the vocabulary, and +inf for a logit of NaN or +inf and for no other one.

    source: `scoring` of the row.
    """
    logits, settings, seen, counts, penalty, is_counted, num_banned = source
    inside = ids < VOCAB_SIZE
    logit = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    score = logit
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
