"""Random weights of one of our shapes as a GGUF file, for llama.cpp's bench. Needs the package gguf."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nanoinfer.models.shapes import SHAPES


def write_random_gguf(path: Path, shape: str) -> None:
    """Write a Qwen3 shape in float16; the values repeat, which no kernel's time depends on.

    The file has no tokenizer: llama-bench needs none.
    """
    import gguf

    config = SHAPES[shape]
    assert config["model_type"] == "qwen3", f"{shape} is a {config['model_type']}"
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(262_144)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    noise = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float16)
    matrices = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": head_dim, "attn_k_norm": head_dim}
    writer.add_tensor("token_embd.weight", np.resize(noise, (vocab, hidden)))
    if not config["tie_word_embeddings"]:
        writer.add_tensor("output.weight", np.resize(noise, (vocab, hidden)))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(config["num_hidden_layers"]):
        for name, size in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.resize(noise, size))
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
