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
