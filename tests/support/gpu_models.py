"""Models of a size that shows what a GPU does, with random weights, and engine arguments for them."""

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=4000,
    max_position_embeddings=65536,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
GEMMA3 = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=4000,
    max_position_embeddings=65536,
    query_pre_attn_scalar=256,
    sliding_window=96,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    dtype="bfloat16",
)
_GEMMA4 = dict(
    architectures=["Gemma4ForCausalLM"],
    model_type="gemma4_text",
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    vocab_size=4000,
    vocab_size_per_layer_input=4000,
    hidden_size_per_layer_input=0,
    max_position_embeddings=65536,
    sliding_window=96,
    layer_types=["sliding_attention", "full_attention"] * 2,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
GEMMA4 = {
    "one projection": _GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    "inputs of layers": _GEMMA4
    | dict(hidden_size_per_layer_input=64, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "experts": _GEMMA4
    | dict(attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True)
    | dict(num_experts=8, top_k_experts=2, moe_intermediate_size=128),
}
_LFM2 = dict(
    architectures=["Lfm2ForCausalLM"],
    model_type="lfm2",
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=4000,
    max_position_embeddings=65536,
    layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
    dtype="bfloat16",
)
LFM2 = {
    "dense": _LFM2,
    "sparse": _LFM2
    | dict(architectures=["Lfm2MoeForCausalLM"], model_type="lfm2_moe", num_dense_layers=1)
    | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
}
_DELTA = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    vocab_size=4000,
    max_position_embeddings=65536,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    dtype="bfloat16",
)
_DELTA_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
_DELTA_EXPERTS |= dict(shared_expert_intermediate_size=256)
DELTA = {
    "gated delta": _DELTA,
    "gated delta, sparse": _DELTA
    | _DELTA_EXPERTS
    | dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text"),
    "gated delta, tiled": _DELTA | dict(linear_heads_are_tiled=True, linear_num_key_heads=2),
    "next": _DELTA | _DELTA_EXPERTS | dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next"),
}
LLAMA_GROUP_OF_3 = QWEN3 | dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=480,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=80,
)
COMMON = dict(load_format="dummy", block_size=32, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048)
COMMON |= dict(gpu_memory_limit="1GiB", host_memory_limit="256MiB", progress_bar=False)
COMMON |= dict(resident_kv_limit=0)  # everything streams, unless a test says otherwise
