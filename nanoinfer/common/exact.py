"""Products and elementwise functions on the CPU whose bits do not depend on what is computed beside them.

Libraries choose the order of a sum by the number of rows. They also give a value other bits in a whole vector than in
the rest behind the last whole vector. So nothing is computed at the size that happens to come: rows are padded to one
of a few counts that are known to agree, values are padded to whole vectors, and no call is so large that torch cuts it
among threads.

Sums over the last, contiguous dimension need no such care: torch adds up each row by itself (one row alone is cut among
threads, but only above 32,768 values). Neither do single additions, products, divisions and comparisons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_ROWS = 16
# A count of 4 makes one row alone cheaper: 9 ms instead of 14 for 16 rows (8192 x 2048 in float32, one core). A count
# of 1 would take 4 ms, but no library computes one row in the order of many. A count of 64 makes a prompt cheaper:
# 290 ms instead of 590 by 16, for 512 rows.
OTHER_ROWS = (4, 64)
# Size of the weight that the check uses in place of the real one: the check takes some 20 ms at most.
_CHECKED_ELEMENTS = 2**22
# Two vectors of 16-bit values, the step of torch's vectorised loops with AVX-512.
WIDTH = 64
# Torch gives a loop of up to 32,768 values to one thread.
MAX_ELEMENTS = 2**14


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, each row as if it were alone.

    x: [N, in_features]; weight: [out_features, in_features]; bias: [out_features]; the result: [N, out_features]; all
    on the CPU.
    """
    counts = row_counts(*weight.shape, weight.dtype, bias is not None, torch.get_num_threads())
    if len(x) <= counts[-1]:
        return _padded_linear(x, weight, bias, counts)
    parts = [_padded_linear(rows, weight, bias, counts) for rows in x.split(counts[-1])]
    return torch.cat(parts)


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
    num_rows = len(x)
    # A new tensor, for its alignment.
    padded = x.new_zeros(counts[bisect_left(counts, num_rows)], x.shape[1])
    padded[:num_rows] = x
    return F.linear(padded, weight, bias)[:num_rows]


@cache
def row_counts(
    out_features: int, in_features: int, dtype: torch.dtype, has_bias: bool, num_threads: int
) -> tuple[int, ...]:
    """Return the numbers of rows, ascending, at which a product of this shape gives a row the same bits at any place.

    They depend on the library and the processor, so they are found by trying, once in a process. Where not even a fixed
    number of rows gives equal bits at every place, the result is one row at a time: (1,).
    """
    out_features = min(out_features, max(16, _CHECKED_ELEMENTS // in_features))
    x, weight = sensitive_operands(out_features, in_features, dtype)
    bias = 1e-3 * torch.randn(out_features, generator=_generator()).to(dtype) if has_bias else None

    def products(num_rows: int) -> Tensor:
        return F.linear(x.expand(num_rows, -1).contiguous(), weight, bias)

    wanted = products(BASE_ROWS)
    if not torch.equal(wanted, wanted[:1].expand_as(wanted)):
        return (1,)
    agreeing = [n for n in OTHER_ROWS if torch.equal(products(n), wanted[:1].expand(n, -1))]
    return tuple(sorted([BASE_ROWS, *agreeing]))


def sensitive_operands(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a row and a weight whose exact product is zero: only rounding is left, which any other order changes."""
    generator = _generator()
    half = in_features // 2
    row, some = torch.randn(1, half, generator=generator), torch.randn(8, half, generator=generator)
    odd = in_features - 2 * half
    row, some = F.pad(torch.cat((row, row), 1), (0, odd)), F.pad(torch.cat((some, -some), 1), (0, odd))
    order = torch.randperm(in_features, generator=generator)
    # Without the factor of 256, float16 would round what is left to zero.
    x, some = (256 * row[:, order]).to(dtype), some[:, order].to(dtype)
    return x, some.repeat(-(-out_features // 8), 1)[:out_features].contiguous()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), each value as if it were alone, for a function of single values such as exp.

    The result is a new, contiguous tensor. Only the CPU needs this; elsewhere it is function(x).
    """
    if not x.is_cpu:
        return function(x)
    flat = x.reshape(-1)
    count = flat.numel()  # not len, which is slow in Python
    num_added = -count % WIDTH
    if num_added or flat.data_ptr() % WIDTH:
        flat = torch.constant_pad_nd(flat, (0, num_added))  # F.pad without its checks
    if flat.numel() <= MAX_ELEMENTS:
        found = function(flat)
    else:
        found = torch.cat([function(part) for part in flat.split(MAX_ELEMENTS)])
    return (found[:count] if num_added else found).view_as(x)
