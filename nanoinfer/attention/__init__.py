"""Attention backends over paged KV. Triton and flash-attn are imported only when a backend needs them."""
