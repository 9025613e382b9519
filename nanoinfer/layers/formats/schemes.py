"""Quantising a weight: the tensors that compressed-tensors keeps of it, worked out from the weight alone.

Codes are symmetric: integers of 4 bits in words of 32, integers of 8 in words or in bytes, or numbers of 8 bits (e4m3).

Rows do not depend on each other, and every step is a single operation in float32 or a sum in a stated order. So the
result has the same bits on every device, and for rows alone or in a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nanoinfer.layers.formats.bits import pack, row_bytes
from nanoinfer.layers.formats.scaled import PackedScaled

# Rows are quantised some at a time: so that what lies between stays in the cache of a CPU, and keeps a GPU busy.
_WEIGHTS_AT_ONCE = {"cpu": 2**18}
_WEIGHTS_AT_ONCE_ELSEWHERE = 2**21
# A scale below this would be rounded to zero; float16 keeps numbers below its normal ones.
_SMALLEST_SCALE = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
_LARGEST_CODES = {("int", 4): 8, ("int", 8): 127, ("fp8", 8): torch.finfo(torch.float8_e4m3fn).max}
# Quarters from 7 (the largest code, so that nothing is cut) to 11.5 (where 0.61 of the largest magnitude is kept).
_DIVISORS = tuple(7 + quarter / 4 for quarter in range(19))


def stored(weights: PackedScaled, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor that a checkpoint holds for a weight, by the end of its name.

    shape: of the weight, [num_rows, in_features].
    """
    packing, (num_rows, in_features) = weights.packing, shape
    scales = ((num_rows, packing.num_groups(in_features)), packing.scale_dtype)
    if weights.words != torch.int32:
        return {weights.codes_name: (shape, weights.words), weights.scales_name: scales}
    words = ((num_rows, row_bytes(in_features, packing.bits) // 4), torch.int32)
    return {weights.codes_name: words, weights.scales_name: scales, "weight_shape": ((2,), torch.int64)}


def quantise(
    pieces: Iterable[Tensor], shape: tuple[int, int], weights: PackedScaled, device: torch.device | str
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint for a weight of floating-point values, by the ends of their names.

    A scale of 8 bits is the largest magnitude of a row over the largest code. One of 4 bits is found by least squares
    (`_least_squares`). Scales are rounded to their dtype before codes are chosen.

    pieces: of some rows each, in their order, on the device; shape: of all rows, [num_rows, in_features].

    Raises:
        ValueError: a weight is NaN or infinite, or would become so; the message follows the tensor's name.
    """
    found = {
        ending: torch.empty(size, dtype=dtype, device=device)
        for ending, (size, dtype) in stored(weights, shape).items()
    }
    if "weight_shape" in found:
        found["weight_shape"].copy_(torch.tensor(shape))
    codes, scales, begin = found[weights.codes_name], found[weights.scales_name], 0
    largest_scale = torch.finfo(scales.dtype).max / _LARGEST_CODES[weights.packing.kind, weights.packing.bits]
    step = max(1, _WEIGHTS_AT_ONCE.get(codes.device.type, _WEIGHTS_AT_ONCE_ELSEWHERE) // shape[1])
    for piece in pieces:
        for rows in piece.split(step):
            rows = rows.float()
            if not bool(torch.isfinite(rows).all()):
                raise ValueError("holds NaN or infinite weights, which cannot be quantised")
            groups, end = rows.unflatten(1, (-1, weights.packing.columns or shape[1])), begin + len(rows)
            codes[begin:end], scales[begin:end] = _codes_and_scales(groups, weights)
            is_small = bool((scales[begin:end].float() <= largest_scale).all())
            if not is_small and not _are_finite(groups, scales[begin:end], weights):
                dtype = str(scales.dtype)[6:]
                raise ValueError(
                    f"holds weights too large for scales in {dtype}, the dtype that config.json gives: they would "
                    "become infinite"
                )
            begin = end
    return found


def _are_finite(groups: Tensor, scales: Tensor, weights: PackedScaled) -> bool:
    """Whether what these scales make of weights is finite: integers may be below the largest; of e4m3 none is."""
    codes = _integers(groups, scales, 2 ** (weights.packing.bits - 1))
    is_finite = torch.isfinite((codes * scales.float().unsqueeze(-1)).to(scales.dtype))
    return weights.packing.kind == "int" and bool(is_finite.all())


def _codes_and_scales(groups: Tensor, weights: PackedScaled) -> tuple[Tensor, Tensor]:
    """[n, num_groups, columns] float32 -> codes as they are stored, [n, words], and scales [n, num_groups]."""
    bits, scale_dtype, largest = weights.packing.bits, weights.packing.scale_dtype, groups.abs().amax(-1)
    if weights.packing.kind == "fp8":
        top = torch.finfo(torch.float8_e4m3fn).max
        scales = _rounded(_over(largest, top), scale_dtype)
        return _divided(groups, scales).clamp_(-top, top).to(torch.float8_e4m3fn).flatten(1), scales
    middle = 2 ** (bits - 1)
    if bits == 4:
        scales = _least_squares(groups, largest, scale_dtype)
    else:
        scales = _rounded(_over(largest, 127), scale_dtype)
    signed = _integers(groups, scales, middle)
    if weights.words != torch.int32:
        return signed.to(torch.int8).flatten(1), scales
    codes = (signed + middle).to(torch.uint8).flatten(1)
    padding = row_bytes(codes.shape[1], bits) * 8 // bits - codes.shape[1]
    packed = pack(torch.nn.functional.pad(codes, (0, padding)), bits)
    return packed.contiguous().view(torch.int32), scales


def _least_squares(groups: Tensor, largest: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return for each group the scale with the least squared error, of the largest magnitude over each divisor.

    The search is that of llm-compressor's MSE observer
    (https://github.com/vllm-project/llm-compressor/blob/main/src/llmcompressor/observers/mse.py), with squares, and
    with the error of what a scale's rounding makes of the weights. The first of equals counts, so the plain scale, over
    7, gives way only to a better one; compressed-tensors' own, over 7.5, is among the others. Codes are -8 to 7.
    """
    best, best_error = None, None
    for divisor in _DIVISORS:
        scales = _rounded(_over(largest, divisor), scale_dtype)
        wide = scales.float().unsqueeze(-1)
        error = _integers(groups, scales, 8).mul_(wide)
        if scale_dtype != torch.float32:
            error = error.to(scale_dtype).float()
        error = _sums(error.sub_(groups).square_())
        if best is None:
            best, best_error = scales, error
            continue
        is_better = error < best_error
        best, best_error = torch.where(is_better, scales, best), torch.where(is_better, error, best_error)
    return best


def _sums(values: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, by halves: an order that no device changes."""
    while (half := values.shape[-1] // 2) > 0:
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def _over(largest: Tensor, divisor: float) -> Tensor:
    """Divide. By a plain number torch would multiply with its reciprocal on a GPU, which rounds twice."""
    return largest / torch.full((), divisor, device=largest.device)


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.to(dtype).clamp_(min=_SMALLEST_SCALE[dtype])


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    return groups / scales.float().unsqueeze(-1)


def _integers(groups: Tensor, scales: Tensor, middle: int) -> Tensor:
    """Return the nearest codes, with a sign, as float32; of two equally near ones the even one."""
    return _divided(groups, scales).round_().clamp_(-middle, middle - 1)
