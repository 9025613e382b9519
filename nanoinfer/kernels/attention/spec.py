"""The shape of a model's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What all attention layers of a model have in common: the one declaration, from the config to the kernels.

    Raises:
        ValueError: no layer has attention.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q.k, above 0 (usually head_dim ** -0.5)."""
    softcap: float | None
    """logits = softcap * tanh(logits / softcap), after the scale and before the mask; None: no cap."""
    dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)
    """The distinct sliding windows of the model's layers, in tokens; None in it stands for full attention."""
    block_size: int = 256
    """Tokens in a KV block and so in a split; a multiple of 16."""
    kv_cache_dtype: torch.dtype | None = None
    """Type of the KV buffers, widened to `dtype` as they are read; None: `dtype`."""

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("windows is empty: list each distinct window of the layers, None for full attention")

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the KV buffers."""
        return self.kv_cache_dtype or self.dtype

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Values of all query heads of a token."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of all keys of a token."""
        return self.num_kv_heads * self.head_dim
