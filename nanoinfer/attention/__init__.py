"""Attention backends over paged KV. Triton and flash-attn are imported only when a backend needs them."""

from nanoinfer.attention.base import (
    AttentionBackend,
    AttentionSpec,
    DecodeWork,
    Partials,
    PrefillPiece,
    PrefillState,
)
from nanoinfer.attention.registry import BACKEND_NAMES, make_backend

__all__ = [
    "BACKEND_NAMES",
    "AttentionBackend",
    "AttentionSpec",
    "DecodeWork",
    "Partials",
    "PrefillPiece",
    "PrefillState",
    "make_backend",
]
