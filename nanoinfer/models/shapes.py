"""Named model shapes with random weights: the configs of well-known models, without their files.

Rotations and limits are those of the models. Random weights have no limit of their own, so what measures longer
contexts says so: `hf_overrides=UNLIMITED`.
"""

from __future__ import annotations

import json
from pathlib import Path

from nanoinfer.common.errors import choose

UNLIMITED = {"max_position_embeddings": 524_288}


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
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    return defaults | fields


_QWEN3 = dict(vocab_size=151_936, max_position_embeddings=40_960, rope_theta=1e6, rms_norm_eps=1e-6)
_LLAMA3 = dict(vocab_size=128_256, max_position_embeddings=131_072, rope_theta=5e5, rms_norm_eps=1e-5)
_LLAMA3_SCALING = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA32 = _LLAMA3 | dict(rope_scaling=_LLAMA3_SCALING | dict(factor=32.0))
_MISTRAL_SMALL = dict(vocab_size=131_072, max_position_embeddings=32_768, rope_theta=1e8, rms_norm_eps=1e-5)
_PHI4 = dict(vocab_size=100_352, max_position_embeddings=16_384, rope_theta=250_000.0, rms_norm_eps=1e-5)
_SMOLLM3 = dict(vocab_size=128_256, max_position_embeddings=65_536, rope_theta=5e6, rms_norm_eps=1e-6)
SHAPES: dict[str, dict] = {
    "tiny": _shape("Qwen3", 128, 256, 4, 8, 4, True, head_dim=32, vocab_size=2048, dtype="float32", **UNLIMITED),
    "qwen3-0.6b": _shape("Qwen3", 1024, 3072, 28, 16, 8, True, **_QWEN3),
    "qwen3-1.7b": _shape("Qwen3", 2048, 6144, 28, 16, 8, True, **_QWEN3),
    "qwen3-4b": _shape("Qwen3", 2560, 9728, 36, 32, 8, True, **_QWEN3),
    "qwen3-8b": _shape("Qwen3", 4096, 12288, 36, 32, 8, False, **_QWEN3),
    "qwen3-14b": _shape("Qwen3", 5120, 17408, 40, 40, 8, False, **_QWEN3),
    "qwen3-32b": _shape("Qwen3", 5120, 25600, 64, 64, 8, False, **_QWEN3),
    "llama3.2-1b": _shape("Llama", 2048, 8192, 16, 32, 8, True, **_LLAMA32 | dict(head_dim=64)),
    "llama3.2-3b": _shape("Llama", 3072, 8192, 28, 24, 8, True, **_LLAMA32),
    "llama3.1-8b": _shape("Llama", 4096, 14336, 32, 32, 8, False, **_LLAMA3, rope_scaling=_LLAMA3_SCALING),
    "smollm3-3b": _shape("SmolLM3", 2048, 11008, 36, 16, 4, True, **_SMOLLM3),
    "phi-4": _shape("Phi3", 5120, 17920, 40, 40, 10, False, **_PHI4),
    "mistral-small-24b": _shape("Mistral", 5120, 32768, 40, 32, 8, False, sliding_window=None, **_MISTRAL_SMALL),
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
