"""Quantising a weight: the tensors that compressed-tensors keeps of it, worked out from the weight alone.

Rows do not depend on each other, and every step is a single operation in float32 or a sum in a stated order. So the
result has the same bits on every device, and for rows alone or in a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.layers.formats.bits import pack, row_bytes

GROUP_SIZES = (128, 64, 32)
# Rows are quantised some at a time: so that what lies between stays in the cache of a CPU, and keeps a GPU busy.
_WEIGHTS_AT_ONCE = {"cpu": 2**18}
_WEIGHTS_AT_ONCE_ELSEWHERE = 2**21
# A scale below this would be rounded to zero; float16 keeps numbers below its normal ones.
_SMALLEST_SCALE = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
# Quarters from 7 (the largest code, so that nothing is cut) to 11.5 (where 0.61 of the largest magnitude is kept).
_DIVISORS = tuple(7 + quarter / 4 for quarter in range(19))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one weight is quantised, always with symmetric codes.

    Attributes:
        kind: "int" or "fp8" (e4m3).
        bits: of a code, 4 or 8.
        columns: neighbouring columns that share a scale; None: a row.
        scale_dtype: scales are rounded to it before codes are chosen.
        in_words: whether integers lie in words of 32 bits, without a sign; otherwise one in a byte, with a sign.
    """

    kind: str
    bits: int
    columns: int | None
    scale_dtype: torch.dtype
    in_words: bool

    @property
    def codes(self) -> str:
        """The end of the name of the tensor that holds the codes."""
        return "weight_packed" if self.in_words else "weight"

    def stored(self, num_rows: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor that a checkpoint holds for a weight, by the end of its name."""
        scales = ((num_rows, in_features // (self.columns or in_features)), self.scale_dtype)
        if not self.in_words:
            dtype = torch.float8_e4m3fn if self.kind == "fp8" else torch.int8
            return {self.codes: ((num_rows, in_features), dtype), "weight_scale": scales}
        words = ((num_rows, row_bytes(in_features, self.bits) // 4), torch.int32)
        return {self.codes: words, "weight_scale": scales, "weight_shape": ((2,), torch.int64)}


def group_size(in_features: int) -> int | None:
    """Return the largest group that divides a row; None: none does."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), None)


def quantise(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint for [num_rows, in_features] floating-point values, by the ends of their names.

    A scale of 8 bits is the largest magnitude of a row over the largest code. One of 4 bits is found by least squares
    (`_least_squares`).

    Raises:
        ValueError: a weight is NaN or infinite; the message follows the tensor's name.
    """
    num_rows, in_features = weight.shape
    found = {
        ending: torch.empty(shape, dtype=dtype, device=weight.device)
        for ending, (shape, dtype) in scheme.stored(num_rows, in_features).items()
        if ending != "weight_shape"
    }
    step = max(1, _WEIGHTS_AT_ONCE.get(weight.device.type, _WEIGHTS_AT_ONCE_ELSEWHERE) // in_features)
    for begin in range(0, num_rows, step):
        rows = weight[begin : begin + step].float()
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("holds NaN or infinite weights, which cannot be quantised")
        codes, scales = _codes_and_scales(rows.unflatten(1, (-1, scheme.columns or in_features)), scheme)
        found[scheme.codes][begin : begin + step] = codes
        found["weight_scale"][begin : begin + step] = scales
    if scheme.in_words:
        found["weight_shape"] = torch.tensor([num_rows, in_features], device=weight.device)
    return found


def _codes_and_scales(groups: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[n, num_groups, columns] float32 -> codes as they are stored, [n, words], and scales [n, num_groups]."""
    largest = groups.abs().amax(-1)
    if scheme.kind == "fp8":
        top = torch.finfo(torch.float8_e4m3fn).max
        scales = _rounded(_over(largest, top), scheme.scale_dtype)
        return _divided(groups, scales).clamp_(-top, top).to(torch.float8_e4m3fn).flatten(1), scales
    middle = 2 ** (scheme.bits - 1)
    scales = (
        _least_squares(groups, largest, scheme)
        if scheme.bits == 4
        else _rounded(_over(largest, 127), scheme.scale_dtype)
    )
    signed = _integers(groups, scales, middle)
    if not scheme.in_words:
        return signed.to(torch.int8).flatten(1), scales
    codes = (signed + middle).to(torch.uint8).flatten(1)
    padding = row_bytes(codes.shape[1], scheme.bits) * 8 // scheme.bits - codes.shape[1]
    packed = pack(torch.nn.functional.pad(codes, (0, padding)), scheme.bits)
    return packed.contiguous().view(torch.int32), scales


def _least_squares(groups: Tensor, largest: Tensor, scheme: Scheme) -> Tensor:
    """Return for each group the scale with the least squared error, of the largest magnitude over each divisor.

    The search is that of llm-compressor's MSE observer
    (https://github.com/vllm-project/llm-compressor/blob/main/src/llmcompressor/observers/mse.py), with squares, and
    with the error of what a scale's rounding makes of the weights. The first of equals counts, so the plain scale, over
    7, gives way only to a better one; compressed-tensors' own, over 7.5, is among the others. Codes are -8 to 7.
    """
    best, best_error = None, None
    for divisor in _DIVISORS:
        scales = _rounded(_over(largest, divisor), scheme.scale_dtype)
        wide = scales.float().unsqueeze(-1)
        error = _integers(groups, scales, 8).mul_(wide)
        if scheme.scale_dtype != torch.float32:
            error = error.to(scheme.scale_dtype).float()
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
