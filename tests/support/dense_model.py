"""A whole sequence through a model at once, with plain attention: no cache, no blocks, no batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import KVSlots
from nanoinfer.models.states import RecurrentState, one_run


def dense_attention(q, k, v, scale, softcap, window, sinks=None):
    """Causal softmax attention over one whole sequence. q: [N, Hq, D]; k, v: [N, Hkv, D]."""
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).contiguous()


def empty_slots(spec, num_tokens: int, layer: int = 0) -> KVSlots:
    """One block in which token i has slot i, for the keys and values of a layer."""
    attention = spec.attentions[spec.layers[layer].shape]
    kv = torch.zeros(1, 2, num_tokens, attention.num_kv_heads, attention.head_dim, dtype=spec.dtype)
    gates = torch.empty(num_tokens, attention.num_q_heads, attention.head_dim, dtype=spec.dtype)
    return KVSlots(kv, torch.arange(num_tokens), gates=gates if spec.gates_attention else None)


@torch.inference_mode()
def dense_logits(model: Decoder, token_ids: list[int], first_position: int = 0) -> torch.Tensor:
    """The logits of every token of one sequence, computed at once: [num_tokens, vocab_size]."""
    spec, runs, made = model.spec, one_run(len(token_ids), "cpu"), {}
    positions, num_live = torch.arange(first_position, first_position + len(token_ids)), torch.tensor([len(token_ids)])
    x, normed = model.embed(torch.tensor(token_ids))
    inputs = None if model.layer_inputs is None else model.layer_inputs(torch.tensor(token_ids), x)
    for layer, state in enumerate(spec.layers):
        if isinstance(state, RecurrentState):
            kept = {one.name: torch.zeros(2, *one.shape, dtype=one.dtype) for one in state.tensors}
            normed = model.recur(layer, x, normed, runs, kept, num_live.int())
            continue
        shape, target = spec.attentions[state.shape], empty_slots(spec, len(token_ids), layer)
        if state.source is None:
            made[layer] = target.kv[0]
        else:
            target = replace(target, kv=None)
        q = model.before_attention(layer, normed, positions, target)
        k, v = made[layer if state.source is None else state.source]
        sinks = model.layers[layer].self_attn.sinks
        attn = dense_attention(q, k, v, shape.scale, shape.softcap, state.window, sinks)
        normed = model.after_attention(layer, x, attn, num_live.int(), inputs, target.gates)
    return model.logits(normed)
