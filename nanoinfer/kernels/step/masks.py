"""Masks of tokens in front of the sampling: a bit for each token that may come."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit(do_not_specialize_on_alignment=["lines"])
def apply_masks_kernel(
    lines,  # [n, 1 + ceil(VOCAB_SIZE / 32)] int32: row of the logits or -1, mask
    logits,  # [rows, VOCAB_SIZE]
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    line = lines + tl.program_id(0).to(tl.int64) * (1 + (VOCAB_SIZE + 31) // 32)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(line).to(tl.int64)
    inside = ids < tl.where(row >= 0, VOCAB_SIZE, 0)
    target = logits + row * VOCAB_SIZE + ids
    word = tl.load(line + 1 + ids // 32, mask=inside, other=-1)
    is_masked = inside & (((word >> (ids % 32)) & 1) == 0)
    logit = tl.load(target, mask=is_masked, other=0.0).to(tl.float32)
    # A logit of NaN or infinity stays: the sampling says that the row is unsound.
    tl.store(target, tl.full([TILE], -float("inf"), logits.dtype.element_ty), mask=is_masked & (logit < float("inf")))


def apply_masks(logits: Tensor, lines: Tensor) -> None:
    """Put -infinity into the logits of tokens that may not come, in place, but for those of NaN or infinity.

    logits: [rows, vocab_size], packed; lines: [n, 1 + ceil(vocab_size / 32)] int32, packed: a row of `logits`, each at
    most once, or -1 in a line without use, then a bit for each token that may come, the lowest of the first word
    first.
    """
    vocab_size = logits.shape[1]
    assert logits.is_contiguous() and lines.is_contiguous() and lines.shape[1] == 1 + (vocab_size + 31) // 32
    grid = len(lines), triton.cdiv(vocab_size, TILE)
    apply_masks_kernel[grid](lines, logits, VOCAB_SIZE=vocab_size, TILE=TILE, num_warps=4, enable_fp_fusion=True)
