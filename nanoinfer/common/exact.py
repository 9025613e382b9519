"""Products and elementwise functions on the CPU whose bits do not depend on what is computed beside them.

Libraries choose the order of a sum by the number of rows. They also give a value other bits in a whole vector than in
the rest behind the last whole vector. So nothing is computed at the size that happens to come: rows are padded to one
of a few counts that are known to agree, values are padded to whole vectors, and no call is so large that torch cuts it
among threads.

Sums over the last, contiguous dimension need no such care: torch adds up each row by itself (one row alone is cut among
threads, but only above 32,768 values). Neither do single additions, products, divisions and comparisons.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
# Elements of the weights that differ from each other. Small weights are tried with several, up to `_MOST_TRIALS`.
_DISTINCT_ELEMENTS = 2**16
_MOST_TRIALS = 64
# Elements of a weight for each thread. On two busy cores two threads took 2.7 times as long as one for weights of
# 16,384 elements, half as long for 1,769,472 (576 x 3072).
_ELEMENTS_PER_THREAD = 2**19
# Of weights that are widened, at a time.
_WIDENED_ELEMENTS = 2**19
# Where torch's allocator begins tensors, in bytes.
_ALIGNMENT = 64
# Two vectors of 16-bit values, the step of torch's vectorised loops with AVX-512.
WIDTH = 64
# Torch gives a loop of up to 32,768 values to one thread.
MAX_ELEMENTS = 2**14
# By thread that is within `threads`: the number before the outermost one, and the number now.
_inside: dict[int, tuple[int, int]] = {}
_lock = threading.RLock()  # the garbage collector may enter an engine anywhere


def num_threads(num_elements: int) -> int:
    """Return with how many threads a model computes on the CPU. num_elements: of the largest weight in its layers.

    How a library cuts a product among threads changes bits, so the number depends on the model's shape, and on how many
    threads torch may use in this process (the processor's cores, unless OMP_NUM_THREADS or `torch.set_num_threads` says
    otherwise). Neither the rows of a step nor what else runs on the machine matters. Small products have one thread: on
    a busy machine each would wait until the other threads have had their turn.
    """
    return max(1, min(_usual_threads(), num_elements // _ELEMENTS_PER_THREAD))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute with `count` threads in this thread, and as before afterwards. It takes a microsecond."""
    caller = threading.get_ident()
    before, held = _usual_threads(), _inside.get(caller)
    try:
        with _lock:
            _inside[caller] = before if held is None else held[0], count
            torch.set_num_threads(count)
        yield
    finally:
        with _lock:
            torch.set_num_threads(before)
            if held is None:
                _inside.pop(caller, None)
            else:
                _inside[caller] = held


