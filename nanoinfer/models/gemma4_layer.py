"""A layer of Gemma 4: norms around attention and MLP, and all of it scaled by one number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.layer import DecoderLayer, Traits


class Gemma4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then x * layer_scalar."""

    neutral_layer_scalar = 1.0
    """The scalar that leaves x as it is."""

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__(spec, traits, device=device)
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=spec.dtype, device=device), requires_grad=False)

    def after_attention(self, x: Tensor, attn: Tensor, norm: RMSNorm, num_live: Tensor) -> Tensor:
        normed = self.post_attention_layernorm.after_sum(x, self.attention_output_norm(self.self_attn.o_proj(attn)))
        x.add_(self.mlp_output_norm(self.mlp(normed))).mul_(self.layer_scalar)
        return norm(x)
