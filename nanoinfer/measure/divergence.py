"""How far the next-token distributions of two models are apart, on the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.base import PrefillPiece
from nanoinfer.attention.registry import make_backend
from nanoinfer.layers.qkv import KVSlots
from nanoinfer.models.base import AttentionState, DecoderModel

# Float64 logits of so many tokens lie side by side: 80 MB where a vocabulary has 150,000 entries.
ROWS_AT_ONCE = 64


@torch.inference_mode()
def prompt_logits(model: DecoderModel, token_ids: list[int]) -> Tensor:
    """Return the logits behind every token of one sequence: [num_tokens, vocab_size], dtype of the model, CPU.

    The sequence is computed as one prefill with all of its keys and values on the model's device, a layer at a time.
    """
    spec, device, count = model.spec, next(model.parameters()).device, len(token_ids)
    attention = spec.attention
    backend = make_backend("auto", attention, device, offload=False)
    num_blocks = -(-count // attention.block_size)
    shape = (num_blocks, 2, attention.block_size, attention.num_kv_heads, attention.head_dim)
    positions = torch.arange(count, device=device)
    target = KVSlots(torch.zeros(shape, dtype=attention.kv_dtype, device=device), positions)  # of each layer in turn
    piece = _whole(count, num_blocks, device)
    x, normed = model.embed(torch.tensor(token_ids, device=device))
    for layer, state in enumerate(spec.layers):
        if isinstance(state, AttentionState):
            q = model.before_attention(layer, normed, positions, target)
            attn = torch.empty_like(q)
            backend.prefill(q, target.kv, piece, None, attn, state.window)
            normed = model.after_attention(layer, x, attn)
        else:
            rows = torch.zeros(count, dtype=torch.int32, device=device)
            start = torch.zeros(2, *state.shape, dtype=state.dtype, device=device)
            normed = model.recur(layer, x, normed, rows, start)
    return torch.cat([model.logits(rows).cpu() for rows in normed.split(ROWS_AT_ONCE)])


def _whole(count: int, num_blocks: int, device: torch.device) -> PrefillPiece:
    """One sequence of `count` tokens from its beginning, in blocks 0, 1, ..."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PrefillPiece(
        cu_seqlens_q=numbers(0, count),
        query_pos=numbers(0),
        first_block=numbers(0),
        kv_end=numbers(count),
        load_state=numbers(0),
        block_table=numbers(*range(num_blocks))[None],
        max_query_len=count,
        query_rows=(0, count),
        store_state=False,
    )


def mean_divergence(wanted: Tensor, found: Tensor) -> float:
    """Return the mean over rows of the Kullback-Leibler divergence KL(wanted || found), in nats, summed in float64.

    wanted, found: [num_tokens, vocab_size] logits of the same tokens.
    """
    assert wanted.shape == found.shape, "logits of other tokens, or of another vocabulary"
    total = 0.0
    for ours, theirs in zip(wanted.split(ROWS_AT_ONCE), found.split(ROWS_AT_ONCE), strict=True):
        log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total / len(wanted)
