"""Qwen3 as a function of its weights, for training: the same numbers as transformers' model, in fewer kernels.

Weights carry transformers' names, so a checkpoint is written by loading them into its model.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

Weights = dict[str, Tensor]
Past = list[tuple[Tensor, Tensor]]

# Over a 64k context 12 of the 32 pairs of rotary dimensions turn by less than 1 rad: these look up by content at any
# distance. With a theta of 1e6, 6 pairs would. The 8 pairs that turn by 0.01 rad per token or more tell neighbours
# apart; with 1e6 there would be 11.
ROPE_THETA = 1e8
EMBEDDING_STD = 0.1
KEY_LIKENESS = 0.7  # correlation of keys with queries at the start
QK_GAIN = 1.5  # of the norms of queries and keys of 32 elements at the start: sharper attention
MAX_LENGTH = 65536 + 1024  # a context of 64k and some answers


@dataclass(frozen=True, kw_only=True)
class Size:
    """Width and depth of a model. The default has 5.4 million weights: 10.8 MB in bf16."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64

    def config(self, vocab_size: int, bos: int, eos: int, pad: int) -> Qwen3Config:
        """vocab_size: entries of the tokenizer, rounded up to a multiple of 64 here, which GPUs multiply faster."""
        return Qwen3Config(
            **vars(self),
            vocab_size=-(-vocab_size // 64) * 64,
            max_position_embeddings=MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            architectures=["Qwen3ForCausalLM"],
        )


def random_weights(config: Qwen3Config, seed: int) -> Weights:
    """Float32 weights to start from, on the CPU.

    In a trial (0.6 million weights, 1,200 steps of 1,024 tokens) 92 % of key digits were right with this start, 83 %
    with a QK_GAIN of 1, 52 % with that and keys apart from queries, 13 % with that and embeddings of 0.02 as well.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim, layers = config.hidden_size, config.head_dim, config.num_hidden_layers

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    # Embeddings must not drown in what the layers add. The last norm makes up for them: logits of about 1.
    weights = {"model.embed_tokens.weight": torch.randn(config.vocab_size, hidden, generator=generator) * EMBEDDING_STD}
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    qk_gain = QK_GAIN * (32 / head_dim) ** 0.25  # keeps the largest score, gain ** 2 * sqrt(head_dim), the same
    into_stream = 1 / math.sqrt(2 * layers)  # keeps the sum of all layers' parts at the size of one
    for layer in range(layers):
        q_proj, k_proj = normal(queries, hidden), normal(keys, hidden)
        # A key starts like the first query of its group, so equal tokens attend to each other.
        like = q_proj.view(config.num_key_value_heads, -1, head_dim, hidden)[:, 0].reshape(keys, hidden)
        k_proj = KEY_LIKENESS * like + math.sqrt(1 - KEY_LIKENESS**2) * k_proj
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": torch.ones(hidden),
                "self_attn.q_proj": q_proj,
                "self_attn.k_proj": k_proj,
                "self_attn.v_proj": normal(keys, hidden),
                "self_attn.q_norm": torch.full([head_dim], qk_gain),
                "self_attn.k_norm": torch.full([head_dim], qk_gain),
                "self_attn.o_proj": normal(hidden, queries, into_stream),
                "post_attention_layernorm": torch.ones(hidden),
                "mlp.gate_proj": normal(config.intermediate_size, hidden),
                "mlp.up_proj": normal(config.intermediate_size, hidden),
                "mlp.down_proj": normal(hidden, config.intermediate_size, into_stream),
            }.items()
        }
    return weights | {"model.norm.weight": torch.full([hidden], 1 / (EMBEDDING_STD * math.sqrt(hidden)))}


def forward(
    weights: Weights, config: Qwen3Config, ids: Tensor, past: Past | None = None, kept: Past | None = None
) -> Tensor:
    """Final hidden states [B, T, hidden_size] in the weights' dtype; `logits` takes them on.

    Args:
        weights: all of one dtype and device.
        ids: [B, T] integers.
        past: keys and values of each layer, [1, num_kv_heads, P, head_dim], which all rows follow.
        kept: takes this call's own keys and values, [B, num_kv_heads, T, head_dim] per layer.
    """
    start = past[0][0].shape[2] if past else 0
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    rotation = _rotation(config.head_dim, start + ids.shape[1], x.device, x.dtype)
    cos, sin = (part[start:, None, :] for part in rotation)  # [T, 1, head_dim / 2]
    for layer in range(config.num_hidden_layers):
        w = {
            name: weights[f"model.layers.{layer}.{name}.weight"]
            for name in ("input_layernorm", "post_attention_layernorm")
            + tuple(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
            + tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
        }
        normed = _norm(x, w["input_layernorm"], config)
        q, k, v = _queries_keys_values(normed, w, config, cos, sin)
        if kept is not None:
            kept.append((k, v))
        attn = _attend(q, k, v, past[layer] if past else None)
        x = x + F.linear(attn.transpose(1, 2).flatten(2), w["self_attn.o_proj"])
        normed = _norm(x, w["post_attention_layernorm"], config)
        gate, up = F.linear(normed, torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]])).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w["mlp.down_proj"])
    return _norm(x, weights["model.norm.weight"], config)


def logits(weights: Weights, hidden: Tensor) -> Tensor:
    """[..., hidden_size] -> [..., vocab_size] in the weights' dtype."""
    return F.linear(hidden, weights["model.embed_tokens.weight"])


def _norm(x: Tensor, weight: Tensor, config: Qwen3Config) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _queries_keys_values(
    normed: Tensor, w: Weights, config: Qwen3Config, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """normed [B, T, hidden_size] -> q [B, num_heads, T, head_dim]; k, v [B, num_kv_heads, T, head_dim], views."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    merged = torch.cat([w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"]])
    qkv = F.linear(normed, merged).unflatten(-1, (heads + 2 * kv_heads, head_dim))
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=2)
    # One norm, one gain and one rotation for queries and keys.
    gain = torch.cat([w["self_attn.q_norm"].expand(heads, -1), w["self_attn.k_norm"].expand(kv_heads, -1)])
    qk = F.rms_norm(qk, (head_dim,), eps=config.rms_norm_eps) * gain
    low, high = qk.chunk(2, dim=-1)
    qk = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    q, k = qk.split([heads, kv_heads], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """Causal attention, [B, num_heads, T, head_dim]. past: what all rows may see in full."""
    if past is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    batch, _, length, _ = q.shape
    k, v = (torch.cat([old.expand(batch, -1, -1, -1), new], dim=2) for old, new in zip(past, (k, v)))
    seen = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@functools.lru_cache(maxsize=4)
def _rotation(head_dim: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin: [length, head_dim / 2], computed in float32 as transformers does."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] / ROPE_THETA ** (pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)
