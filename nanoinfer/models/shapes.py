"""Named model shapes with random weights: the sizes of well-known models, without their files."""

from __future__ import annotations

import json
from pathlib import Path

from nanoinfer.common.errors import choose

LONG_CONTEXT = 524_288  # positions; random weights have no context limit of their own


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict:
    return dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=LONG_CONTEXT,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attention_bias=False,
        dtype="bfloat16",
    )


SHAPES: dict[str, dict] = {
    "tiny": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=2048,
        max_position_embeddings=LONG_CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, False),
    "llama3.1-8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=LONG_CONTEXT,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
}


def refuse_shape(model: str) -> None:
    """Raise ValueError if `model` is the name of a shape where a checkpoint is expected."""
    if model in SHAPES and not Path(model).exists():
        raise ValueError(f"{model!r} is a shape, which has random weights: give --shape {model}, or a checkpoint")


def write_shape(name: str, directory: str | Path) -> Path:
    """Writes the shape's config.json into `directory`, for `LLM(directory, load_format="dummy")`.

    Raises:
        ValueError: there is no such shape. The message names the nearest shape and all shapes.
    """
    choose("shape", name, SHAPES)
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(SHAPES[name]))
    return path.parent
