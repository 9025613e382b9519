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
        size: values of one layer.
        is_on_host: whether the table lies in memory of the host, of which the device reads rows.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        size: int,
        norm: type[RMSNorm],
        eps: float,
        *,
        is_on_host: bool,
        formats: Formats,
        dtype: torch.dtype,
        device,
    ) -> None:
        super().__init__()
        options, of_table = dict(dtype=dtype, device=device), formats.of_embeddings("model.embed_tokens_per_layer")
        self.table = Embedding(
            vocab_size, num_layers * size, is_tied=False, is_on_host=is_on_host, formats=of_table, **options
        )
        formats = formats.below("model.per_layer_model_projection")
        self.projection = Linear(hidden_size, num_layers * size, formats=formats, **options)
        self.norm = norm(size, eps, **options)
        self._size, self._factor = size, hidden_size**-0.5
        self._table_factor = torch.tensor(size**0.5, dtype=dtype, device="cpu").item()

    def forward(self, token_ids: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute them for all layers, one layer's behind the other's, in `out` if that is given.

        token_ids: [N] int64; x: [N, hidden_size], the embeddings. Returns [N, num_layers * size].
        """
        out = self.projection(x, out).mul_(self._factor)
        parts = out.view(-1, self._size)
        self.norm(parts, out=parts)
        return out.add_(self.table.lookup(token_ids).mul_(self._table_factor)).mul_(2**-0.5)
