"""Checkpoints that hold q, k and v as one tensor, and gate and up."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def names_of_parts(name: str) -> list[str]:
    """The names of the tensors that a merged tensor is made of; none if it is not merged."""
    merged = next((merged for merged in PARTS if f".{merged}." in name), None)
    return [name.replace(merged, part) for part in PARTS.get(merged, ())]


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in tensors:
        for merged, parts in PARTS.items():
            if f".{parts[0]}." in name:
                whole = name.replace(parts[0], merged)
                found[whole] = torch.cat([found.pop(part) for part in names_of_parts(whole)])
    return found


def apart(tensors: dict[str, Tensor], sizes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse. sizes: tensors of as many rows as the parts have."""
    found = {}
    for name, tensor in tensors.items():
        names = names_of_parts(name) or [name]
        pieces = tensor.split([len(sizes[part]) for part in names])
        found |= {part: piece.clone() for part, piece in zip(names, pieces, strict=True)}
    return found


def fuse(path: Path) -> Path:
    """Change a checkpoint in one file."""
    save_file(fused(load_file(path / "model.safetensors")), path / "model.safetensors", metadata={"format": "pt"})
    return path
