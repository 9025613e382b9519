"""Random weights of one of our shapes as a GGUF file, for llama.cpp and for ours. Needs the package gguf.

python tools/gpu_gguf.py SHAPE TYPE OUT            (TYPE: F16 or Q4_0)
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nanoinfer.models.shapes import SHAPES  # noqa: E402

BLOCK, Q4_0_BYTES = 32, 18
PIECE_BYTES = 1 << 24


def write_random_gguf(path: Path, shape: str, kind: str = "F16") -> int:
    """Write a Qwen3 shape, dense or sparse, without a tokenizer, and return its bytes.

    Values repeat, which no kernel's time depends on: all tensors are written from one piece of memory.

    Args:
        kind: of all matrices, F16 or Q4_0; norms and routers are F32.
    """
    import gguf

    config = SHAPES[shape]
    is_sparse = config["model_type"] == "qwen3_moe"
    assert is_sparse or config["model_type"] == "qwen3", f"{shape} is a {config['model_type']}"
    writer = gguf.GGUFWriter(str(path), "qwen3moe" if is_sparse else "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if is_sparse:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    matrices, vectors = _tensors(config)
    most = max(int(np.prod(size)) for size in matrices.values())
    piece = _halves(most) if kind == "F16" else _q4_0(most)
    raw = gguf.GGMLQuantizationType[kind]
    found = {}
    for name, size in matrices.items():
        stored = size if kind == "F16" else (*size[:-1], size[-1] // BLOCK * Q4_0_BYTES)
        found[name] = piece[: int(np.prod(stored))]
        writer.add_tensor_info(name, stored, found[name].dtype, found[name].nbytes, raw)
    generator = np.random.default_rng(1)
    for name, size in vectors.items():  # routers have two dimensions
        found[name] = np.ones(size, np.float32) if len(size) == 1 else _router(generator, size)
        writer.add_tensor_info(name, size, found[name].dtype, found[name].nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _append(path, list(found.values()), writer.data_alignment)


def _append(path: Path, tensors: list[np.ndarray], alignment: int) -> int:
    """Write the tensors behind the header with several threads: new pages of a file in memory cost most."""
    end, pieces = path.stat().st_size, []
    for tensor in tensors:
        begin = -(-end // alignment) * alignment
        data, end = tensor.reshape(-1).view(np.uint8), begin + tensor.nbytes
        pieces += [(data[at : at + PIECE_BYTES], begin + at) for at in range(0, len(data), PIECE_BYTES)]
    total = -(-end // alignment) * alignment
    with path.open("r+b") as file, ThreadPoolExecutor(max_workers=16) as pool:
        file.truncate(total)
        for written, (data, _) in zip(
            pool.map(lambda piece: os.pwrite(file.fileno(), *piece), pieces), pieces, strict=True
        ):
            assert written == len(data), f"{path} took {written} of {len(data)} bytes: is there room?"
    return total


def _tensors(config: dict) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Return the sizes of the matrices, and of what stays in 32 bits, by llama.cpp's names."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
    }
    wide = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    if num_experts := config.get("num_experts"):
        inner = config["moe_intermediate_size"]
        layer |= {f"ffn_{name}_exps": (num_experts, inner, hidden) for name in ("gate", "up")}
        layer["ffn_down_exps"] = num_experts, hidden, inner
        wide["ffn_gate_inp"] = num_experts, hidden
    else:
        layer |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    embedding = config["vocab_size"], hidden
    matrices = {"token_embd.weight": embedding}
    if not config["tie_word_embeddings"]:
        matrices["output.weight"] = embedding
    vectors = {"output_norm.weight": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        matrices |= {f"blk.{number}.{name}.weight": size for name, size in layer.items()}
        vectors |= {f"blk.{number}.{name}.weight": size for name, size in wide.items()}
    return matrices, vectors


def _halves(count: int) -> np.ndarray:
    noise = (np.random.default_rng(0).standard_normal(min(count, 1 << 22)) * 0.02).astype(np.float16)
    return np.resize(noise, count)


def _q4_0(count: int) -> np.ndarray:
    """Return bytes of blocks, for that many values: a scale in 16 bits and 32 values of 4 bits each."""
    generator, count = np.random.default_rng(0), count // BLOCK
    blocks = generator.integers(0, 256, (min(count, 1 << 18), Q4_0_BYTES), np.uint8)
    scales = generator.uniform(0.004, 0.006, len(blocks)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return np.resize(blocks.reshape(-1), count * Q4_0_BYTES)


def _router(generator: np.random.Generator, size: tuple) -> np.ndarray:
    return (generator.standard_normal(size) * 0.05).astype(np.float32)


if __name__ == "__main__":
    print(f"{write_random_gguf(Path(sys.argv[3]), sys.argv[1], sys.argv[2]):,} bytes")