def _usual_threads() -> int:
    """Return the number of threads that torch would use here if no other thread were within `threads`.

    Torch gives a thread that is new to it the number that any thread has set last.
    """
    with _lock:
        own = torch.get_num_threads()
        if threading.get_ident() in _inside:
            return own
        return next((before for before, count in list(_inside.values()) if count == own), own)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    row_sizes: Sequence[int] = (),
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias, each row as if it were alone.

    x: [N, in_features]; weight: [out_features, in_features]; bias: [out_features]; the result: [N, out_features], in
    `out` if that is given; all on the CPU. row_sizes: so many neighbouring rows of the weight are a product of their
    own each, whose bits depend on nothing else: a library chooses the order of sums by the shape. (): all are one.
    """
    if len(row_sizes) > 1:
        out, begin = x.new_empty(len(x), len(weight)) if out is None else out, 0
        for size in row_sizes:
            rows, begin = slice(begin, begin + size), begin + size
            out[:, rows] = linear(x, weight[rows], None if bias is None else bias[rows])
        return out
    if out is not None:
        return out.copy_(linear(x, weight, bias))
    if weight.data_ptr() % _ALIGNMENT:  # as a library may choose by this, too
        weight = weight.clone()
    counts = row_counts(*weight.shape, weight.dtype, bias is not None, torch.get_num_threads())
    if len(x) <= counts[-1]:
        return _padded_linear(x, weight, bias, counts)
    parts = [_padded_linear(rows, weight, bias, counts) for rows in x.split(counts[-1])]
    return torch.cat(parts)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of values widened to float32, not rounded, as `linear`: [N, out_features] float32.

    weight: [out_features, in_features], which may be columns of a matrix: some rows at a time are widened, or copied,
    which a processor's cache holds. So how they lie changes no bit.
    """
    x, step = x.float(), max(1, _WIDENED_ELEMENTS // weight.shape[1])
    products = [linear(x, some.float().contiguous()) for some in weight.split(step)]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


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
    number of rows gives equal bits at every place, the result is one row at a time: (1,). So it is for one and two
    columns, of which no operands could show an order.
    """
    if in_features < 3:
        return (1,)
    out_features = min(out_features, max(16, _CHECKED_ELEMENTS // in_features))
    num_trials = min(_MOST_TRIALS, max(1, _DISTINCT_ELEMENTS // (out_features * in_features)))
    x, weights = sensitive_operands(num_trials * out_features, in_features, dtype)
    trials = [weight.clone() for weight in weights.split(out_features)]  # aligned as a model's weights are
    # Small, so that it does not round away what is left of a sum.
    bias = (1e-4 * torch.randn(out_features, generator=_generator())).to(dtype) if has_bias else None

    def products(num_rows: int) -> Tensor:
        return torch.cat([F.linear(x.expand(num_rows, -1).contiguous(), weight, bias) for weight in trials], 1)

    wanted = products(BASE_ROWS)
    if not torch.equal(wanted, wanted[:1].expand_as(wanted)):
        return (1,)
    agreeing = [n for n in OTHER_ROWS if torch.equal(products(n), wanted[:1].expand(n, -1))]
    return tuple(sorted([BASE_ROWS, *agreeing]))


def sensitive_operands(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a row and a weight whose products show by their bits in which order they were summed.

    Each sum has pairs of terms that cancel, at places and of magnitudes that differ from output to output, and one or
    two small terms. What the small ones leave depends on what was added before them. The magnitudes span as many bits
    as a float32 sum keeps: products of two 16-bit values fill 16 or 22 of its 24 bits, so sums of a few terms of like
    size would be exact, and the same in any order. One or two terms have no order.

    Returns: [1, in_features] and [out_features, in_features], of `dtype`, on the CPU.
    """
    generator = _generator()
    num_distinct = min(out_features, max(8, _DISTINCT_ELEMENTS // in_features))
    # float16 has normal numbers down to 2^-14. Its products are longer, so less of a span does.
    span, least = (12, 14) if dtype == torch.float16 else (24, 24)
    num_pairs = (in_features - 1) // 2

    def draw(columns: int) -> Tensor:
        return torch.rand(num_distinct, columns, generator=generator)

    large = (1 + draw(num_pairs)) * torch.exp2(-((span + 1) * draw(num_pairs)).floor())
    small = (1 + draw(in_features - 2 * num_pairs)) * 2.0**-least
    some = torch.cat((large, -large, small), 1).gather(1, draw(in_features).argsort(1)).to(dtype)
    # Equal values, so that any two terms may cancel; all bits of their mantissa matter. Without the factor of 256,
    # float16 would round what is left of a sum to zero.
    x = torch.full((1, in_features), 256 * 1.7109376).to(dtype)
    return x, some.repeat(-(-out_features // num_distinct), 1)[:out_features].contiguous()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), each value as if it were alone, for a function of single values such as exp.

    The result is a new, contiguous tensor. Only the CPU needs this; elsewhere it is function(x).
    """
    if not x.is_cpu:
        return function(x)
    flat = x.reshape(-1).contiguous()  # a column stays a view, whose values torch computes one by one
    count = flat.numel()  # not len, which is slow in Python
    num_added = -count % WIDTH
    if num_added or flat.data_ptr() % WIDTH:
        flat = torch.constant_pad_nd(flat, (0, num_added))  # F.pad without its checks
    if flat.numel() <= MAX_ELEMENTS:
        values = function(flat)
    else:
        values = torch.cat([function(part) for part in flat.split(MAX_ELEMENTS)])
    return (values[:count] if num_added else values).view_as(x)
