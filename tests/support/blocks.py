"""Random weights in the block types of GGUF, and what the package `gguf` makes of them."""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from nanoinfer.layers.formats.gguf_blocks import BLOCKS

TYPES = list(BLOCKS)
# Where a block has float16 numbers: its scale or factor, and its minimum or that of its minima.
_NUMBERS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82),
    "MXFP4": (),
}  # fmt: skip


def numbers_of(name: str) -> tuple[int, ...]:
    """Where a block has float16 numbers."""
    return _NUMBERS.get(name, (0,))


def random_rows(name: str, num_rows: int, in_features: int, *, seed: int = 0, largest: float | None = None) -> Tensor:
    """Return rows of random bytes with finite scales. largest: about the largest weight; None: of any float16 scale."""
    block, generator = BLOCKS[name], torch.Generator().manual_seed(seed)
    shape = num_rows, in_features // block.columns, block.num_bytes
    blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    for begin in numbers_of(name):
        if largest is None:
            numbers = blocks[..., begin : begin + 2].contiguous().view(torch.float16)
            numbers[~numbers.isfinite()] = 1.0
        else:
            packing = block.packing
            codes, factor = 2**packing.bits, 2 ** (packing.scale_words.bits % 16)
            scale = largest / factor / (1 if begin in (2, 82) else 128 if packing.kind == "iq4" else codes)
            numbers = (scale * torch.randn(*shape[:2], 1, generator=generator)).half()
        blocks[..., begin : begin + 2] = numbers.view(torch.uint8)
    if name == "MXFP4":
        middle = 127 if largest is None else 120
        blocks[..., :1] = torch.randint(middle - 9, middle + 1, (*shape[:2], 1), generator=generator)
    return blocks.flatten(1)


def expanded(name: str, rows: Tensor) -> Tensor:
    """Return what the package makes of rows: [n, bytes of a row] -> [n, columns] float32."""
    found = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(found)
