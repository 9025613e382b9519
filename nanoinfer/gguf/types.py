"""The types of tensors in GGUF files: values in blocks, each of which has its scales beside its codes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """One type of tensor. `id`: in files. A block holds `values` neighbours of a row in `num_bytes` bytes."""

    name: str
    id: int
    values: int
    num_bytes: int

    @property
    def is_wide(self) -> bool:
        """Whether it has no blocks: each value is a floating-point number of its own."""
        return self.values == 1


BLOCK_TYPES: dict[int, BlockType] = {
    kind.id: kind
    for kind in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("BF16", 30, 1, 2),
        BlockType("MXFP4", 39, 32, 17),
    )
}
"""The supported types by their ids."""

# llama.cpp's other types, so that a file is refused by its type's name (ggml.h, ggml_type).
_OTHERS = {
    **dict(enumerate(("Q8_1",), 9)),
    **dict(enumerate(("Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), 15)),
    **dict(enumerate(("IQ3_S", "IQ2_S"), 21)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M"), 24)),
    **dict(enumerate(("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0"), 31)),
    **dict(enumerate(("NVFP4", "Q1_0", "Q2_0"), 40)),
}


def block_type(type_id: int) -> BlockType:
    """Return the type with an id; ValueError, in words that follow a tensor's name, if it is not supported."""
    if type_id in BLOCK_TYPES:
        return BLOCK_TYPES[type_id]
    name = _OTHERS.get(type_id, f"number {type_id}")
    known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
    raise ValueError(f"has type {name}, which is not supported: supported are {known}")
