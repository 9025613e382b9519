"""Named model shapes with random weights: the sizes of well-known models, without their files."""

from __future__ import annotations

import json
from pathlib import Path

from nanoinfer.common.errors import choose

LONG_CONTEXT = 524_288  # positions; random weights have no context limit of their own


def _shape(
    family: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool, **fields
) -> dict:
    """A config.json; what it leaves out is as the family has it."""
    defaults = dict(
        architectures=[f"{family}ForCausalLM"],
        model_type=family.lower(),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=LONG_CONTEXT,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    return defaults | fields


_QWEN3 = dict(vocab_size=151_936, rope_theta=1_000_000.0)
SHAPES: dict[str, dict] = {
    "tiny": _shape("Qwen3", 128, 256, 4, 8, 4, True, head_dim=32, vocab_size=2048, dtype="float32"),
    "qwen3-0.6b": _shape("Qwen3", 1024, 3072, 28, 16, 8, True, **_QWEN3),
    "qwen3-1.7b": _shape("Qwen3", 2048, 6144, 28, 16, 8, True, **_QWEN3),
    "qwen3-4b": _shape("Qwen3", 2560, 9728, 36, 32, 8, True, **_QWEN3),
    "qwen3-8b": _shape("Qwen3", 4096, 12288, 36, 32, 8, False, **_QWEN3),
    "llama3.1-8b": _shape("Llama", 4096, 14336, 32, 32, 8, False, vocab_size=128_256, rope_theta=500_000.0),
}


def refuse_shape(model: str) -> None:
    """Raise ValueError if `model` is the name of a shape where a checkpoint is expected."""
    if model in SHAPES and not Path(model).exists():
        raise ValueError(f"{model!r} is a shape, which has random weights: give --shape {model}, or a checkpoint")


def write_shape(name: str, directory: str | Path) -> Path:
    """Write the shape's config.json into `directory`, for `LLM(directory, load_format="dummy")`."""
    choose("shape", name, SHAPES)
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(SHAPES[name]))
    return path.parent
