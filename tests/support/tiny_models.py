"""Random checkpoints of a few thousand weights, written by transformers, for tests that compare with it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Those with Gated DeltaNet."""
VOCAB_SIZE = 160
_MADE: dict[str, dict[str, bytes]] = {}  # small checkpoints that were asked for: their files, by name
_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma3": Gemma3TextConfig,
    "gemma4": Gemma4TextConfig,
    "gemma4_inputs": Gemma4TextConfig,
    "gemma4_moe": Gemma4TextConfig,
    "gemma4_unified": Gemma4UnifiedTextConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "granite4": GraniteMoeHybridConfig,
    "starcoder2": Starcoder2Config,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "exaone4": Exaone4Config,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "nemotron": NemotronConfig,
    "ernie4_5": Ernie4_5Config,
    "hunyuan": HunYuanDenseV1Config,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "phi3": Phi3Config,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "qwen3_next": Qwen3NextConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
}

ALL_FAMILIES = tuple(_CONFIGS)


def tiny_config(
    family: str,
    *,
    head_dim: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied: bool = False,
    sliding_window: int | None = None,
    num_layers: int = 3,
    **overrides,
) -> PretrainedConfig:
    """A config whose head size is not hidden_size / num_heads.

    sliding_window: llama has none; all layers of mistral and starcoder2; all but the first of qwen2 and qwen3; all but
    the last of gemma3, gemma4, olmo3 and exaone4, and every other one of gpt_oss, which take 8 where None is given; 0
    means none of exaone4. overrides: any other field of the family's config.
    """
    fields = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=12 * num_heads,
        intermediate_size=56,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family in ("mistral", "mixtral"):
        fields |= dict(sliding_window=sliding_window)
        if family == "mixtral":
            fields |= dict(num_local_experts=6, num_experts_per_tok=2)
    elif family in ("qwen2", "qwen3"):
        use_window = sliding_window is not None
        fields |= dict(sliding_window=sliding_window, use_sliding_window=use_window, max_window_layers=1)
    elif family == "gemma3":
        layer_types = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
        fields |= dict(sliding_window=sliding_window or 8, layer_types=layer_types, query_pre_attn_scalar=20)
    elif family.startswith("gemma4"):
        layer_types = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
        fields |= dict(sliding_window=sliding_window or 8, layer_types=layer_types, tie_word_embeddings=True)
        fields |= dict(global_head_dim=2 * head_dim, final_logit_softcapping=30.0)
        if family == "gemma4_moe":
            fields |= dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24)
        if family != "gemma4_unified":
            size = 8 if family == "gemma4_inputs" else 0
            fields |= dict(hidden_size_per_layer_input=size, vocab_size_per_layer_input=VOCAB_SIZE)
    elif family in ("granite", "granite4"):
        fields |= dict(embedding_multiplier=5.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=7.0)
        if family == "granite4":
            fields |= dict(shared_intermediate_size=56, num_local_experts=0, position_embedding_type="rope")
            fields |= dict(layer_types=["attention"] * num_layers, mamba_n_heads=1)
    elif family == "qwen3_moe":
        fields |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True)
        fields |= dict(sliding_window=sliding_window, use_sliding_window=sliding_window is not None)
    elif family == "gpt_oss":
        fields |= dict(sliding_window=sliding_window or 8, num_local_experts=6, num_experts_per_tok=2)
    elif family == "glm4_moe":
        fields |= dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_group=2, topk_group=1)
    elif family == "olmoe":  # which has no head_dim of its own
        hidden_size = overrides.get("hidden_size", head_dim * num_heads)
        fields |= dict(num_experts=8, num_experts_per_tok=3, hidden_size=hidden_size, head_dim=hidden_size // num_heads)
    elif family in ("starcoder2", "ministral3"):
        fields |= dict(sliding_window=sliding_window)
    elif family == "ministral":
        fields |= dict(sliding_window=sliding_window or 8)
    elif family.startswith("lfm2"):  # which has no head_dim of its own
        layer_types = [("conv", "full_attention")[layer % 3 == 1] for layer in range(num_layers)]
        fields |= dict(hidden_size=head_dim * num_heads, layer_types=layer_types)
        if family == "lfm2_moe":
            fields |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, num_dense_layers=1)
    elif family in DELTA:
        layer_types = [("linear_attention", "full_attention")[layer % 3 == 1] for layer in range(num_layers)]
        fields |= dict(layer_types=layer_types, linear_key_head_dim=16, linear_value_head_dim=32)
        fields |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
        if family != "qwen3_5":
            fields |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
            fields |= dict(shared_expert_intermediate_size=32)
    elif family in ("olmo3", "exaone4"):
        layer_types = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
        fields |= dict(sliding_window=None if sliding_window == 0 else sliding_window or 8, layer_types=layer_types)
    elif family == "phi3":  # which has no head_dim of its own
        fields |= dict(sliding_window=sliding_window, hidden_size=head_dim * num_heads)
    elif family == "smollm3":
        fields |= dict(sliding_window=sliding_window, use_sliding_window=sliding_window is not None)
    elif sliding_window is not None:
        raise ValueError(f"{family} has no sliding window")
    return _CONFIGS[family](**(fields | overrides))


