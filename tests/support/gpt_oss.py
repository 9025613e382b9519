"""Tiny checkpoints of gpt-oss with MXFP4 experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = dict(num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=64, intermediate_size=96)
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def rewrite(path: Path, tensors: dict[str, Tensor], **config) -> Path:
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    content = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(content))
    return path


def mxfp4_checkpoint(directory: Path, dtype: str = "bfloat16") -> tuple[Path, Path]:
    """The packed checkpoint, and the same one with the matrices that transformers makes of it in bfloat16."""
    paths = [make_checkpoint("gpt_oss", directory / name, **SIZES) for name in ("packed", "dense")]
    packed, generator = load_file(paths[0] / "model.safetensors"), torch.Generator().manual_seed(1)
    dense = dict(packed)
    for name, weight in list(packed.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = packed.pop(name).shape
            blocks = torch.randint(256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 125, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense[name] = convert_moe_packed_tensors(blocks, scales).float()
            assert dense[name].shape == weight.shape
    settings = dict(quant_method="mxfp4", modules_to_not_convert=LEFT_OUT)
    return rewrite(paths[0], packed, dtype=dtype, quantization_config=settings), rewrite(paths[1], dense, dtype=dtype)
