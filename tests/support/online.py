"""Checkpoints whose weights are quantised while they are read."""

from __future__ import annotations

import torch
from loading import loaded
from quantised import SIZES
from tiny_models import make_checkpoint

from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats import schemes
from nanoinfer.layers.formats.scaled import PackedScaled
from nanoinfer.layers.linear import Linear
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.quantize import quantised_while_read

QUIET = dict(progress=False)


def packed(
    kind: str, bits: int, columns: int | None, scale_dtype: torch.dtype, has_zeros: bool = False
) -> PackedScaled:
    """The format of a weight that is quantised while it is read; integers lie in words."""
    packing = Packing(kind=kind, bits=bits, columns=columns, scale_dtype=scale_dtype, has_zeros=has_zeros)
    if kind == "fp8":
        return PackedScaled(packing, words=torch.float8_e4m3fn)
    return PackedScaled(packing, words=torch.int32, codes_name="weight_packed", has_zeros_in_words=has_zeros)


def quantise(weight: torch.Tensor, own: PackedScaled) -> dict[str, torch.Tensor]:
    return schemes.quantise([weight], tuple(weight.shape), own, weight.device)


def load(path, quantization=None, head=None, dtype="auto"):
    checkpoint = quantised_while_read(read_checkpoint(path), quantization, head)
    return loaded(checkpoint, dtype)


def matrices(model) -> dict[str, torch.Tensor]:
    """The expanded weight of each projection, and of tables."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            ids = torch.arange(module.num_rows)
            found[name] = module.weights.matrix(module).clone() if module.multiplies else module.lookup(ids)
    return found


def expert_matrices(model) -> dict[str, torch.Tensor]:
    """The expanded weight of each expert's projections, by its name in the checkpoint."""
    found = {}
    for path, experts in model.named_modules():
        if isinstance(experts, Experts):
            for expert, place in enumerate(experts.table.tolist()):
                for one in experts.projections:
                    matrix, _ = one.matrix(experts.pool[place])
                    names = [f"model.{path}.{expert}.{name}.weight" for name in one.names]
                    found |= dict(zip(names, matrix.split(list(one.names.values())), strict=True))
    return found


def equal(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def make(path, family="qwen3", dtype=torch.bfloat16, **sizes):
    return make_checkpoint(family, path, dtype=dtype, **(SIZES | sizes))
