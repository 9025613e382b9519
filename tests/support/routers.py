"""Tiny sparse checkpoints whose routers tie, or send all rows to one expert."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

SPARSE_FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "glm4_moe")


def make_sparse(family: str, directory: Path, routers: tuple[str, ...], dtype=torch.float32, **fields) -> Path:
    """Write a checkpoint of two layers, or of as many as it has routers. glm4_moe's first layer is dense.

    routers: of all layers, or of each. "drawn": as they come; "tied": experts 2n and 2n + 1 have equal logits in every
    row; "one expert": all experts do, so where a row takes one it is the same for all, the fourth of glm4_moe.
    """
    if "one expert" in routers:
        fields["num_experts_per_tok"] = 1
    path = make_checkpoint(family, directory, dtype=dtype, num_layers=max(2, len(routers)), **fields)
    tensors = load_file(path / "model.safetensors")
    for name, one in tensors.items():
        of_choice = name.endswith("e_score_correction_bias")
        if of_choice or ".gate." in name or ".router." in name:
            router = routers[int(name.split(".")[2]) % len(routers)]
            if router == "tied":
                one[1::2] = one[::2][: len(one[1::2])]
            elif router == "one expert":
                one.zero_()
                if of_choice:
                    one[3] = 1.0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
