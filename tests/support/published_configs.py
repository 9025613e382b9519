"""Contents of config.json as published with checkpoints that people run, but for fields that no code reads."""

from __future__ import annotations

import json
from pathlib import Path


def _qwen2(hidden, intermediate, layers, heads, kv_heads, **fields):
    return dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645,
        hidden_act="silu", hidden_size=hidden, initializer_range=0.02, intermediate_size=intermediate,
        max_position_embeddings=32768, max_window_layers=layers, model_type="qwen2", num_attention_heads=heads,
        num_hidden_layers=layers, num_key_value_heads=kv_heads, rms_norm_eps=1e-06, rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True,
        use_sliding_window=False, vocab_size=152064,
    ) | fields  # fmt: skip


def _qwen3(hidden, intermediate, layers, heads, kv_heads, **fields):
    own = dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, head_dim=128, max_position_embeddings=40960,
        model_type="qwen3", rope_scaling=None, rope_theta=1000000, sliding_window=None, vocab_size=151936,
    )  # fmt: skip
    return _qwen2(hidden, intermediate, layers, heads, kv_heads) | own | fields


def _llama(hidden, intermediate, layers, heads, kv_heads, factor, **fields):
    scaling = dict(
        factor=factor, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
        rope_type="llama3",
    )  # fmt: skip
    return dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009], hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
        intermediate_size=intermediate, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
        num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=kv_heads, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_scaling=scaling, rope_theta=500000.0, tie_word_embeddings=False,
        torch_dtype="bfloat16", use_cache=True, vocab_size=128256,
    ) | fields  # fmt: skip


