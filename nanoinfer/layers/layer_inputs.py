"""Embeddings of each layer: what the layers read of a token beside the residual sum, made once at the beginning."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.layers.formats.base import Formats
from nanoinfer.layers.linear import Embedding, Linear
from nanoinfer.layers.norm import RMSNorm


class LayerInputs(nn.Module):
    """(norm(projection(x) * hidden_size ** -0.5) + table[token] * size ** 0.5) * 2 ** -0.5, as in Gemma 3n and 4.

    The norm is one of each layer's part. Each product and sum is rounded to the model's dtype.

    Args:
        table: of all layers, one layer's values behind the other's.
        norm: of one layer's values.
    """

    def __init__(
        self,
        table: Embedding,
        norm: RMSNorm,
        hidden_size: int,
        num_layers: int,
        *,
        formats: Formats,
        dtype: torch.dtype,
        device,
    ) -> None:
        super().__init__()
        self.table, self.norm, self._size = table, norm, norm.weight.numel()
        self._factor, of_table = hidden_size**-0.5, torch.tensor(self._size**0.5, dtype=dtype, device="cpu")
        self._table_factor = of_table.item()
        self.projection = Linear(
            hidden_size,
            num_layers * self._size,
            formats=formats.below("model.per_layer_model_projection"),
            dtype=dtype,
            device=device,
        )

    def forward(self, token_ids: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute them for all layers, one layer's behind the other's, in `out` if that is given.

        token_ids: [N] int64; x: [N, hidden_size], the embeddings. Returns [N, num_layers * size].
        """
        out = self.projection(x, out).mul_(self._factor)
        parts = out.view(-1, self._size)
        self.norm(parts, out=parts)
        return out.add_(self.table.lookup(token_ids).mul_(self._table_factor)).mul_(2**-0.5)
