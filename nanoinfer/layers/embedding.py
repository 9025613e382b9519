"""Embeddings of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.layers.weight import empty_weight


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size], by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device) -> None:
        super().__init__()
        self.weight = empty_weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)