def _mistral(hidden, intermediate, layers, vocab, **fields):
    return dict(
        architectures=["MistralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2, head_dim=128,
        hidden_act="silu", hidden_size=hidden, initializer_range=0.02, intermediate_size=intermediate,
        max_position_embeddings=32768, model_type="mistral", num_attention_heads=32, num_hidden_layers=layers,
        num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=vocab,
    ) | fields  # fmt: skip


def _qwen3_5(hidden, layers, heads, kv_heads, **fields):
    rope = dict(
        mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=10000000,
        rope_type="default",
    )  # fmt: skip
    types = ["linear_attention"] * 3 + ["full_attention"]
    return dict(
        attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
        full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
        layer_types=types * (layers // 4), linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_value_head_dim=128, mamba_ssm_dtype="float32",
        max_position_embeddings=262144, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
        num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=kv_heads, rms_norm_eps=1e-06,
        rope_parameters=rope, tie_word_embeddings=False, use_cache=True, vocab_size=248320,
    ) | fields  # fmt: skip


PUBLISHED = {
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2(5120, 13824, 48, 40, 8, max_window_layers=70),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32, 8, 8.0),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 8192, 28, 24, 8, 32.0, head_dim=128, tie_word_embeddings=True),
    "mistralai/Mistral-7B-Instruct-v0.3": _mistral(4096, 14336, 32, 32768),
    "mistralai/Mistral-Nemo-Instruct-2407": _mistral(5120, 14336, 40, 131072, max_position_embeddings=131072),
    "mistralai/Mistral-Small-24B-Instruct-2501": _mistral(5120, 32768, 40, 131072, rope_theta=100000000.0),
    "google/gemma-3-1b-it": dict(
        architectures=["Gemma3ForCausalLM"], attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None,
        bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 106], final_logit_softcapping=None,
        head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152, initializer_range=0.02,
        intermediate_size=6912, max_position_embeddings=32768, model_type="gemma3_text", num_attention_heads=4,
        num_hidden_layers=26, num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, torch_dtype="bfloat16", use_cache=True, vocab_size=262144,
    ),
    "google/gemma-3-12b-it": dict(
        architectures=["Gemma3ForConditionalGeneration"], boi_token_index=255999, eoi_token_index=256000,
        eos_token_id=[1, 106], image_token_index=262144, initializer_range=0.02, mm_tokens_per_image=256,
        model_type="gemma3", torch_dtype="bfloat16",
        text_config=dict(
            hidden_size=3840, intermediate_size=15360, model_type="gemma3_text", num_attention_heads=16,
            num_hidden_layers=48, num_key_value_heads=8, rope_scaling=dict(factor=8.0, rope_type="linear"),
            sliding_window=1024,
        ),
        vision_config=dict(
            hidden_size=1152, image_size=896, intermediate_size=4304, model_type="siglip_vision_model",
            num_attention_heads=16, num_hidden_layers=27, patch_size=14, vision_use_head=False,
        ),
    ),
    "microsoft/phi-4": dict(
        architectures=["Phi3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=100257,
        embd_pdrop=0.0, eos_token_id=100265, hidden_act="silu", hidden_size=5120, initializer_range=0.02,
        intermediate_size=17920, max_position_embeddings=16384, model_type="phi3", num_attention_heads=40,
        num_hidden_layers=40, num_key_value_heads=10, original_max_position_embeddings=16384, pad_token_id=100349,
        resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=250000, sliding_window=None,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=100352,
    ),
    "Qwen/Qwen3-30B-A3B": _qwen3(
        2048, 6144, 48, 32, 4, architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, mlp_only_layers=[],
        model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, router_aux_loss_coef=0.001,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": dict(
        architectures=["MixtralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu",
        hidden_size=4096, initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768,
        model_type="mixtral", num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05,
        rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
        torch_dtype="bfloat16", use_cache=True, vocab_size=32000,
    ),
    "allenai/OLMoE-1B-7B-0924-Instruct": dict(
        architectures=["OlmoeForCausalLM"], attention_bias=False, attention_dropout=0.0, clip_qkv=None,
        eos_token_id=50279, hidden_act="silu", hidden_size=2048, initializer_range=0.02, intermediate_size=1024,
        max_position_embeddings=4096, model_type="olmoe", norm_topk_prob=False, num_attention_heads=16, num_experts=64,
        num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16, output_router_logits=False, pad_token_id=1,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=50304,
    ),
    "Qwen/Qwen3.5-9B": dict(
        architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=248056, model_type="qwen3_5",
        text_config=_qwen3_5(4096, 32, 16, 4, intermediate_size=12288, model_type="qwen3_5_text"),
        tie_word_embeddings=False, video_token_id=248057, vision_end_token_id=248054, vision_start_token_id=248053,
        vision_config=dict(
            depth=27, hidden_size=1152, intermediate_size=4304, model_type="qwen3_5", num_heads=16,
            out_hidden_size=4096, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
        ),
    ),
    "zai-org/GLM-4.5-Air": dict(
        architectures=["Glm4MoeForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=[151329, 151336, 151338], first_k_dense_replace=1, head_dim=128, hidden_act="silu",
        hidden_size=4096, initializer_range=0.02, intermediate_size=10944, max_position_embeddings=131072,
        model_type="glm4_moe", moe_intermediate_size=1408, n_group=1, n_routed_experts=128, n_shared_experts=1,
        norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8, num_hidden_layers=46,
        num_key_value_heads=8, num_nextn_predict_layers=1, pad_token_id=151329, partial_rotary_factor=0.5,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0,
        tie_word_embeddings=False, topk_group=1, torch_dtype="bfloat16", use_cache=True, use_qk_norm=False,
        vocab_size=151552,
    ),
    "openai/gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=200002,
        experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880, initial_context_length=4096,
        initializer_range=0.02, intermediate_size=2880, layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072, model_type="gpt_oss", num_attention_heads=64, num_experts_per_tok=4,
        num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, output_router_logits=False,
        pad_token_id=199999, rms_norm_eps=1e-05, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128,
        swiglu_limit=7.0, tie_word_embeddings=False, use_cache=True, vocab_size=201088,
        quantization_config=dict(
            modules_to_not_convert=[
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            quant_method="mxfp4",
        ),
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
    ),
}  # fmt: skip


def write_published(name: str, directory: str | Path) -> Path:
    """Write the config of a checkpoint, and nothing else, into a new directory of its name."""
    path = Path(directory) / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return path
