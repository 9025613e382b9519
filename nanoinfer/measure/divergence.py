"""How far the next-token distributions of two models are apart, on the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.attention.base import PrefillPiece
from nanoinfer.attention.registry import make_backend
from nanoinfer.execution.recurrent import RecurrentStates
from nanoinfer.execution.segments import Segments
from nanoinfer.execution.step_tensors import StepTensors
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder

# Float64 logits of so many tokens lie side by side: 80 MB where a vocabulary has 150,000 entries.
ROWS_AT_ONCE = 64


@torch.inference_mode()
def prompt_logits(model: Decoder, token_ids: list[int]) -> Tensor:
    """Return the logits behind every token of one sequence: [num_tokens, vocab_size], dtype of the model, CPU.

    The sequence is one prefill. The keys and values of one layer lie on the model's device, each layer's in turn.
    """
    spec, device, count = model.spec, next(model.parameters()).device, len(token_ids)
    attention = spec.attention
    backend = make_backend("auto", attention, device, offload=False)
    num_blocks = -(-count // attention.block_size)
    shape = (num_blocks, 2, attention.block_size, attention.num_kv_heads, attention.head_dim)
    kv = torch.zeros(shape, dtype=attention.kv_dtype, device=device)
    piece = PrefillPiece.of_one(count, torch.arange(num_blocks, dtype=torch.int32, device=device)[None])
    states = RecurrentStates(spec, 1, device)
    windows = [state.window for state in spec.layers if isinstance(state, AttentionState)]
    segments = Segments(model, [kv] * len(windows), states)
    positions = torch.arange(count, device=device)
    rows = torch.zeros_like(positions, dtype=torch.int32)
    tensors = StepTensors(torch.tensor(token_ids, device=device), positions, positions, rows)
    tensors.reserve(spec)
    for index in range(len(segments)):
        segments.run(index, tensors)
        if index < len(windows):
            backend.prefill(tensors.q, kv, piece, None, tensors.attention, windows[index])
    return torch.cat([model.logits(some).cpu() for some in tensors.x.split(ROWS_AT_ONCE)])


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