def make_checkpoint(
    family: str,
    directory: str | Path,
    *,
    shards: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    **config_fields,
) -> Path:
    """Saves a random model of `tiny_config(family, **config_fields)` in `directory` and returns it.

    The weights spread more than transformers' own initial ones, so that attention is not uniform and the logits lie
    far apart. shards: at least this many files, where it is above 1. fused: with names and tensors as transformers has
    them in memory, among which one holds all experts of a layer.
    """
    asked = repr((family, shards, seed, dtype, fused, config_fields))
    files = _MADE.get(asked)
    if files is None:
        with TemporaryDirectory() as made:
            _save(family, made, shards, seed, dtype, fused, config_fields)
            files = {path.name: path.read_bytes() for path in Path(made).iterdir()}
        if sum(map(len, files.values())) < 2**20:
            _MADE[asked] = files
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def _save(
    family: str, directory: str, shards: int, seed: int, dtype: torch.dtype, fused: bool, config_fields: dict
) -> None:
    config = tiny_config(family, **config_fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.data = noise - 2.0  # states that decay within some ten tokens
        elif "norm" in name or name.endswith("scale"):
            counts_from_one = family == "gemma3" or family in DELTA and not name.endswith("linear_attn.norm.weight")
            weight.data = 0.2 * noise + (0.0 if counts_from_one else 1.0)
        elif name.endswith("bias"):
            weight.data = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            weight.data = 0.5 * noise
        elif name.endswith("sinks"):
            weight.data = 2 * noise
        else:
            weight.data = 1.5 * weight.shape[-1] ** -0.5 * noise
    for name, bias in model.named_buffers():
        if name.endswith("layer_scalar"):
            bias.copy_(1 + 0.2 * torch.randn(bias.shape, generator=generator))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    model.tie_weights()
    model.to(dtype)
    limit = {} if shards == 1 else dict(max_shard_size=model.num_parameters() * dtype.itemsize // shards)
    model.save_pretrained(directory, save_original_format=not fused, **limit)


def reference_logits(
    directory: str | Path, token_ids: list[int], *, dtype: torch.dtype = torch.float32, first_position: int = 0
) -> Tensor:
    """transformers' own logits for every token of one sequence: [num_tokens, vocab_size] float32."""
    return logits_of(read_reference(directory, dtype), token_ids, first_position)


def read_reference(directory: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: list[int], first_position: int = 0) -> Tensor:
    """A model of transformers -> what `reference_logits` gives."""
    positions = torch.arange(first_position, first_position + len(token_ids))[None]
    return model(torch.tensor([token_ids]), position_ids=positions, use_cache=False).logits[0].float()


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
