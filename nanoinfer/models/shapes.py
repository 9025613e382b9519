"""Named model shapes with random weights: the configs of well-known models, without their files.

Rotations and limits are those of the models. Random weights have no limit of their own, so what measures longer
contexts says so: `hf_overrides=UNLIMITED`.
"""

from __future__ import annotations

import json
from pathlib import Path

from nanoinfer.common.errors import choose, same_digits

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
_QWEN3_MOE = _QWEN3 | dict(
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_TINY_SPARSE = _QWEN3_MOE | dict(
    head_dim=32,
    vocab_size=2048,
    dtype="float32",
    moe_intermediate_size=64,
    num_experts=16,
    num_experts_per_tok=4,
    **UNLIMITED,
)
_QWEN3_CODER = _QWEN3_MOE | dict(max_position_embeddings=262_144, rope_theta=1e7)
_LLAMA3 = dict(vocab_size=128_256, max_position_embeddings=131_072, rope_theta=5e5, rms_norm_eps=1e-5)
_LLAMA3_SCALING = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA32 = _LLAMA3 | dict(rope_scaling=_LLAMA3_SCALING | dict(factor=32.0))
_QWEN25 = dict(vocab_size=152_064, max_position_embeddings=32_768, rope_theta=1e6, rms_norm_eps=1e-6)
_GEMMA3 = dict(
    model_type="gemma3_text",
    head_dim=256,
    vocab_size=262_208,
    max_position_embeddings=131_072,
    query_pre_attn_scalar=256,
    sliding_window=1024,
    rope_theta=1e6,
    rope_local_base_freq=10_000.0,
    rope_scaling=dict(rope_type="linear", factor=8.0),
)
_GEMMA3_1B = dict(vocab_size=262_144, max_position_embeddings=32_768, sliding_window=512, rope_scaling=None)
_GRANITE = dict(
    max_position_embeddings=131_072,
    rope_theta=1e7,
    rms_norm_eps=1e-5,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
)
_GRANITE33 = _GRANITE | dict(vocab_size=49_159, attention_multiplier=0.0078125, logits_scaling=16.0)
_GRANITE4 = _GRANITE | dict(
    vocab_size=100_352,
    head_dim=64,
    shared_intermediate_size=8192,
    num_local_experts=0,
    layer_types=["attention"] * 40,
    position_embedding_type="rope",
    attention_multiplier=0.015625,
    logits_scaling=10.0,
)
_GPT_OSS = dict(
    model_type="gpt_oss",
    head_dim=64,
    vocab_size=201_088,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    num_experts_per_tok=4,
    sliding_window=128,
    quantization_config=dict(quant_method="mxfp4"),
)
_OLMO2 = dict(vocab_size=100_352, max_position_embeddings=4096, rope_theta=5e5, rms_norm_eps=1e-6)
_GLM = dict(vocab_size=151_552, partial_rotary_factor=0.5, rope_theta=10_000.0)
_GLM4_9B = _GLM | dict(max_position_embeddings=131_072, attention_bias=True)
_GLM4_32B = _GLM | dict(max_position_embeddings=32_768, attention_bias=False, rms_norm_eps=1e-5)
_GLM45_AIR = _GLM | dict(
    model_type="glm4_moe",
    max_position_embeddings=131_072,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    attention_bias=True,
    use_qk_norm=False,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
_MIXTRAL = dict(
    vocab_size=32_000,
    max_position_embeddings=32_768,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    sliding_window=None,
    num_local_experts=8,
    num_experts_per_tok=2,
)
_OLMOE = dict(
    vocab_size=50_304,
    max_position_embeddings=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    clip_qkv=None,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=False,
)
_EXAONE4 = dict(
    vocab_size=102_400,
    max_position_embeddings=131_072,
    sliding_window=4096,
    sliding_window_pattern=4,
    rope_theta=1e6,
    rope_scaling=_LLAMA3_SCALING | dict(factor=16.0),
    rms_norm_eps=1e-5,
)
_SEED = dict(
    model_type="seed_oss",
    vocab_size=155_136,
    max_position_embeddings=524_288,
    rope_theta=1e7,
    attention_bias=True,
    attention_out_bias=False,
)
_ERNIE = dict(vocab_size=103_424, max_position_embeddings=131_072, rope_theta=5e5, use_bias=False)
_NEMOTRON = dict(vocab_size=256_000, max_position_embeddings=4096, rope_theta=10_000.0, partial_rotary_factor=0.5)
_STARCODER2 = dict(vocab_size=49_152, max_position_embeddings=16_384, sliding_window=4096, rope_theta=1e6)
_MISTRAL_SMALL = dict(vocab_size=131_072, max_position_embeddings=32_768, rope_theta=1e8, rms_norm_eps=1e-5)
_PHI4 = dict(vocab_size=100_352, max_position_embeddings=16_384, rope_theta=250_000.0, rms_norm_eps=1e-5)
_SMOLLM3 = dict(vocab_size=128_256, max_position_embeddings=65_536, rope_theta=5e6, rms_norm_eps=1e-6)
SHAPES: dict[str, dict] = {
    "tiny": _shape("Qwen3", 128, 256, 4, 8, 4, True, head_dim=32, vocab_size=2048, dtype="float32", **UNLIMITED),
    "tiny-sparse": _shape("Qwen3Moe", 128, 256, 4, 8, 4, True, **_TINY_SPARSE),
    "qwen3-0.6b": _shape("Qwen3", 1024, 3072, 28, 16, 8, True, **_QWEN3),
    "qwen3-1.7b": _shape("Qwen3", 2048, 6144, 28, 16, 8, True, **_QWEN3),
    "qwen3-4b": _shape("Qwen3", 2560, 9728, 36, 32, 8, True, **_QWEN3),
    "qwen3-8b": _shape("Qwen3", 4096, 12288, 36, 32, 8, False, **_QWEN3),
    "qwen3-14b": _shape("Qwen3", 5120, 17408, 40, 40, 8, False, **_QWEN3),
    "qwen3-32b": _shape("Qwen3", 5120, 25600, 64, 64, 8, False, **_QWEN3),
    "qwen3-30b-a3b": _shape("Qwen3Moe", 2048, 6144, 48, 32, 4, False, **_QWEN3_MOE),
    "qwen3-coder-30b-a3b": _shape("Qwen3Moe", 2048, 5472, 48, 32, 4, False, **_QWEN3_CODER),
    "llama3.2-1b": _shape("Llama", 2048, 8192, 16, 32, 8, True, **_LLAMA32 | dict(head_dim=64)),
    "llama3.2-3b": _shape("Llama", 3072, 8192, 28, 24, 8, True, **_LLAMA32),
    "llama3.1-8b": _shape("Llama", 4096, 14336, 32, 32, 8, False, **_LLAMA3, rope_scaling=_LLAMA3_SCALING),
    "smollm3-3b": _shape("SmolLM3", 2048, 11008, 36, 16, 4, True, **_SMOLLM3),
    "phi-4": _shape("Phi3", 5120, 17920, 40, 40, 10, False, **_PHI4),
    "qwen2.5-7b": _shape("Qwen2", 3584, 18944, 28, 28, 4, False, **_QWEN25),
    "qwen2.5-14b": _shape("Qwen2", 5120, 13824, 48, 40, 8, False, **_QWEN25),
    "qwen2.5-32b": _shape("Qwen2", 5120, 27648, 64, 40, 8, False, **_QWEN25),
    "gemma3-1b": _shape("Gemma3", 1152, 6912, 26, 4, 1, True, **_GEMMA3 | _GEMMA3_1B),
    "gemma3-4b": _shape("Gemma3", 2560, 10240, 34, 8, 4, True, **_GEMMA3),
    "gemma3-12b": _shape("Gemma3", 3840, 15360, 48, 16, 8, True, **_GEMMA3),
    "gemma3-27b": _shape(
        "Gemma3", 5376, 21504, 62, 32, 16, True, **_GEMMA3 | dict(head_dim=128, query_pre_attn_scalar=168)
    ),
    "granite-3.3-8b": _shape("Granite", 4096, 12800, 40, 32, 8, True, **_GRANITE33),
    "granite-4-micro": _shape("GraniteMoeHybrid", 2560, 8192, 40, 40, 8, True, **_GRANITE4),
    "olmo2-7b": _shape("Olmo2", 4096, 11008, 32, 32, 32, False, **_OLMO2),
    "olmo2-13b": _shape("Olmo2", 5120, 13824, 40, 40, 40, False, **_OLMO2),
    "glm-4-9b": _shape("Glm", 4096, 13696, 40, 32, 2, False, **_GLM4_9B),
    "glm-4-32b": _shape("Glm4", 6144, 23040, 61, 48, 2, False, **_GLM4_32B),
    "exaone-4-32b": _shape("Exaone4", 5120, 27392, 64, 40, 8, False, **_EXAONE4),
    "seed-oss-36b": _shape("SeedOss", 5120, 27648, 64, 80, 8, False, **_SEED),
    "ernie-4.5-0.3b": _shape("Ernie4_5", 1024, 3072, 18, 16, 2, True, **_ERNIE),
    "nemotron-mini-4b": _shape("Nemotron", 3072, 9216, 32, 24, 8, False, **_NEMOTRON),
    "starcoder2-7b": _shape("Starcoder2", 4608, 18432, 32, 36, 4, True, **_STARCODER2),
    "starcoder2-15b": _shape("Starcoder2", 6144, 24576, 40, 48, 4, False, **_STARCODER2 | dict(rope_theta=1e5)),
    "gpt-oss-20b": _shape("GptOss", 2880, 2880, 24, 64, 8, False, **_GPT_OSS, num_local_experts=32),
    "gpt-oss-120b": _shape("GptOss", 2880, 2880, 36, 64, 8, False, **_GPT_OSS, num_local_experts=128),
    "glm-4.5-air": _shape("Glm4Moe", 4096, 10_944, 46, 96, 8, False, **_GLM45_AIR),
    "mixtral-8x7b": _shape("Mixtral", 4096, 14_336, 32, 32, 8, False, **_MIXTRAL),
    "olmoe-7b": _shape("Olmoe", 2048, 1024, 16, 16, 16, False, **_OLMOE),
    "mistral-small-24b": _shape("Mistral", 5120, 32768, 40, 32, 8, False, sliding_window=None, **_MISTRAL_SMALL),
}


def has_experts(name: str | None) -> bool:
    """Whether a shape is that of a sparse model; of no shape: False."""
    return any(field.startswith("num_experts_per") for field in SHAPES.get(name, ()))


def refuse_shape(model: str) -> None:
    """Raise ValueError if `model` is the name of a shape where a checkpoint is expected."""
    if model in SHAPES and not Path(model).exists():
        raise ValueError(f"{model!r} is a shape, which has random weights: give --shape {model}, or a checkpoint")


def write_shape(name: str, directory: str | Path) -> Path:
    """Write the shape's config.json into `directory`, for `LLM(directory, load_format="dummy")`."""
    choose("shape", name, SHAPES, same_digits(name, SHAPES))
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(SHAPES[name]))
    return path.parent
